"""The actors for one kind of device, and the items that they run.

An actor that cannot start on its GPU twice is kept, without work, so that a cluster gives that GPU to no other one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lastbit.crew.ledger import RUNS_AGAIN, ItemOutcome, Ledger
from lastbit.crew.resources import DeviceKind
from lastbit.errors import LastbitError
from lastbit.files import append_lines
from lastbit.reports.records import dump
from lastbit.result import CaseResult
from lastbit.run import NotRun, Spent
from lastbit.trees import MixedTrees
from lastbit.verify.notes import Ended, Planned

if TYPE_CHECKING:
    from lastbit.crew.campaign import Campaign

# One failure may be of the node or of its load; a second one on the same device is taken to be of the device.
TRIES = 2
"""Starts of actors that fail on a device before the device is taken out."""

# Importing torch may take minutes from a file system that many nodes read at once.
START = 900.0
"""Seconds that an actor may take to import what it needs and to make its plan, once it has a process."""


@dataclass(frozen=True)
class Heard:
    """A message from an actor, or an event that befell it.

    `placed`: where it is. `ready`: what `Actor.start` returns. `failed`: why that raised. `events`: a batch of those of
    `lastbit.verify.result_recorder`. `gone`: why there is no such process any more, where it did not fail to start.
    """

    actor: Hashable
    kind: str
    content: Any
    node_died: bool = False


@dataclass
class Member:
    """An actor that is starting or works."""

    where: Mapping[str, Any] = field(default_factory=dict)
    began: float | None = None
    ready: bool = False
    idle: bool = False

    def __str__(self) -> str:
        if not self.where:
            return "an actor without a process"
        accelerator = f", GPU {self.where['accelerator']}" if self.where.get("accelerator") else ""
        return f"process {self.where['pid']} of {_node(self.where)} ({self.where['host']}{accelerator})"

    @property
    def device(self) -> tuple[str, str]:
        """The node, and the accelerator there."""
        return self.where.get("node", ""), self.where.get("accelerator", "")


class Team:
    """Starts actors, hands them items, and replaces those that are lost.

    Attributes:
        plan: what the first actor told of itself when it was ready; empty before.
        items: those of the plan.
        told: what each actor told, by node.
        stages, taken, answers: what actors found besides results; see `lastbit.verify.result_recorder`.
    """

    def __init__(self, kind: DeviceKind, campaign: Campaign) -> None:
        self.kind, self._all = kind, campaign
        self.plan: Mapping[str, Any] = {}
        self.told: dict[str, Mapping[str, Any]] = {}
        self.items: tuple[Planned, ...] = ()
        self.stages: list[str] = []
        self.taken: list[Any] = []
        self.answers: list[Any] = []
        self.ledger: Ledger | None = None
        self._selected: Collection[str] | None = None
        self._members: dict[Hashable, Member] = {}
        self._failures: Counter[tuple[str, str]] = Counter()
        self._out: dict[str, str] = {}
        self._held: list[Hashable] = []  # actors that keep others off a device
        self._spent: dict[Hashable, Spent] = {}
        self._traces = 0
        self._recorded = 0

    def open(self) -> None:
        """Start the actors."""
        for _ in range(self.kind.actors):
            self._start()

    def _start(self) -> None:
        self._members[self._all.pool.start(self.kind)] = Member()

    @property
    def done(self) -> bool:
        """Return whether all items have run, or nobody is left who could run them."""
        return (self.ledger is not None and self.ledger.done) or not self._members

    @property
    def there(self) -> tuple[int, int]:
        """The number of actors that have a process, and the number of actors."""
        return sum(bool(member.where) for member in self._members.values()), len(self._members)

    def has(self, actor: Hashable) -> bool:
        return actor in self._members

    def hear(self, heard: Heard) -> None:
        """Take note of what came from an actor of the team.

        Raises:
            LastbitError: there is no plan, or the run means nothing, and the message says why.
        """
        actor = heard.actor
        match heard.kind:
            case "placed":
                self._members[actor].where = heard.content
                self._members[actor].began = self._all.clock()
                self._all.log(f"{self.kind.device}: {self._members[actor]} is there")
            case "ready":
                self._ready(actor, heard.content)
            case "failed":
                self._not_started(actor, heard.content, alive=True)
            case "events":
                self._events(actor, heard.content)
            case "gone" if self.ledger and self._members[actor].ready:
                self._lost(actor, heard.content, by_kernel=not heard.node_died)
            case "gone":
                self._not_started(actor, heard.content, alive=False)

    def _ready(self, actor: Hashable, told: Mapping[str, Any]) -> None:
        member = self._members[actor]
        if "refused" in told:
            if not self.plan:
                _refuse(told["refused"])
            return self._out_of(actor, f"it cannot make the plan: {told['refused']['reason']}")
        if not self.plan:
            self.plan, self.items = told, tuple(Planned(**item) for item in told["items"])
            if self._all.machines.address:
                self.begin(None)
        elif told["items"] != self.plan["items"]:
            return self._out_of(actor, "it makes another plan than the first one: its versions or files are others")
        self.told[member.where["node"]] = told
        member.ready = member.idle = True
        for whose, text in told.get("printed", ()):
            self._print(whose, text)
        self._all.log(f"{self.kind.device}: {member} is ready")
        return None

    def begin(self, selected: Collection[str] | None) -> None:
        """Let the items with these ids run, or all of them."""
        if not self.plan:
            return
        everything, self._selected = self._all, selected
        known = everything.kept.known(self.plan["depends"], self.items, selected)
        self.ledger = Ledger(
            self.items,
            self.kind.actors,
            everything.config.limit,
            keep=self._kept,
            tell=lambda result: everything.tell(result),
            patience=everything.patience,
            selected=selected,
            known=known,
        )
        self._recorded = len(known)  # results that are kept already are written down with the run alone
        for place, outcome in known.items():
            for result in outcome.results:
                everything.tell(result)
            everything.over(self.items[place], outcome)

    def _kept(self, trace: str) -> str:
        """Write down the lines that were under way in a case that took too long."""
        self._traces += 1
        path = self._file(f"-{self._traces}.trace")
        path.write_text(trace)
        return str(path)

    def _events(self, actor: Hashable, events: list[list[Any]]) -> None:
        assert self.ledger is not None
        for event in events:
            match event:
                case ["time", seconds]:
                    self._spent[actor] = Spent(seconds, processes=1)
                case ["stages", text]:
                    self.stages.append(text)
                case ["taken", *taken]:
                    self.taken.append(taken)
                case ["reads", item, reads, beyond]:
                    self._all.kept.hear(item, reads, beyond)
                case ["answers", new]:
                    self.answers += new
                case ["printed", whose, text]:
                    self._print(whose, text)
                case ["refused", why]:
                    _refuse(why)
                case _ if self.ledger.hear(actor, event, self._all.clock()):
                    self._members[actor].idle = True
        if self.ledger.news:
            self.ledger.news = False
            for other, attempt in self.ledger.attempts.items():
                self._all.pool.warn(other, sorted(self.ledger.failed(attempt.place)))
        self._record()

    def _print(self, whose: str, text: str) -> None:
        append_lines(self._file(".log"), [f"printed in a process of {whose}:\n{text}"])

    def _record(self) -> None:
        """Tell which items are done since, and write down their results, for whoever finds a run that was killed."""
        assert self.ledger is not None
        for place, outcome in islice(self.ledger.settled.items(), self._recorded, None):
            append_lines(self._file("-items.jsonl"), map(dump, outcome.results))
            self._recorded += 1
            self._all.over(self.items[place], outcome)

    def _file(self, suffix: str) -> Path:
        return Path(self._all.config.folder, f"{self.kind.device.replace(':', '')}{suffix}")

    def _lost(self, actor: Hashable, reason: str, *, by_kernel: bool) -> None:
        assert self.ledger is not None
        member = self._members.pop(actor)
        self._all.pool.kill(actor)
        becomes = self.ledger.lose(actor, self._all.clock(), by_kernel=by_kernel)
        self._all.begun_anew += becomes == RUNS_AGAIN
        self._all.log(f"{self.kind.device}: {member} was lost: {reason}{f'; its item: {becomes}' if becomes else ''}")
        self._record()
        if not self.ledger.done:
            self._start()

    def _not_started(self, actor: Hashable, reason: str, *, alive: bool) -> None:
        """Start another actor, unless the device has failed before: then an actor that lives keeps others off it."""
        member = self._members[actor]
        self._failures[member.device] += 1
        self._all.log(f"{self.kind.device}: {member} did not start: {reason}")
        if self._failures[member.device] < TRIES:
            del self._members[actor]
            self._all.pool.kill(actor)
            self._start()
        else:
            self._out_of(actor, reason, alive=alive)

    def _out_of(self, actor: Hashable, reason: str, *, alive: bool = True) -> None:
        member = self._members.pop(actor)
        if alive and self.kind.type != "cpu":
            self._held.append(actor)
        else:
            self._all.pool.kill(actor)
        where = f"{_node(member.where)} ({member.where['host']})" if member.where else "a node"
        what = f"GPU {member.where['accelerator']} of {where}" if member.where.get("accelerator") else where
        self._out.setdefault(f"{what}, for {self.kind.device}", reason)
        self._all.log(f"{self.kind.device}: {what} is taken out: {reason}")

    def watch(self) -> None:
        """Hand items to those who are without work, and end those who have said nothing for too long."""
        now = self._all.clock()
        for actor, member in list(self._members.items()):
            if not member.ready and member.began is not None and now - member.began > START:
                self._not_started(actor, f"nothing was heard of it for {START:g} s", alive=False)
        if self.ledger is None:
            return
        for actor in self.ledger.overdue(now):
            self._lost(actor, "it said nothing for too long", by_kernel=True)
        for actor, member in self._members.items():
            if member.idle and (place := self.ledger.next(actor, now)) is not None:
                member.idle = False
                self._all.pool.run(actor, place, sorted(self.ledger.failed(place)))

    def close(self) -> None:
        """End the actors, whose cores others may wait for."""
        for actor in [*self._members, *self._held]:
            self._all.pool.kill(actor)
        self._members, self._held = {}, []

    def ended(self, log: Path, stop: str) -> tuple[Ended, list[CaseResult]]:
        """Sum up the team's work when its actors end, and return its results; `stop` says what stopped them."""
        ledger = self.ledger
        if ledger is None:
            return Ended(self.kind.device, log, self.items, tuple(self._taken_out()), stop=stop or self.stuck), []
        outcomes = ledger.outcomes()
        stop = stop or ("" if ledger.done else f"every actor for {self.kind.device} was lost")
        return Ended(
            device_type=self.kind.device,
            log=log,
            items=ledger.items,
            not_run=(*(NotRun(**note) for note in self.plan["not_run"]), *self._taken_out()),
            selected=None if self._selected is None else frozenset(self._selected),
            stop=stop,
            under_way=tuple(o.died for o in outcomes if o.died),
            rest=ledger.rest(),
            given_up=ledger.given_up(),
            isolated=str(self.plan.get("isolated", "")),
        ), [result for outcome in outcomes for result in outcome.results]

    def _taken_out(self) -> Iterator[NotRun]:
        return (NotRun(what, f"taken out: {reason}") for what, reason in self._out.items())

    @property
    def outcomes(self) -> dict[str, ItemOutcome]:
        """Map each item that ran from beginning to end to its outcome."""
        settled = self.ledger.settled if self.ledger is not None else {}
        return {
            self.items[place].id: one for place, one in settled.items() if not (one.left or one.died or one.given_up)
        }

    @property
    def stuck(self) -> str:
        """The reason why nobody is left to make a plan; empty if there is a plan, or may be."""
        if self.plan or self._members or not self._out:
            return ""
        see = "" if self._all.machines.address else f"; see {self._file('.log')}"
        return f"no actor for {self.kind.device} could be started: {'; '.join(self._out.values())}{see}"

    @property
    def spent(self) -> Spent:
        """The time of the actors by its parts."""
        return sum(self._spent.values(), Spent())


def _node(where: Mapping[str, Any]) -> str:
    return f"node {where['address']}" if where["node"] else "this machine"


def _refuse(why: Mapping[str, Any]) -> NoReturn:
    raise (MixedTrees if why["mixed"] else LastbitError)(why["reason"])
