"""The edges: fixed cases of every op for what a kernel may branch on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lastbit.case import Case
from lastbit.config import Config
from lastbit.inputs import build
from lastbit.verify.project import Project, open_project

CASES = Path(__file__).resolve().parents[2] / "cases"
OPS = sorted(path.stem for path in CASES.glob("[a-z]*.py"))


@pytest.fixture(scope="module")
def project() -> Project:
    return open_project(Config(folder=""))


def edges_of(project: Project, op: str, *, small: bool, without: frozenset[str] = frozenset()) -> tuple[Case, ...]:
    accepts = frozenset(project.op(op).inputs) | frozenset(project.op(op).params)
    groups = {group.name: group for group in project.groups(op, accepts - without, small=small)}
    assert groups["edges"].strategy is None
    return groups["edges"].examples


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_edges(project: Project, op: str) -> None:
    small, every = (edges_of(project, op, small=small) for small in (True, False))
    assert len(set(every)) == len(every) == len({case.seed for case in every}) or op == "completion_mask"
    assert {case.op for case in every} == {op}
    assert every[: len(small)] == small and len(every) > len(small)


def test_a_kernel_gets_the_edges_that_it_can_take(project: Project) -> None:
    fewer = edges_of(project, "rms_norm", small=True, without=frozenset({"quant", "residual"}))
    assert fewer and set(fewer) < set(edges_of(project, "rms_norm", small=True))
    assert not any({"quant", "residual"} & case.names for case in fewer)


@pytest.mark.parametrize("op", OPS)
def test_edges_for_a_cpu_are_small(project: Project, op: str) -> None:
    for case in edges_of(project, op, small=True):
        for tensor in case.tensors:
            assert tensor.numel < 1 << 18 and max(tensor.element_strides, default=0) < 1 << 18, case


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_no_rows_a_square_and_a_column_stride(project: Project, op: str) -> None:
    firsts = [case.tensors[0] for case in edges_of(project, op, small=True)]
    assert any(0 in t.shape for t in firsts)
    assert any(math.prod(t.shape[:-1]) == t.shape[-1] and t.element_strides[-1] > 1 for t in firsts)


@pytest.mark.parametrize("op", OPS)
def test_accelerators_get_many_rows_and_far_elements(project: Project, op: str) -> None:
    large = edges_of(project, op, small=False)
    assert any(math.prod(case.tensors[0].shape[:-1]) > 1 << 16 for case in large)
    assert any(
        sum((size - 1) * stride for size, stride in zip(t.shape, t.element_strides, strict=True)) >= 1 << 31
        for case in large
        for t in case.tensors
    )


def test_a_given_scale_is_too_small_for_e5m2(project: Project) -> None:
    """Other cases of e5m2 find their scale, so that a kernel that does not limit its codes is seen here alone."""
    beyond = []
    for case in edges_of(project, "quantize", small=True):
        if case.params["dtype"] == "e5m2" and "scale" in case.names:
            tensors = build(case, "cpu").hand_out()
            scaled = tensors["x"].double() / tensors["scale"].double()
            beyond += [case] if (scaled.isfinite() & (scaled.abs() > 61440.0)).any() else []
    assert beyond


@pytest.mark.parametrize("op", ["cross_entropy", "cross_entropy_backward"])
def test_a_row_that_counts_has_an_infinite_logit(project: Project, op: str) -> None:
    """Its loss and gradient are NaN; of a kernel that takes no shift there the loss is infinite."""
    rows = 0
    for case in edges_of(project, op, small=True):
        tensors = build(case, "cpu").hand_out()
        counted = tensors["labels"] != case.params.get("ignore_index", -100)
        logits = tensors["logits"].float()
        rows += int((counted & logits.isposinf().any(-1) & ~logits.isnan().any(-1)).sum())
    assert rows


@pytest.mark.parametrize(("dtype", "largest"), [("e4m3", 448.0), ("int8", 127.0)])
def test_a_scale_is_one_before_it_is_rounded_up(project: Project, dtype: str, largest: float) -> None:
    """Its logarithm is exactly 0, so that the power of two above it is wrong under every contract."""
    amax = []
    for case in edges_of(project, "quantize", small=True):
        if case.params["dtype"] == dtype and case.params.get("ue8m0") and "group_size" not in case.params:
            amax += build(case, "cpu").hand_out()["x"].double().abs().amax(-1).tolist()
    assert largest in amax


def test_a_position_needs_more_than_16_bits(project: Project) -> None:
    cases = [case for case in edges_of(project, "rotary", small=True) if case.tensors[0].numel]
    assert max(int(build(case, "cpu").hand_out()["positions"].amax()) for case in cases) > 32767


@pytest.mark.parametrize("first", [16, 32, 64, 128])
def test_exponentials_relative_to_the_first_keys_overflow(project: Project, first: int) -> None:
    """The formula does not show that: over the real numbers every shift is as good."""
    above = []
    for case in edges_of(project, "attention", small=True):
        q, k, *_ = (x.float() for x in build(case, "cpu").hand_out().values())
        if k.shape[1] > first and not case.params.get("causal") and "cap" not in case.params:
            heads = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
            scores = torch.einsum("bthd,bshd->bhts", q, heads) * case.params["scale"]
            above.append(float((scores.amax(-1) - scores[..., :first].amax(-1)).max()))
    assert max(above) > math.log(torch.finfo(torch.float32).max)


@pytest.mark.parametrize("shared", [5, 6, 7])
def test_heads_that_share_keys_have_more_than_one_group(project: Project, shared: int) -> None:
    """Of one group alone every head has the keys of that, however a kernel counts."""
    shapes = [[t.shape for t in case.tensors[:2]] for case in edges_of(project, "attention", small=True)]
    assert any(k[2] > 1 and q[2] == shared * k[2] for q, k in shapes)


def overflows(case: Case, given: Mapping[str, Tensor]) -> bool:
    """Tell whether a softmax of positive scales, x.max() · scale subtracted, is infinite."""
    scores = given["x"].float() * case.params.get("scale", 1.0)
    most = given["x"].float().amax(-1, keepdim=True) * case.params.get("scale", 1.0)
    return given.keys() == {"x"} and bool(scores.isfinite().all() and torch.exp(scores - most).isinf().any())


def rounds_down(case: Case, given: Mapping[str, Tensor]) -> bool:
    """Tell whether 2 to the whole logarithm above a scale, in fp32, is below the scale."""
    largest = {"e4m3": 448.0, "int8": 127.0, "e5m2": 57344.0}[case.params["dtype"]]
    amax = given["x"].float().abs().amax(-1) if given["x"].numel() else torch.zeros(1)
    scale = amax / torch.full_like(amax, largest)  # torch multiplies by the reciprocal of a number
    return bool(case.params.get("ue8m0")) and bool((torch.exp2(torch.ceil(torch.log2(scale))) < scale).any())


def is_alike_in_fp32(case: Case, given: Mapping[str, Tensor]) -> bool:
    """Tell whether an id of another dtype than the end is the end in fp32 alone."""
    ids, ends = given["ids"].reshape(-1, 1), given["eos_ids"]
    return ids.dtype != ends.dtype and bool(((ids.float() == ends.float()) & (ids != ends)).any())


def lies_otherwise(case: Case, given: Mapping[str, Tensor]) -> bool:
    """Tell whether a rank after the fourth has other strides than the first."""
    return any(given[name].stride() != given["x"].stride() for name in given if name > "peer_3")


@pytest.mark.parametrize(
    ("op", "shows"),
    [
        ("softmax", overflows),
        ("quantize", rounds_down),
        ("completion_mask", is_alike_in_fp32),
        ("all_reduce", lies_otherwise),
    ],
)
def test_edges_show_what_passed_before_they_did(
    project: Project, op: str, shows: Callable[[Case, Mapping[str, Tensor]], bool]
) -> None:
    cases = edges_of(project, op, small=True)
    assert any(shows(case, build(case, torch.device("cpu")).tensors) for case in cases)
