"""Calls of a kernel in a process under compute-sanitizer: nothing is judged there, and nothing else runs on the GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lastbit.calling.performing import under_any_name
from lastbit.case import parse_case
from lastbit.devices import made_current
from lastbit.errors import UnsupportedCase
from lastbit.inputs import bare, build
from lastbit.verify.check import Subject, first_line
from lastbit.verify.worker import Workplace


@dataclass(frozen=True)
class NamedAllocation:
    """A named allocation: that of an input, or of something that the kernel returned."""

    name: str
    start: int
    size: int


@dataclass(frozen=True)
class Called:
    """The results of calling a case under the tool, apart from the tool's own reports.

    Attributes:
        memory: allocations with a name.
        raised: what the kernel raised; empty if nothing.
    """

    memory: tuple[NamedAllocation, ...] = ()
    raised: str = ""


def call_bare(place: Workplace, kernel: str, line: str) -> Called:
    """Call a kernel on tensors without guards: as it is, and once more for the stages that it declares."""
    subject, case = place.subjects[kernel], parse_case(line).gathered()
    inputs, held, raised = build(case, "cpu"), list[Mapping[str, object]](), ""
    try:
        with place.watch(case), made_current(subject.device):
            for asked in _calls(subject):
                held.append(tensors := bare(inputs, subject.device))
                held.append(_returned(subject, tensors, {**case.params, **asked}))
    except UnsupportedCase:
        pass
    except Exception as error:
        raised = first_line(error)
    return Called(tuple(memory for tensors in held for memory in _memory(tensors)), raised)


def _calls(subject: Subject) -> Iterator[dict[str, Any]]:
    yield {}
    if subject.kernel.stages:
        yield {"stages": subject.kernel.stages}


def _returned(subject: Subject, tensors: Mapping[str, Tensor], arguments: Mapping[str, Any]) -> Mapping[str, object]:
    """Return the kernel's return values by name, once the device has finished its work."""
    returned = subject.kernel.call(**tensors, **arguments)
    torch.accelerator.synchronize(subject.device)
    return under_any_name(returned)


def _memory(tensors: Mapping[str, object]) -> Iterator[NamedAllocation]:
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor):
            storage = tensor.untyped_storage()
            yield NamedAllocation(name, storage.data_ptr(), storage.nbytes())
