"""Questions of `lastbit invariance` about a kernel, and their answers, found in a worker process.

Some are answered by calls in a process of their own, with other environment variables: everything is compiled anew
there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from lastbit.case import Case, parse_case
from lastbit.config import Config
from lastbit.devices import DevicePlan
from lastbit.inputs import build
from lastbit.invariance.properties import properties_of
from lastbit.invariance.property import Anew
from lastbit.kernel import REVISION_MARK
from lastbit.property_result import PropertyResult
from lastbit.relations import Tensors
from lastbit.verify.check import Subject, unsupported
from lastbit.verify.narrowing import groups_of
from lastbit.verify.property_checks import asked_cases, properties_on
from lastbit.verify.worker import Worker, Workplace


def anew_for(config: Config, subject: Subject, case: Case) -> Anew:
    """Make a function that calls a kernel on a case in a new process, which ends with the call.

    `config` is the configuration that the kernel was loaded with. The results are on the device of the kernel.
    """
    name, line, device = subject.kernel.name, str(case), str(subject.device)
    in_every_revision = name.partition(REVISION_MARK)[0]
    own = replace(
        config, folder="", kernels=(in_every_revision,), lines=(line,), device_plan=DevicePlan((device,), ("",))
    )

    def anew(environ: Mapping[str, str]) -> Tensors:
        with Worker(own, environ=environ) as worker:
            results = worker.do(results_of_line, name, line)
        return {result: tensor.to(subject.device) for result, tensor in results.items()}

    return anew


def results_of_line(place: Workplace, name: str, line: str) -> dict[str, torch.Tensor]:
    """Return a kernel's results for a case line, on the host."""
    subject = place.subjects[name]
    with place.watch(line):
        inputs = build(parse_case(line).gathered(), subject.device)
        call = subject.caller(subject.problem(inputs)).unguarded(inputs)
        return {result: call.actual[result].cpu() for result in call.results}


@dataclass(frozen=True)
class Asking:
    """The question whether a kernel has a property on a case."""

    case: str
    property: str


def askings(place: Workplace, kernel: str, *, quick: bool) -> tuple[Asking, ...]:
    """List all questions about a kernel: on the configured case lines, or else on its op's cases for properties.

    Of an op that has none, the most ordinary cases are taken. With `quick`, properties that take long are left out.
    """
    subject, config = place.subjects[kernel], place.config
    known = properties_of(subject.op)
    names = [n for n, one in known.items() if (n in config.properties if config.properties else one.quick or not quick)]
    return tuple(Asking(line, name) for line in _lines(place, kernel) for name in names)


def _lines(place: Workplace, kernel: str) -> list[str]:
    subject, config = place.subjects[kernel], place.config
    if config.lines:
        cases = (case for line in config.lines if (case := parse_case(line)).op == subject.op.name)
        return [str(case) for case in cases if not unsupported(subject.kernel, case)]
    groups = groups_of(place.project, subject.kernel, small=config.small)
    return [str(case) for case in asked_cases(subject, groups, count=config.cases_per_group, seed=config.seed)]


def answer(place: Workplace, kernel: str, asking: Asking, *, thorough: bool) -> PropertyResult:
    """Ask whether a kernel has a property on a case.

    Exceptions of the kernel are passed on.
    """
    subject, case = place.subjects[kernel], parse_case(asking.case)
    anew = anew_for(place.config, subject, case) if thorough else None
    with place.watch(f"{asking.case} (property {asking.property})"):
        return properties_on(subject, case, [asking.property], thorough=thorough, anew=anew)[0]
