"""A run: its devices, on this machine or of a cluster, its actors at work, and what they leave behind as a `Run`."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, current_thread, main_thread
from types import FrameType
from typing import TYPE_CHECKING

from lastbit.config import Config
from lastbit.crew.kept_verdicts import KeptVerdicts
from lastbit.crew.ledger import ELSEWHERE, HERE, ItemOutcome
from lastbit.crew.resources import ANY, ClusterNode, DeviceKind, chosen, device_plan, kinds_of, side_by_side
from lastbit.crew.team import Team
from lastbit.devices import DevicePlan
from lastbit.errors import LastbitError
from lastbit.result import CaseResult
from lastbit.run import NotRun, Run, Spent
from lastbit.verify.notes import INTERRUPTED, NO_ACCELERATOR, Planned
from lastbit.verify.processes import environment_of, settings_of, workers_for

if TYPE_CHECKING:
    from lastbit.crew.local_pool import LocalPool
    from lastbit.crew.ray_calls import RayPool


@dataclass(frozen=True)
class Machines:
    """This machine, or a cluster that is connected, and its kinds of devices that a run uses.

    Attributes:
        address: of a cluster; empty for this machine.
        config: with the devices of the cluster.
        lacking: what was asked for by --device any, and is not there.
    """

    address: str
    config: Config
    kinds: tuple[DeviceKind, ...]
    nodes: tuple[ClusterNode, ...] = ()
    lacking: tuple[NotRun, ...] = ()


def here(config: Config, workers: int | None) -> Machines:
    """Plan a configuration's run on this machine: a kind for each type of device, with so many workers."""
    counts = {kind: sum(device.startswith(kind) for device in config.devices) for kind in config.device_plan.types}
    kinds = (DeviceKind(kind, "", count, workers or workers_for(kind, config)) for kind, count in counts.items())
    return Machines("", config, tuple(kinds))


@contextmanager
def on_cluster(config: Config, address: str, device: str, workers: int | None) -> Iterator[Machines]:
    """Connect to the cluster at an address, or start one here, and plan a configuration's run on the given devices.

    Raises:
        UsageError: the cluster lacks the device, or Ray is missing.
        LastbitError: the cluster cannot be used.
    """
    from lastbit.crew.ray_calls import LOCAL, connected
    from lastbit.crew.travel import packed

    with packed(config) as folder, connected(address, workers, folder) as nodes:
        most = workers_for("cpu", replace(config, device_plan=DevicePlan())) if address == LOCAL else None
        has = kinds_of(nodes, workers, most)
        kinds = side_by_side(chosen(device, has), sum(node.cpus for node in nodes))
        own = replace(config, device_plan=device_plan(device, kinds))
        yield Machines(address, own, tuple(kinds), tuple(nodes), tuple(_lacking(device, has, nodes)))


def _lacking(device: str, has: Sequence[DeviceKind], nodes: Sequence[ClusterNode]) -> Iterator[NotRun]:
    """Yield the devices that a cluster lacks, or has without lastbit being able to ask for them."""
    if all(kind.type == "cpu" for kind in has):
        yield NotRun("every kernel on an accelerator", "the cluster has none; the CPU runs Triton interpreted")
    if device == ANY and all(kind.type != "cpu" for kind in has):
        yield NotRun("every kernel on the CPU", "the cluster has no core for it")
    for other in dict.fromkeys(name for node in nodes for name in node.others):
        yield NotRun(f"every kernel on {other}", "lastbit asks a cluster for what it calls CPU and GPU")


# Arbitrary: sooner, it would be said of runs that are about to begin; later, a user waits without a word.
_WAIT = 10.0
"""Seconds that actors may wait for a place before it is said."""

# Arbitrary: shorter asks Ray more often for nothing, longer delays what is printed by that much.
_PAUSE = 0.2  # seconds between two looks at actors that say nothing


class Campaign:
    """The actors of a run at work, from `open` to the `run` that they leave behind.

    Attributes:
        clock: seconds, of which only differences count.
        plan: is told how many cases there will be, when that is known.
        tell: is told each result that is new.
        over: is told each item that is done, and its outcome.
        stop: why it ended before all items had run; empty if it did not.
        begun_anew: how often an item began anew, since its actor was lost and no case was why.
        kept: the verdicts of earlier runs that count, of kernels that need not run.
    """

    def __init__(
        self,
        machines: Machines,
        pool: RayPool | LocalPool,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.machines, self.config, self.pool = machines, machines.config, pool
        self.clock, self.patience = clock, ELSEWHERE if machines.address else HERE
        self.plan: Callable[[int], None] = lambda cases: None
        self.tell: Callable[[CaseResult], None] = lambda result: None
        self.over: Callable[[Planned, ItemOutcome], None] = lambda planned, outcome: None
        self.stop, self.begun_anew, self._counted = "", 0, False
        self.kept = KeptVerdicts(self.config)
        self.teams = [Team(kind, self) for kind in machines.kinds]

    def open(self) -> None:
        """Start the actors."""
        self.config.save()
        Path(self.config.folder, ".gitignore").write_text("*\n")  # records are no sources
        self._file = Path(self.config.folder, f"{'cluster' if self.machines.address else 'workers'}.log")
        self._file.write_text("")
        self._began = self.clock()
        for team in self.teams:
            team.open()

    def log(self, line: str) -> None:
        """Write down what happens to actors."""
        with suppress(OSError), self._file.open("a") as file:
            print(f"{self.clock() - self._began:.1f} s: {line}", file=file)

    @property
    def planned(self) -> bool:
        """Return whether the plan of every team is known."""
        return all(team.plan or team.stuck for team in self.teams)

    @property
    def items(self) -> list[Planned]:
        """The items of all plans."""
        return [item for team in self.teams for item in team.items]

    def begin(self, selected: Collection[str]) -> None:
        """Let the items with these ids run, which on this machine nobody knows before all plans are there."""
        for team in self.teams:
            team.begin(selected)

    def work(self, until: Callable[[], bool] | None = None) -> None:
        """Let the actors work until all items have run, or so far.

        Raises:
            LastbitError: there is no plan, or the run means nothing, and the message says why.
            KeyboardInterrupt: also one that a call of Ray has lost.
        """
        latest = self.clock() + _WAIT
        with _interruption() as noticed:
            while not (until() if until else all(team.done for team in self.teams)):
                if noticed.is_set():
                    raise KeyboardInterrupt
                for heard in self.pool.hear(_PAUSE):
                    for team in self.teams:
                        if team.has(heard.actor):
                            team.hear(heard)
                for team in self.teams:
                    team.close() if team.done else team.watch()
                if all(team.stuck for team in self.teams):
                    raise LastbitError("; ".join(team.stuck for team in self.teams))
                if not self._counted and self.planned:
                    self._counted = True
                    self.plan(sum(item.cases for item in self.items))
                if self.machines.address and self.clock() >= latest:
                    there, asked = (sum(each) for each in zip(*(team.there for team in self.teams), strict=True))
                    if there < asked:
                        said = f"waiting for the cluster: {asked} actors asked for, {there} there"
                        print(said, file=sys.stderr, flush=True)
                    latest = float("inf")

    @property
    def stages(self) -> list[str]:
        """Return what was found of the stages of kernels that declare none, as text."""
        kept = [text for verdict in self.kept.verdicts.values() for text in verdict.stages]
        return kept + [text for team in self.teams for text in team.stages]

    @property
    def run(self) -> Run:
        """The run, of which there is nothing if it was interrupted before it was planned."""
        from lastbit.verify.assemble import assembled, isolation_of

        if self.begun_anew:
            lost = f"{self.begun_anew} time{'s' * (self.begun_anew > 1)}"
            print(
                f"a process was lost {lost} where no case was why, and its cases ran again: {self._file}",
                file=sys.stderr,
            )
        left = [team.ended(self._file, self.stop) for team in self.teams]
        ended = [one for one, _ in left]
        ended[-1] = replace(ended[-1], not_run=(*ended[-1].not_run, *self._lacking()))
        environment = _environment(self.machines, self.teams) if self.machines.address else environment_of(self.config)
        kept = self.kept.verdicts
        taken = [(kernel, found) for team in self.teams for kernel, found in team.taken]
        run = assembled(
            self.config,
            ended,
            [result for _, results in left for result in results],
            environment=environment | isolation_of(ended),
            spent=sum((team.spent for team in self.teams), Spent()),
            interrupted=self.stop == INTERRUPTED,
            known={tuple(question): answer for team in self.teams for question, answer in team.answers},
            taken=[*((kernel, verdict.taken) for (kernel, _), verdict in kept.items()), *taken],
            before={subject: (verdict.power, verdict.undecidable) for subject, verdict in kept.items()},
        )
        outcomes = {item: outcome for team in self.teams for item, outcome in team.outcomes.items()}
        return self.kept.over(run, outcomes, taken, self.stages)

    def _lacking(self) -> Iterator[NotRun]:
        import torch

        yield from self.machines.lacking
        if not (self.machines.address or torch.accelerator.is_available()):
            yield NotRun("every kernel on an accelerator", NO_ACCELERATOR)


@contextmanager
def _interruption() -> Iterator[Event]:
    """Yield an event that is set by an interruption from the keyboard, which a call of Ray might swallow."""
    noticed, handler = Event(), signal.getsignal(signal.SIGINT)

    def notice(number: int, frame: FrameType | None) -> None:
        noticed.set()
        raise KeyboardInterrupt

    own = current_thread() is main_thread() and handler is signal.default_int_handler
    if own:
        signal.signal(signal.SIGINT, notice)
    try:
        yield noticed
    finally:
        if own:
            signal.signal(signal.SIGINT, handler)


def _environment(machines: Machines, teams: Sequence[Team]) -> dict[str, str]:
    """Describe the environment of results: versions on the first actor, and where others differ from it."""
    told = [(team.kind, node, one) for team in teams for node, one in team.told.items()]
    first: Mapping[str, str] = told[0][2]["versions"] if told else {}
    names = dict.fromkeys(f"{kind.device}: {one['device']}" for kind, _, one in told if one["device"])
    premises = dict.fromkeys(f"{kind.device}: {one['premises']}" for kind, _, one in told)
    addresses = {node.id: node.address for node in machines.nodes}
    differing = [
        f"node {addresses.get(node, node)} has {name} {version}, not {first[name]}"
        for _, node, one in told
        for name, version in one["versions"].items()
        if version != first[name]
    ]
    count = len(machines.nodes)
    return {
        **{name: version for name, version in first.items() if name != "lastbit_code"},
        **settings_of(machines.config, accelerators=", ".join(names), premises="; ".join(premises)),
        "cluster": f"{machines.address}: {count} node{'s' * (count != 1)}; {', '.join(map(str, machines.kinds))}",
        **({"differing_nodes": "; ".join(dict.fromkeys(differing))} if differing else {}),
    }
