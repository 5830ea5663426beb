"""A run on a cluster: its actors at work, and what they leave behind as a `Run`."""

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

from lastbit.cluster.connection import Cluster
from lastbit.cluster.pool import Pool
from lastbit.cluster.team import Campaign, Team
from lastbit.errors import LastbitError
from lastbit.result import CaseResult
from lastbit.run import Run, Spent
from lastbit.verify.assemble import assembled, isolation_of
from lastbit.verify.processes import settings_of

LOG = "cluster.log"
"""The file of a run's folder that says what happened to actors."""

_WAIT = 10.0
"""Seconds that actors may wait for a place before it is said."""

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
        """Whether the plan of every team is known."""
        return all(team.ledger or team.stuck for team in self.teams)

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
    pool: Pool,
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
    teams: Sequence[Team], pool: Pool, plan: Callable[[int], None], clock: Callable[[], float], noticed: Event
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
