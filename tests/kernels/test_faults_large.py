"""The faults of `tests/faults/large.py`, which only the large edges show: on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lastbit.case import Case
from lastbit.judging.problem import PROBLEMS
from lastbit.result import Verdict
from lastbit.verify.check import verify_case
from lastbit.verify.device_memory import give_back
from tests.faults import hunt
from tests.faults.catalogue import FAULTS as SMALL_FAULTS
from tests.faults.large import FAULTS
from tests.faults.plant import Fault, alternatives, mutated, planted, read_sources
from tests.rms_norm_contract import DEVICE  # installs the bit-faithful interpreter, where Triton interprets


def large_edges(fault: Fault) -> list[Case]:
    """Return the edges for accelerators alone that the kernel of a fault can take."""
    kernel = hunt.clean(fault)
    every, small = (
        next(g.examples for g in hunt.project().groups(kernel.op, kernel.accepts, small=small) if g.name == "edges")
        for small in (False, True)
    )
    return [case for case in every if case not in small and case.tensors[0].dtype in fault.dtypes]


@pytest.fixture
def memory() -> Iterator[None]:
    """Memory for tensors of many GiB: none is left to the next test."""
    yield
    PROBLEMS.forget()
    give_back(torch.device(DEVICE))


@pytest.mark.gpu
@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_fault_is_seen_and_named(fault: Fault):
    device, cases = torch.device(DEVICE), large_edges(fault)
    with planted(fault) as kernel:
        exposed = hunt.hunt(kernel, cases, device)
        assert exposed is not None
        hidden = hunt.hunt(hunt.without_stages(kernel), cases, device, start=exposed.cases)
    assert hidden is not None
    assert exposed.named in alternatives(fault.exposed)
    assert hidden.named in alternatives(fault.hidden)
    for case in cases[: hidden.cases]:
        assert verify_case(hunt.subject_of(hunt.clean(fault), device), case).verdict is Verdict.PASSED


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_there_are_cases_and_replacements_apply(fault: Fault):
    assert large_edges(fault)
    assert mutated(fault, read_sources())


def test_names_are_unique():
    assert len({str(fault) for fault in (*FAULTS, *SMALL_FAULTS)}) == len(FAULTS) + len(SMALL_FAULTS)
