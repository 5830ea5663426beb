"""Stages that a kernel keeps in memory: which tensor is which, and the first that does not follow."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lastbit.diagnosing.buffers import Buffer, Held, agreeing
from lastbit.diagnosing.in_memory import Onward, first_wrong
from lastbit.diagnosing.needs import Needs
from lastbit.judging.problem import Problem
from lastbit.numerics import Enclosure
from lastbit.ops import op
from lastbit.tracing.of_torch import addresses_of


@op(rows=(), rounds={"hidden": "x", "y": "x"})
def chain(x, weight, *, contract, stage) -> None:
    hidden = stage("hidden", x * weight)
    stage("raised", hidden + x)
    stage("y", stage("gated", hidden * x), result=True)


@op(rows=(), rounds={"hidden": "x", "y": "x"})
def late(x, weight, *, contract, stage) -> None:
    raised = stage("raised", stage("hidden", x * weight) + x)
    stage("y", raised * x, result=True)


X = torch.linspace(0.5, 3, 24).reshape(4, 6).bfloat16()
WEIGHT = torch.linspace(-2, 2, 6).bfloat16()
PROBLEM = Problem(chain, chain.contract(), {"x": X, "weight": WEIGHT}, {})


def buffers(**tensors: Tensor) -> list[Buffer]:
    """In this order; only `y` is a result."""
    made = [(name, tensor.clone()) for name, tensor in tensors.items()]
    return [
        Buffer(tensor, addresses_of(tensor), rank, name if name == "y" else "")
        for rank, (name, tensor) in enumerate(made)
    ]


HIDDEN = X * WEIGHT
GATED = HIDDEN.float() * X.float()


def stages_of(**tensors: Tensor) -> list[Held]:
    """For each tensor the stage that it is nearest to."""
    found = [list(agreeing(PROBLEM.trace, buffer, {"y"})) for buffer in buffers(**tensors)]
    return [min(some, key=lambda h: h.error) for some in found if some]


def test_a_tensor_is_the_stage_that_its_values_agree_with() -> None:
    held = stages_of(a=HIDDEN, b=GATED, c=-GATED, y=GATED.bfloat16())
    assert [one.name for one in held] == ["hidden", "gated", "y"]


def test_a_part_of_a_stage_is_found_along_a_dimension() -> None:
    (held,) = stages_of(half=HIDDEN[:, 3:])
    assert held.name == "hidden"
    whole = PROBLEM.trace.enclosure("hidden").value.reshape(-1)
    assert torch.equal(whole[held.part].reshape(4, 3), HIDDEN[:, 3:].double())
    laid, where = held.buffer.laid_out_as(held)
    assert laid.shape == (4, 6) and bool(laid[:, :3].isnan().all())
    assert (where.at(np.arange(24)).reshape(4, 6)[:, :3] == 0).all()


def test_what_agrees_with_nothing_is_the_stage_from_which_the_next_one_follows() -> None:
    found = first_wrong(PROBLEM, buffers(a=-HIDDEN, b=-GATED, y=(-GATED).bfloat16()))
    assert found is not None and found.held.name == "hidden"


def test_a_buffer_that_was_taken_for_an_earlier_stage_explains_a_later_one() -> None:
    """The sum with x left out: the buffer has the values of `hidden`, and is what `raised` should be."""
    problem = Problem(late, late.contract(), {"x": X, "weight": WEIGHT}, {})
    found = first_wrong(problem, buffers(a=HIDDEN, y=GATED.bfloat16()))
    assert found is not None and found.held.name == "raised"


def test_the_first_stage_that_does_not_follow_is_wrong_and_not_what_follows_from_it() -> None:
    wrong = HIDDEN.clone()
    wrong[2, 1] += 1
    found = first_wrong(PROBLEM, buffers(a=wrong, y=(wrong.float() * X.float()).bfloat16()))
    assert found is not None
    assert (found.held.name, found.worst) == ("hidden", 13)
    y = HIDDEN.float() * X.float() * 2
    after = first_wrong(PROBLEM, buffers(a=HIDDEN, y=y.bfloat16()))
    assert after is not None and after.held.name == "y"
    assert list(after.problem.given) == ["hidden"]


def test_nothing_is_wrong_with_right_buffers() -> None:
    assert first_wrong(PROBLEM, buffers(a=HIDDEN, y=GATED.bfloat16())) is None


def test_an_element_needs_what_it_is_computed_from_and_nothing_else() -> None:
    needs = Needs(Onward.of(PROBLEM, {}), "y", 13)
    assert needs.any_of("x", [13]) and needs.any_of("weight", [1])
    assert not needs.any_of("x", [13], others=True)
    assert not needs.any_of("weight", [0, 2, 3, 4, 5])
    onward = Needs(Onward.of(PROBLEM, {"hidden": Enclosure.point(HIDDEN)}), "y", 13)
    assert onward.any_of("hidden", [13]) and not onward.any_of("hidden", [12])
