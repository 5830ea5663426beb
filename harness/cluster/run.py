"""A run on a cluster: its actors at work, and what they leave behind as a `Run`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from harness.cluster.connection import Cluster
from harness.cluster.pool import Pool
from harness.cluster.team import Campaign, Team
from harness.result import CaseResult
from harness.run import Run, Spent
from harness.verify.assemble import Ended, assembled
from harness.verify.run import settings_of

LOG = "cluster.log"
"""The file of a run's folder that says what happened to actors."""

_PAUSE = 0.2  # seconds between two looks at actors that say nothing


def run_on(
    cluster: Cluster,
    pool: Pool,
    *,
    parse: Callable[[bytes, str], CaseResult],
    tell: Callable[[CaseResult], None],
    plan: Callable[[int], None],
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Run | None, bool]:
    """The run, and whether it was interrupted from the keyboard; None if that was before there was a plan.

    `plan` is told how many cases there will be, `tell` each result that is new.

    Raises:
        LastbitError: there is no plan, and the message says why.
    """
    config = cluster.config
    config.save()
    log, began = Path(config.folder, LOG), clock()
    with log.open("w") as file:
        campaign = Campaign(config, pool, clock, parse, tell, lambda line: print(f"{clock() - began:.1f} s: {line}", file=file, flush=True))
        teams = [Team(kind, campaign) for kind in cluster.kinds]
        interrupted = False
        try:
            _work(teams, pool, plan)
        except KeyboardInterrupt:
            interrupted = True
    if not all(team.ledger for team in teams) and interrupted:
        return None, True
    ended, results = _left(teams, log, interrupted)
    ended[-1] = replace(ended[-1], not_run=(*ended[-1].not_run, *cluster.lacking))
    spent = sum((team.spent for team in teams), Spent())
    environment = _environment(cluster, teams)
    return assembled(config, ended, results, environment=environment, spent=spent, interrupted=interrupted), interrupted


def _work(teams: Sequence[Team], pool: Pool, plan: Callable[[int], None]) -> None:
    """Let the teams run all items."""
    for team in teams:
        team.open()
    planned = False
    while not all(team.done for team in teams):
        for heard in pool.hear(_PAUSE):
            for team in teams:
                if team.has(heard.actor):
                    team.hear(heard)
        for team in teams:
            team.watch()
        if not planned and (planned := all(team.ledger for team in teams)):
            plan(sum(item.cases for team in teams if team.ledger for item in team.ledger.items))


def _left(teams: Sequence[Team], log: Path, interrupted: bool) -> tuple[list[Ended], list[CaseResult]]:
    """What the teams leave behind, and their results."""
    found = [team.ended(log, interrupted) for team in teams]
    return [ended for ended, _ in found], [result for _, results in found for result in results]


def _environment(cluster: Cluster, teams: Sequence[Team]) -> dict[str, str]:
    """What results depend on: versions as the first actor has them, and where others differ from it."""
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
    """`local: 1 node; cpu (2 cores)`."""
    count = len(cluster.nodes)
    return f"{cluster.address}: {count} node{'s' * (count != 1)}; {', '.join(map(str, cluster.kinds))}"
