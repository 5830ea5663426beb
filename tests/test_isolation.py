"""Kernels in processes of their own: the same results as in this one, and no more than one item lost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from harness.case import parse_case
from harness.config import Config
from harness.errors import KernelError, LastbitError
from harness.interpret import install
from harness.isolation.declared import Elsewhere, Kernels
from harness.isolation.isolated import Isolated
from harness.isolation.process import ForkServer
from harness.kernel import Kernel, load_kernels
from harness.result import CaseResult, Verdict
from harness.verify.check import Subject, verify_case
from harness.verify.project import open_project

FOLDER = Path(__file__).parent / "isolated"
CPU = torch.device("cpu")
RMS_NORM = open_project(Config(folder="")).op("rms_norm")
CASE = parse_case("rms_norm x=bf16[4,64] weight=bf16[64] eps=1e-06 seed=1")
CONTRACT = "native_multiply"


@dataclass
class Isolation:
    kernels: Kernels
    there: dict[str, Kernel]
    here: dict[str, Kernel]
    printed: list[str] = field(default_factory=list)

    def verify(self, name: str, *, races: bool = False, timeout: float = 60.0) -> CaseResult:
        """The result of a kernel in its own processes."""
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
    """Values, stages, findings with all words, and reasons; only the time that it took is another."""
    races = name in ("interpreted", "faulty")
    plain = verify_case(Subject(isolation.here[name], RMS_NORM, CPU, races=races), CASE)
    assert plain.verdict is SAME[name]
    isolated = isolation.verify(name, races=races)
    assert repr(replace(isolated, seconds=0)) == repr(replace(plain, seconds=0))


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


def test_a_declared_height_is_that_of_some_tree(isolation: Isolation) -> None:
    depth = isolation.there["shallow"].depth
    assert depth is not None
    assert [depth(terms) for terms in (1, 2, 3, 1024, 1025)] == [0, 1, 2, 10, 11]


def test_a_kernel_that_looks_for_lastbit_does_not_find_it_everywhere(isolation: Isolation) -> None:
    result = isolation.verify("watchful")
    assert [finding.kind for finding in result.faults] == ["guards"]


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


def test_what_it_prints_is_kept_in_part(isolation: Isolation) -> None:
    isolation.printed.clear()
    assert isolation.verify("printing").verdict is Verdict.PASSED
    assert len(isolation.printed) == 2
    assert all(len(text) < 1 << 17 and "PASSED" in text for text in isolation.printed)


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
from harness.isolation.process import ForkServer, Start
import os
server = ForkServer()
process = server.start(Start())
print(server._process.pid, process._pid, len(os.listdir(f"/proc/{server._process.pid}/task")), flush=True)
os._exit(0)
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    server, process, threads = map(int, said.split())
    assert threads == 1
    for pid in (server, process):
        _wait_for_end(pid)


def _wait_for_end(pid: int) -> None:
    import time

    latest = time.monotonic() + 20
    while time.monotonic() < latest:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except FileNotFoundError:
            return
        time.sleep(0.02)
    raise AssertionError(f"process {pid} has not ended")
