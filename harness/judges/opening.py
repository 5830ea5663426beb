"""A kernel file opened for judging, and the cases that it is judged on: those of its op that it takes, the cheapest
first. Its code runs in kernel processes alone, never in this one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch

from lastbit.calibrate import load_premises
from lastbit.case import SEED_BITS, Case, parse_case
from lastbit.config import PROFILES, Config
from lastbit.errors import KernelError, UsageError
from lastbit.files import BUILT_IN
from lastbit.inputs import build
from lastbit.isolation.answers import Raised
from lastbit.isolation.elsewhere import Kernels
from lastbit.isolation.isolated import Isolated
from lastbit.isolation.limits import Limits
from lastbit.isolation.process import ForkServer
from lastbit.judges.question import RANDOM, JudgeQuestion
from lastbit.judging.problem import Problem
from lastbit.judging.verdict import judge
from lastbit.of_file import held_to
from lastbit.ops import Contract, Op
from lastbit.reports.bench import Roof
from lastbit.reports.judged import Held
from lastbit.result import BAD, CaseResult, Verdict
from lastbit.run import Run
from lastbit.verify.check import Subject, check_line
from lastbit.verify.declarations import check_kernel
from lastbit.verify.device_memory import SharedDevice, Verify, directly
from lastbit.verify.drawing import designed, draw
from lastbit.verify.item_run import reseeded
from lastbit.verify.plan import Plan
from lastbit.verify.power import Separable, power_of, undecidable_of
from lastbit.verify.processes import environment_for
from lastbit.verify.project import Project, open_project
from lastbit.verify.worker import Tick, Watch, Workplace, one_device, prepare


@dataclass(frozen=True)
class OrderedCase:
    """A case, and the name and cases of the group that it is of."""

    case: Case
    group: str
    alike: Sequence[Case]


@dataclass
class CaseOrder:
    """Makes cases, and keeps what it made: to draw them takes as long as to judge some.

    Attributes:
        small: cases are cut to what the interpreter runs in a moment.
    """

    project: Project
    small: bool
    _known: dict[tuple[object, ...], tuple[OrderedCase, ...]] = field(default_factory=dict)

    def of(self, question: JudgeQuestion, accepts: frozenset[str]) -> tuple[OrderedCase, ...]:
        """List the cases for a kernel that takes `accepts`, by their number of elements.

        Where the seed is random, each case gets one that follows from the number drawn for the question, or for this
        call, unless a line lists its values.

        Raises:
            UsageError: a line is malformed, or no case of the op.
        """
        if question.lines:
            cases = [parse_case(line) for line in question.lines]
            op = self.project.op(question.op)
            for case in cases:
                check_line(op, case, [op.contract(question.contract)])
            return tuple(OrderedCase(case, "lines", ()) for case in cases)
        kind, _, number = question.drawn.seed.partition(":")
        key = question.op, accepts, question.profile, kind
        if key not in self._known:
            self._known[key] = tuple(sorted(self._drawn(question, accepts), key=lambda chosen: chosen.case.numel))
        chosen = self._known[key]
        if kind != RANDOM:
            return chosen
        found = []
        for place, one in enumerate(chosen):  # a seed from which nobody finds that of another case
            digest = hashlib.sha256(f"{number} {place}".encode()).digest()
            seed = int.from_bytes(digest) >> (8 * len(digest) - SEED_BITS)
            found.append(replace(one, case=reseeded(one.case, seed)))
        return tuple(found)

    def _drawn(self, question: JudgeQuestion, accepts: frozenset[str]) -> list[OrderedCase]:
        count = PROFILES[question.profile]
        groups = designed(
            self.project.groups(question.op, accepts, small=self.small), count, whole=count >= PROFILES["ci"]
        )
        seed = 0 if question.seed.startswith(RANDOM) else int(question.seed)
        found = []
        for group in groups:
            drawn = tuple(draw(group, count, seed))
            found += [OrderedCase(case, group.name, drawn) for case in drawn]
        return found


@dataclass(frozen=True)
class Desk(Workplace):
    """The workplace of a judge of files: it loads no kernel, and forks the processes that do.

    Attributes:
        turns: a folder by which judges of one device take turns where its memory runs out; empty for a judge alone.
        separable: what is known of contracts that can be told apart, by files judged before.
    """

    turns: str = ""
    separable: Separable = field(default_factory=Separable)

    @cached_property
    def device(self) -> torch.device:
        return torch.device(one_device(self.config))

    @cached_property
    def verify(self) -> Verify:
        """The function that verifies a case: once more alone, if it ran out of memory that other judges share."""
        if not self.turns or self.device.type == "cpu":
            return directly
        return SharedDevice(Path(self.turns), self.device).verify

    @cached_property
    def kernels(self) -> Kernels:
        """Kernel processes on the device."""
        return Kernels(ForkServer(), self.device.type)

    @cached_property
    def on_cpu(self) -> Kernels:
        """Kernel processes on the CPU, which can read references: a kernel that has failed is explained there."""
        server = self.kernels.server if self.device.type == "cpu" else ForkServer(environment_for("cpu"))
        return Kernels(server, readable=(BUILT_IN, *map(Path, self.config.projects)))

    @cached_property
    def cases(self) -> CaseOrder:
        """The cases of the project, which are kept as long as the process judges."""
        return CaseOrder(self.project, self.config.small)

    @cached_property
    def roof(self) -> Roof:
        """The device's best rates of copies and matrix products, measured once."""
        from lastbit.bench.kernel_speed import roof
        from lastbit.bench.samples import QUICK

        return roof(self, QUICK)

    def run_of(self, results: Sequence[CaseResult]) -> Run:
        """Return the results as a run, with its power unless one of them is bad: what other files have in common."""
        if any(result.verdict in BAD for result in results):
            return Run(tuple(results))
        alike = [replace(result, case=str(replace(parse_case(result.case), seed=0))) for result in results]
        power = power_of(alike, self.project, self.separable)
        return Run(tuple(results), power=power, undecidable=undecidable_of(alike, self.project))

    def evaluate(self, op: Op, contract: Contract, case: Case) -> None:
        """Evaluate a case if it means something: what that imports and compiles is there when a kernel is judged."""
        tensors = build(case.gathered(), self.device).tensors
        with suppress(UsageError):
            _ = Problem(op, contract, tensors, case.params, load_premises(self.device)).trace


def desk_of(place: Workplace) -> Desk:
    """Cast the workplace to that of a judge, which it must be."""
    assert isinstance(place, Desk)
    return place


def open_desk(config: Config, watch: Watch, tick: Tick, turns: str = "") -> Desk:
    """Make this process a judge of files for a configuration with one device; for `turns` see `Desk`."""
    prepare(torch.device(one_device(config)))
    desk = Desk(config, open_project(config), Plan((), (), 0), watch, tick, turns)
    desk.kernels.server.begin()
    return desk


@dataclass(frozen=True)
class OpenedKernel:
    """A kernel that is held to the role that the caller gives it.

    Attributes:
        isolated: performs its calls.
        notes: what its file declares otherwise.
    """

    subject: Subject
    isolated: Isolated
    notes: tuple[str, ...] = ()

    @property
    def confinement(self) -> Mapping[str, Held]:
        """The limits to which the kernel's process is held."""
        measures = self.isolated.pair.guarded.confinement.measures
        return {measure.name: Held(measure.holds, measure.how) for measure in measures}

    def depends_on(self, operator: str, case: Case) -> bool:
        """Return whether the kernel fails a case that it passes, when an operator of torch gives other values.

        Its process calls it as ever, and has no profiler or mode that it could look for. One that raises then depends
        on the operator unless it raises without, too.
        """
        subject, inputs = self.subject, build(case.gathered(), self.subject.device)
        problem = subject.problem(inputs)
        caller = subject.caller(problem)
        try:
            actual = caller.unguarded(inputs, replaced=operator).actual
            return judge(problem, actual, alternatives=False).verdict is Verdict.FAILED
        except (Raised, KernelError):
            try:
                caller.unguarded(inputs)
            except (Raised, KernelError):
                return False
            return True


@contextmanager
def opened(desk: Desk, path: Path, question: JudgeQuestion) -> Iterator[OpenedKernel]:
    """Open the kernel of a file; its processes last as long as the context.

    Raises:
        LastbitError: the file cannot be loaded, or has no kernel that could be meant.
    """
    limits = desk.kernels.limits if question.memory is None else Limits(memory=question.memory)
    kernels = replace(desk.kernels, limits=limits)
    with kernels.of_file(path.resolve(), question.role, question.timeout) as (declared, pair):
        own, notes = held_to(declared, question.role, op := desk.project.op(question.op))
        check_kernel(own, op)
        isolated = Isolated(pair, desk.device)
        premises = load_premises(desk.device)
        yield OpenedKernel(
            Subject(own, op, desk.device, premises, question.strict, performer=isolated), isolated, notes
        )
