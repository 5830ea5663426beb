"""The processes of a run: how many workers there are, and that all end when they are told to, whatever they do."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lastbit.config import Config
from lastbit.devices import DevicePlan
from lastbit.verify import processes
from lastbit.verify.processes import Child, end, environment_for, wait, workers_for

DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
PARENT = f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-S', '-c', {DEAF!r}]); child.wait()"


def child(program: str, folder: Path) -> Child:
    """Start a process in a session of its own, as those of a run are, that has begun what it does."""
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", program], stdout=subprocess.PIPE, bufsize=0, start_new_session=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    return Child("cpu", process, folder / "cpu.log")


@pytest.mark.parametrize("program", [DEAF, PARENT], ids=["itself", "a worker of it"])
def test_who_does_not_listen_is_killed(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_GRACE", 0.1)
    deaf = child(program, tmp_path)
    end([deaf])
    assert deaf.process.returncode in (-signal.SIGKILL, -signal.SIGTERM)
    assert deaf.process.stdout is not None
    assert select.select([deaf.process.stdout], [], [], 5.0)[0], "something that could write to the pipe is alive"


def test_processes_that_have_ended_are_left_alone(tmp_path: Path) -> None:
    over = child("print()", tmp_path)
    ticks: list[None] = []
    wait([over], lambda: ticks.append(None))
    end([over])
    assert over.process.returncode == 0


def test_an_interrupt_while_processes_are_ended_does_not_keep_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second Ctrl-C of somebody who has lost patience."""
    deaf = child(DEAF, tmp_path)

    def interrupted(timeout: float | None = None) -> int:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(deaf.process, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        end([deaf])
    assert deaf.process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("device_type", "cores", "expected"),
    [("cpu", 1, 1), ("cpu", 2, 2), ("cpu", 64, 8), ("cuda", 64, 16), ("cuda", 4, 4)],
)
def test_each_type_of_device_has_its_own_number_of_workers(
    device_type: str, cores: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two accelerators have twice as many as one, if this process may use cores enough of the machine's."""
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)), raising=False)
    plan = DevicePlan(("cpu", "cuda:0", "cuda:1"), ("", "", ""))
    assert workers_for(device_type, Config(folder="", device_plan=plan)) == expected


def test_products_of_numpy_have_one_thread_in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers share the cores, and a thread of OpenBLAS spins for some milliseconds when its part is done."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "16")
    assert environment_for("cpu")["OPENBLAS_NUM_THREADS"] == "1"
