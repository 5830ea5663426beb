"""Cases are drawn inside of what a kernel declares that it takes; what it declines besides counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import reject
from hypothesis import strategies as st
from torch import Tensor

from lastbit.case import Case, Group, contiguous_strides, parse_case
from lastbit.config import Config
from lastbit.errors import UnsupportedCase, UsageError
from lastbit.inputs import build
from lastbit.kernel import Kernel, declarations_of, kernel
from lastbit.reports.stage_summary import on_cases
from lastbit.reports.wording import undecided
from lastbit.result import TURNED_DOWN, CaseResult, Verdict
from lastbit.run import Run
from lastbit.takes import as_text, beyond, declared_takes, of_text, placed_inside, told
from lastbit.verify.check import Subject, unsupported, verify_case
from lastbit.verify.declarations import check_kernel
from lastbit.verify.drawing import draw
from lastbit.verify.item_run import CaseFailed, perform, run_item
from lastbit.verify.narrowing import narrowed, not_asked
from lastbit.verify.plan import Item, Plan, make_plan
from lastbit.verify.project import open_project
from tests.recorded import Recorded

PROJECT = open_project(Config(folder=""))
NORM = PROJECT.op("rms_norm")


def norm(x: Tensor, weight: Tensor | None = None, *, eps: float) -> Tensor:
    """Compute fp32 multiply as it should be."""
    y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight.float()).to(x.dtype)


def quantized(x: Tensor, weight: Tensor, scale: Tensor, *, eps: float, quant: str) -> Tensor:
    """Take cases of static quantization alone."""
    return x


def kernel_of(function: Callable[..., Any] = norm, takes: object = (), name: str = "mine") -> Kernel:
    return Kernel(name, "rms_norm", "fp32_multiply", function, takes=declared_takes(takes, name), source="mine.py:7")


def plan_of(*kernels: Kernel) -> Plan:
    config = Config(folder="", kernel_folders=(str(Path(__file__).parent),))
    return make_plan(config, "cpu", load=lambda folder: kernels)


def cases_of(plan: Plan, name: str = "mine") -> list[Case]:
    items = (item for item in plan.items if item.subject.kernel.name == name)
    return [case for item in items for case in draw(item.group, plan.cases_per_group)]


def test_a_declaration_narrows_the_plan_and_leaves_as_many_cases() -> None:
    kernels = [kernel_of(name="all"), kernel_of(takes="contiguous", name="contiguous")]
    plan = plan_of(*kernels)
    every, own = cases_of(plan, "all"), cases_of(plan, "contiguous")
    strided = [case for case in every if unsupported(kernels[1], case)]
    assert len(strided) > len(every) / 3
    specs = [tensor for case in own for tensor in case.tensors]
    assert all(torch.empty_strided(t.shape, t.element_strides, device="meta").is_contiguous() for t in specs)
    assert not [case for case in own if unsupported(kernels[1], case)]
    assert len(own) >= len(every)
    assert plan.not_run[0].reason == "declares takes='contiguous', and gets no other cases"
    assert [note.what for note in plan.not_run[1:]] == ["cases with a tensor on another device"]


def test_what_is_left_is_designed_as_if_there_were_nothing_else() -> None:
    takes = {"tensors": "non-empty", "x columns": range(16, 1025, 16), "x dtype": ("bf16", "fp16"), "eps": 1e-6}
    plan = plan_of(kernel_of(), kernel_of(takes=takes, name="narrow"))
    own = cases_of(plan, "narrow")
    assert {case["x"].dtype for case in own} == {"bf16", "fp16"}
    assert all(case["x"].shape[-1] % 16 == 0 and 16 <= case["x"].shape[-1] <= 1024 for case in own)
    assert {case.params["eps"] for case in own} == {1e-6}
    assert len(own) > 0.7 * len(cases_of(plan))
    layouts = {layout for item in plan.items for layout in item.group.choices.get("x layout", ())}
    assert {"contiguous", "columns_first", "non_flattenable"} <= layouts


def test_a_declaration_is_not_blamed_for_cases_that_the_signature_does_not_take() -> None:
    """Groups without a residual are none that `takes` keeps from a kernel that requires one; those of wide rows are."""

    def fused(x: Tensor, residual: Tensor, *, eps: float) -> Tensor:
        return x

    def note_of(takes: object) -> str:
        kernel = kernel_of(fused, takes)
        every = PROJECT.groups("rms_norm", kernel.accepts, small=True)
        (note,) = not_asked(kernel, NORM, every, narrowed(every, kernel, NORM))
        return note.what

    assert note_of("contiguous") == "mine"
    assert note_of({"x columns": range(2, 9)}) == "mine (no case of real-shapes)"


def test_a_signature_that_needs_a_parameter_narrows_the_plan_too() -> None:
    """All other groups have cases without it: 101 of 122 cases of a run once went to calls that nobody can make."""
    kernels = [kernel_of(quantized)]
    own = cases_of(plan_of(*kernels))
    assert {case.params["quant"] for case in own} == {"static"}
    assert not [case for case in own if unsupported(kernels[0], case)]
    assert len(own) > 60


@pytest.mark.parametrize(
    "sizes", [tuple(2**i for i in range(14)), (64, 128, 1024, 4096), [2**i for i in range(14)], range(48, 8192, 333)]
)
def test_sizes_are_drawn_from_those_that_are_declared(sizes: Any) -> None:
    """A group of 1,025 to 2,048 columns once drew from all with the residue of a power of two, and found none."""
    plan = plan_of(kernel_of(takes={"tensors": "contiguous", "x columns": sizes}))
    drawn = {item.group.name: draw(item.group, 8) for item in plan.items if item.group.strategy is not None}
    assert all(drawn.values())
    assert {case["x"].shape[-1] for cases in drawn.values() for case in cases} <= set(sizes)
    own = {name: tuple(map(int, name.rpartition("-N")[2].split("to"))) for name in drawn}
    assert all(any(low <= size <= high for size in sizes) for low, high in own.values())
    every = PROJECT.groups("rms_norm", plan.items[0].subject.kernel.accepts, small=True)
    for low, high in (map(int, g.name.rpartition("-N")[2].split("to")) for g in every if g.strategy is not None):
        assert any(low <= size <= high for size in sizes) == ((low, high) in own.values())


def test_packed_rows_are_those_of_every_case() -> None:
    """Examples with more dimensions have all rows along one; what stands beside x has as many."""
    fused = kernel_of(lambda x, weight=None, residual=None, *, eps: x, ("packed rows", "aligned"))
    cases = cases_of(plan_of(fused))
    specs = [tensor for case in cases for tensor in case.tensors]
    assert {len(case["x"].shape) for case in cases} == {2}
    assert all(t.strides is None or t.element_strides == contiguous_strides(t.shape) for t in specs if t.numel)
    assert any("residual" in case.names and case["residual"].shape == case["x"].shape for case in cases)
    line = "rms_norm x=bf16[2,3,8]@99,9,1+1 weight=bf16[8] residual=bf16[2,3,8] eps=1"
    placed = placed_inside(fused.takes, parse_case(line))
    assert [str(tensor) for tensor in placed.tensors] == ["x=bf16[6,8]", "weight=bf16[8]", "residual=bf16[6,8]"]
    attention = Kernel(
        "mine", "attention", "", lambda q, k, v, *, scale: q, takes=declared_takes("packed rows", "mine")
    )
    with pytest.raises(UsageError, match="'packed rows', but the op has no inputs of rows"):
        check_kernel(attention, PROJECT.op("attention"))


@pytest.mark.parametrize(
    ("takes", "found"),
    [
        ("contiguous rows", "x=bf16[4,6]@12,1 up=bf16[4,6]@12,1+6&x"),
        ("contiguous", "x=bf16[4,6] up=bf16[4,6]+24&x"),
        ("aligned", "x=bf16[4,6] up=bf16[4,6]+24&x"),
        (("contiguous", "aligned"), "x=bf16[4,6] up=bf16[4,6]+24&x"),
        ({"up layout": "contiguous"}, "x=bf16[4,6] up=bf16[4,6]+24&x"),
    ],
)
def test_tensors_of_one_storage_lie_one_after_the_other_where_they_must_move(takes: object, found: str) -> None:
    case = parse_case("swiglu x=bf16[4,6]@12,1 up=bf16[4,6]@12,1+6&x bias=bf16[6]@2 seed=1")
    placed = placed_inside(declared_takes(takes, "k"), case)
    assert str(placed).startswith(f"swiglu {found} bias")
    build(placed, "cpu")


def test_a_dtype_may_be_that_of_another_tensor() -> None:
    plan = plan_of(kernel_of(takes={"weight dtype": ("x dtype", "fp32")}))
    found = {(case["x"].dtype, case["weight"].dtype if "weight" in case.names else "") for case in cases_of(plan)}
    assert found >= {(x, weight) for x in ("bf16", "fp16", "fp32") for weight in (x, "fp32", "")}
    assert not found & {("bf16", "fp16"), ("fp16", "bf16"), ("fp32", "bf16")}


def test_heads_are_as_wide_as_is_declared() -> None:
    """No drawn head had 64 columns, and no long one had as many of values as of queries."""
    takes = declared_takes({"q columns": (64, 128), "v columns": "q columns", "causal": True}, "mine")
    mine = Kernel("mine", "attention", "", lambda q, k, v, *, scale, causal: q, takes=takes)
    plan = plan_of(mine)
    drawn = [case for item in plan.items if item.group.strategy for case in draw(item.group, 8)]
    assert {case["q"].shape[-1] for case in drawn} == {64, 128}
    sized = [case for item in plan.items if item.group.name == "sizes" for case in item.group.examples]
    assert sized
    assert all(case["q"].shape[-1] == case["v"].shape[-1] for case in (*drawn, *sized))


def recording(results: list[CaseResult]) -> Any:
    """Stand for what `perform` tells of its results."""
    return Recorded(cases=2, results=results)


def test_a_group_of_which_nothing_can_be_drawn_is_no_error_of_the_kernel() -> None:
    subject = Subject(kernel_of(takes={"x size 0": 7}), NORM, torch.device("cpu"))
    results: list[CaseResult] = []
    designed = ({"eps": 1e-6},)
    strategy = lambda chosen: st.integers().flatmap(lambda n: reject())  # noqa: E731
    group = Group("narrow", strategy, choices={"eps": (1e-6,)}, designed=designed)
    perform(Item(subject, group), recording(results), None)
    assert [(result.verdict, result.reason) for result in results] == [
        (Verdict.SKIPPED, "lastbit found no case of group narrow that takes={'x size 0': 7} allows")
    ]


@pytest.mark.parametrize(
    ("takes", "line", "reason"),
    [
        ("contiguous", "x=bf16[4,8]@9,1", "x must be contiguous"),
        ("contiguous", "x=bf16[4,8]+1", ""),
        ("contiguous", "x=bf16[1,8]@99,1", ""),
        ("contiguous rows", "x=bf16[4,8]@9,1", ""),
        ("contiguous rows", "x=bf16[4,8]@1,4", "x must be contiguous rows"),
        ("aligned", "x=bf16[4,8]+4", "x must be aligned"),
        ("aligned", "x=bf16[4,8]+8", ""),
        ("distinct", "x=bf16[4,8]@0,1", "x must be distinct"),
        ("non-empty", "x=bf16[0,8]", "x must be non-empty"),
        ("one dtype", "x=bf16[4,8] weight=fp32[8]", "all tensors must have one dtype"),
        ("packed rows", "x=bf16[4,8]+1 weight=bf16[8]", ""),
        ("packed rows", "x=bf16[2,2,8]", "x must be packed rows, and all other tensors contiguous"),
        ("packed rows", "x=bf16[8]", "x must be packed rows, and all other tensors contiguous"),
        ("packed rows", "x=bf16[4,8] weight=bf16[8]@2", "x must be packed rows, and all other tensors contiguous"),
        ({"x size 0": "x columns"}, "x=bf16[4,8]", "x size 0 must be x columns"),
        ({"x size 0": "x columns"}, "x=bf16[8,8]", ""),
        ({"weight columns": (7, "x columns")}, "x=bf16[4,8] weight=bf16[8]", ""),
        ({"weight dtype": ("x dtype", "fp32")}, "x=bf16[4,8] weight=fp16[8]", "weight dtype must be x dtype or fp32"),
        ({"weight dtype": ("x dtype", "fp32")}, "x=bf16[4,8] weight=fp32[8]", ""),
        ({"weight dtype": ("x dtype", "fp32")}, "x=fp16[4,8] weight=fp16[8]", ""),
        ({"weight dtype": ("x dtype", "fp32")}, "x=fp16[4,8]", ""),
        ({"weight layout": "contiguous"}, "x=bf16[4,8]@9,1 weight=bf16[8]@2", "weight must be contiguous"),
        ({"weight layout": "contiguous"}, "x=bf16[4,8]@9,1", ""),
        ({"x columns": (8, 16)}, "x=bf16[4,24]", "x columns must be 8 or 16"),
        ({"x columns": range(8, 33, 8)}, "x=bf16[4,24]", ""),
        ({"x size 0": range(8, 33, 8)}, "x=bf16[4,24]", "x size 0 must be from 8 to 32 in steps of 8"),
        ({"quant": "static"}, "x=bf16[4,8]", "quant must be static"),
        ({"quant": ("static", None)}, "x=bf16[4,8]", ""),
    ],
)
def test_what_is_beyond_a_declaration(takes: object, line: str, reason: str) -> None:
    case = parse_case(f"rms_norm {line} eps=1e-6 seed=1")
    declared = declared_takes(takes, "mine")
    assert beyond(declared, case) == reason
    assert beyond(of_text(as_text(declared), "mine"), case) == reason
    subject = Subject(kernel_of(takes=takes), NORM, torch.device("cpu"))
    result = verify_case(subject, case) if reason else None
    assert result is None or (result.verdict, result.declined) == (Verdict.UNSUPPORTED, False)


@pytest.mark.parametrize(
    ("takes", "message"),
    [
        ("contigous", "unknown word in takes of kernel 'mine' .*'tensors' has 'contigous'; did you mean 'contiguous'"),
        ({"y layout": "contiguous"}, "unknown tensor in takes of .*'y'"),
        ({"qant": "static"}, "unknown name in takes of .*'qant'; did you mean 'quant'"),
        ({"x dtype": "bfloat16"}, "unknown dtype in takes of .*'bfloat16'"),
        ({"x columns": -1}, "'x columns' has -1, which is no size"),
        ({"x columns": "wide"}, "'x columns' has 'wide', which is no size"),
        ({"x columns": "y columns"}, "'x columns' cannot be 'y columns'; name a dimension of an input"),
        ({"weight dtype": "x columns"}, "'weight dtype' cannot be 'x columns'; name a dtype of an input"),
        ({"x layout": "packed rows"}, "unknown word in takes of .*'x layout' has 'packed rows'"),
        ({"x columns": range(0)}, r"'x columns' has range\(0, 0\); give a word"),
        (7, r"unknown word in takes .* 7.* give a mapping: takes=\{'x columns': \(64, 128, 256\)\}"),
    ],
)
def test_a_declaration_that_means_nothing(takes: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_kernel(kernel_of(takes=takes), NORM)


def test_the_decorator_takes_words_and_a_mapping() -> None:
    @kernel("rms_norm", takes=("contiguous", "non-empty"))
    @kernel("rms_norm", name="other", takes={"x columns": range(1, 9), "tensors": "aligned"})
    def mine(x: Tensor, *, eps: float) -> Tensor:
        return x

    other, own = declarations_of(mine)
    assert told(own.takes) == "takes=('contiguous', 'non-empty')"
    assert told(other.takes) == "takes={'x columns': range(1, 9), 'tensors': 'aligned'}"


def test_a_parameter_that_the_op_does_not_have_may_receive_a_result() -> None:
    with pytest.raises(UsageError, match=r"If it receives a result, declare out=\{'out': 'output'\}"):
        check_kernel(kernel_of(lambda out, x, *, eps: None), NORM)


def test_a_parameter_that_stands_for_an_input_is_to_be_renamed() -> None:
    with pytest.raises(UsageError, match=r"inputs of rms_norm are x, weight \(optional\), .*: rename") as caught:
        check_kernel(kernel_of(lambda rows, *, eps: None), NORM)
    assert "declare out" not in str(caught.value)


def test_a_kernel_that_cannot_be_called_does_not_stop_the_others() -> None:
    """A folder of eight kernels once did not run because one of them called x by another name."""
    kernels = [kernel_of(), kernel_of(lambda rows, *, eps: None, name="other")]
    config = Config(folder="", kernel_folders=(str(Path(__file__).parent),))
    plan = make_plan(config, "cpu", load=lambda folder: tuple(kernels), refusing=True)
    [item] = [item for item in plan.items if item.subject.kernel.name == "other"]
    assert cases_of(plan)
    results: list[CaseResult] = []
    with pytest.raises(UsageError, match=r"which kernel 'other' .* requires: 'rows'"):
        perform(item, recording(results), None)
    assert [(r.verdict, r.reason[:26]) for r in results] == [(Verdict.ERRORED, "UsageError: unknown parame")]
    with pytest.raises(UsageError, match="requires: 'rows'"):
        make_plan(config, "cpu", load=lambda folder: (kernels[1],), refusing=True)


# What is declined inside of a declaration counts


def declining(x: Tensor, weight: Tensor | None = None, *, eps: float) -> Tensor:
    if not x.is_contiguous():
        raise UnsupportedCase("x is strided")
    return norm(x, weight, eps=eps)


def run_of(cases: Iterator[str]) -> Run:
    subject = Subject(kernel_of(declining), NORM, torch.device("cpu"))
    return Run(tuple(verify_case(subject, parse_case(line), repeat=False) for line in cases))


def lines(strided: int, contiguous: int) -> Iterator[str]:
    yield from (f"rms_norm x=bf16[4,8]@9,1 eps=1e-6 seed={seed}" for seed in range(strided))
    yield from (f"rms_norm x=bf16[4,8] eps=1e-6 seed={seed}" for seed in range(contiguous))


def test_a_kernel_that_declines_more_than_half_has_not_passed() -> None:
    run = run_of(lines(strided=3, contiguous=2))
    assert [result.verdict for result in run.results] == [Verdict.UNSUPPORTED] * 3 + [Verdict.PASSED] * 2
    assert all(result.declined == (result.verdict in TURNED_DOWN) for result in run.results)
    assert (run.verdict("mine", "cpu"), run.exit_code) == (Verdict.INCONCLUSIVE, 1)
    assert on_cases(run, ("mine", "cpu")) == " on 2 of 5 cases"
    assert undecided(run) == [
        "mine on cpu: UnsupportedCase in 3 of 5 cases, and at least 50 % must be judged; declare what it takes, "
        "such as takes='contiguous' or takes={'x columns': (64, 128, 256)}, and as many cases are drawn inside of that"
    ]


def test_how_many_cases_were_judged_stands_beside_the_verdict() -> None:
    run = run_of(lines(strided=2, contiguous=2))
    assert (run.verdict("mine", "cpu"), run.exit_code) == (Verdict.PASSED, 0)
    assert on_cases(run, ("mine", "cpu")) == " on 2 of 4 cases"
    assert on_cases(run_of(lines(strided=0, contiguous=2)), ("mine", "cpu")) == ""


# What a kernel may declare


def failed(function: Callable[..., Any], line: str) -> CaseResult:
    subject = Subject(kernel_of(function), NORM, torch.device("cpu"))
    group = Group("mine", examples=(parse_case(f"rms_norm {line} eps=1e-6 seed=1"),))
    with pytest.raises(CaseFailed) as caught:
        run_item(Item(subject, group), recording([]))
    return caught.value.result


def views(x: Tensor, *, eps: float) -> Tensor:
    return norm(x.view(-1, x.shape[-1]), eps=eps).view(x.shape)


def by_columns(x: Tensor, *, eps: float) -> Tensor:
    assert x.stride(-1) == 1 or x.numel() < 2, "columns have a stride"
    return norm(x, eps=eps)


def peeks(x: Tensor, *, eps: float) -> Tensor:
    x.abs().max()
    return norm(x, eps=eps)


def flat(x: Tensor, *, eps: float) -> Tensor:
    """Read memory as if there were no strides: no error, but wrong numbers."""
    return norm(x.as_strided(x.shape, tuple(x.new_empty(x.shape).stride())), eps=eps)


@pytest.mark.parametrize(
    ("function", "line", "advice"),
    [
        (views, "x=bf16[3,4,8]@32,1,4", "takes='contiguous'"),
        (by_columns, "x=bf16[3,4,8]@32,1,4", "takes='contiguous rows'"),
        (peeks, "x=bf16[0,8]", "takes='non-empty'"),
        (flat, "x=bf16[3,4,8]@32,1,4", "takes='contiguous'"),
    ],
    ids=lambda given: getattr(given, "__name__", None),
)
def test_a_failure_says_what_the_kernel_may_declare(function: Callable[..., Any], line: str, advice: str) -> None:
    result = failed(function, line)
    said = result.reason if result.verdict is Verdict.ERRORED else result.findings[0].sentence
    assert said.endswith(f"alone, write @kernel(…, {advice}).")
    assert ". It passes the case with" in said
    assert not failed(kernel_of(function).call, line).counted


def matrix(x: Tensor, *, eps: float) -> Tensor:
    _, _ = x.shape
    return norm(x, eps=eps)


def powers(x: Tensor, *, eps: float) -> Tensor:
    assert x.shape[-1].bit_count() == 1, "width must be a power of two"
    return norm(x, eps=eps)


def blocks(x: Tensor, *, eps: float) -> Tensor:
    return norm(x.unflatten(-1, (-1, 128)).flatten(-2), eps=eps)


@pytest.mark.parametrize(
    ("function", "line", "advice"),
    [
        (matrix, "x=bf16[3,4,8]", "all rows along one dimension: begin with x = x.reshape(-1, x.shape[-1]), and give"),
        (
            powers,
            "x=bf16[4,24]",
            "4 columns of x in place of 3: if it is meant for some widths alone, name them, as in",
        ),
        (blocks, "x=bf16[4,24]", "@kernel(…, takes={'x columns': (64, 128, 256)})."),
    ],
)
def test_a_kernel_that_raises_is_told_of_its_shapes(function: Callable[..., Any], line: str, advice: str) -> None:
    result = failed(function, line)
    assert result.verdict is Verdict.ERRORED
    assert advice in result.reason


def test_a_kernel_that_fails_in_every_layout_gets_no_advice() -> None:
    def wrong(x: Tensor, *, eps: float) -> Tensor:
        return norm(x, eps=eps) * 2

    assert "declare" not in failed(wrong, "x=bf16[3,4,8]@32,1,4").findings[0].sentence
