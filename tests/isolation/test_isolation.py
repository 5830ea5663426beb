"""Kernels in processes of their own: the same results as in this one, and no more than one item lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lastbit.calling.performing import CallRequest
from lastbit.case import Case, Group, parse_case
from lastbit.config import Config
from lastbit.errors import KernelError, LastbitError
from lastbit.files import IMPORTED_FROM
from lastbit.inputs import build, unequal
from lastbit.interpret import install
from lastbit.isolation import answers
from lastbit.isolation.answers import Raised, Unreadable
from lastbit.isolation.elsewhere import Elsewhere, Kernels
from lastbit.isolation.inside import _declared
from lastbit.isolation.isolated import Isolated
from lastbit.isolation.process import ForkServer
from lastbit.kernel import Kernel, load_kernels
from lastbit.result import CaseResult, Verdict
from lastbit.verify.case_calls import IN_A_THREAD, Here
from lastbit.verify.check import Subject, verify_case
from lastbit.verify.formula_check import with_formula
from lastbit.verify.isolating import _on_the_path, in_processes
from lastbit.verify.item_run import CaseFailed, reseeded, run_item
from lastbit.verify.plan import Item, make_plan
from lastbit.verify.project import open_project
from tests.recorded import Recorded

FOLDER = Path(__file__).parents[1] / "isolated"
CPU = torch.device("cpu")
RMS_NORM = open_project(Config(folder="")).op("rms_norm")
CASE = parse_case("rms_norm x=bf16[4,64] weight=bf16[64] eps=1e-06 seed=1")
RESULT = {"name": "y", "dtype": "float32", "shape": [4], "strides": [1], "device": "cpu", "at": 0}


@dataclass
class Isolation:
    kernels: Kernels
    there: dict[str, Kernel]
    here: dict[str, Kernel]
    printed: list[str] = field(default_factory=list)

    def verify(self, name: str, *, races: bool = False, timeout: float = 60.0) -> CaseResult:
        """Judge a kernel in its own processes."""
        with self.kernels.pair(self.there[name], timeout) as pair:
            return verify_case(
                Subject(self.there[name], RMS_NORM, CPU, races=races, performer=Isolated(pair, CPU)), CASE
            )


@pytest.fixture(scope="module")
def isolation() -> Iterator[Isolation]:
    install()
    server, printed = ForkServer(), list[str]()
    kernels = Kernels(server, printed=lambda whose, text: printed.append(f"{whose}: {text}"))
    there = {kernel.name: kernel for kernel in kernels.declared(FOLDER)}
    yield Isolation(kernels, there, {kernel.name: kernel for kernel in load_kernels(FOLDER)}, printed)
    server.close()


SAME = {
    "with_stages": Verdict.PASSED,
    "interpreted": Verdict.PASSED,
    "in_place": Verdict.PASSED,
    "receiving": Verdict.PASSED,
    "bundled": Verdict.PASSED,
    "transposed": Verdict.PASSED,
    "faulty": Verdict.FAILED,
    "fast_math": Verdict.FAILED,
    "flushing": Verdict.FAILED,
    "mutating": Verdict.FAILED,
    "unwritten": Verdict.FAILED,
    "aliasing": Verdict.FAILED,
    "writing_outside": Verdict.FAILED,
    "reusing": Verdict.FAILED,
    "caching": Verdict.FAILED,
    "declining": Verdict.UNSUPPORTED,
    "raising": Verdict.ERRORED,
    "giving_nothing": Verdict.ERRORED,
    "of_another_shape": Verdict.ERRORED,
    "without_memory": Verdict.ERRORED,
    "large": Verdict.ERRORED,
}


@pytest.mark.parametrize("name", SAME)
def test_a_kernel_has_the_same_result_in_a_process_of_its_own(isolation: Isolation, name: str) -> None:
    """Values, stages, findings with all words but the threads of torch, and reasons; only its time is another."""
    races = name in ("interpreted", "faulty")
    plain = verify_case(Subject(isolation.here[name], RMS_NORM, CPU, races=races), CASE)
    assert plain.verdict is SAME[name]
    isolated = isolation.verify(name, races=races)
    words = repr(replace(isolated, seconds=0)).replace(IN_A_THREAD, "")
    assert words == repr(replace(plain, seconds=0))


FORMULAS = {
    "with_stages": Verdict.PASSED,
    "interpreted": Verdict.PASSED,
    "of_another_eps": Verdict.FAILED,
    "interpreted_of_another_eps": Verdict.FAILED,
    "exiting_while_followed": Verdict.ERRORED,
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_kernel_is_followed_where_it_runs(isolation: Isolation, name: str) -> None:
    kernel, case = isolation.there[name], parse_case("rms_norm x=fp32[2,4096] weight=fp32[4096] eps=0.001 seed=1")
    with isolation.kernels.pair(kernel, 60.0) as pair:
        subject = Subject(kernel, RMS_NORM, CPU, performer=Isolated(pair, CPU))
        plain = verify_case(subject, case, renumber=False)
        found = with_formula(subject, case, plain)
    assert plain.verdict is Verdict.PASSED and found.verdict is FORMULAS[name]
    assert not any(stage.equal for stage in found.stages)
    assert [finding.kind for finding in found.findings] == ["formula"] * (found.verdict is Verdict.FAILED)


def test_declarations_are_data(isolation: Isolation) -> None:
    """Nothing of a kernel's file is loaded here, and what stands for its function cannot be called."""
    for name, kernel in isolation.there.items():
        known = isolation.here[name]
        assert isinstance(kernel.call, Elsewhere)
        assert (kernel.accepts, kernel.requires) == (known.accepts, known.requires)
        unlike = {"call": None, "depth": None, "mutates": tuple(known.mutates)}
        assert replace(kernel, **unlike | {"call": print}) == replace(known, **unlike | {"call": print})
    with pytest.raises(LastbitError, match="cannot be called in this one"):
        isolation.there["with_stages"].call()


def test_a_declaration_that_does_not_cross_is_named_here(isolation: Isolation) -> None:
    """Own primitives are asked for where the kernel is followed, and refusals heard, in its own process.

    Of which file it is is told beside its declaration.
    """
    crossing = {field.name for field in fields(Kernel)} - {"call", "primitives", "refuses", "file"}
    assert _declared(isolation.here["with_stages"]).keys() - {"parameters"} == crossing


def test_a_declared_height_is_that_of_some_tree(isolation: Isolation) -> None:
    depth = isolation.there["shallow"].depth
    assert depth is not None
    assert [depth(terms) for terms in (1, 2, 3, 1024, 1025)] == [0, 1, 2, 10, 11]


def test_a_kernel_that_looks_for_lastbit_does_not_find_it_everywhere(isolation: Isolation) -> None:
    result = isolation.verify("watchful")
    assert {finding.kind for finding in result.faults} == {"guards", "other_values"}


def test_what_a_kernel_did_to_its_process_is_found(isolation: Isolation) -> None:
    assert [finding.kind for finding in isolation.verify("moving").faults] == ["process_state"]


ENDED = {
    "exiting": "its process ended with exit code 0, without an exception",
    "crashing": "its process was ended by signal SIGSEGV",
    "hanging": "no result after 1 s (--timeout), so its process was stopped",
}


@pytest.mark.parametrize("name", ENDED)
def test_a_process_that_ends_costs_its_item(isolation: Isolation, name: str) -> None:
    result = isolation.verify(name, timeout=1.0)
    assert (result.verdict, result.reason) == (
        Verdict.ERRORED,
        f"{ENDED[name]}; the other cases of its group did not run",
    )


def test_what_cannot_be_taken_is_the_kernels_error(isolation: Isolation) -> None:
    assert isolation.verify("vast").reason.startswith("Unreadable: the kernel")


def test_a_result_of_another_shape_is_not_copied(isolation: Isolation) -> None:
    kernel = isolation.there["claiming"]
    with isolation.kernels.pair(kernel, 60.0) as pair:
        result = verify_case(Subject(kernel, RMS_NORM, CPU, performer=Isolated(pair, CPU)), CASE)
        assert result.reason == "KernelError: result 'output' has shape (1073741824,), but the op requires (4, 64)"
        assert pair.blocks.nbytes < 1 << 24


def test_what_it_prints_is_kept_in_part(isolation: Isolation) -> None:
    isolation.printed.clear()
    assert isolation.verify("printing").verdict is Verdict.PASSED
    assert len(isolation.printed) == 2
    assert all(len(text) < 1 << 17 and "PASSED" in text for text in isolation.printed)


def test_a_file_is_loaded_as_well_as_its_folder(isolation: Isolation) -> None:
    file = FOLDER / "kernels.py"
    names = {kernel.name for kernel in isolation.kernels.declared(file)}
    assert names == {kernel.name for kernel in load_kernels(file)} < set(isolation.there)


def test_a_file_that_raises_is_an_error_as_here(isolation: Isolation, tmp_path: Path) -> None:
    for text in ("1 / 0", "import os; os._exit(3)", "x = 1"):
        (tmp_path / "broken.py").write_text(text)
        with pytest.raises(KernelError, match=r"ZeroDivisionError while|exit code 3|declares a kernel"):
            isolation.kernels.declared(tmp_path)


def test_nothing_of_it_is_left(isolation: Isolation) -> None:
    """Neither a process, nor a zombie, nor a folder."""
    with isolation.kernels.pair(isolation.there["bundled"], 10.0) as pair:
        folders = [pair.guarded._folder, pair.bare._folder]
        pids = [pair.guarded._pid, pair.bare._pid]
        assert all(folder.is_dir() for folder in folders)
    assert not any(folder.exists() for folder in folders)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_the_server_has_one_thread_and_ends_with_its_judge() -> None:
    program = """
from lastbit.isolation.process import ForkServer, Start
import os
server = ForkServer()
process = server.start(Start())
threads = len(os.listdir(f"/proc/{server._child.pid}/task"))
print(server._child.pid, process._pid, threads, process._folder, flush=True)
os._exit(0)
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    server, process, threads, folder = said.split()
    assert threads == "1"
    for pid in (server, process):
        _wait_for_end(int(pid))
    assert not Path(folder).exists()


def _wait_for_end(pid: int) -> None:
    latest = time.monotonic() + 20
    while time.monotonic() < latest:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except FileNotFoundError:
            return
        time.sleep(0.02)
    raise AssertionError(f"process {pid} has not ended")


# Calls with tensors on other devices


def test_an_attempt_is_the_same_in_a_process_of_its_own(isolation: Isolation) -> None:
    asked = CallRequest(CASE.params, ("output",))
    kernel = isolation.there["warning"]
    with isolation.kernels.pair(kernel, 60.0) as pair:
        there, here = build(CASE, CPU), build(CASE, CPU)
        found = Isolated(pair, CPU).attempt(there, asked, None)
        expected = Here(isolation.here["warning"], CPU).attempt(here, asked, None)
        assert [(type(w), str(w).replace("\\x1b", "\x1b")) for w in found.warnings] == [
            (type(w), str(w)) for w in expected.warnings
        ]
        assert unequal([(found.results["output"], expected.results["output"])]) == [False]
        assert there.violations() == here.violations() != []
        raised = Isolated(pair, CPU).attempt(build(replaced(CASE, 3), CPU), asked, CPU).error
        assert isinstance(raised, Raised)
        assert (raised.kind, str(raised)) == ("ValueError", "x is on cpu, but weight is on cuda:1")


# Items


def replaced(case: Case, rows: int) -> Case:
    return parse_case(str(case).replace("[4,", f"[{rows},"))


def ran(isolation: Isolation, name: str, rows: Sequence[int], **how: Any) -> tuple[list[CaseResult], list[int]]:
    """Run an item with cases of so many rows; return its results, and how many cases it left."""
    kernel = isolation.there[name]
    group = Group("mine", examples=tuple(replaced(CASE, n) for n in rows))
    item, recorded = Item(Subject(kernel, RMS_NORM, CPU), group, how.pop("asked", False)), Recorded(**how)
    with in_processes(item, isolation.kernels, 60.0) as prepared, suppress(CaseFailed):
        run_item(prepared, recorded)  # type: ignore[arg-type]
    return recorded.results, recorded.told_of("left")


@pytest.mark.parametrize("keep_going", [False, True])
def test_a_process_that_ends_costs_the_rest_of_its_item(isolation: Isolation, keep_going: bool) -> None:
    """Nothing is made small, since nothing can be run."""
    failures = None if keep_going else set[tuple[str, str]]()
    results, left = ran(isolation, "exiting_later", (4, 3, 5, 6), failures=failures)
    assert [result.verdict for result in results] == [Verdict.PASSED, Verdict.ERRORED]
    assert results[-1].reason.startswith("its process ended with exit code 3")
    assert left == ([] if keep_going else [2])
    assert failures == (None if keep_going else {("exiting_later", "cpu")})


def test_seeds_that_nobody_knew(isolation: Isolation) -> None:
    """Each case has one of its own, and all else as it was; lines that a reader gave stay as they are."""
    runs = [ran(isolation, "bundled", (4, 5), random=True)[0] for _ in range(2)]
    cases = [parse_case(result.case) for results in runs for result in results]
    assert all(result.verdict is Verdict.PASSED for results in runs for result in results)
    assert len({case.seed for case in cases}) == len(cases)
    assert [replace(case, seed=1) for case in cases] == [replaced(CASE, 4), replaced(CASE, 5)] * 2
    asked, _ = ran(isolation, "bundled", (4,), random=True, asked=True)
    assert [result.case for result in asked] == [str(CASE)]
    given = parse_case("rms_norm x=bf16[1,3]:values(1.5,-2,0.5) eps=1e-06 seed=0")
    assert reseeded(given) is given


def test_a_plan_without_a_line_of_a_kernel(isolation: Isolation) -> None:
    config = Config("", kernel_folders=(str(FOLDER),), kernels=("bundled",), lines=(str(CASE),), isolate=True)
    [item] = make_plan(config, "cpu", isolation.kernels.declared).items
    assert isinstance(item.subject.kernel.call, Elsewhere)
    assert item.subject.kernel.call.path == FOLDER / "kernels.py"


# What a stranger says


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"[]",
        b"[" * 10_000,
        b"{}",
        b'{"returned": []}',
        b'{"returned": [], "number": 5}',
        b'{"returned": 1, "number": "n"}',
        b'{"returned": [1], "number": "n"}',
        *(
            json.dumps({"returned": [{**RESULT, name: value}], "number": "n"}).encode()
            for name, value in (
                ("name", 3),
                ("dtype", "__class__"),
                ("dtype", "quint8"),
                ("shape", [-1]),
                ("shape", [True, 1]),
                ("shape", [1 << 40, 1 << 40]),
                ("shape", [1] * 100),
                ("shape", 5),
                ("strides", [0]),
                ("strides", [2]),
                ("strides", []),
                ("device", "cuda:x"),
                ("device", "somewhere"),
                ("at", 256),
                ("at", -2),
                ("at", -1),
            )
        ),
        json.dumps({"returned": [RESULT, RESULT], "number": "n"}).encode(),
    ],
)
def test_answers_that_no_kernel_process_gives(said: bytes) -> None:
    with pytest.raises(Unreadable):
        answers.results_of(answers.parsed(said, "n"))


def test_an_answer_that_is_one() -> None:
    said = json.dumps({"returned": [RESULT], "number": "n"}).encode()
    [result], size = answers.results_of(answers.parsed(said, "n"))
    assert (result.dtype, result.shape, size) == (torch.float32, (4,), 256)


@pytest.mark.parametrize("given", [[["values", "x", "wrong"]], [["race", "x"]], "race", [[1, 2, 3]], [["race"] * 4]])
def test_findings_that_no_call_can_have(given: object) -> None:
    with pytest.raises(Unreadable):
        answers.findings(given)


def test_kernels_can_import_what_lies_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the working directory is another one, as that of a worker of a cluster is."""
    for name in ("path/mine.py", "path/package/__init__.py", "path/run/records.jsonl", "here/own.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PYTHONPATH", f"{IMPORTED_FROM}:{tmp_path / 'path'}:{tmp_path / 'none'}:relative:")
    assert {str(path.relative_to(tmp_path)) for path in _on_the_path()} == {
        "path/mine.py",
        "path/package",
        "here/own.py",
    }
