"""Who judges what in a pool, with processes that are none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import lastbit
from lastbit.config import Config
from lastbit.errors import UsageError
from lastbit.judges import warm_judges
from lastbit.judges.judge_file import judge_file, ready, unjudged
from lastbit.judges.question import JudgeQuestion
from lastbit.reports.judged import FileVerdict
from lastbit.result import Verdict
from lastbit.verify.worker import WorkerEnded

Answer = Callable[[str, JudgeQuestion], FileVerdict]


class FakeWorker:
    """A worker whose process is a function; it counts what is asked of all of them.

    Attributes:
        made: every worker.
        answer: what a judge says of a file.
    """

    made: list[FakeWorker]
    answer: Answer

    def __init__(self, config: Config, *, opening: Callable[..., Any]) -> None:
        self.config, self.over, self.asked = config, False, list[str]()
        self.made.append(self)

    def do(self, work: Callable[..., Any], *args: Any) -> Any:
        if work is ready:
            return None
        assert work is judge_file and not self.over
        path, question = args
        self.asked.append(path)
        return type(self).answer(path, question)

    def kill(self) -> None:
        self.over = True

    def __exit__(self, *error: object) -> None:
        self.over = True


@pytest.fixture(autouse=True)
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeWorker]]:
    FakeWorker.made, FakeWorker.answer = [], staticmethod(passed)  # type: ignore[assignment]
    monkeypatch.setattr(warm_judges, "Worker", FakeWorker)
    yield FakeWorker.made
    assert all(worker.over for worker in FakeWorker.made), "a process is left"


def passed(path: str, question: JudgeQuestion) -> FileVerdict:
    return unjudged(path, question, "cpu", verdict=Verdict.PASSED)


def test_every_file_is_judged_once_and_answers_have_the_order_of_questions(workers: list[FakeWorker]) -> None:
    paths = [f"{number}.py" for number in range(20)]
    with lastbit.Judges(3, op="an_op", contract="a") as judges:
        found = [future.result() for future in [judges.judge(path) for path in paths]]
    assert [one.file for one in found] == paths
    assert sorted(path for worker in workers for path in worker.asked) == sorted(paths) and len(workers) == 3


def test_a_question_is_that_of_the_pool_unless_the_call_says_otherwise() -> None:
    asked: list[JudgeQuestion] = []

    def answer(path: str, question: JudgeQuestion) -> FileVerdict:
        asked.append(question)
        return passed(path, question)

    FakeWorker.answer = staticmethod(answer)  # type: ignore[assignment]
    with lastbit.Judges(1, op="an_op", contract="a", fail_fast=True) as judges:
        judges.judge("1.py").result()
        judges.judge("2.py", contract="b", mutates={"x": ""}).result()
    assert asked == [
        JudgeQuestion(op="an_op", contract="a", fail_fast=True),
        JudgeQuestion(op="an_op", contract="b", mutates={"x": ""}, fail_fast=True),
    ]


def test_a_judge_that_ends_is_replaced_and_the_file_tried_once_more() -> None:
    ends = {"once.py": 1, "always.py": 9}

    def answer(path: str, question: JudgeQuestion) -> FileVerdict:
        if ends.get(path, 0):
            ends[path] -= 1
            raise WorkerEnded("the process died")
        return passed(path, question)

    FakeWorker.answer = staticmethod(answer)  # type: ignore[assignment]
    with lastbit.Judges(1, op="an_op") as judges:
        futures = [judges.judge(path) for path in ("once.py", "always.py", "after.py")]
        found = [future.result() for future in futures]
    assert [one.verdict for one in found] == ["PASSED", "ERRORED", "PASSED"]
    assert found[1].reason == "the process died" and found[1].exit_code == 2 and ends == {"once.py": 0, "always.py": 7}


def test_a_question_that_means_nothing_is_an_error_of_the_caller() -> None:
    def answer(path: str, question: JudgeQuestion) -> FileVerdict:
        raise UsageError("unknown op 'an_po'")

    FakeWorker.answer = staticmethod(answer)  # type: ignore[assignment]
    with lastbit.Judges(1, op="an_po") as judges:
        with pytest.raises(UsageError, match="an_po"):
            judges.judge("1.py").result()
        for wrong in ({"profile": "cii"}, {"placement": "stays"}, {"seed": "-1"}):
            with pytest.raises(UsageError):
                judges.judge("1.py", **wrong)
    with pytest.raises(UsageError, match="0 judges judge nothing"):
        lastbit.Judges(0)


def test_an_interruption_ends_the_judges_and_what_waits_is_not_judged(workers: list[FakeWorker]) -> None:
    begun, over = threading.Event(), threading.Event()

    def answer(path: str, question: JudgeQuestion) -> FileVerdict:
        begun.set()
        assert over.wait(10)
        raise WorkerEnded("it was ended")

    FakeWorker.answer = staticmethod(answer)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt), lastbit.Judges(1, op="an_op") as judges:
        futures = [judges.judge(path) for path in ("1.py", "2.py")]
        assert begun.wait(10)
        workers[0].kill = over.set  # type: ignore[method-assign]
        raise KeyboardInterrupt
    assert workers[0].asked == ["1.py"] and futures[1].cancelled()


def test_one_file_is_a_pool_of_one(workers: list[FakeWorker]) -> None:
    assert lastbit.judge("1.py", op="an_op").verdict is Verdict.PASSED
    assert len(workers) == 1 and workers[0].config.devices == ("cpu",)


@pytest.mark.parametrize("devices", [("cuda:0",), ("cuda:0", "cuda:1")])
def test_devices_are_shared_out(devices: tuple[str, ...]) -> None:
    configs = warm_judges._configs(devices, (), 4)
    assert [config.devices[0] for config in configs] == list(devices) * (4 // len(devices))
    assert all(len(config.devices) == 1 for config in configs)
