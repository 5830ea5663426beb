"""Rounding and flush-to-zero are settings of a thread: who changes them is told, and nobody else computes by them."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lastbit import ContractViolation, assert_contract
from lastbit.calling.process_state import kept_process_state
from lastbit.case import parse_case
from lastbit.floating_point import FloatingPoint, default_floating_point, kept_floating_point
from lastbit.inputs import build
from lastbit.kernel import Kernel, load_kernels
from lastbit.of_file import Role, kernel_of_file
from lastbit.references.rms_norm import rms_norm
from lastbit.result import CaseResult, Verdict
from lastbit.verify.check import Subject, verify_case
from tests.faults.hostile import norm

LINE = "rms_norm x=fp32[3,16] weight=fp32[16]:subnormal eps=1e-06 seed=0"
DEFAULT = "rounding to nearest"
FLUSHING = f"{DEFAULT}, subnormal results flushed to zero, subnormal operands taken for zero"
UP, TOWARD_ZERO = {"x86_64": (0x800, 0xC00), "aarch64": (0x400000, 0xC00000)}.get(platform.machine(), (0, 0))
flushing = pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor has no flush-to-zero")


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    with kept_floating_point():
        yield


def flush() -> None:
    torch.set_flush_denormal(True)


def round_up() -> None:
    ctypes.CDLL(None).fesetround(UP)


def flushed(x, weight, *, eps):
    """Return zero for a subnormal number, as no kernel may."""
    y = norm(x, weight, eps=eps)
    return torch.where(y.abs() < torch.finfo(y.dtype).tiny, 0.0, y)


def verified(call: Callable[..., object]) -> CaseResult:
    return verify_case(Subject(Kernel("mine", "rms_norm", "", call), rms_norm, torch.device("cpu")), parse_case(LINE))


def leaving(change: Callable[[], None]) -> Callable[..., object]:
    def kernel(x, weight, *, eps):
        y = norm(x, weight, eps=eps)
        change()
        return y

    return kernel


@flushing
def test_settings_are_seen_by_arithmetic_and_restored() -> None:
    library = ctypes.CDLL(None)
    with kept_floating_point() as left:
        flush()
        assert str(FloatingPoint.now()) == FLUSHING
        with default_floating_point():
            assert str(FloatingPoint.now()) == DEFAULT
        assert str(FloatingPoint.now()) == FLUSHING
    assert (left, str(FloatingPoint.now())) == ([FLUSHING], DEFAULT)
    for mode, words in ((UP, "rounding up"), (TOWARD_ZERO, "rounding toward zero")):
        with kept_floating_point() as left:
            library.fesetround(mode)
        assert (left, str(FloatingPoint.now())) == ([words], DEFAULT)


@flushing
@pytest.mark.parametrize(("change", "left"), [(flush, FLUSHING), (round_up, "rounding up")])
def test_a_kernel_that_leaves_other_settings_is_told_and_the_next_one_is_judged_without_them(change, left) -> None:
    result = verified(leaving(change))
    told = f"left the floating-point arithmetic of the process at {left}, where it was {DEFAULT}; whatever runs next"
    assert result.verdict is Verdict.FAILED
    assert [(f.kind, f.sentence[: len(told)]) for f in result.findings] == [("process_state", told)]
    assert str(FloatingPoint.now()) == DEFAULT
    assert {finding.kind for finding in verified(flushed).findings} >= {"outside"}


@flushing
def test_a_kernel_that_puts_them_back_computes_as_it_likes_and_is_judged_by_what_it_gives() -> None:
    def kernel(x, weight, *, eps):
        flush()
        y = norm(x, weight, eps=eps)
        torch.set_flush_denormal(False)
        return y

    assert {finding.kind for finding in verified(kernel).findings} >= {"outside"}
    assert "process_state" not in {finding.kind for finding in verified(kernel).findings}


@flushing
def test_settings_outlive_no_call_that_raises_and_no_thread_that_openmp_has_started() -> None:
    threads, values = torch.get_num_threads(), torch.full((1 << 20,), 1e-39)

    def zeros() -> int:
        torch.set_num_threads(4)
        return int((values * 0.5 == 0).sum())

    try:
        with pytest.raises(ZeroDivisionError), kept_process_state():
            flush()
            assert zeros()
            raise ZeroDivisionError
        assert zeros() == 0
    finally:
        torch.set_num_threads(threads)


@flushing
def test_a_result_is_judged_in_a_process_that_flushes() -> None:
    case = parse_case(LINE)

    given = {**build(case, "cpu").tensors, **case.params}
    right, wrong = norm(**given), flushed(**given)
    flush()
    assert_contract("rms_norm", right, **given)
    with pytest.raises(ContractViolation):
        assert_contract("rms_norm", wrong, **given)
    assert str(FloatingPoint.now()) == FLUSHING


def fast_math(folder: Path) -> str:
    """Return a line of Python that loads a library linked with -ffast-math, or does what loading it does."""
    if shutil.which("gcc"):
        start = subprocess.check_output(["gcc", "-print-file-name=crtfastmath.o"], text=True).strip()
        (folder / "fast.c").write_text("int fast(void) { return 1; }\n")
        made = subprocess.run(["gcc", "-shared", "-fPIC", "fast.c", start, "-o", "fast.so"], cwd=folder)
        if not made.returncode:
            return f"import ctypes; ctypes.CDLL({str(folder / 'fast.so')!r})"
    return "import torch; torch.set_flush_denormal(True)"


KERNEL = """
from tests.faults.hostile import norm
from lastbit import kernel

@kernel("rms_norm")
def {name}(x, weight, *, eps):
    return norm(x, weight, eps=eps)
"""


@flushing
def test_a_file_that_loads_a_fast_math_library_is_told_and_its_neighbour_is_not(tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text(fast_math(tmp_path) + KERNEL.format(name="first"))
    (tmp_path / "second.py").write_text(KERNEL.format(name="second"))
    kernels = load_kernels(tmp_path)
    assert str(FloatingPoint.now()) == DEFAULT
    results = [verify_case(Subject(k, rms_norm, torch.device("cpu")), parse_case(LINE)) for k in kernels]
    assert [result.verdict for result in results] == [Verdict.FAILED, Verdict.PASSED]
    [finding] = results[0].findings
    assert finding.kind == "process_state"
    assert finding.sentence.startswith("loading first.py left the floating-point arithmetic of the process at ")


@flushing
def test_so_is_the_only_kernel_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text(fast_math(tmp_path) + "\nfrom tests.faults.hostile import norm as _norm\n")
    with (tmp_path / "first.py").open("a") as file:
        file.write("def rms_norm(x, weight, *, eps):\n    return _norm(x, weight, eps=eps)\n")
    assert kernel_of_file(tmp_path / "first.py", Role("rms_norm")).arithmetic == FLUSHING
    assert str(FloatingPoint.now()) == DEFAULT
