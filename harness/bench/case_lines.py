"""Cases to measure: those of the case files of the project."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lastbit.case import Case, parse_case
from lastbit.verify.case_files import read_cases
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
