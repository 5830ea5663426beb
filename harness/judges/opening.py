"""A kernel file opened for judging: in a process of its own, in which alone its code runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from harness.calibrate import load_premises
from harness.case import Case
from harness.inputs import build
from harness.judges.operators import operators_called
from harness.judges.question import Question
from harness.of_file import held_to, kernel_of_file
from harness.outcomes.file_verdict import Held
from harness.verify.check import Subject
from harness.verify.declarations import check_kernel
from harness.verify.inprocess import Workplace


@dataclass(frozen=True)
class Opened:
    """A kernel that is held to what the caller says.

    Attributes:
        notes: what its file declares otherwise.
        confinement: what the process of the kernel is kept from.
    """

    subject: Subject
    notes: tuple[str, ...] = ()
    confinement: Mapping[str, Held] = field(default_factory=dict)
    gone: bool = False

    def operators(self, case: Case) -> frozenset[str]:
        """The operators of torch that a call of the kernel on a case calls."""
        inputs = build(case.gathered(), self.subject.device)
        return operators_called(lambda: self.subject.kernel.call(**inputs.hand_out(), **case.params))


@contextmanager
def opened(place: Workplace, path: Path, question: Question) -> Iterator[Opened]:
    """The kernel of a file."""
    op = place.project.op(question.op)
    own, notes = held_to(kernel_of_file(path, question.role), question.role, op)
    check_kernel(own, op)
    device = torch.device(place.config.devices[0])
    yield Opened(Subject(own, op, device, load_premises(device), strict=question.strict), notes)
