"""A line is named where a replay of what the kernel did, with that line mended, is right; otherwise none is."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
from rich.console import Console

from lastbit.diagnosing import mends
from lastbit.diagnosing.responsible import constant_of
from lastbit.interpret import install
from lastbit.numerics.algebraic import FORMULAS
from lastbit.numerics.formats import BF16, FP16
from lastbit.numerics.residues import Residues, constant
from lastbit.reports.explanation import print_explanation
from lastbit.reports.why import Explanation
from lastbit.tracing import Event, Log, Operand
from lastbit.tracing.ancestry import Ancestry
from lastbit.tracing.events import Made, Origin
from lastbit.tracing.lanes import everything, pointwise
from lastbit.tracing.redo import Redo
from tests.diagnosing.test_explain_command import explained
from tests.diagnosing.test_mends_culprits import STRIDED, TORCH, TRITON, kernel_of

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="the traces are of the interpreter")

if triton.knobs.runtime.interpret:
    install()

LINE = "rms_norm x=bf16[3,1000] weight=bf16[1000] eps=0.01 seed=1"


def found(folder: Path, text: str, old: str, new: str, line: str = LINE) -> Explanation:
    return explained(kernel_of(folder, text.replace("BLOCK=64", "BLOCK=1024"), old, new), line)


def printed(explanation: Explanation) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_explanation(explanation, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("text", "old", "new", "code", "mend"),
    [
        (TRITON, "(x * rstd).to(x_ptr.dtype.element_ty)", "x * rstd", "xhat = x * rstd", "rounded to bf16"),
        (TRITON, "squares = x * x", "squares = (x * x).to(tl.bfloat16).to(tl.float32)", "squares =", "not rounded"),
        (TRITON, "total / n", "total / (n - 1)", "var = total / (n - 1)", "with 1000 in place of 999"),
        (TRITON, "y = xhat * w", "y = xhat / w", "y = xhat / w", "multiplied"),
        (TRITON, "var + eps", "var - eps", "shifted = var - eps", "added"),
        (
            TRITON,
            "w_ptr + cols,",
            "w_ptr + n - 1 - cols,",
            "w = tl.load",
            "with the elements of weight that belong there",
        ),
        (TORCH, "x.float().square()", "x.float().square().bfloat16().float()", "squares =", "not rounded"),
        (TORCH, "(x.float() * rstd).to(x.dtype)", "x.float() * rstd", "xhat = x.float() * rstd", "rounded to bf16"),
    ],
)
def test_the_line_whose_mending_makes_every_element_right(
    tmp_path: Path, text: str, old: str, new: str, code: str, mend: str
) -> None:
    explanation = found(tmp_path, text, old, new)
    assert explanation.culprit is not None and explanation.culprit.code.startswith(code)
    assert explanation.culprit.mend == mend
    assert f"should be: {explanation.culprit.mend}; done again so, every element is right" in printed(explanation)


@pytest.mark.parametrize(
    ("condition", "chosen", "mend"),
    [
        ("weight < 0.5", "scaled, xhat", "always its first value"),
        ("rstd < 1.0", "second, first", "with the condition the other way round"),
    ],
)
def test_the_side_that_a_choice_should_have_taken(tmp_path: Path, condition: str, chosen: str, mend: str) -> None:
    """The condition is broadcast, and residues are chosen as the values are."""
    choice = f"""scaled, taken = xhat * weight, {condition}
    first, second = torch.where(taken, scaled, -scaled), torch.where(taken, -scaled, scaled)
    return torch.where(taken, {chosen})"""
    line = "rms_norm x=bf16[4,4] weight=bf16[4] eps=0.01 seed=1"
    explanation = found(tmp_path, TORCH, "return (xhat * weight).to(x.dtype)", choice, line)
    assert explanation.culprit is not None and explanation.culprit.code.startswith("return torch.where")
    assert explanation.culprit.mend == mend


def test_no_line_is_named_where_two_are_wrong(tmp_path: Path) -> None:
    """Neither of two wrong lines can be mended alone; the stage before them is right."""
    text = TRITON.replace("y = xhat * w\n", "gain = w - 0.25\n    y = (xhat * gain) + 0.125\n")
    explanation = found(tmp_path, text, "", "")
    assert explanation.culprit is None
    lines = text.splitlines()
    first, last = (next(n for n, line in enumerate(lines, 1) if part in line) for part in ("w = tl.load", "0.125"))
    [between] = explanation.trace.between
    a, _, b = between.rpartition(":")[2].partition(" to ")
    assert first <= int(a) < int(b) and int(b) >= last
    said = printed(explanation)
    assert "line      not found; between normalized, which is right, and " in said
    assert "the kernel gives" in said and f"line {last} gives" not in said


def test_a_cast_that_changes_nothing_is_never_named(tmp_path: Path) -> None:
    """The load of strided rows as if they were contiguous is; the cast in its line reads what it was given."""
    explanation = found(tmp_path, TRITON, "row * stride + cols", "row * n + cols", STRIDED)
    assert explanation.culprit is not None and explanation.culprit.code.startswith("x = tl.load")
    both = TORCH.replace("(x.float() * rstd)", "(x.float() * rstd * (1.0 + rstd))")
    explanation = found(tmp_path, both, "(xhat * weight)", "(xhat * weight.float() * 3.0)")
    assert explanation.culprit is None or "rstd" in explanation.culprit.text or "3.0" in explanation.culprit.text


def test_one_wrong_element_is_enough(tmp_path: Path) -> None:
    """Any rounding mends the value of one element by chance, but not its residue."""
    one = "rms_norm x=bf16[1,2]:values(-1.5,1) weight=bf16[2]:values(1.25,1) eps=1e-06 seed=0"
    explanation = found(tmp_path, TRITON, "(x * rstd).to(x_ptr.dtype.element_ty)", "x * rstd", one)
    assert explanation.culprit is not None and explanation.culprit.code == "xhat = x * rstd"
    assert [step.mend for step in explanation.trace.mended] == ["rounded to bf16"]


def test_the_contract_that_is_kept_leads(tmp_path: Path) -> None:
    said = printed(found(tmp_path, TRITON, "(x * rstd).to(x_ptr.dtype.element_ty)", "x * rstd")).splitlines()
    assert said[3].startswith("  keeps     fp32_multiply: this contract of the op allows every bit")
    assert said[3].endswith("; it claims native_multiply")


HELPERS = """
@triton.jit
def rounded(value, dtype: tl.constexpr, ROUND: tl.constexpr):
    if ROUND:
        value = value.to(dtype).to(tl.float32)
    return value

@triton.jit
def root(z, DIVIDES: tl.constexpr):
    if DIVIDES:
        return tl.div_rn(1.0, tl.sqrt_rn(z)) + 0.0 * z
    return tl.rsqrt(z)

@triton.jit
def _norm("""

CALLS = TRITON.replace("\n@triton.jit\ndef _norm(", HELPERS).replace(
    "(x * rstd).to(x_ptr.dtype.element_ty)", "rounded(x * rstd, x_ptr.dtype.element_ty, ROUND)"
)
CALLS = CALLS.replace("BLOCK: tl.constexpr", "ROUND: tl.constexpr, BLOCK: tl.constexpr")
CALLS = CALLS.replace("BLOCK=64", "ROUND=True, BLOCK=64").replace("y = xhat * w", "y = xhat.to(tl.float32) * w")


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("element_ty, ROUND)", "element_ty, False)", "xhat = rounded("),
        ("squares = x * x", "squares = rounded(x * x, tl.bfloat16, True)", "squares = rounded("),
        ("ROUND=True", "ROUND=False", "_norm[(x.shape[0],)]("),
    ],
)
def test_what_passes_a_flag_is_named_and_not_the_helper(tmp_path: Path, old: str, new: str, code: str) -> None:
    explanation = found(tmp_path, CALLS, old, new)
    assert explanation.trace.mended
    assert explanation.culprit is not None and explanation.culprit.code.startswith(code)


def test_what_several_operations_of_a_function_are_passed(tmp_path: Path) -> None:
    text = CALLS.replace("tl.rsqrt(shifted)", "root(shifted, True)")
    explanation = found(tmp_path, text, "root(shifted, True)", "root(var, True)")
    assert explanation.culprit is not None and explanation.culprit.code == "rstd = root(var, True)"


@pytest.mark.parametrize(
    ("old", "new", "code", "mend"),
    [
        ("mask = cols < n", "mask = cols < n - 1", "mask = cols < n - 1", "with 0 in place of 1"),
    ],
)
def test_a_number_in_a_mask(tmp_path: Path, old: str, new: str, code: str, mend: str) -> None:
    text = TRITON.replace(
        "tl.store(y_ptr + row * n + cols, y, mask=mask)", "tl.store(y_ptr + row * n + cols, y, mask=cols < n)"
    )
    explanation = found(tmp_path, text, old, new)
    assert explanation.culprit is not None and explanation.culprit.code.startswith(code)
    assert explanation.culprit.mend == mend


def test_a_number_that_the_launch_is_given_is_not_the_fault_of_the_line(tmp_path: Path) -> None:
    """It was worked out before the launch, from what the case does not have."""
    text = TRITON.replace("    y = torch", "    [given] = map(float, [eps])\n    y = torch").replace(
        "), eps, B", "), given, B"
    )
    explanation = found(tmp_path, text, "[eps]", "[2 * eps]")
    assert explanation.culprit is None and "perhaps" in printed(explanation)


# What a mend computes


def made(*numbers: float) -> Made:
    values = np.array(numbers)
    return Made(values, Residues.of(torch.from_numpy(values)))


@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        ("of the other sign", (-4.0, 2.0)),
        ("its magnitude", (4.0, 2.0)),
        ("squared", (16.0, 4.0)),
        ("inverted", (0.25, -0.5)),
        ("added", (6.0, -6.0)),
        ("subtracted", (2.0, 2.0)),
        ("multiplied", (8.0, 8.0)),
        ("divided", (2.0, 0.5)),
        ("its first operand", (4.0, -2.0)),
        ("its second operand", (2.0, -4.0)),
        ("subtracted the other way round", (-2.0, -2.0)),
        ("divided the other way round", (0.5, 2.0)),
        ("the larger of the two", (4.0, -2.0)),
        ("the smaller of the two", (2.0, -4.0)),
    ],
)
def test_other_operations_on_numbers_and_their_residues(words: str, numbers: tuple[float, ...]) -> None:
    x, y = made(4.0, -2.0), made(2.0, -4.0)
    found = mends._OF_ONE[words](x) if words in mends._OF_ONE else mends._OF_TWO[words](x, y)
    assert tuple(found.values) == numbers
    assert found.residues is not None and found.residues.equal(Residues.of(torch.tensor(numbers))).all()
    bare = Made(x.values)
    if words not in ("its first operand", "its second operand"):
        without = mends._OF_ONE[words](bare) if words in mends._OF_ONE else mends._OF_TWO[words](bare, y)
        assert tuple(without.values) == numbers and without.residues is None


@pytest.mark.parametrize(
    ("words", "name"),
    [("its root", "sqrt"), ("its inverse root", "rsqrt"), ("exp of it", "exp"), ("exp2 of it", "exp2")],
)
def test_functions_of_one_number(words: str, name: str) -> None:
    x = made(4.0, 9.0)
    found = mends._OF_ONE[words](x)
    assert x.residues is not None and found.residues is not None
    assert found.residues.equal(FORMULAS[name](x.residues)).all()
    assert found.values == pytest.approx(getattr(torch, name)(torch.tensor([4.0, 9.0])).numpy(), rel=1e-6)


def test_comparisons_and_operations_by_name() -> None:
    a, b = np.array([1, 2, 3]), np.array([2, 2, 2])
    signs = {sign: function(a, b).tolist() for sign, function in mends._COMPARED.values()}
    no, yes = False, True
    assert signs == {
        "<": [yes, no, no], "<=": [yes, yes, no], ">": [no, no, yes], ">=": [no, yes, yes], "==": [no, yes, no],
        "!=": [yes, no, yes],
    }  # fmt: skip
    x, y = made(8.0), made(2.0)
    assert {name: float(f(x, y).values[0]) for name, f in mends._BY_NAME.items()} == {
        "fadd": 10.0, "add": 10.0, "fsub": 6.0, "sub": 6.0, "fmul": 16.0, "mul": 16.0, "fdiv": 4.0, "div": 4.0,
    }  # fmt: skip
    assert [float(f(x, y).values[0]) for f in mends._MORE.values()] == [10.0, 6.0, 16.0, 4.0]
    assert [words.format("n") for words in mends._MORE] == ["plus n", "minus n", "times n", "divided by n"]


def test_numbers_are_filled_shaped_and_chosen_with_their_residues() -> None:
    third = Made.full(1 / 3, (2, 2), np.float32)
    assert third.values.dtype == np.float32 and third.values.shape == (2, 2) and third.residues is not None
    assert third.residues.shape == (2, 2) and third.residues.equal(constant(3.0).reciprocal()).all()
    one, four = made(7.0), made(1.0, 2.0, 3.0, 4.0)
    operands = (Operand(everything(())), Operand(pointwise((4,), (4,))))
    event, redo = Event(0, "select", (), 0, "", np.zeros((2, 2)), operands), Redo(Ancestry(Log()))
    assert redo.spread(event, 0, one).values.tolist() == [[7.0] * 2] * 2
    assert redo.spread(event, 1, four).values.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    chosen = mends._where(np.array([True, False]), made(1.0, 2.0), made(3.0, 4.0))
    assert chosen.values.tolist() == [1.0, 4.0] and chosen.residues is not None
    assert chosen.residues.p.tolist() == [1, 4]
    assert mends._where(np.array([True]), Made(np.ones(1)), made(3.0)).residues is None
    second = mends._second(mends._SUB, 3.0, four)
    assert second.values.tolist() == [-2.0, -1.0, 0.0, 1.0]


def test_numbers_are_stored_and_rounded_as_their_dtype_holds_them() -> None:
    wide = made(1.001, 2.0)
    stored, rounded = mends._stored(wide, np.dtype(np.float16)), mends._rounded(BF16, wide)
    assert stored.values.dtype == np.float16 and stored.values.tolist() == [1.0009765625, 2.0]
    assert rounded.values.dtype == np.float64 and rounded.values.tolist() == [1.0, 2.0]
    assert wide.residues is not None
    for found, fmt in ((stored, FP16), (rounded, BF16)):
        assert found.residues is not None
        assert found.residues.equal(wide.residues.rounded(fmt, torch.tensor([1.001, 2.0]).double())).all()
    assert mends._stored(wide, np.dtype(np.float32)).residues.equal(wide.residues).all()  # type: ignore[union-attr]
    assert mends._rounded(BF16, Made(np.float16([1.001]))).values.dtype == np.float32
    kept = mends._kept(mends._OF_ONE["squared"], Made(np.float32([3.0])))
    assert kept.values.dtype == np.float32 and kept.values.tolist() == [9.0]


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [(np.float16, np.float32), (np.float32, np.float32), (np.float64, np.float64), (np.int8, np.float32)],
)
def test_the_dtype_of_an_unrounded_result(dtype: type, wide: type) -> None:
    assert mends._wide(Event(0, "fadd", (), 0, "", np.zeros(1, dtype))) == np.dtype(wide)


NOTHING = Event(1, "fadd", (), 0, "", np.full(3, 2.5))


@pytest.mark.parametrize(
    ("operand", "number"),
    [
        (Operand(lambda lanes: lanes, values=np.array(5)), 5.0),
        (Operand(lambda lanes: lanes, values=np.array([5.0, 5.0])), 5.0),
        (Operand(lambda lanes: lanes, values=np.array([5.0, 6.0])), None),
        (Operand(lambda lanes: lanes, values=np.array([])), None),
        (Operand(lambda lanes: lanes, values=np.array(5), address=True), None),
        (Operand(lambda lanes: lanes, event=NOTHING), None),
        (Operand(lambda lanes: lanes, event=replace(NOTHING, origin=Origin.ARGUMENTS)), 2.5),
        (Operand(lambda lanes: lanes, event=replace(NOTHING, origin=Origin.ARGUMENTS, name="get_program_id")), None),
    ],
)
def test_constants_among_operands(operand: Operand, number: float | None) -> None:
    assert constant_of(operand) == number
