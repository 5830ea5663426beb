"""Hostile kernels fail for what they do, right kernels of the same kind pass, and the process stays as it was."""

from __future__ import annotations

import os

import pytest
import torch

from lastbit.calling.process_state import kept_process_state
from lastbit.case import parse_case
from lastbit.inputs import build, guarded_allocations
from lastbit.kernel import Kernel
from lastbit.references.rms_norm import rms_norm
from lastbit.result import CaseResult, Verdict
from lastbit.verify.check import Subject, verify_case
from tests.faults.hostile import HOSTILE, RIGHT, Hostile, is_wrapped, norm, static_output
from tests.rms_norm_contract import INTERPRETED  # installs the bit-faithful interpreter

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the kernels are for the CPU")

LINE = "rms_norm x=bf16[6,64]@72,1 weight=bf16[64] eps=1e-06 seed=3"
LINES = (LINE, "rms_norm x=fp32[3,16] weight=fp32[16] eps=1e-06 seed=0")


def verified(hostile: Hostile, line: str, *, repeat: bool = True) -> CaseResult:
    kernel = Kernel("mine", "rms_norm", "", hostile.make(), mutates=hostile.mutates)
    return verify_case(Subject(kernel, rms_norm, torch.device("cpu")), parse_case(line), repeat=repeat)


def kinds(result: CaseResult) -> set[str]:
    """Kinds of findings; wrong elements and unexplained rows are both values."""
    return {"outside" if finding.kind in ("special", "rows") else finding.kind for finding in result.findings}


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("hostile", HOSTILE, ids=str)
def test_hostile_kernel_fails_for_what_it_does(hostile: Hostile, line: str) -> None:
    result = verified(hostile, line)
    assert (result.verdict, kinds(result)) == (Verdict.FAILED, hostile.kinds), result


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("hostile", RIGHT, ids=str)
def test_right_kernel_of_the_same_kind_passes(hostile: Hostile, line: str) -> None:
    result = verified(hostile, line)
    assert (result.verdict, result.findings) == (Verdict.PASSED, ())


def sentences(hostile: Hostile) -> dict[str, str]:
    """Kind → the first sentence of that kind."""
    return {finding.kind: finding.sentence for finding in reversed(verified(hostile, LINE).findings)}


def named(name: str) -> Hostile:
    return next(hostile for hostile in HOSTILE if hostile.name == name)


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        (
            "cached output",
            "reused_memory",
            "result output of a second call lies in the memory of the first call's output",
        ),
        ("output by shape", "other_values", f"with other values of the same shapes, in {LINE.replace('=3', '=4')}: 38"),
        ("x.data", "rebound_input", "rebound x: it now has other memory, strides [64, 1] in place of [72, 1]"),
        ("x.t_", "rebound_input", "rebound x: it now has shape [64, 6] in place of [6, 64], strides [1, 72] in place"),
        ("storage freed", "rebound_input", "rebound x: it now has a storage of 0 bytes in place of 132,"),
        (
            "sees __wrapped__",
            "guards",
            "6 of 384 elements of output differ between two calls on the same values, of which one was not guarded and",
        ),
        (
            "default dtype",
            "process_state",
            "left the default dtype of the process at torch.float64, where it was",
        ),
    ],
)
def test_what_a_reader_is_told(name: str, kind: str, words: str) -> None:
    assert sentences(named(name))[kind].startswith(words), sentences(named(name))[kind]


def test_a_race_is_told_apart_from_stages() -> None:
    sentence = sentences(named("last writer wins"))["nondeterministic"]
    assert "the second found other bits in uninitialised memory and ran its programs in descending order." in sentence
    sentence = sentences(Hostile("", static_output))["nondeterministic"]
    assert "the second found other bits in uninitialised memory." in sentence


def test_two_calls_alone_let_pass_what_needs_other_values_or_no_guards() -> None:
    passed = {h.name for h in HOSTILE if verified(h, LINE, repeat=False).verdict is Verdict.PASSED}
    assert passed == {
        "uncleared maximum",
        "output by shape",
        "output by address",
        "output by weight",
        "eps by shape",
        "captured graph",
        "sees __wrapped__",
        "sees a Python function",
    }


@pytest.mark.parametrize("poison", [0, 1])
def test_storage_that_was_resized_is_brought_back(poison: int) -> None:
    inputs = build(parse_case(LINE), "cpu")
    with guarded_allocations(poison) as allocations:
        own = torch.empty(10)
    own.untyped_storage().resize_(0)
    handed = inputs.hand_out()
    handed["x"].untyped_storage().resize_(0)
    handed["weight"].resize_(1 << 20)
    assert allocations.violations() == [] and inputs.violations() == []
    assert [change.stage for change in inputs.rebound(handed)] == ["x", "weight"]
    inputs.restore()
    assert inputs.violations() == [] and inputs.rebound(inputs.hand_out()) == []
    assert all(torch.equal(inputs.hand_out()[name], tensor) for name, tensor in inputs.tensors.items())


def test_a_result_without_memory_is_an_error() -> None:
    def kernel(x, weight, *, eps):
        y = torch.empty_like(x)
        y.untyped_storage().resize_(0)
        return y

    result = verified(Hostile("", lambda: kernel), LINE)
    assert result.verdict is Verdict.ERRORED
    assert "the kernel returned 'output' with a storage of 0 bytes, but it needs" in result.reason


def test_an_error_with_other_values_says_where() -> None:
    def make():
        seen = []

        def kernel(x, weight, *, eps):
            seen.append(x.float().sum().item())
            if seen[-1] != seen[0]:
                raise ValueError("the shape is known, the values are not")
            return norm(x, weight, eps=eps)

        return kernel

    result = verified(Hostile("", make), LINE)
    assert result.verdict is Verdict.ERRORED
    assert result.reason.startswith("ValueError: the shape is known, the values are not with other values of the same")
    assert result.reason.endswith("seed=4")


def test_a_kernel_that_writes_outside_keeps_its_guards() -> None:
    guarded = []

    def kernel(x, weight, *, eps):
        guarded.append(is_wrapped())
        y = torch.empty(x.shape, dtype=x.dtype).copy_(norm(x, weight, eps=eps))
        if is_wrapped():
            y.as_strided((1,), (1,), y.storage_offset() - 1).zero_()
        return y

    assert kinds(verified(Hostile("", lambda: kernel), LINE)) == {"wrote_outside"}
    assert guarded == [True] * 3


def test_what_a_call_with_some_other_values_does_is_told_with_where() -> None:
    calls = []

    def kernel(x, weight, *, eps):
        calls.append(is_wrapped())
        y = torch.empty(x.shape, dtype=x.dtype).copy_(norm(x, weight, eps=eps))
        if len(calls) == 3:
            y.as_strided((1,), (1,), y.storage_offset() - 1).zero_()
        return y

    [finding] = verified(Hostile("", lambda: kernel), LINE).findings
    assert finding.kind == "wrote_outside" and calls == [True] * 4, "no call without guards comes after it"
    assert finding.sentence.startswith("with other values of the same shapes for all inputs but x, in rms_norm x=bf16")


def test_the_process_is_as_it_was_even_if_the_kernel_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LASTBIT_HOSTILE", "before")
    before = os.getcwd(), torch.get_default_dtype(), torch.get_num_threads(), dict(os.environ)
    with pytest.raises(ZeroDivisionError), kept_process_state():
        os.chdir("/")
        os.environ["LASTBIT_HOSTILE"] = "after"
        os.environ["LASTBIT_HOSTILE_TOO"] = "1"
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(before[2] + 1)
        raise ZeroDivisionError
    assert before == (os.getcwd(), torch.get_default_dtype(), torch.get_num_threads(), dict(os.environ))


def test_a_working_directory_that_is_gone(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with kept_process_state() as found:
        (tmp_path / "gone").mkdir()
        os.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()
    assert [(f.kind, f.stage) for f in found] == [("process_state", "working directory")]
    assert os.getcwd() == str(tmp_path)
