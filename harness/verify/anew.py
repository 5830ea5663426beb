"""A call of a kernel in a process of its own, with other environment variables: everything is compiled anew there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from lastbit.case import Case, parse_case
from lastbit.config import Config
from lastbit.devices import DevicePlan
from lastbit.inputs import build
from lastbit.invariance.basis import Anew
from lastbit.kernel import REVISION_MARK
from lastbit.relations import Tensors
from lastbit.verify.calls import Caller
from lastbit.verify.check import Subject
from lastbit.verify.inprocess import Workplace
from lastbit.verify.worker import Worker


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
        problem = subject.problem(inputs)
        required, optional = tuple(problem.required), tuple(problem.may_return)
        call = Caller(subject.kernel, subject.device, required, optional).unguarded(inputs)
        return {result: call.actual[result].cpu() for result in call.results}
