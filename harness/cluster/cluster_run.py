"""A run on a cluster: what of a connected one it uses, its actors at work, and what they leave behind as a `Run`."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, current_thread, main_thread
from types import FrameType

from lastbit.cluster.ray_calls import LOCAL, RayPool, connected
from lastbit.cluster.resources import ANY, ClusterNode, DeviceKind, chosen, device_plan, kinds_of, side_by_side
from lastbit.cluster.team import Campaign, Team
from lastbit.cluster.travel import packed
from lastbit.config import Config
from lastbit.devices import DevicePlan
from lastbit.errors import LastbitError
from lastbit.result import CaseResult
from lastbit.run import NotRun, Run, Spent
from lastbit.verify.assemble import assembled, isolation_of
from lastbit.verify.processes import settings_of, workers_for


@dataclass(frozen=True)
class Cluster:
    """A cluster that is connected, and its kinds of devices that a run uses.

    Attributes:
        config: with the devices of the cluster.
        lacking: what was asked for by --device any, and is not there.
    """

    address: str
    config: Config
    kinds: tuple[DeviceKind, ...]
    nodes: tuple[ClusterNode, ...]
    lacking: tuple[NotRun, ...]


@contextmanager
def on_cluster(config: Config, address: str, device: str, workers: int | None) -> Iterator[Cluster]:
    """Connect to the cluster at an address, or start one here, and plan a configuration's run on the given devices.

    Raises:
        UsageError: the cluster lacks the device, or Ray is missing.
        LastbitError: the cluster cannot be used.
    """
    with packed(config) as folder, connected(address, workers, folder) as nodes:
        most = workers_for("cpu", replace(config, device_plan=DevicePlan())) if address == LOCAL else None
        has = kinds_of(nodes, workers, most)
        kinds = side_by_side(chosen(device, has), sum(node.cpus for node in nodes))
        own = replace(config, device_plan=device_plan(device, kinds))
        yield Cluster(address, own, tuple(kinds), tuple(nodes), tuple(_lacking(device, has, nodes)))


def _lacking(device: str, has: Sequence[DeviceKind], nodes: Sequence[ClusterNode]) -> Iterator[NotRun]:
    """Yield the devices that a cluster lacks, or has without lastbit being able to ask for them."""
    if all(kind.type == "cpu" for kind in has):
        yield NotRun("every kernel on an accelerator", "the cluster has none; the CPU runs Triton interpreted")
    if device == ANY and all(kind.type != "cpu" for kind in has):
        yield NotRun("every kernel on the CPU", "the cluster has no core for it")
    for other in dict.fromkeys(name for node in nodes for name in node.others):
        yield NotRun(f"every kernel on {other}", "lastbit asks a cluster for what it calls CPU and GPU")


LOG = "cluster.log"
"""The file of a run's folder that says what happened to actors."""

# Arbitrary: sooner, it would be said of runs that are about to begin; later, a user waits without a word.
_WAIT = 10.0
"""Seconds that actors may wait for a place before it is said."""

# Arbitrary: shorter asks Ray more often for nothing, longer delays what is printed by that much.
_PAUSE = 0.2  # seconds between two looks at actors that say nothing


@dataclass(frozen=True)
class TeamsWork:
    """The results of a run's teams, to be put together when their actors have ended."""

    cluster: Cluster
    teams: tuple[Team, ...]
    log: Path
    interrupted: bool

    @property
    def planned(self) -> bool:
        """Return whether the plan of every team is known."""
        return all(team.ledger or team.stuck for team in self.teams)

    @property
    def stages(self) -> list[str]:
        """Return what was found of the stages of kernels that declare none, as text."""
        return [text for team in self.teams for text in team.stages]

    @property
    def run(self) -> Run:
        """The run, of which there is nothing if it was interrupted before it was planned."""
        config, teams = self.cluster.config, self.teams
        left = [team.ended(self.log, self.interrupted) for team in teams]
        ended = [one for one, _ in left]
        ended[-1] = replace(ended[-1], not_run=(*ended[-1].not_run, *self.cluster.lacking))
        return assembled(
            config,
            ended,
            [result for _, results in left for result in results],
            environment=_environment(self.cluster, teams) | isolation_of(ended),
            spent=sum((team.spent for team in teams), Spent()),
            interrupted=self.interrupted,
        )


def work_on(
    cluster: Cluster,
    pool: RayPool,
    *,
    parse: Callable[[bytes, str], CaseResult],
    tell: Callable[[CaseResult], None],
    plan: Callable[[int], None],
    clock: Callable[[], float] = time.monotonic,
) -> TeamsWork:
    """Let actors run all items of the configuration; after an interruption from the keyboard, what was done until then.

    `plan` is told how many cases there will be, `tell` each result that is new.

    Raises:
        LastbitError: there is no plan, and the message says why.
    """
    config = cluster.config
    config.save()
    log, began = Path(config.folder, LOG), clock()
    with log.open("w") as file:

        def say(line: str) -> None:
            print(f"{clock() - began:.1f} s: {line}", file=file, flush=True)

        teams = [Team(kind, Campaign(config, pool, clock, parse, tell, say)) for kind in cluster.kinds]
        try:
            with _interruption() as noticed:
                _work(teams, pool, plan, clock, noticed)
        except KeyboardInterrupt:
            return TeamsWork(cluster, tuple(teams), log, interrupted=True)
    return TeamsWork(cluster, tuple(teams), log, interrupted=False)


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


def _work(
    teams: Sequence[Team], pool: RayPool, plan: Callable[[int], None], clock: Callable[[], float], noticed: Event
) -> None:
    """Let the teams run all items.

    Raises:
        KeyboardInterrupt: also one that was `noticed` and then lost.
    """
    latest = clock() + _WAIT
    for team in teams:
        team.open()
    planned = False
    while not all(team.done for team in teams):
        if noticed.is_set():
            raise KeyboardInterrupt
        for heard in pool.hear(_PAUSE):
            for team in teams:
                if team.has(heard.actor):
                    team.hear(heard)
        for team in teams:
            team.close() if team.done else team.watch()
        if all(team.stuck for team in teams):
            raise LastbitError("; ".join(team.stuck for team in teams))
        if not planned and (planned := all(team.ledger or team.stuck for team in teams)):
            plan(sum(item.cases for team in teams if team.ledger for item in team.ledger.items))
        if clock() >= latest:
            _say_who_waits(teams)
            latest = float("inf")


def _say_who_waits(teams: Sequence[Team]) -> None:
    """Say how many actors have no place, if there are such."""
    there, asked = (sum(numbers) for numbers in zip(*(team.there for team in teams), strict=True))
    if there < asked:
        print(f"waiting for the cluster: {asked} actors asked for, {there} there", file=sys.stderr, flush=True)


def _environment(cluster: Cluster, teams: Sequence[Team]) -> dict[str, str]:
    """Describe the environment of results: versions on the first actor, and where others differ from it."""
    told = [(team.kind, node, one) for team in teams for node, one in team.told.items()]
    first: Mapping[str, str] = told[0][2]["versions"] if told else {}
    names = dict.fromkeys(f"{kind.device}: {one['device']}" for kind, _, one in told if one["device"])
    premises = dict.fromkeys(f"{kind.device}: {one['premises']}" for kind, _, one in told)
    addresses = {node.id: node.address for node in cluster.nodes}
    differing = [
        f"node {addresses.get(node, node)} has {name} {version}, not {first[name]}"
        for _, node, one in told
        for name, version in one["versions"].items()
        if version != first[name]
    ]
    return {
        **{name: version for name, version in first.items() if name != "lastbit_code"},
        **settings_of(cluster.config, accelerators=", ".join(names), premises="; ".join(premises)),
        "cluster": _described(cluster),
        **({"differing_nodes": "; ".join(dict.fromkeys(differing))} if differing else {}),
    }


def _described(cluster: Cluster) -> str:
    """Describe a cluster: `local: 1 node; cpu (2 cores)`."""
    count = len(cluster.nodes)
    return f"{cluster.address}: {count} node{'s' * (count != 1)}; {', '.join(map(str, cluster.kinds))}"
