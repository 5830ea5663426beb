"""Dtypes and options of an op meet two by two in the cases of profile ci, for kernels that take little and much.

An op has the dtypes and options that any of its cases has, edges and drawn ones. Of two that no case of a kernel has
together, the reference says whether they have a meaning.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from lastbit.case import Case, Group
from lastbit.config import PROFILES, Config
from lastbit.inputs import build
from lastbit.judging.problem import Problem
from lastbit.numerics import Premises
from lastbit.ops import REQUIRED, Op, check_arguments
from lastbit.verify.check import Subject
from lastbit.verify.drawing import designed, designed_cases
from lastbit.verify.project import open_project
from lastbit.verify.run_groups import groups_in_a_run

PROJECT = open_project(Config(folder=""))
OPS = (
    *("rms_norm", "rms_norm_quantize", "swiglu", "swiglu_backward", "quantize", "softmax", "completion_mask"),
    *("rotary", "attention", "cross_entropy", "cross_entropy_backward", "layer_norm_gated", "qk_norm_rope"),
)
"""Ops whose options stand for themselves. Ranks, experts and saved statistics go together in ways of their own."""

Options = Mapping[str, str]
"""Tensor or parameter → its dtype or value; `number` for any number, and nothing where it is left out."""

ALIKE = {"residual", "up", "dy", "k", "v", "z"}
"""Tensors that have the dtype of x: docs/contracts says so, and references take any. They are given or left out."""

UNMEANT = {
    frozenset({("weight", ""), ("weight_offset", "number")}),
    frozenset({("activation", "sigmoid"), ("z", "")}),
}
"""Pairs that references take and that mean nothing: an offset is added to a weight, an activation is a gate's."""

HALVES = {"bf16", "fp16"}


def is_left_out(op: str, pair: frozenset[tuple[str, str]]) -> bool:
    """Tell whether the cases of an op leave two options out, for a reason."""
    (a, of_a), (b, of_b) = sorted(pair)
    if (a, b) == ("cos", "sin"):  # tables of two dtypes stand in an edge; no model has them
        return of_a != of_b
    if (a, b) == ("grad_output", "logits"):  # a gradient has the dtype of the loss: that of the logits, or fp32
        return of_a not in ("fp32", of_b)
    # No model mixes the two formats of 16 bits: a weight or sink has x's own dtype, or is fp32 beside it.
    halves = {of_a, of_b} == HALVES or not {("sinks", "fp16"), ("weight", "fp16")}.isdisjoint(pair)
    return op in ("attention", "layer_norm_gated") and halves


def options_of(case: Case) -> Options:
    params = {n: str(v) if isinstance(v, str | bool) else "number" for n, v in case.params.items()}
    tensors = {t.name: "as x" if t.name in ALIKE else t.dtype for t in case.tensors}
    if "bias" in tensors:
        tensors["bias"] = "as weight" if tensors["bias"] == tensors["weight"] else "another"
    return tensors | {n: value for n, value in params.items() if value != "False"}


@functools.cache
def groups_of(op: str, accepts: frozenset[str]) -> tuple[Group, ...]:
    return tuple(designed(PROJECT.groups(op, accepts, small=True), PROFILES["ci"]))


@functools.cache
def cases_of(op: str, accepts: frozenset[str]) -> tuple[Case, ...]:
    return tuple(case for group in groups_of(op, accepts) for case in (*group.examples, *designed_cases(group, 0)))


def everything(op: Op) -> frozenset[str]:
    return frozenset((*op.inputs, *op.params))


def fewest(op: Op) -> frozenset[str]:
    """Return what a kernel takes at least."""
    needed = (name for name, value in op.params.items() if value is REQUIRED)
    return frozenset((*(name for name in op.inputs if name not in op.optional), *needed))


def pairs(options: Options, names: list[str]) -> Iterator[frozenset[tuple[str, str]]]:
    """Yield each two options; what is left out counts as one."""
    yield from map(frozenset, itertools.combinations([(name, options.get(name, "")) for name in names], 2))


def has_meaning(op: Op, pair: frozenset[tuple[str, str]], cases: tuple[Case, ...]) -> bool:
    """Tell whether the reference takes a case that has one of the options and is given the other."""
    small = sorted(cases, key=lambda case: case.tensors[0].numel)
    for own, other in itertools.permutations(sorted(pair)):
        having = [case for case in small if case.tensors[0].numel and options_of(case).get(own[0], "") == own[1]]
        changed = (_with(case, *other, cases) for case in having[:_TRIES])
        if any(_is_taken(op, case) for case in changed if case is not None):
            return True
    return False


# Arbitrary: options differ from case to case, and one of a few has none that keeps the other away.
_TRIES = 12


def _with(case: Case, name: str, option: str, cases: tuple[Case, ...]) -> Case | None:
    """Return a case with another option; None if it cannot be made."""
    own = {t.name: t for t in case.tensors}
    if not option:
        params = {n: value for n, value in case.params.items() if n != name}
        return replace(case, tensors=tuple(t for n, t in own.items() if n != name), params=params)
    other = next(other for other in cases if options_of(other).get(name) == option)
    if name in other.params:
        return replace(case, params={**case.params, name: other.params[name]})
    main, given = other.tensors[0].shape, other[name].shape
    shapes = {main: case.tensors[0].shape, main[-1:]: case.tensors[0].shape[-1:]}
    own[name] = own.get(name) or replace(other[name], shape=shapes.get(given, given), strides=None, offset=0)
    first, dtype = case.tensors[0].name, case.tensors[0].dtype if option == "as x" else option
    alike = {n for n in own if n in ALIKE} if name == first else set[str]()
    return replace(case, tensors=tuple(replace(t, dtype=dtype) if n in {name, *alike} else t for n, t in own.items()))


def _is_taken(op: Op, case: Case) -> bool:
    default = op.contract("")
    for contract in (default, *op.alternatives(default)):
        with suppress(Exception):  # a reference may raise whatever it likes, as for `takes` of verify/check.py
            check_arguments(op, [t.name for t in case.tensors], case.params)
            tensors = build(case, torch.device("cpu")).tensors
            return bool(Problem(op, contract, tensors, dict(case.params), Premises()).results)
    return False


@pytest.mark.parametrize("name", sorted(PROJECT.ops))
def test_every_tensor_and_parameter_is_given_by_a_case(name: str) -> None:
    """A fused norm passed that forgot its `weight_offset`: no case gave it one."""
    op = PROJECT.op(name)
    groups = PROJECT.groups(name, everything(op), small=True)
    cases = [case for group in groups for case in group.examples]
    given = {name for case in cases for name in (*case.names, *case.params)} | {n for g in groups for n in g.choices}
    assert everything(op) <= given


@pytest.mark.parametrize("most", [False, True], ids=["fewest", "most"])
@pytest.mark.parametrize("name", OPS)
def test_every_two_options_that_go_together_meet(name: str, most: bool) -> None:
    op = PROJECT.op(name)
    every = cases_of(name, everything(op))
    accepts = everything(op) if most else fewest(op)
    names = sorted(accepts)
    known: dict[str, set[str]] = {n: {options_of(case).get(n, "") for case in every} for n in names}
    needed = {n for n in op.inputs if n not in op.optional} | {n for n, v in op.params.items() if v is REQUIRED}
    wanted = {
        frozenset(((a, of_a), (b, of_b)))
        for a, b in itertools.combinations(names, 2)
        for of_a in known[a] - ({""} if a in needed else set())
        for of_b in known[b] - ({""} if b in needed else set())
    }
    judged = {pair for case in cases_of(name, accepts) for pair in pairs(options_of(case), names)}
    left = sorted(sorted(pair) for pair in wanted - judged - UNMEANT if not is_left_out(name, pair))
    assert [pair for pair in left if has_meaning(op, frozenset(pair), every)] == []


def test_every_three_options_of_a_norm_after_ranks_meet() -> None:
    op = PROJECT.op("all_reduce_rms_norm")
    given = {tuple(n in case.names for n in ("peer_2", "weight", "residual")) for case in drawn_of(op)}
    assert len(given) == 8


@pytest.mark.parametrize("name", ["layer_norm_gated", "layer_norm_gated_backward"])
def test_a_bias_has_another_dtype_than_the_weight(name: str) -> None:
    """A kernel passed that reads its bias in the dtype of the weight."""
    biased = [case for case in drawn_of(PROJECT.op(name)) if "bias" in case.names]
    assert {case["bias"].dtype == case["weight"].dtype for case in biased} == {True, False}


def test_a_least_scale_is_above_that_of_a_row() -> None:
    """A root-mean-square of 1 bounds the largest magnitude by the root of the width.

    A kernel passed that bounds a power of two, not the scale before it was rounded up: the bound was a power of two.
    """
    above = []
    for case in drawn_of(PROJECT.op("rms_norm_quantize")):
        largest = {"int8": 127.0, "e4m3": 448.0, "e5m2": 57344.0}[case.params["dtype"]]
        least = case.params.get("least_scale", 0.0) * largest
        above += [case] if "weight" not in case.names and least > math.sqrt(case.tensors[0].shape[-1]) else []
    assert above
    rounded = [case.params["least_scale"] for case in above if case.params.get("ue8m0")]
    assert any(math.frexp(least)[0] != 0.5 for least in rounded)


def drawn_of(op: Op) -> list[Case]:
    return [case for group in groups_of(op.name, everything(op)) for case in designed_cases(group, 0)]


@pytest.mark.parametrize(
    "name", ["eager[cross_entropy]", "eager[attention+flash]", "eager[rms_norm_quantize+per_group]"]
)
def test_in_a_run_of_few_functions_every_three_options_meet(name: str) -> None:
    kernel = next(k for k in PROJECT.kernels() if k.name == name)
    subject = Subject(kernel, PROJECT.op(kernel.op), torch.device("cpu"))

    def met(functions: int, count: int) -> set[tuple[tuple[str, object], ...]]:
        groups, _ = groups_in_a_run(PROJECT, Config(folder=""), functions)(subject)
        rows = [tuple(group.combination.items()) for group in groups if group.combination]
        return {some for row in rows for some in itertools.combinations(row, count)}

    assert met(1, 2) == met(9, 2)
    assert met(9, 3) < met(1, 3)
