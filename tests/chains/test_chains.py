"""Chains of ops: the parts one after the other, each missing rounding by its name, and declarations that fit."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit.chains import Part, chain
from lastbit.config import Config
from lastbit.diagnosing.worked import FormulaTrace
from lastbit.errors import OpError, UsageError
from lastbit.identifying.kept_contracts import identify
from lastbit.judging.problem import Problem
from lastbit.kernel import Kernel, load_kernels
from lastbit.numerics import Enclosure
from lastbit.ops import Contract, Latent, Op, StageRecorder, op
from lastbit.references.all_reduce import all_reduce
from lastbit.references.all_reduce_rms_norm import all_reduce_rms_norm
from lastbit.references.rms_norm import rms_norm
from lastbit.stage_names import stage_names
from lastbit.verify.check import Subject
from lastbit.verify.declarations import check_op
from lastbit.verify.drawing import draw
from lastbit.verify.project import Project, open_project

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "fused_codes"
BF16, FP32 = torch.bfloat16, torch.float32
CPU = torch.device("cpu")


@op(rows=("x", "y"), axes={"rule": {"plain": {}, "halved": {"half": "x"}}}, rounds={"output": "x"})
def added(x: Enclosure, y: Enclosure, *, gain: float = 1.0, contract: Contract, stage: StageRecorder) -> None:
    """(x + y) · gain, and half of it; x, y: [..., N]."""
    half = stage("half", (x + y) * 0.5)
    stage("output", half * 2.0 if contract.has("halved") else (x + y) * gain, result=True)


@op(rows=("x",), integers=("index",), rounds={"output": "bf16", "tied": "w"}, latent=Latent("spread", ("output",)))
def spread(
    x: Enclosure, w: Enclosure | None = None, index: Tensor | None = None, *, contract: Contract, stage: StageRecorder
) -> None:
    """x, rounded to bf16, and to the dtype of w."""
    value = stage("spread", x * 1.0)
    stage("output", value, result=True)
    stage("tied", value, result=True)


def tensors(*names: str, rows: int = 6, width: int = 40, dtype: torch.dtype = BF16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(rows, width, generator=generator).to(dtype) for name in names}


def traced(op_: Op, contract: str, given: Mapping[str, Tensor], **params: Any) -> Problem:
    return Problem(op_, op_.contract(contract), given, params)


def assert_same(one: Enclosure, other: Enclosure) -> None:
    assert torch.equal(one.full, other.full)


# The parts one after the other


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("contract", ["", "rounded_hops+fp32_multiply", "input_multiply+unrounded_sum+divided"])
def test_the_enclosure_is_that_of_the_parts_one_after_the_other(ranks: int, contract: str) -> None:
    """Where the first part leaves one value, which then is the tensor that the second kernel reads."""
    given = tensors("x", *(f"peer_{n}" for n in range(1, ranks)), "residual")
    given = {name: torch.round(t * 8).to(BF16) for name, t in given.items()}  # sums that are exact in any order
    weight = torch.randn(40).to(BF16)
    words = contract.split("+")
    hops = "rounded_hops" if "rounded_hops" in words else ""
    first = traced(all_reduce, hops, {n: t for n, t in given.items() if n != "residual"}).trace.enclosure("reduced")
    assert torch.equal(first.lo, first.hi)
    reduced = first.value.to(BF16)
    rest = "+".join(word for word in words if word != "rounded_hops")
    unfused = traced(rms_norm, rest, {"x": reduced, "weight": weight, "residual": given["residual"]}, eps=1e-6).trace
    fused = traced(all_reduce_rms_norm, contract, {**given, "weight": weight}, eps=1e-6).trace
    assert [*fused.stages] == ["reduced", *unfused.stages]
    assert fused.results == unfused.results  # what is passed on is no result
    for name in unfused.stages:
        assert torch.equal(fused.enclosure(name).value, unfused.enclosure(name).value), name
        assert torch.equal(fused.enclosure(name).lo, unfused.enclosure(name).lo), name
        assert torch.equal(fused.enclosure(name).hi, unfused.enclosure(name).hi), name
        assert fused.formats[name] == unfused.formats[name]


def test_what_is_passed_on_without_being_rounded_is_not_rounded() -> None:
    given = tensors("x", "peer_1", "residual")
    stored, kept = (
        traced(all_reduce_rms_norm, contract, given, eps=1e-6).trace for contract in ("", "unrounded_reduced")
    )
    exact = given["x"].double() + given["peer_1"].double()
    assert torch.equal(stored.enclosure("reduced").value, exact.float().to(BF16).double())
    assert torch.equal(kept.enclosure("reduced").value, exact.float().double())
    assert kept.formats["output"].name == "bf16"  # the dtype of what is passed on is what it is stored in
    total = exact.float() + given["residual"].float()
    assert torch.equal(kept.enclosure("residual_sum").value, total.to(BF16).double())


def test_each_point_rounds_in_its_own_direction() -> None:
    """What is taken is rounded as the part that gives it says; a later point has the dtype, and no direction."""

    @op(rows=("x",), rounds={"first": "x:zero"})
    def cut(x: Enclosure, *, contract: Contract, stage: StageRecorder) -> None:
        stage("first", x * 1.01, result=True)

    @op(rows=("y",), rounds={"second": "y", "third": "bf16:either"})
    def tripled(y: Enclosure, *, contract: Contract, stage: StageRecorder) -> None:
        stage("third", stage("second", y * 3.0), result=True)

    joined = chain("cut_tripled", Part(cut), Part(tripled, takes={"y": "first"}), returned=())
    assert joined.contract().rounds == {"first": "x:zero", "second": "x", "third": "bf16:either"}
    directed = joined.contract("second:ties_away+first:nearest")
    given = tensors("x")
    trace = Problem(joined, directed, given, {}).trace
    assert [fmt.direction for fmt in trace.formats.values()] == ["nearest", "ties_away", "either"]
    assert str(directed) == "second:ties_away+first:nearest"


def test_a_kernels_own_stage_goes_on() -> None:
    given = tensors("x", "peer_1")
    problem = traced(all_reduce_rms_norm, "", given, eps=1e-6)
    own = torch.ones_like(given["x"])
    assert torch.equal(problem.evaluate({"reduced": own}).enclosure("output").value, torch.ones(6, 40).double())


def test_blocks_of_rows_are_those_of_the_whole() -> None:
    given = tensors("x", "peer_1", "residual")
    problem = traced(all_reduce_rms_norm, "unrounded_reduced", given, eps=1e-6)
    whole = problem.trace.enclosure("output")
    for index, part in problem.blocks(80):
        assert_same(part.trace.enclosure("output"), Enclosure(whole.parts[(slice(None), *index)]))


def test_norm_then_codes_is_the_norm_with_codes() -> None:
    """The FP8 stages of the norm can be told from it: what it quantizes is rounded to the dtype of x first."""
    project = open_project(Config(folder="", projects=(str(EXAMPLE),)))
    codes = chain(
        "c", Part(rms_norm, fixed={"scale": None, "quant": None}), Part(project.op("e4m3_codes"), {"x": "output"})
    )
    given = {**tensors("x"), "weight": torch.randn(40).to(BF16), "scale": torch.tensor([0.03])}
    one = traced(codes, "fp32_multiply", given, eps=1e-6).trace
    other = traced(rms_norm, "fp32_multiply", given, eps=1e-6, quant="static").trace
    assert_same(one.enclosure("codes"), other.enclosure("quantized"))
    assert one.results == ["codes"] and codes.contract("unrounded_output")


def test_a_chain_is_a_part_of_a_chain() -> None:
    project = open_project(Config(folder="", projects=(str(EXAMPLE),)))
    three = project.op("all_reduce_rms_norm_codes")
    nested = chain("nested", Part(all_reduce_rms_norm), Part(project.op("e4m3_codes"), {"x": "output"}))
    given = {**tensors("x", "peer_1", "residual"), "weight": torch.randn(40).to(BF16), "scale": torch.tensor([0.03])}
    for contract in ("", "unrounded_reduced+fp32_multiply", "unrounded_output"):
        one, other = (traced(o, contract, given, eps=1e-6).trace for o in (three, nested))
        assert [*one.stages] == [*other.stages]
        assert_same(one.enclosure("codes"), other.enclosure("codes"))


# Names


def test_what_two_parts_have_gets_the_label_of_its_part() -> None:
    twice = chain(
        "twice", Part(added, label="a"), Part(added, {"x": "a_output"}, renamed={"y": "z", "gain": "by"}, label="b")
    )
    check_op(twice)
    assert twice.inputs == ("x", "y", "z") and twice.params == {"gain": 1.0, "by": 1.0}
    assert [*twice.axes] == ["a_rule", "passed_a_output", "b_rule"]
    trace = traced(twice, "a_halved+b_plain", tensors("x", "y", "z"), by=2.0).trace
    assert [*trace.stages] == ["a_half", "a_output", "b_half", "b_output"]
    assert {n: f.name for n, f in trace.formats.items()} == {
        "a_half": "bf16", "a_output": "bf16", "b_half": "fp32", "b_output": "bf16"
    }  # fmt: skip
    known = stage_names(twice.reference)
    assert known is not None and "a_half" in known and "half" not in known


def test_a_shared_input_is_one() -> None:
    made = chain("made", Part(added, label="a"), Part(added, {"x": "a_output"}, label="b"), shared=("y", "gain"))
    assert made.inputs == ("x", "y") and [*made.params] == ["gain"]
    exact = traced(made, "", tensors("x", "y"), gain=1.0).trace.enclosure("b_output").exact
    given = tensors("x", "y")
    assert torch.allclose(exact, given["x"].double() + 2 * given["y"].double())


def test_an_input_that_is_missing_has_the_dtype_of_what_is_passed_on() -> None:
    """`tied` is rounded to w; without w that is the part's first input, which is stored in bf16 here."""
    second = Part(spread, {"x": "a_output"}, renamed={"w": "v", "index": "i"}, label="b")
    made = chain("made", Part(spread, label="a"), second, latent_of="b")
    assert made.latent == Latent("b_spread", ("b_output",))
    trace = traced(made, "", {"x": torch.randn(2, 5)}).trace
    assert trace.formats["a_tied"].name == "fp32" and trace.formats["b_tied"].name == "bf16"
    assert trace.results == ["a_tied", "b_output", "b_tied"]
    with pytest.raises(OpError, match="a and b have a Latent; say whose it has"):
        chain("made", Part(spread, label="a"), second)


def test_what_is_returned_is_rounded_and_what_goes_on_need_not_be() -> None:
    made = chain("made", Part(all_reduce), Part(added, {"x": "reduced"}), returned=("reduced",))
    given = tensors("x", "peer_1", "y")
    one, other = (traced(made, contract, given).trace for contract in ("", "unrounded_reduced"))
    assert one.results == other.results == ["reduced", "output"]
    assert_same(one.enclosure("reduced"), other.enclosure("reduced"))
    total = given["x"].float() + given["peer_1"].float()
    assert torch.equal(other.enclosure("output").value, (total + given["y"].float()).to(BF16).double())
    assert torch.equal(one.enclosure("output").value, (total.to(BF16).float() + given["y"].float()).to(BF16).double())


def test_formulas_have_the_names_of_the_chain() -> None:
    given = {**tensors("x", "peer_1", "residual"), "weight": torch.randn(40).to(BF16)}
    problem = traced(all_reduce_rms_norm, "fp32_multiply", given, eps=1e-6)
    formulas = FormulaTrace(problem=problem).evaluate().formulas
    assert formulas["variance"] == "mean_of_squares(residual_sum[..., :])"
    assert formulas["inv_rms"] == "rsqrt(variance + eps)"


def test_it_says_where_it_is_declared() -> None:
    assert all_reduce_rms_norm.where.split(":")[0].endswith("all_reduce_rms_norm.py")
    assert "All-reduce" in str(sys.modules[all_reduce_rms_norm.module].__doc__)


# Declarations that do not fit


ADDED = Part(added)


def norm(**declared: Any) -> Part:
    return Part(rms_norm, **{"takes": {"x": "added_output"}, **declared})


@pytest.mark.parametrize(
    ("parts", "options", "said"),
    [
        ((ADDED,), {}, "a chain has two parts or more, and this one has 1"),
        ((ADDED, rms_norm), {}, "is no part; write Part"),
        ((ADDED, Part(added, {"x": "output"})), {}, "two parts are called 'added'; give one a label"),
        ((ADDED, Part(rms_norm, renamed={"x": "z"})), {}, "rms_norm takes nothing of the parts before it"),
        ((ADDED, norm(takes={"y": "output"})), {}, "unknown input in takes of rms_norm: 'y'"),
        ((ADDED, norm(takes={"x": "hafl"})), {}, "unknown stage that rms_norm takes: 'hafl'; did you mean 'half'?"),
        ((norm(takes={"x": "half"}), Part(added, {"y": "inv_rms"})), {}, "takes 'half' of added, which is not compu"),
        ((Part(added, {"y": "half"}), norm(takes={"x": "half"})), {}, "a chain has no cycle, and its parts stand in"),
        ((ADDED, norm(takes={"x": "half"})), {}, "'half' of added is rounded as the contract says"),
        ((ADDED, norm(takes={"residual": "added_output"})), {}, "added and rms_norm have 'x'; rename it in one"),
        ((ADDED, norm(fixed={"eps": 1}, renamed={"eps": "e"})), {}, "'eps' of rms_norm is in fixed and in renamed"),
        ((ADDED, norm(fixed={"ep": 1})), {}, "in fixed of rms_norm: 'ep'; did you mean 'eps'?"),
        ((Part(added, fixed={"y": None}), norm()), {}, "'y' of added is fixed to None; only an optional one"),
        ((ADDED, norm()), {"shared": ("y",)}, "unknown name in shared, which two parts have: 'y'"),
        ((ADDED, norm()), {"returned": ("half",)}, "stage in returned, which no part takes: 'half'"),
        ((Part(added, label="a+b"), norm()), {}, "'a+b' cannot be the label or new name of added"),
        ((Part(added, renamed={"y": "p 1"}), norm()), {}, "'p 1' cannot be the label or new name of added"),
        ((added, norm()), {}, "'added' is no part; write Part(OP)"),
        ((ADDED, norm()), {"latent_of": "added"}, "unknown part with a Latent: 'added'"),
    ],
)
def test_a_declaration_that_does_not_fit(parts: tuple[Any, ...], options: dict[str, Any], said: str) -> None:
    with pytest.raises(OpError) as caught:
        chain("made", *parts, **options)
    assert said in str(caught.value) and __file__ in str(caught.value)


@pytest.mark.parametrize("name", ["", "a b", "a+b"])
def test_a_name_that_no_case_line_can_have(name: str) -> None:
    with pytest.raises(OpError, match="cannot be the name of a chain"):
        chain(name, ADDED, norm())


def test_an_axis_of_a_part_does_not_replace_that_of_a_passed_stage() -> None:
    """`unrounded_output` would be gone, and a rounding that is missing could not be named."""

    @op(rows=("x",), axes={"passed_output": {"": {}, "halved": {"half": "x"}}}, rounds={"last": "x"})
    def later(x: Enclosure, *, contract: Contract, stage: StageRecorder) -> None:
        stage("last", stage("half", x * 0.5) * 2.0, result=True)

    with pytest.raises(OpError, match="two axes are called 'passed_output'"):
        chain("made", ADDED, Part(later, {"x": "output"}))


def test_an_input_of_codes_cannot_be_taken() -> None:
    @op(rows=("x",), plain=("codes",), rounds={"y": "x"})
    def decoded(x: Enclosure, codes: Tensor, *, contract: Contract, stage: StageRecorder) -> None:
        stage("y", x * 1.0, result=True)

    with pytest.raises(OpError, match="'codes' of decoded is plain"):
        chain("made", Part(added), Part(decoded, {"codes": "output"}))


def test_a_stage_of_the_wrong_kind_is_told() -> None:
    made = chain("made", Part(all_reduce), Part(spread, {"index": "reduced"}, renamed={"x": "z"}))
    with pytest.raises(OpError, match="'index' of spread takes 'reduced', which is not of the kind that this input is"):
        traced(made, "", tensors("x", "peer_1", "z")).trace  # noqa: B018


def test_a_stage_that_a_case_lacks_is_told() -> None:
    made = chain("made", Part(rms_norm), Part(added, {"x": "residual_sum"}))
    with pytest.raises(UsageError, match="added takes 'residual_sum', which no part before it records here"):
        traced(made, "", {**tensors("x"), "y": tensors("y")["y"]}, eps=1e-6).trace  # noqa: B018


# Kernels


def identified(project: Project, kernel: Kernel, count: int = 2) -> tuple[str, ...]:
    op_ = project.op(kernel.op)
    groups = project.groups(kernel.op, kernel.accepts, small=True)
    cases = [case for group in groups for case in draw(group, count)]
    found = identify(Subject(kernel, op_, CPU), cases, most=10)
    assert not found.errors
    return tuple(name for candidate in found.kept if not candidate.changed for name in candidate.contracts)


def test_each_missing_rounding_is_named_and_a_correct_kernel_keeps_the_chain() -> None:
    project = open_project(Config(folder="", projects=(str(EXAMPLE),)))
    kept = {kernel.name: identified(project, kernel) for kernel in load_kernels(EXAMPLE / "kernels")}
    chained = "fp32_sum+fp32_multiply+rounded_sum"
    assert chained in kept["as the chain"]
    assert not any(name.startswith("fp32_sum+unrounded_reduced") for name in kept["as the chain"])
    without_sum, without_output = kept["without the rounded sum"], kept["without the rounded output"]
    assert without_sum and all("unrounded_reduced" in name for name in without_sum)
    assert without_output and all("unrounded_output" in name for name in without_output)


def test_the_residual_added_to_the_unrounded_sum_is_named() -> None:
    """ROCm/aiter #2586: residual_out = bf16(sum in fp32 + residual), where the unfused path rounds the sum first."""
    project = open_project(Config(folder=""))

    def planted(x: Tensor, peer_1: Tensor, weight: Tensor, residual: Tensor, *, eps: float) -> dict[str, Tensor]:
        residual_sum = (x.float() + peer_1.float() + residual.float()).to(x.dtype)
        value = residual_sum.float()
        normalized = (value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)).to(weight.dtype)
        return {"output": (normalized * weight).to(x.dtype), "residual_sum": residual_sum}

    kernel = Kernel("planted", "all_reduce_rms_norm", "native_multiply", planted)
    kept = identified(project, replace(kernel))
    assert "fp32_sum+unrounded_reduced+native_multiply+rounded_sum" in kept
    assert all("unrounded_reduced" in name for name in kept)


# The sum over the ranks


def orders(terms: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the sums of the terms in every order and bracketing, each addition rounded to a dtype."""
    if len(terms) == 1:
        return [terms[0].to(dtype)]
    found = []
    for mask in range(1, (1 << len(terms)) - 1, 2):  # the first term is always on the left
        left = [t for n, t in enumerate(terms) if mask >> n & 1]
        right = [t for n, t in enumerate(terms) if not mask >> n & 1]
        found += [(a + b).to(dtype) for a in orders(left, dtype) for b in orders(right, dtype)]
    return found


@pytest.mark.parametrize(("contract", "dtype"), [("fp32_sum", FP32), ("rounded_hops", BF16)])
def test_the_ends_of_a_sum_over_ranks_are_those_of_all_orders(contract: str, dtype: torch.dtype) -> None:
    given = tensors("x", "peer_1", "peer_2", "peer_3")
    found = traced(all_reduce, contract, given).trace.enclosure("reduced")
    every = torch.stack([total.to(BF16).double() for total in orders([t.to(dtype) for t in given.values()], dtype)])
    assert torch.equal(found.lo, every.amin(0)) and torch.equal(found.hi, every.amax(0))
    assert (found.lo < found.hi).any() == (contract == "rounded_hops")


def test_ranks_must_be_alike() -> None:
    given = tensors("x", "peer_1")
    with pytest.raises(UsageError, match="peer_1 is of fp32; it must be of bf16"):
        traced(all_reduce, "", {**given, "peer_1": given["x"].float()}).trace  # noqa: B018
    with pytest.raises(UsageError, match=r"peer_1 has shape \(3, 40\)"):
        traced(all_reduce, "", {**given, "peer_1": given["x"][:3]}).trace  # noqa: B018
