"""Every moment counts for one part: the innermost, unless a purpose encloses it."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

from lastbit import timing
from lastbit.case import parse_case
from lastbit.config import Config
from lastbit.kernel import Kernel
from lastbit.reports import html, markdown, records, wording
from lastbit.reports.records import dump
from lastbit.reports.terminal import print_run
from lastbit.run import Run, Spent
from lastbit.timing import (
    COMPARING,
    GUARDS,
    INPUTS,
    KERNEL,
    REFERENCES,
    REST,
    ROWS,
    Clock,
    listening,
    seconds_so_far,
    timed,
)
from lastbit.verify.check import Subject, verify_case
from lastbit.verify.project import open_project
from lastbit.verify.result_recorder import CaseRecorder


class Hands:
    """A clock's hands that are moved by hand."""

    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def hands() -> Iterator[Hands]:
    hands = Hands()
    with listening(Clock(hands)):
        yield hands


def test_an_inner_part_is_subtracted_from_the_outer_one(hands: Hands) -> None:
    hands.at = 1.0
    with timed(GUARDS):
        hands.at = 3.0
        with timed(KERNEL):
            hands.at = 7.0
        hands.at = 15.0
    hands.at = 31.0
    assert seconds_so_far() == {REST: 1.0 + 16.0, GUARDS: 2.0 + 8.0, KERNEL: 4.0}


def test_what_a_purpose_calls_is_its_own(hands: Hands) -> None:
    with timed(ROWS):
        hands.at = 1.0
        with timed(REFERENCES), timed(COMPARING):
            hands.at = 3.0
        hands.at = 7.0
    with timed(REFERENCES):
        hands.at = 15.0
    assert seconds_so_far() == {REST: 0.0, ROWS: 7.0, REFERENCES: 8.0}


def test_a_part_within_itself_is_counted_once(hands: Hands) -> None:
    @timed(REFERENCES)
    def evaluate(depth: int) -> None:
        hands.at += 1.0
        if depth:
            evaluate(depth - 1)

    evaluate(3)
    assert seconds_so_far() == {REST: 0.0, REFERENCES: 4.0}


def test_what_raises_is_counted_too(hands: Hands) -> None:
    with pytest.raises(ZeroDivisionError), timed(KERNEL):
        hands.at = 2.0
        raise ZeroDivisionError
    hands.at = 3.0
    assert seconds_so_far() == {KERNEL: 2.0, REST: 1.0}


def test_nothing_is_counted_where_no_clock_listens() -> None:
    with timed(KERNEL):
        assert seconds_so_far() == {}


def test_every_part_is_named_once() -> None:
    named = [value for name, value in vars(timing).items() if name.isupper() and isinstance(value, str)]
    assert sorted(named) == sorted(timing.PARTS)


def test_a_run_says_where_its_time_went() -> None:
    run = Run((), spent=Spent({"kernel calls": 60.0, "references": 39.2, "guards": 0.7, "planning": 0.1}, 2))
    assert wording.time_spent(run) == "kernel calls 60%, references 39% of 100 s in 2 workers"
    few = replace(run, spent=Spent({"references": 98.0, **{f"part {n}": 0.5 for n in range(4)}}, 1))
    assert wording.time_spent(few) == "references 98%, others 2% of 100 s in 1 worker"
    assert wording.time_spent(Run(())) == ""


def test_every_report_of_a_run_says_where_its_time_went(tmp_path: Path) -> None:
    run = Run((), spent=Spent({KERNEL: 60.0, REFERENCES: 40.0}, 2))
    records.write(run, tmp_path)
    assert records.read(tmp_path) == run
    said = "kernel calls 60%, references 40% of 100 s in 2 workers"
    console = Console(file=io.StringIO(), width=200)
    print_run(run, console, verbose=2)
    assert f"Time: {said}" in console.file.getvalue()  # type: ignore[attr-defined]
    assert said in markdown.page(run)
    assert ("Where time went", said) in html._facts(run)


def test_a_worker_tells_its_time_after_each_item(tmp_path: Path, hands: Hands) -> None:
    recorder = CaseRecorder(Config(folder=str(tmp_path)), dump, tmp_path)
    told = []
    for until in (1.0, 3.0):
        with timed(REFERENCES):
            hands.at = until
        recorder.end()
        told += [event[1] for batch in recorder.batches() for event in batch if event[0] == "time"]
    assert told == [{REST: 0.0, REFERENCES: 1.0}, {REST: 0.0, REFERENCES: 3.0}]


def test_parts_of_a_case_are_counted_where_they_happen() -> None:
    """A toy kernel whose call takes the time that is expected of it."""
    hands = Hands()

    def call(ids: Tensor, eos_ids: Tensor) -> Tensor:
        hands.at += 5.0
        return torch.ones_like(ids, dtype=torch.int32)

    op = open_project(Config(folder="")).op("completion_mask")
    subject = Subject(Kernel("toy", op.name, "", call), op, torch.device("cpu"))
    with listening(Clock(hands)) as clock:
        verify_case(subject, parse_case("completion_mask ids=int64[2,3]:sequences_1 eos_ids=int64[1]:counting seed=0"))
    assert clock.seconds[KERNEL] == 4 * 5.0
    assert {INPUTS, GUARDS, REFERENCES, COMPARING} <= clock.seconds.keys()
