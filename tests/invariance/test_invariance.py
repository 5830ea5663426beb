"""What the bits of a kernel depend on."""

import dataclasses

import pytest
import torch

from lastbit.case import parse_case
from lastbit.config import Config
from lastbit.errors import LastbitError, UnsupportedCase
from lastbit.kernel import Kernel
from lastbit.property_result import PropertyOutcome
from lastbit.relations import Related, Relation
from lastbit.verify import property_checks
from lastbit.verify.check import Subject
from lastbit.verify.project import open_project
from lastbit.verify.property_checks import properties_on

CPU = torch.device("cpu")
CASE = parse_case("rms_norm x=fp32[40,256] weight=fp32[256] eps=1e-06 seed=1")
RMS_NORM = open_project(Config(folder="")).op("rms_norm")
THRESHOLD = 19


def by_number_of_rows(x, weight, *, eps):
    """Sum in halves from some number of rows on."""
    squares = x.square()
    total = squares.sum(-1) if x.shape[0] < THRESHOLD else squares[:, ::2].sum(-1) + squares[:, 1::2].sum(-1)
    return x * torch.rsqrt(total / x.shape[-1] + eps)[:, None] * weight


def subject(function, **declared):
    return Subject(Kernel("planted", "rms_norm", "fp32_multiply", function, **declared), RMS_NORM, CPU)


def test_rows_are_bisected():
    [found] = properties_on(subject(by_number_of_rows, invariant=("rows",)), CASE, ["rows"])
    assert found.outcome is PropertyOutcome.BROKEN and found.fails and found.legal
    assert found.where == f"changes between {THRESHOLD - 1} and {THRESHOLD} rows"


def test_a_case_without_elements_shows_nothing():
    empty = parse_case("rms_norm x=fp32[0,256] weight=fp32[256] eps=1e-06 seed=1")
    for found in properties_on(subject(by_number_of_rows), empty, ["layout", "run to run"]):
        assert found.outcome is PropertyOutcome.NOT_APPLICABLE and "no pair of calls" in found.reason


def test_a_relation_of_two_other_calls_shows_the_first_of_them():
    """The case itself is right; both further calls are at weights of which the kernel makes something else."""

    def kernel(x, weight, *, eps):
        output = by_number_of_rows(x, weight, eps=eps)
        return output * 2 if bool((weight == 3).all()) else output

    def related(tensors, params, random):
        threes = {**tensors, "weight": torch.full_like(tensors["weight"], 3)}
        yield Related("times one", tensors, first=Related("weights of 3", threes))

    asked = Relation("threes", "weights of 3 are as others", related)
    with_relation = dataclasses.replace(RMS_NORM, relations=(asked,))
    planted = Subject(Kernel("planted", "rms_norm", "fp32_multiply", kernel), with_relation, CPU)
    [found] = properties_on(planted, CASE, ["threes"])
    assert found.first == f"{CASE}, weights of 3" and found.second == "times one"
    assert found.legal is False


def test_a_case_that_the_kernel_does_not_take_shows_nothing():
    def refuses(x, weight, *, eps):
        raise UnsupportedCase("40 rows are too many")

    [found] = properties_on(subject(refuses, invariant=("rows",)), CASE, ["rows"])
    assert found.outcome is PropertyOutcome.NOT_APPLICABLE and found.declared
    assert found.reason == "the kernel does not take the case: 40 rows are too many"


def test_a_kernel_that_no_call_can_follow_is_no_undeclared_property(monkeypatch):
    """What it raised is the outcome of the case, whatever it declares."""
    monkeypatch.setattr(property_checks, "is_lost", lambda device: True)

    def ends(x, weight, *, eps):
        if len(x) < THRESHOLD:
            raise RuntimeError("an illegal memory access was encountered")
        return by_number_of_rows(x, weight, eps=eps)

    with pytest.raises(LastbitError, match="look for rows errored: RuntimeError: an illegal memory access"):
        properties_on(subject(ends), CASE, ["rows"])
