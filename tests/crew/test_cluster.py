"""Campaigns on a cluster, with a pool in place of Ray: whatever happens to actors, results are those of whole runs."""

from __future__ import annotations

import signal
from collections import Counter, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lastbit.config import Config
from lastbit.crew.campaign import Campaign, Machines
from lastbit.crew.ledger import GRACE, MOST_LOST
from lastbit.crew.resources import DeviceKind
from lastbit.crew.team import Heard
from lastbit.devices import DevicePlan
from lastbit.errors import LastbitError
from lastbit.reports.records import dump, parse
from lastbit.result import CaseResult, Verdict
from lastbit.trees import MixedTrees
from lastbit.verify.notes import INTERRUPTED, Planned

CONTRACT = "native_multiply+rounded_sum"
CPU, GPU = DeviceKind("cpu", "", 4, 3), DeviceKind("cuda:0", "H200", 2, 2)
LIMIT = 100.0


def item(name: str, cases: int = 3, device: str = "cpu", kernel: str = "") -> Planned:
    return Planned(name, kernel or name, "rms_norm", CONTRACT, device, "g" if not kernel else name, "k.py:1", cases)


def line(planned: Planned, number: int) -> str:
    return f"rms_norm x=bf16[4,64] weight=bf16[64] eps=1e-06 seed={number}"


def result(planned: Planned, number: int, verdict: Verdict = Verdict.PASSED) -> CaseResult:
    names = {"kernel": planned.kernel, "device": planned.device, "group": planned.group}
    return CaseResult(verdict, case=line(planned, number), op="rms_norm", contract=CONTRACT, dtypes="bf16", **names)


@dataclass
class Does:
    """What an item does in each run: `fails`, `dies`, `hangs` or poisons its device (`loses`) in its last case."""

    planned: Planned
    ends: str = ""
    says: str = ""  # what its kernel prints in each case

    def events(self, failed: Sequence[tuple[str, str]]) -> Iterator[list[list[Any]] | str]:
        if (self.planned.kernel, self.planned.device) in failed:
            yield [["left", self.planned.cases], ["time", {}], ["done"]]
            return
        for number in range(self.planned.cases):
            last = number == self.planned.cases - 1
            yield [["begins", self.note(number)]]
            if last and self.ends in ("dies", "hangs"):
                yield self.ends
                return
            bad = last and self.ends in ("fails", "loses")
            made = result(self.planned, number, Verdict.ERRORED if bad else Verdict.PASSED)
            yield [["result", dump(made)]]
            if self.says:
                yield [["printed", "k.py", self.says]]
            if last and self.ends == "loses":
                yield [["lost"]]
                yield "dies"
                return
        yield [["time", {"kernel calls": 1.0}], ["done"]]

    def note(self, number: int) -> dict[str, Any]:
        of = self.planned
        names = {"kernel": of.kernel, "device": of.device, "group": of.group, "contract": CONTRACT, "source": ""}
        return {**names, "case": line(of, number), "limit": LIMIT, "counted": True}

    @property
    def verdicts(self) -> list[Verdict]:
        """Those of a run that nothing disturbs."""
        passed = [Verdict.PASSED] * (self.planned.cases - 1)
        return [*passed, Verdict.ERRORED if self.ends else Verdict.PASSED]


@dataclass
class Fake:
    """A pool whose actors are lists of what they are about to say, in an order that chance chooses."""

    items: Mapping[str, Sequence[Does]]
    chance: Random
    losses: int = 0  # actors that it ends by itself
    broken: frozenset[str] = frozenset()  # accelerators on which no actor starts
    slow: str = ""  # an item whose first run goes no further
    now: float = 0.0
    says: dict[int, deque[Any]] = field(default_factory=dict)
    kinds: dict[int, DeviceKind] = field(default_factory=dict)
    places: dict[int, str] = field(default_factory=dict)  # actor → its accelerator
    killed: list[int] = field(default_factory=list)
    runs: Counter[str] = field(default_factory=Counter)
    failed: dict[str, list[Any]] = field(default_factory=dict)
    warned: dict[int, list[Any]] = field(default_factory=dict)

    def start(self, kind: DeviceKind) -> int:
        actor = len(self.kinds) + 1
        held = {self.places[other] for other in self.says if self.kinds[other] == kind}
        free = [str(n) for n in range(kind.count) if str(n) not in held] if kind.type != "cpu" else [""]
        self.kinds[actor] = kind
        self.places[actor] = accelerator = free[0]
        where = {"node": "n", "host": "h", "address": "a", "pid": actor, "accelerator": accelerator}
        plan = {
            "items": [asdict(does.planned) for does in self.items[kind.device]],
            "not_run": [],
            "depends": [],
            "device": "",
            "premises": "p",
            "versions": {"torch": "2"},
        }
        ready = ("failed", "CUDA error") if accelerator in self.broken else ("ready", plan)
        self.says[actor] = deque([("placed", where), ready])
        return actor

    def run(self, actor: Hashable, place: int, failed: Sequence[tuple[str, str]]) -> None:
        assert isinstance(actor, int)
        does = self.items[self.kinds[actor].device][place]
        self.runs[does.planned.id] += 1
        self.failed[does.planned.id] = list(failed)
        if does.planned.id == self.slow and self.runs[self.slow] == 1:
            return
        self.says[actor].extend(("events", batch) for batch in does.events(failed))

    def warn(self, actor: Hashable, failed: Sequence[tuple[str, str]]) -> None:
        assert isinstance(actor, int)
        self.warned[actor] = list(failed)

    def kill(self, actor: Hashable) -> None:
        assert isinstance(actor, int)
        self.killed.append(actor)
        self.says.pop(actor, None)

    def hear(self, seconds: float) -> list[Heard]:
        self.now += seconds
        assert self.now < 100 * LIMIT, "the campaign has no end"
        talking = [actor for actor, says in self.says.items() if says]
        if not talking:
            self.now += GRACE / 4
            return []
        actor = self.chance.choice(talking)
        kind, content = self.says[actor].popleft()
        if content == "hangs":
            return []
        if content == "dies" or (self.losses and kind == "events" and self.chance.random() < 0.3):
            self.losses -= content != "dies"
            self.says[actor].clear()
            return [Heard(actor, "gone", "it was killed", node_died=content != "dies")]
        return [Heard(actor, kind, content)]


def worked(
    fake: Fake, folder: Path, kinds: Sequence[DeviceKind] = (CPU,), *, keep_going: bool = True, address: str = "fake"
) -> Campaign:
    plan = DevicePlan(tuple(kind.device for kind in kinds), ("",) * len(kinds))
    config = Config(folder=str(folder), device_plan=plan, timeout=LIMIT, keep_going=keep_going)
    campaign = Campaign(Machines(address, config, tuple(kinds)), fake, clock=lambda: fake.now)  # type: ignore[arg-type]
    try:
        campaign.open()
        if not address:
            campaign.work(until=lambda: campaign.planned)
            campaign.begin([one.id for one in campaign.items])
        campaign.work()
    except KeyboardInterrupt:
        campaign.stop = INTERRUPTED
    return campaign


def verdicts(found: Campaign) -> dict[str, list[Verdict]]:
    """Item → verdicts of its cases, each of which is there once and in order."""
    verdicts: dict[str, list[Verdict]] = {}
    for team in found.teams:
        ended, results = team.ended(Path(), found.stop)
        results += [case.errored for case in ended.under_way if case.died]
        for planned in ended.items:
            own = [r for r in results if (r.kernel, r.group) == (planned.kernel, planned.group)]
            assert [r.case for r in own] == [line(planned, number) for number in range(len(own))]
            verdicts[planned.id] = [r.verdict for r in own]
    return verdicts


ENDS = st.sampled_from(["", "", "", "fails", "dies", "hangs", "loses"])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), ENDS), min_size=1, max_size=8),
    st.integers(0, MOST_LOST - 2),
    st.integers(0, 1 << 32).map(Random),
)
def test_whatever_happens_to_actors_the_results_are_those_of_a_run_that_nothing_disturbs(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[int, str]], losses: int, chance: Random
) -> None:
    does = [Does(item(f"i{number}", cases), ends) for number, (cases, ends) in enumerate(drawn)]
    fake = Fake({"cpu": does}, chance, losses)
    found = verdicts(worked(fake, tmp_path_factory.mktemp("run")))
    assert found == {one.planned.id: one.verdicts for one in does}


def test_an_item_that_loses_its_actors_again_and_again_in_no_case_is_given_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = worked(Fake({"cpu": [Does(item("k", 50))]}, Random(1), losses=100), tmp_path)
    ended, _ = found.teams[0].ended(Path(), "")
    assert list(ended.given_up) == [("k", "cpu", "g")]
    assert found.run.broken.startswith("k on cpu, the rest of group g: its process was lost 5 times")
    assert found.run.exit_code == 2
    said, *_ = capsys.readouterr().err.splitlines()
    assert said == (
        f"a process was lost 4 times where no case was why, and its cases ran again: {tmp_path / 'cluster.log'}"
    )


def test_an_actor_without_work_runs_what_another_is_slow_with(tmp_path: Path) -> None:
    does = [Does(item("slow")), Does(item("quick"))]
    fake = Fake({"cpu": does}, Random(1), slow="slow")
    assert verdicts(worked(fake, tmp_path)) == {one.planned.id: one.verdicts for one in does}
    assert fake.runs == {"slow": 2, "quick": 1}


def test_a_kernel_that_has_failed_runs_nothing_more_and_its_own_item_does_not_count(tmp_path: Path) -> None:
    does = [Does(item("first", 9, kernel="k"), "dies"), Does(item("second", 1, kernel="k"))]
    fake = Fake({"cpu": does}, Random(1))
    found = worked(fake, tmp_path, [replace(CPU, actors=1)], keep_going=False)
    assert verdicts(found) == {"first": does[0].verdicts, "second": []}
    assert fake.failed == {"first": [], "second": [("k", "cpu")]}
    assert "k on cpu, 1 more case" in [note.what for note in found.run.not_run]


def test_actors_that_work_learn_which_kernels_fail_meanwhile(tmp_path: Path) -> None:
    does = [Does(item("wrong", 1, kernel="k"), "fails"), Does(item("long", 99, kernel="k"))]
    fake = Fake({"cpu": does}, Random(1))
    worked(fake, tmp_path, [replace(CPU, actors=2)], keep_going=False)
    assert ("k", "cpu") in [one for failed in fake.warned.values() for one in failed]


def test_a_gpu_on_which_no_actor_starts_is_taken_out_and_held(tmp_path: Path) -> None:
    does = [Does(item(f"i{number}", 50, device="cuda:0")) for number in range(4)]
    fake = Fake({"cuda:0": does}, Random(1), broken=frozenset({"1"}))
    found = worked(fake, tmp_path, [GPU])
    assert verdicts(found) == {one.planned.id: one.verdicts for one in does}
    ended, _ = found.teams[0].ended(Path(), "")
    assert [(note.what, note.reason) for note in ended.not_run] == [
        ("GPU 1 of node a (h), for cuda:0", "taken out: CUDA error")
    ]
    assert len(fake.kinds) == 3  # one was tried again, and then kept others off GPU 1


def test_a_cluster_on_which_nothing_starts_is_an_error(tmp_path: Path) -> None:
    fake = Fake({"cuda:0": []}, Random(1), broken=frozenset({"0", "1"}))
    with pytest.raises(LastbitError, match="no actor for cuda:0 could be started: CUDA error"):
        worked(fake, tmp_path, [GPU])


def test_what_other_actors_do_is_kept_when_those_of_one_kind_cannot_start(tmp_path: Path) -> None:
    fake = Fake({"cpu": [Does(item("k"))], "cuda:0": []}, Random(1), broken=frozenset({"0", "1"}))
    run = worked(fake, tmp_path, [CPU, GPU]).run
    assert [r.verdict for r in run.results] == [Verdict.PASSED] * 3
    assert "no actor for cuda:0 could be started: CUDA error" in run.broken


def test_actors_of_a_kind_that_is_done_leave_their_cores_to_others(tmp_path: Path) -> None:
    fake = Fake({"cpu": [Does(item("k", 50))], "cuda:0": []}, Random(1), broken=frozenset({"0", "1"}))
    seen: list[int] = []
    hear = fake.hear
    fake.hear = lambda seconds: seen.append(len(fake.says)) or hear(seconds)  # type: ignore[method-assign,func-returns-value]
    worked(fake, tmp_path, [CPU, GPU])
    assert seen[0] == CPU.actors + GPU.actors and seen[-1] == CPU.actors


class Other(Fake):
    """The second actor makes another plan, or none."""

    plan: Mapping[str, Any] = {"refused": {"reason": "unknown kernel 'k'", "mixed": False}}

    def start(self, kind: DeviceKind) -> int:
        actor = super().start(kind)
        if actor == 2:
            self.says[actor][1] = ("ready", self.plan)
        return actor


def test_an_actor_that_makes_no_plan_where_others_do_is_left_out(tmp_path: Path) -> None:
    found = worked(Other({"cpu": [Does(item("k", 50))]}, Random(3)), tmp_path, [replace(CPU, actors=2)])
    ended, _ = found.teams[0].ended(Path(), "")
    assert verdicts(found) == {"k": [Verdict.PASSED] * 50}
    [left_out] = ended.not_run
    assert "cannot make the plan: unknown kernel 'k'" in left_out.reason


def test_a_plan_that_nobody_can_make_is_refused_in_its_own_words(tmp_path: Path) -> None:
    for mixed, kind in ((False, LastbitError), (True, MixedTrees)):
        fake = Other({"cpu": []}, Random(1))
        fake.kinds[1] = CPU
        fake.plan = {"refused": {"reason": "unknown kernel 'k'", "mixed": mixed}}
        with pytest.raises(LastbitError, match=r"^unknown kernel 'k'$") as caught:
            worked(fake, tmp_path, [replace(CPU, actors=1)])
        assert caught.type is kind


def test_on_this_machine_the_first_loss_in_a_case_is_the_kernels_and_nothing_runs_twice(tmp_path: Path) -> None:
    does = [Does(item("dies"), "dies"), Does(item("slow", 30)), Does(item("quick"))]
    fake = Fake({"cpu": does}, Random(1))
    assert verdicts(worked(fake, tmp_path, address="")) == {one.planned.id: one.verdicts for one in does}
    assert set(fake.runs.values()) == {1}


def test_what_is_found_after_the_last_case_costs_no_result(tmp_path: Path) -> None:
    """Of a process that ends while it looks for stages: the item does not run again."""

    class Looks(Does):
        def events(self, failed: Sequence[tuple[str, str]]) -> Iterator[list[list[Any]] | str]:
            *cases, _ = super().events(failed)
            yield from cases
            yield [["looks"]]
            yield "dies"

    fake = Fake({"cpu": [Looks(item("k"))]}, Random(1))
    assert verdicts(worked(fake, tmp_path)) == {"k": [Verdict.PASSED] * 3}
    assert fake.runs == {"k": 1}


class Interrupting(Fake):
    """Ctrl-C, when a third of the cases were there."""

    def hear(self, seconds: float) -> list[Heard]:
        if self.now > 4.1:
            raise KeyboardInterrupt
        return super().hear(seconds)


class Losing(Fake):
    """The same, where a call loses it, and nothing else comes."""

    lost = False

    def hear(self, seconds: float) -> list[Heard]:
        if self.lost or self.now <= 4.1:
            return super().hear(seconds)
        self.lost = True
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return []


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python's own handler: a shell starts what it puts into the background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("kind", [Interrupting, Losing])
def test_what_was_done_before_an_interruption_is_reported(tmp_path: Path, kind: type[Fake]) -> None:
    fake = kind({"cpu": [Does(item("k", 50))]}, Random(1))
    found = worked(fake, tmp_path, [replace(CPU, actors=1)])
    assert found.stop == INTERRUPTED and found.planned
    run = found.run
    assert 0 < len(run.results) < 50
    assert run.broken == "interrupted"
    assert [note.reason for note in run.not_run if note.kernel] == ["interrupted"]


def test_a_run_that_is_killed_leaves_the_results_of_items_that_were_done(tmp_path: Path) -> None:
    fake = Interrupting({"cpu": [Does(item(f"i{number}")) for number in range(20)]}, Random(1))
    run = worked(fake, tmp_path, [replace(CPU, actors=1)]).run
    left = [parse(line, "") for line in (tmp_path / "cpu-items.jsonl").read_bytes().splitlines()]
    assert 0 < len(left) < len(fake.items["cpu"]) * 3
    assert set(Counter(result.kernel for result in left).values()) == {3}
    assert [result.case for result in run.results[: len(left)]] == [result.case for result in left]


def test_what_kernel_processes_print_is_in_the_log_of_the_device(tmp_path: Path) -> None:
    worked(Fake({"cpu": [Does(item("k", 2), says="hello")]}, Random(1)), tmp_path, [replace(CPU, actors=1)])
    assert (tmp_path / "cpu.log").read_text() == "printed in a process of k.py:\nhello\n" * 2


class Full(Fake):
    """There is room for one actor."""

    def start(self, kind: DeviceKind) -> int:
        actor = super().start(kind)
        if actor > 1:
            self.says[actor].clear()
        return actor


def test_actors_that_find_no_place_are_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    worked(Full({"cpu": [Does(item("k", 99))]}, Random(1)), tmp_path)
    assert capsys.readouterr().err == "waiting for the cluster: 3 actors asked for, 1 there\n"
    worked(Fake({"cpu": [Does(item("k", 99))]}, Random(1)), tmp_path)
    assert capsys.readouterr().err == ""
