"""Cases and kernels to measure: case files of the project, and for each case the first kernel that takes it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lastbit.case import Case, parse_case
from lastbit.errors import UsageError
from lastbit.verify.case_files import read_cases
from lastbit.verify.check import Subject, unsupported
from lastbit.verify.project import Project
from lastbit.verify.worker import Workplace


def case_lines(place: Workplace, file: str) -> list[str]:
    """List the lines that the configuration names, or else those of cases/bench/KIND/`file` of the project's folders.

    KIND is `cpu` or `accelerator`. Ops that the configuration leaves out are left out.
    """
    ops, device = place.config.ops, torch.device(*place.config.devices)
    cases = [parse_case(line) for line in place.config.lines] or list(bench_cases(place.project, device, file))
    return [str(case) for case in cases if not ops or case.op in ops]


def bench_cases(project: Project, device: torch.device, file: str) -> Iterator[Case]:
    """Yield the cases of a file for devices of that kind, of all folders of the project.

    Raises:
        UsageError: a line is malformed, or of an unknown op.
    """
    kind = "cpu" if device.type == "cpu" else "accelerator"
    for folder in project.folders:
        if (path := folder / "cases" / "bench" / kind / file).is_file():
            for case in read_cases(path):
                project.op(case.op)
                yield case


def ops_of(place: Workplace) -> list[str]:
    """List the ops of the plan's kernels, in order."""
    return list(dict.fromkeys(subject.op.name for subject in place.subjects.values()))


def subject_for(place: Workplace, case: Case) -> Subject:
    """Return the first kernel of the plan that takes the case.

    Raises:
        UsageError: none does.
    """
    for subject in place.subjects.values():
        if subject.op.name == case.op and not unsupported(subject.kernel, case):
            return subject
    raise UsageError(f"no kernel takes {case}")


def eager_for(place: Workplace, subject: Subject, case: Case) -> Subject | None:
    """Find another implementation to compare with: the first in another file, of the same contract if possible.

    It need not be a kernel that the configuration chose.
    """
    file = subject.kernel.source.rpartition(":")[0]
    kernels = [k for k in place.project.kernels() if k.op == case.op and not unsupported(k, case)]
    others = [k for k in kernels if k.source.rpartition(":")[0] != file]
    others.sort(key=lambda k: subject.op.contract(k.contract) != subject.contract)
    fitting = (k for k in others if not k.devices or subject.device.type in k.devices)
    return next((Subject(k, subject.op, subject.device, subject.premises) for k in fitting), None)
