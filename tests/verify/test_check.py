"""One case of one kernel under guards: whatever the kernel does wrong becomes a verdict and a sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit.case import Case, parse_case
from lastbit.errors import UnsupportedCase
from lastbit.inputs import build
from lastbit.kernel import Kernel
from lastbit.ops import op
from lastbit.references.rms_norm import rms_norm
from lastbit.result import CaseResult, Verdict, simplest
from lastbit.verify.check import Subject, first_line, unsupported, verify_case

LINE = "rms_norm x=bf16[6,64]@72,1 weight=bf16[64] eps=1e-06 seed=3"
WITH_RESIDUAL = "rms_norm x=bf16[6,64] residual=bf16[6,64] eps=1e-06 seed=3"


def norm(x: Tensor, weight: Tensor | None = None, *, eps: float) -> Tensor:
    """Compute native multiply as it should be."""
    y = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return y if weight is None else y * weight


def verified(function: Callable[..., Any], line: str = LINE, **declared: Any) -> CaseResult:
    kernel = Kernel("mine", "rms_norm", declared.pop("contract", ""), function, **declared, source="mine.py:7")
    return verify_case(Subject(kernel, rms_norm, torch.device("cpu")), parse_case(line))


def kinds(result: CaseResult) -> list[str]:
    return [finding.kind for finding in result.findings]


def sentence(result: CaseResult, kind: str) -> str:
    return next(finding.sentence for finding in result.findings if finding.kind == kind)


def beside(x: Tensor, offset: int) -> Tensor:
    """Return the element of the storage of `x` that lies `offset` elements after its first one."""
    return x.as_strided((1,), (1,), x.storage_offset() + offset)


# What passes


def test_a_correct_kernel_in_full() -> None:
    result = verified(norm)
    assert result.verdict is Verdict.PASSED
    assert (result.findings, result.reason, result.explained_by) == ((), "", ())
    assert (result.case, result.op, result.kernel, result.source) == (LINE, "rms_norm", "mine", "mine.py:7")
    assert (result.contract, result.device, result.dtypes) == ("native_multiply+rounded_sum", "cpu", "bf16")
    assert [stage.name for stage in result.stages] == ["output"]
    assert result.rows is not None
    assert result.rows.rows == result.rows.explained == 6
    assert result.ruled_out["fp32_multiply+rounded_sum"] > 0
    assert result.fingerprint == build(parse_case(LINE), "cpu").fingerprint
    assert result.seconds > 0


def test_a_mapping_is_as_good_as_a_tensor() -> None:
    result = verified(lambda x, weight, *, eps: {"output": norm(x, weight, eps=eps)})
    assert result.verdict is Verdict.PASSED


def test_one_element_may_have_any_stride() -> None:
    """torch calls it contiguous, and refuses to view its bytes."""
    result = verified(lambda x, *, eps: norm(x, eps=eps).as_strided((1, 1), (10, 10)), "rms_norm x=bf16[1,1] eps=0.001")
    assert result.verdict is Verdict.PASSED


def test_several_results() -> None:
    def both(x: Tensor, residual: Tensor, *, eps: float) -> dict[str, Tensor]:
        added = (x.float() + residual.float()).to(x.dtype)
        return {"residual_sum": added, "output": norm(added, eps=eps)}

    assert verified(both, WITH_RESIDUAL).verdict is Verdict.PASSED


def test_another_contract_fails_and_is_named() -> None:
    def fp32(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        return (norm(x.float(), eps=eps) * weight.float()).to(x.dtype)

    assert verified(fp32, contract="fp32_multiply").verdict is Verdict.PASSED
    failed = verified(fp32)
    assert failed.verdict is Verdict.FAILED
    assert {f"fp32_multiply+{rule}" for rule in rms_norm.axes["residual_rule"]} <= set(failed.explained_by)
    assert simplest(failed.explained_by, failed.contract) == ("fp32_multiply+rounded_sum",)
    assert failed.failing_stage is not None
    assert failed.failing_stage.name == "output"


def test_declared_stages_are_asked_for_in_the_last_call_only() -> None:
    asked: list[tuple[str, ...]] = []

    def staged(x: Tensor, weight: Tensor, *, eps: float, stages: tuple[str, ...] = ()) -> Any:
        asked.append(stages)
        output = norm(x, weight, eps=eps)
        inv_rms = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        return {"output": output, **({"inv_rms": inv_rms} if stages else {})}

    result = verified(staged, stages=("inv_rms",))
    assert result.verdict is Verdict.PASSED
    assert asked == [(), (), (), (), (), ("inv_rms",)]
    assert [stage.name for stage in result.stages] == ["inv_rms", "output"]


def test_a_result_that_changes_when_stages_are_stored_is_a_finding() -> None:
    def staged(x: Tensor, weight: Tensor, *, eps: float, stages: tuple[str, ...] = ()) -> dict[str, Tensor]:
        return {"output": norm(x, weight, eps=0.5 if stages else eps)}

    result = verified(staged, stages=("inv_rms",))
    assert result.verdict is Verdict.FAILED
    assert "nondeterministic" in kinds(result)
    assert "output" not in [f.stage for f in result.findings if f.kind == "outside"], "the first call is judged"


# Errors


def test_a_kernel_that_raises() -> None:
    def broken(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        raise ValueError("no such tile\nand a second line")

    result = verified(broken)
    assert (result.verdict, result.reason) == (Verdict.ERRORED, "ValueError: no such tile")


def test_an_error_without_text() -> None:
    def broken(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        raise ZeroDivisionError

    assert verified(broken).reason == "ZeroDivisionError"


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (None, "the kernel returned NoneType, but must return a tensor or {'output': tensor}"),
        (None, "write @kernel(…, out={'PARAMETER': 'output'}), into an input, mutates={'INPUT': 'output'}"),
        ((1, 2), "the kernel returned tuple of 2, but must return a tensor or {'output': tensor}"),
        ({"output": 3.0}, "the kernel returned float for 'output', but must return a tensor"),
        ({"y": torch.zeros(6, 64)}, "the kernel returned ['y'], which lacks the result 'output'"),
        (torch.zeros(6, 63, dtype=torch.bfloat16), "result 'output' has shape (6, 63), but the op requires (6, 64)"),
        (torch.zeros(6, 64), "result 'output' has dtype torch.float32, but the op requires torch.bfloat16; convert it"),
        (torch.zeros(6, 64, dtype=torch.complex128), "result 'output' has dtype torch.complex128"),
        (torch.zeros(6, 64, dtype=torch.int32), "result 'output' has dtype torch.int32"),
    ],
)
def test_what_a_kernel_must_not_return(returned: object, reason: str) -> None:
    result = verified(lambda x, weight, *, eps: returned)
    assert result.verdict is Verdict.ERRORED
    assert reason in result.reason


def test_a_tensor_where_there_are_several_results() -> None:
    result = verified(lambda x, residual, *, eps: norm(x, eps=eps), WITH_RESIDUAL)
    assert result.verdict is Verdict.ERRORED
    assert (
        "the kernel returned Tensor, but must return all of output, residual_sum: a tuple in this order, or return "
        in (result.reason)
    )


def fused(x: Tensor, residual: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    total = (x.float() + residual.float()).to(x.dtype)
    return norm(total, eps=eps), total


def test_several_results_by_order() -> None:
    """In the order that `assert_contract` takes, which is not that in which the reference records them."""
    assert verified(fused, WITH_RESIDUAL).verdict is Verdict.PASSED
    assert (
        verified(lambda x, residual, *, eps: list(fused(x, residual, eps=eps)), WITH_RESIDUAL).verdict is Verdict.PASSED
    )
    swapped = verified(lambda x, residual, *, eps: fused(x, residual, eps=eps)[::-1], WITH_RESIDUAL)
    assert swapped.verdict is Verdict.FAILED
    more = verified(lambda x, residual, *, eps: (*fused(x, residual, eps=eps), x), WITH_RESIDUAL)
    assert "returned tuple of 3" in more.reason
    assert "return {'output': …, 'residual_sum': …}; if it writes" in more.reason
    assert "mutates={'INPUT': 'output', 'OTHER INPUT': 'residual_sum'}" in more.reason


def test_a_stage_that_the_op_does_not_have() -> None:
    result = verified(lambda x, weight, *, eps: {"output": norm(x, weight, eps=eps), "extra": x.clone()})
    assert result.verdict is Verdict.ERRORED
    assert "'extra', which is no stage here" in result.reason


@pytest.mark.parametrize(
    ("kernel", "line", "reason"),
    [
        (lambda x, wieght, *, eps: x, "x=bf16[6,64] wieght=bf16[64] eps=1e-6", "unknown tensor of rms_norm 'wieght'"),
        (lambda x: x, "x=bf16[6,64]", "rms_norm was not given eps"),
        (norm, "x=bf16[6,64]:no_such_regime eps=1e-6", "'no_such_regime'"),
        (lambda x, *, eps, quant: x, "x=bf16[6,64] eps=1e-6 quant=foo", "quant='foo' is neither static nor dynamic"),
        (lambda x, *, eps, quant: x, "x=bf16[6,64] eps=1e-6 quant=static", "a scale goes with quant=static"),
        (lambda x, *, eps, variance_size: x, "x=bf16[6,64] eps=1e-6 variance_size=99", "not from 1 to 64"),
        (lambda x, w, *, eps, weight_offset: x, "x=bf16[6,64] eps=1e-6 weight_offset=1.0 w=bf16[64]", "unknown tensor"),
    ],
)
def test_a_case_that_makes_no_sense_is_an_error_that_says_so(kernel: Any, line: str, reason: str) -> None:
    result = verified(kernel, f"rms_norm {line}")
    assert result.verdict is Verdict.ERRORED
    assert result.reason.startswith("UsageError: ")
    assert reason in result.reason


def test_an_offset_of_the_weight_has_no_meaning_in_a_native_product() -> None:
    def offset(x: Tensor, weight: Tensor, *, eps: float, weight_offset: float) -> Tensor:
        return x

    result = verified(offset, "rms_norm x=bf16[6,64] weight=bf16[64] eps=1e-6 weight_offset=1.0")
    assert "weight_offset=1.0 has a meaning under fp32_multiply only" in result.reason


def test_a_kernel_that_exits_is_an_error() -> None:
    def leaves(x: Tensor, *, eps: float) -> Tensor:
        raise SystemExit(0)

    assert verified(leaves, "rms_norm x=bf16[6,64] eps=1e-6").verdict is Verdict.ERRORED


# Unsupported


def test_a_case_that_the_kernel_declines() -> None:
    def narrow(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        raise UnsupportedCase("64 columns are too many")

    result = verified(narrow)
    assert (result.verdict, result.reason) == (Verdict.UNSUPPORTED, "64 columns are too many")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x, *, eps: x, "the kernel takes no weight"),
        (lambda x: x, "the kernel takes no eps, weight"),
        (lambda x, weight, scale, *, eps: x, "the kernel needs scale"),
        (lambda x, weight, *, eps, quant, mode: x, "the kernel needs mode, quant"),
        (lambda x, weight=None, residual=None, *, eps=1e-6, stages=(): x, ""),
    ],
)
def test_a_signature_that_cannot_take_the_case(function: Callable[..., Any], reason: str) -> None:
    kernel = Kernel("mine", "rms_norm", "", function)
    case: Case = parse_case(LINE)
    assert unsupported(kernel, case) == reason
    if reason:
        result = verified(function)
        assert (result.verdict, result.reason) == (Verdict.UNSUPPORTED, reason)


# Memory


def test_a_kernel_that_changes_its_input() -> None:
    def greedy(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        y = norm(x, weight, eps=eps)
        x[2, 5] += 1
        return y

    result = verified(greedy)
    assert result.verdict is Verdict.FAILED
    assert set(kinds(result)) == {"mutated_input"}
    assert sentence(result, "mutated_input") == "changed 1 element of the input x (first x[2, 5])"


@pytest.mark.parametrize(
    ("offset", "words"),
    [(-1, "before the start of x"), (64, "between the rows of x"), (5 * 72 + 64, "past the end of x")],
)
def test_a_kernel_that_writes_beside_its_input(offset: int, words: str) -> None:
    def careless(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        beside(x, offset).zero_()
        return norm(x, weight, eps=eps)

    result = verified(careless)
    assert result.verdict is Verdict.FAILED
    assert set(kinds(result)) == {"wrote_outside"}
    assert f"wrote 1 element {words}" in sentence(result, "wrote_outside")


@pytest.mark.parametrize(("offset", "words"), [(-1, "before the start of output"), (6 * 64, "past the end of output")])
def test_a_kernel_that_writes_beside_its_result(offset: int, words: str) -> None:
    def careless(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        y.copy_(norm(x, weight, eps=eps))
        beside(y, offset).zero_()
        return y

    result = verified(careless)
    assert result.verdict is Verdict.FAILED
    assert f"wrote 1 element {words}" in sentence(result, "wrote_outside")


def test_a_kernel_that_writes_outside_only_while_it_stores_its_stages() -> None:
    def careless(x: Tensor, weight: Tensor, *, eps: float, stages: tuple[str, ...] = ()) -> dict[str, Tensor]:
        if stages:
            beside(x, -1).zero_()
        return {"output": norm(x, weight, eps=eps)}

    result = verified(careless, stages=("inv_rms",))
    assert result.verdict is Verdict.FAILED
    assert kinds(result) == ["wrote_outside"]


def test_a_kernel_that_leaves_elements_unwritten() -> None:
    def lazy(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        y = torch.empty(x.shape, dtype=x.dtype)
        y[:, :60] = norm(x, weight, eps=eps)[:, :60]
        return y

    result = verified(lazy)
    assert result.verdict is Verdict.FAILED
    assert sentence(result, "unwritten") == "24 of 384 elements of output were never written."
    assert "nondeterministic" not in kinds(result)


def test_a_kernel_that_computes_from_memory_that_it_has_not_written() -> None:
    """Its result is written to the last element, so that nobody has to look for a mask that is too short."""

    def careless(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        y, scratch = torch.empty(6, 64), torch.empty(6, 64)
        scratch[:, :60] = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps))[:, :60]
        y[:] = scratch * weight.float()
        return y

    line = "rms_norm x=fp32[6,64] weight=fp32[64] eps=1e-06 seed=3"
    result = verified(careless, line)
    assert result.verdict is Verdict.FAILED
    expected = "24 of 384 elements of output were computed from memory that was never written."
    assert sentence(result, "uninitialised") == expected
    assert {"unwritten", "nondeterministic"}.isdisjoint(kinds(result))


def test_a_kernel_whose_result_depends_on_uninitialised_memory() -> None:
    def sloppy(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        scratch = torch.empty(64, dtype=torch.int32)
        y = norm(x, weight, eps=eps)
        y[0] = torch.where(scratch < 0, y[0], -y[0])
        return y

    result = verified(sloppy)
    assert result.verdict is Verdict.FAILED
    assert "differ between two calls on the same input" in sentence(result, "nondeterministic")


FP32 = "rms_norm x=fp32[6,64] weight=fp32[64] eps=1e-06 seed=3"


def moody(error: float) -> Callable[..., Tensor]:
    """Make a kernel whose inverse rms is off by a relative error in the last call of a case."""
    calls: list[int] = []

    def call(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        calls.append(1)
        inv_rms = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return x * (inv_rms * (1 + error * (len(calls) == 6))) * weight

    return call


def test_a_kernel_that_is_nondeterministic_within_its_contract() -> None:
    """Both results are allowed in fp32, but they differ."""
    result = verified(moody(2.0**-23), FP32)
    assert result.verdict is Verdict.FAILED
    assert kinds(result) == ["nondeterministic"]
    assert " of 384 elements of output differ" in sentence(result, "nondeterministic")


def test_results_that_are_declared_unordered_may_differ_within_the_contract() -> None:
    result = verified(moody(2.0**-23), FP32, unordered=("output",))
    assert (result.verdict, result.findings) == (Verdict.PASSED, ())


def test_every_call_of_an_unordered_kernel_is_judged() -> None:
    result = verified(moody(2.0**-10), FP32, unordered=("output",))
    assert result.verdict is Verdict.FAILED
    assert kinds(result) == ["outside", "rows"]


def test_only_atomic_additions_may_flush_subnormal_numbers() -> None:
    ordered = Kernel("mine", "rms_norm", "", norm)
    atomic = Kernel("mine", "rms_norm", "", norm, unordered=("output",), depth=lambda n: 7)
    plain, flushing = (Subject(k, rms_norm, torch.device("cpu")).bounds for k in (ordered, atomic))
    assert (plain.atomic, plain.depth) == (frozenset(), None)
    assert (flushing.atomic, flushing.depth) == ({"output"}, atomic.depth)


def test_unordered_results_must_be_written_all_the_same() -> None:
    def half(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        y = torch.empty_like(x)
        y[:3] = norm(x, weight, eps=eps)[:3]
        return y

    assert "unwritten" in kinds(verified(half, FP32, unordered=("output",)))


def test_a_shape_that_differs_between_calls() -> None:
    calls: list[int] = []

    def moody(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        calls.append(1)
        y = norm(x, weight, eps=eps)
        return y if len(calls) == 1 else y[:3]

    result = verified(moody)
    assert result.verdict is Verdict.FAILED
    assert sentence(result, "nondeterministic") == "output has another shape or dtype in a second call."


def test_a_kernel_that_returns_its_input() -> None:
    """The right bits, x being all zeros, but in memory that is not its own."""
    result = verified(lambda x, weight, *, eps: x, "rms_norm x=bf16[6,64]:zeros weight=bf16[64] eps=1e-06")
    assert result.verdict is Verdict.FAILED
    assert "result output shares memory with input x" in sentence(result, "overlap")


def test_results_that_share_memory() -> None:
    def both(x: Tensor, residual: Tensor, *, eps: float) -> dict[str, Tensor]:
        zeros = torch.zeros_like(x)
        return {"residual_sum": zeros, "output": zeros}

    result = verified(both, "rms_norm x=bf16[6,64]:zeros residual=bf16[6,64]:zeros eps=1e-06")
    assert set(kinds(result)) == {"overlap"}
    assert "shares memory with" in sentence(result, "overlap")


@pytest.mark.parametrize("strides", [(0, 1), (32, 1)])
def test_a_result_whose_elements_share_memory(strides: tuple[int, int]) -> None:
    """The right bits, x being all zeros, in one row for all, or in rows of which each begins within the last."""
    result = verified(
        lambda x, weight, *, eps: torch.zeros(6 * 64, dtype=x.dtype).as_strided(x.shape, strides),
        "rms_norm x=bf16[6,64]:zeros weight=bf16[64] eps=1e-06",
    )
    assert set(kinds(result)) == {"overlap"}
    assert "elements of result output share memory" in sentence(result, "overlap")


# Declared mutation


def in_place(x: Tensor, residual: Tensor, *, eps: float) -> dict[str, Tensor]:
    """Write the sum to where the residual was."""
    residual.copy_((x.float() + residual.float()).to(x.dtype))
    return {"residual_sum": residual, "output": norm(residual, eps=eps)}


def test_an_input_that_the_kernel_declares_may_hold_a_result() -> None:
    result = verified(in_place, WITH_RESIDUAL, mutates=("residual",))
    assert (result.verdict, result.findings) == (Verdict.PASSED, ())
    assert result.fingerprint == build(parse_case(WITH_RESIDUAL), "cpu").fingerprint


def test_the_same_without_the_declaration() -> None:
    result = verified(in_place, WITH_RESIDUAL)
    assert result.verdict is Verdict.FAILED
    assert set(kinds(result)) >= {"mutated_input", "overlap"}


def test_a_declared_input_may_be_absent() -> None:
    result = verified(norm, mutates=("residual",))
    assert result.verdict is Verdict.PASSED


def test_declared_mutation_does_not_excuse_writes_outside() -> None:
    def careless(x: Tensor, residual: Tensor, *, eps: float) -> dict[str, Tensor]:
        beside(residual, residual.numel()).zero_()
        return in_place(x, residual, eps=eps)

    result = verified(careless, WITH_RESIDUAL, mutates=("residual",))
    assert result.verdict is Verdict.FAILED
    assert "past the end of residual" in sentence(result, "wrote_outside")


def test_a_wrong_result_in_a_declared_input_fails() -> None:
    def wrong(x: Tensor, residual: Tensor, *, eps: float) -> dict[str, Tensor]:
        results = in_place(x, residual, eps=eps)
        residual[0, 0] += 1
        return results

    result = verified(wrong, WITH_RESIDUAL, mutates=("residual",))
    assert result.verdict is Verdict.FAILED
    assert "residual_sum" in [f.stage for f in result.findings]


@pytest.mark.parametrize("declining", [3, 5])  # the fourth call has other numbers, which a kernel may decline
def test_a_case_that_was_taken_cannot_be_declined_later(declining: int) -> None:
    calls = [0]

    def moody(x: Tensor, *, eps: float) -> Tensor:
        calls[0] += 1
        if calls[0] == declining:
            raise UnsupportedCase("not again")
        return norm(x, eps=eps)

    result = verified(moody, "rms_norm x=bf16[3,8] eps=1e-06")
    assert result.verdict is Verdict.ERRORED
    assert "took the case and declined it in a later call: not again" in result.reason


# Another op


@op(rows=("x",))
def empty_friendly(x, *, contract, stage) -> None:
    """x + x, for cases without elements."""
    stage("y", x + x, result=True)


@pytest.mark.parametrize("shape", ["0,8", "3,0", "0"])
def test_a_case_without_elements_is_right(shape: str) -> None:
    subject = Subject(Kernel("twice", "empty_friendly", "", lambda x: x + x), empty_friendly, torch.device("cpu"))
    result = verify_case(subject, parse_case(f"empty_friendly x=fp32[{shape}]"))
    assert (result.verdict, result.findings) == (Verdict.PASSED, ())


@pytest.mark.parametrize("shape", ["0,8", "3,0"])
def test_rms_norm_without_elements(shape: str) -> None:
    assert verified(norm, f"rms_norm x=bf16[{shape}] eps=1e-06").verdict is Verdict.PASSED


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "at 3:7:\n  x = y\n      ^\nNameError('y is not defined')",
            "ValueError: at 3:7: NameError('y is not defined')",
        ),
        ("two lines\nof which the first says all", "ValueError: two lines"),
        ("ends with a colon:", "ValueError: ends with a colon"),
        ("", "ValueError"),
    ],
)
def test_the_reason_of_an_error_is_one_line_that_says_something(text: str, reason: str) -> None:
    assert first_line(ValueError(text)) == reason
