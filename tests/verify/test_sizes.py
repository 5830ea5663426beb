"""Sized cases: every dimension is long once, and what a kernel's source compares sizes with has cases beside it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lastbit.branches.branch_sites import unreached
from lastbit.branches.size_constants import SizeConstants, size_constants
from lastbit.branches.taken import traced_call, watching
from lastbit.case import Case
from lastbit.config import Config
from lastbit.devices import plan_devices
from lastbit.errors import UsageError
from lastbit.inputs import build
from lastbit.kernel import Kernel, load_kernels
from lastbit.result import Verdict
from lastbit.takes import declared_takes
from lastbit.verify import sizes
from lastbit.verify.check import verify_case
from lastbit.verify.plan import NO_SIZES_LEFT, make_plan
from lastbit.verify.project import open_project
from lastbit.verify.sizes import Template, cases_of_each, read_templates, sized_cases, templates_of
from tests.branches.test_size_constants import SOURCE
from tests.faults import hunt
from tests.faults.sizes import BRANCHES, LAST, LONG, Branch, TooLong
from tests.rms_norm_contract import DEVICE  # installs the bit-faithful interpreter, where Triton interprets

PROJECT = open_project(Config(folder=""))
OPS = sorted(path.stem for path in (Path(__file__).resolve().parents[2] / "cases").glob("[a-z]*.py"))
FEW, MANY = cases_of_each(1000), cases_of_each(1)
NORM = "rms_norm T=2..300..900 N=16..4000/8 x=bf16[T,N] weight=bf16[N] eps=1e-06"


def cases_of(kernel: Kernel, most: int, constants: SizeConstants | None = None) -> tuple[Case, ...]:
    own = size_constants(kernel.call, kernel.source) if constants is None else constants
    return sized_cases(templates_of(PROJECT, kernel.op, small=True), kernel, own, most).cases


def verdict(kernel: Kernel, case: Case) -> Verdict:
    return verify_case(hunt.subject_of(kernel, torch.device(DEVICE)), case, repeat=False).verdict


@pytest.mark.parametrize("fault", LONG, ids=str)
def test_every_dimension_is_long_once(fault: TooLong) -> None:
    """In the fewest cases that a function has in a run of profile ci, whatever its source says."""
    assert any(map(fault.applies, cases_of(fault.base, FEW, SizeConstants())))


@pytest.mark.parametrize("fault", LAST, ids=str)
def test_a_kernel_that_is_wrong_from_a_length_on_fails(fault: TooLong) -> None:
    cases = cases_of(fault.base, FEW, SizeConstants())
    assert verdict(fault.planted(), next(filter(fault.applies, cases))) is Verdict.FAILED


@pytest.fixture
def untraced() -> Iterator[None]:
    """Nobody traces this process meanwhile: under `nox -s coverage` somebody does."""
    tracer = sys.gettrace()
    sys.settrace(None)
    yield
    sys.settrace(tracer)


@pytest.mark.parametrize("branch", BRANCHES, ids=str)
def test_what_is_behind_a_comparison_of_a_size_is_reached_and_a_fault_there_fails(
    branch: Branch, tmp_path: Path, untraced: None
) -> None:
    kernels = []
    for name, second in (("right", "results"), ("wrong", "spoiled(results)")):
        file = tmp_path / name / f"{name}.py"
        file.parent.mkdir()
        file.write_text(branch.text(second))
        kernels += load_kernels(file)
    right, wrong = kernels
    cases, differing = cases_of(right, MANY), []
    with watching("branching", tmp_path / "right" / "right.py") as taken:
        for case in cases:
            inputs = build(case, DEVICE)
            with traced_call():
                expected = right.call(**inputs.hand_out(), **case.params)
            actual = wrong.call(**inputs.hand_out(), **case.params)
            differing += [case] if _first(expected).ne(_first(actual)).any() else []
        assert unreached({"branching": taken.decisions()}, cases=len) == ()
    assert len(differing) < len(cases)
    assert verdict(wrong, differing[0]) is Verdict.FAILED


def _first(results: object) -> torch.Tensor:
    several = results.values() if isinstance(results, dict) else results if isinstance(results, tuple) else [results]
    return next(iter(several))


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_templates_whose_longest_cases_have_a_result(op: str) -> None:
    known = PROJECT.op(op)
    for small in (True, False):
        for template in templates_of(PROJECT, op, small=small):
            for case in (template.case({}), *(template.case({n: d.longest}) for n, d in template.dimensions.items())):
                assert case.op == op and case.names <= {*known.inputs, *known.params}
                assert max(tensor.numel for tensor in case.tensors) <= 1 << (20 if small else 28)
    assert templates_of(PROJECT, op, small=True)


def template(tmp_path: Path, line: str = NORM, *, small: bool = True) -> Template:
    file = tmp_path / "rms_norm.txt"
    file.write_text(f"# a comment\n\n{line}\n")
    return read_templates(file, small=small)[0]


def norm(x, weight, *, eps):  # type: ignore[no-untyped-def]
    return x


def test_a_template_is_a_case_line_in_which_dimensions_are_names(tmp_path: Path) -> None:
    made = template(tmp_path)
    assert str(made.case({"T": 7})) == "rms_norm x=bf16[7,16] weight=bf16[16] eps=1e-06 seed=0"
    assert made.has({"T": 300, "N": 4000}) and not made.has({"T": 301}) and not made.has({"N": 12})
    assert template(tmp_path, small=False).has({"T": 900})
    sliced = template(tmp_path, "rms_norm N=8..64 x=bf16[3,N] weight=bf16[N/2]:below_{N} eps=1e-06")
    assert str(sliced.case({})) == "rms_norm x=bf16[3,8] weight=bf16[4]:below_8 eps=1e-06 seed=0"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("rms_norm T=2..3 x=bf16[T,N]", "line 3: dimension 'N' is not declared; write N=NARROW"),
        ("rms_norm T=2..3 x=bf16[T-1,4]", "cannot read 'T-1'"),
        ("rms_norm T=3..9/2 x=bf16[T,4]", "must begin with a multiple of 2"),
    ],
)
def test_a_line_that_is_no_template_is_told_by_its_number(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(UsageError, match=said.replace("[", r"\[")):
        template(tmp_path, line)


def test_a_kernel_gets_sizes_that_it_declares(tmp_path: Path) -> None:
    takes = declared_takes({"x size 0": range(4, 200, 4), "x columns": tuple(range(64, 4096, 64))}, "mine")
    kernel = Kernel("mine", "rms_norm", "", norm, takes=takes, source="mine.py:7")
    cases = sized_cases([template(tmp_path)], kernel, SizeConstants(compared=(100,)), MANY).cases
    shapes = {case.tensors[0].shape for case in cases}
    assert all(rows % 4 == 0 and rows < 200 and columns % 64 == 0 for rows, columns in shapes)
    assert max(rows for rows, _ in shapes) == 196 and max(columns for _, columns in shapes) == 3968
    other = Kernel("mine", "rms_norm", "", norm, takes=declared_takes({"x dtype": "fp16"}, "mine"), source="mine.py:7")
    assert not sized_cases([template(tmp_path)], other, SizeConstants(), MANY).cases


def test_numbers_beside_which_there_is_no_case_left_are_told(tmp_path: Path) -> None:
    kernel, made = Kernel("mine", "rms_norm", "", norm, source="mine.py:7"), template(tmp_path)
    every = tuple(range(100, 200, 10))
    few = sized_cases([made], kernel, SizeConstants(compared=every), 3)
    assert len(few.cases) == 3 and few.left and set(few.left) < set(every)
    assert not sized_cases([made], kernel, SizeConstants(compared=every), 40).left
    assert not sized_cases([made], kernel, SizeConstants(blocks=every), 3).left


def test_a_run_has_a_group_of_them_and_says_what_is_left(tmp_path: Path) -> None:
    file = tmp_path / "norm.py"
    file.write_text(SOURCE)
    kernels = tuple(replace(one, name=f"norm_{n}") for one in load_kernels(file) for n in range(2))
    config = Config(folder="", kernel_folders=(str(file),), device_plan=plan_devices("cpu"), cases=1)
    plan = make_plan(config, "cpu", load=lambda folder: kernels)
    sized = [item for item in plan.items if item.group.name == "sizes"]
    assert [len(item.group.examples) for item in sized] == [cases_of_each(1, share=1 / 6)] * 2
    assert [note.what for note in plan.not_run if note.reason == NO_SIZES_LEFT] == ["2 kernels"]
    alone = make_plan(replace(config, kernels=("norm_0",)), "cpu", load=lambda folder: kernels)
    [told] = [note.what for note in alone.not_run if note.reason == NO_SIZES_LEFT]
    assert told.startswith("norm_0 beside ")
    none = make_plan(replace(config, cases=0), "cpu", load=lambda folder: kernels)
    assert not any(item.group.name == "sizes" for item in none.items)


def test_the_budget_of_a_run_is_divided_among_its_functions() -> None:
    assert cases_of_each(1) > cases_of_each(4) > cases_of_each(1000) > 0
    assert cases_of_each(1, share=0) == 0


# Templates and the sizes that are looked at


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("N", 12),
        ("7", 7),
        ("G*N", 36),
        ("2*N", 24),
        ("N/2", 6),
        ("N/5", 2),
        ("G*N/2", 18),
        ("N/2*G", 18),
        ("N*N/G", 48),
    ],
)
def test_products_and_quotients_of_dimensions(expression: str, value: int) -> None:
    assert sizes._value(expression, {"N": 12, "G": 3}) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("N+1", r"cannot read 'N\+1': expected dimensions and numbers"),
        ("M", "dimension 'M' is not declared; write M=NARROW..LONGEST before the tensors"),
        ("2*M", "dimension 'M' is not declared"),
    ],
)
def test_sizes_that_cannot_be_read(expression: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        sizes._value(expression, {"N": 12})


def template_of(line: str, folder: Path, *, small: bool = True) -> Template:
    path = folder / "op.txt"
    path.write_text(line)
    return read_templates(path, small=small)[0]


def test_the_sizes_of_a_dimension(tmp_path: Path) -> None:
    small, large = (template_of(NORM, tmp_path, small=small) for small in (True, False))
    tokens, width = small.dimensions["T"], small.dimensions["N"]
    assert (tokens.narrow, tokens.longest, tokens.step) == (2, 300, 1) and large.dimensions["T"].longest == 900
    assert (width.narrow, width.longest, width.step) == (16, 4000, 8) and large.dimensions["N"].longest == 4000
    assert [tokens.has(n) for n in (0, 1, 300, 301)] == [False, True, True, False]
    assert [width.has(n) for n in (8, 12, 4000, 4008)] == [True, False, True, False]
    within = width.within([24, 12, 5000, "x", 128])
    assert within is not None and (within.narrow, within.longest, within.step) == (24, 128, 8)
    assert [within.has(n) for n in (16, 24, 128)] == [False, True, True]
    few = width.within([8])
    assert few is not None and (few.narrow, few.longest) == (8, 8) and width.within([12, 4008]) is None
    odd = template_of("rms_norm N=16..4001/8 x=bf16[N] weight=bf16[N] eps=1e-06", tmp_path)
    assert odd.dimensions["N"].longest == 4000


def test_cases_of_a_template(tmp_path: Path) -> None:
    made = template_of("op G=2..9 N=16..4000/8 x=bf16[3,G*N] y=bf16[N/2]:below_{G} n={G} eps=0.5", tmp_path)
    assert str(made.case({"N": 24}, 7)) == "op x=bf16[3,48] y=bf16[12]:below_2 n=2 eps=0.5 seed=7"
    assert str(made.case({})) == "op x=bf16[3,32] y=bf16[8]:below_2 n=2 eps=0.5 seed=0"
    assert (
        made.elements({}) == 104 and made.elements({"G": 4, "N": 24}) == 300 and made.shapes == [["3", "G*N"], ["N/2"]]
    )
    assert made.has({"N": 24, "G": 2}) and not made.has({"N": 20}) and not made.has({"M": 2}) and made.has({})
    assert [made.dimension_of("y", place) for place in (0, -1, 1)] == ["", "", ""]
    norm = template_of(NORM, tmp_path)
    assert [norm.dimension_of("x", place) for place in (-2, -1, 0, 1, 2, -3)] == ["T", "N", "T", "N", "", ""]
    assert norm.dimension_of("z", 0) == ""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("op N=16..4000/7 x=bf16[N]", "line 1: 'N=16..4000/7' must begin with a multiple of 7 from 1 to 4000"),
        ("op N=5..4 x=bf16[N]", "'N=5..4' must begin with a multiple of 1 from 1 to 4"),
        ("op N=0..4 x=bf16[N]", "must begin with a multiple of 1"),
        ("op N=1..4 x=bf16[M]", "dimension 'M' is not declared"),
    ],
)
def test_templates_that_are_none(line: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        template_of(line, tmp_path)


@pytest.mark.parametrize(
    ("constants", "first"),
    [
        (SizeConstants(), ["T 300", "N 4000", "N 2056", "N 1032", "N 520", "T 257", "N 264"]),
        (SizeConstants(compared=(640,)), ["T 300", "N 4000", "N 648: 640", "N 640", "N 632", "N 1288"]),
        (SizeConstants(compared=(100,)), ["T 300", "N 4000", "T 101: 100", "N 104: 100", "T 100", "T 99", "N 96"]),
        (SizeConstants(compared=(10000,)), ["T 300", "N 4000", "N 100, T 101: 10000"]),
        (
            SizeConstants(blocks=(64,)),
            ["T 300", "N 4000", "T 65", "N 72", "N 72, T 1", "T 129", "N 136", "T 64", "N 64"],
        ),
    ],
)
def test_what_is_looked_at_first(constants: SizeConstants, first: list[str], tmp_path: Path) -> None:
    rungs = sizes._rungs([template_of(NORM, tmp_path)], constants)
    told = [
        ", ".join(f"{n} {s}" for n, s in rung) + (f": {number}" if number else "") for rung, number in rungs.items()
    ]
    assert told[: len(first)] == first
    assert len(set(rungs)) == len(rungs) and all(n >= 2 or len(rung) > 1 for rung in rungs for _, n in rung)


@pytest.mark.parametrize(("functions", "share"), [(0, 1.0), (1, 1.0), (1, 0.5), (10, 1.0), (1000, 1.0), (1000, 0.5)])
def test_cases_that_each_function_has(functions: int, share: float) -> None:
    most, fewest, total = sizes._MOST, sizes._FEWEST, sizes._CASES_OF_A_RUN
    assert cases_of_each(functions, share=share) == round(max(fewest, min(most, total // max(functions, 1))) * share)


def test_beyond_a_number_of_a_comparison_each_template_has_a_case(tmp_path: Path) -> None:
    kernel = Kernel("mine", "rms_norm", "", norm, source="mine.py:7")
    texts = [f"rms_norm T=2..300 N=16..4000 x={x}[T,N] weight=bf16[N] eps=1e-06" for x in ("bf16", "fp16")]
    lines = [template(tmp_path, text) for text in texts]
    cases = sized_cases(lines, kernel, SizeConstants(compared=(1000,)), MANY).cases
    assert {case.tensors[0].dtype for case in cases if case.tensors[0].shape[1] == 1001} == {"bf16", "fp16"}
    few = sized_cases(lines, kernel, SizeConstants(compared=tuple(range(100, 4000, 100))), MANY).cases
    assert len(few) == MANY


@pytest.mark.parametrize(
    ("line", "number", "shapes"),
    [
        ("T=2..300..70001 N=16..4000..5000", 65535, {(65536, 3)}),
        ("T=2..300..900 N=16..4000..270001", 50000, {(2, 50001), (1, 100001)}),
        ("T=2..300..900 N=16..4000..5000", 65535, set()),
    ],
)
def test_a_number_that_no_dimension_reaches_is_passed_in_narrow_tensors(
    line: str, number: int, shapes: set[tuple[int, int]], tmp_path: Path
) -> None:
    """Kernels passed that write 65,535 rows, the most of a grid, or add 65,536 classes, the most of a block."""
    made = template(tmp_path, f"rms_norm {line} x=bf16[T,N] weight=bf16[N] eps=1e-06")
    kernel = Kernel("mine", "rms_norm", "", norm, source="mine.py:7")
    found = {case.tensors[0].shape for case in sized_cases([made], kernel, SizeConstants((number,)), MANY).cases}
    longest = {name: own.longest for name, own in made.dimensions.items()}
    assert {shape for shape in found if shape[0] > longest["T"] or shape[1] > longest["N"]} == shapes


def test_keys_of_attention_have_two_groups_where_other_dimensions_are_long() -> None:
    """Of one group alone every head has the keys of that, however a kernel counts."""
    for made in templates_of(PROJECT, "attention", small=True):
        assert made.case({"H": 5}).tensors[1].shape[2] > 1


def test_a_block_has_a_case_of_one_row_and_one_element_more(tmp_path: Path) -> None:
    kernel = Kernel("mine", "rms_norm", "", norm, source="mine.py:7")
    cases = sized_cases([template(tmp_path)], kernel, SizeConstants(blocks=(248,)), MANY).cases
    assert (1, 256) in {case.tensors[0].shape for case in cases}  # the next multiple of 8
    odd = template(tmp_path, "rms_norm T=2..300 N=16..4000 x=bf16[T,N] weight=bf16[N] eps=1e-06")
    cases = sized_cases([odd], kernel, SizeConstants(blocks=(256,)), MANY).cases
    assert (1, 257) in {case.tensors[0].shape for case in cases}


def test_parameters_that_a_kernel_does_not_accept_are_left_out(tmp_path: Path) -> None:
    kernel = Kernel("mine", "rms_norm", "", norm, source="mine.py:7")
    lines = [template(tmp_path, f"{NORM}{more}") for more in (" weight_offset=1.0", "", " quant=dynamic")]
    cases = sized_cases(lines, kernel, SizeConstants(compared=(100,)), MANY).cases
    assert cases and all(set(case.params) == {"eps"} for case in cases) and len(set(map(str, cases))) == len(cases)
