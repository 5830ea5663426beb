"""`lastbit verify --cluster` on clusters of this machine: what a local run gives, whatever happens to the workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from harness.commands.running import execute
from harness.config import Config
from harness.devices import plan_devices
from harness.result import CaseResult, Verdict
from harness.run import Run
from reports import records

pytest.importorskip("ray", reason="lastbit[cluster] is not installed")

pytestmark = pytest.mark.slow

PROJECT = Path(__file__).with_name("cluster_project")
ITEMS = 500
CORES = 3  # more than the two of a small machine: several workers at any time, also while one is replaced
LONGEST = 150.0  # seconds that anything may take here


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster that somebody else has started; `raylet` is the process that starts its workers."""

    address: str
    raylet: int


@pytest.fixture(scope="module")
def settings() -> Iterator[Path]:
    """A folder for what Ray keeps, with a short name because sockets lie in it, and no token of the user's."""
    with tempfile.TemporaryDirectory(prefix="ray") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", folder)
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("DAWDLED", str(Path(folder, "dawdled")))
        yield Path(folder)


@pytest.fixture(scope="module")
def cluster(settings: Path) -> Iterator[Cluster]:
    from ray.cluster_utils import Cluster as RayCluster

    head = {"num_cpus": CORES, "include_dashboard": False, "object_store_memory": 100 << 20}
    started = RayCluster(initialize_head=True, head_node_args={**head, "temp_dir": str(settings)})
    try:
        yield Cluster(started.address, started.head_node.all_processes["raylet"][0].process.pid)
    finally:
        started.shutdown()


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The 500 items on this machine, without a cluster."""
    folder = tmp_path_factory.mktemp("local")
    config = Config(
        folder=str(folder),
        device_plan=plan_devices("cpu"),
        projects=(str(PROJECT),),
        kernel_folders=(str(PROJECT / "kernels"),),
        ops=("halved_sum",),
        cases=1,
        keep_going=True,
    )
    return execute(config, ["-n", "2"], quiet=True)


def started(where: str, folder: Path, kernels: str, *options: str) -> subprocess.Popen[str]:
    """`lastbit verify` of a folder of kernels on a cluster, in a session of its own."""
    command = [sys.executable, "-m", "harness", "verify", "--cluster", where, "--op", "halved_sum"]
    command += ["--project", str(PROJECT), "--kernels", str(PROJECT / kernels), "--run-folder", str(folder)]
    return subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def finished(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code of a command and what it printed."""
    try:
        printed, _ = process.communicate(timeout=LONGEST)
    finally:
        process.kill()
    return process.returncode, printed


def below(root: int) -> dict[int, str]:
    """Each process that a process has started, directly or not → its command line."""
    parents: dict[int, int] = {}
    lines: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            lines[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended in the meantime

    def descends(pid: int) -> bool:
        return pid in parents and (parents[pid] == root or descends(parents[pid]))

    return {pid: line for pid, line in lines.items() if descends(pid)}


def workers(root: int) -> list[int]:
    """The actors below a process: what Ray has called by their class, and not what is idle or its own."""
    own = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
    return sorted(pid for pid, line in below(root).items() if line.startswith("ray::") and not line.startswith(own))


def recorded(folder: Path) -> int:
    """How many results of a run have come so far."""
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("*-*.jsonl"))


def until(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Wait for something to be true while a command runs."""
    latest = time.monotonic() + LONGEST
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < latest, "it did not happen"
        time.sleep(0.02)


def comparable(results: tuple[CaseResult, ...]) -> list[CaseResult]:
    """Results without what differs from run to run."""
    return [replace(result, seconds=0.0) for result in results]


def test_dying_and_stopped_workers_change_no_result(cluster: Cluster, local: Run, tmp_path: Path) -> None:
    """Two workers are killed in the middle of 500 items, and one stops without a word."""
    options = ("--keep-going", "--cases-per-group", "1", "--timeout", "4")
    process = started(cluster.address, tmp_path, "kernels", *options)
    for count, number in ((50, signal.SIGKILL), (150, signal.SIGSTOP), (250, signal.SIGKILL)):
        until(lambda count=count: recorded(tmp_path) >= count and workers(cluster.raylet), process)
        os.kill(workers(cluster.raylet)[0], number)
    code, printed = finished(process)
    run = records.read(tmp_path)
    assert len({(r.kernel, r.device, r.group) for r in run.results}) == ITEMS
    assert Counter(map(key_of, run.results)) == Counter(map(key_of, local.results))
    assert comparable(run.results) == comparable(local.results)
    assert (run.broken, run.power, run.coverage) == ("", local.power, local.coverage)
    assert code == local.exit_code, printed


def key_of(result: CaseResult) -> tuple[Any, ...]:
    return result.kernel, result.device, result.group, result.case, result.counted


def test_a_cluster_that_was_there_lives_on(cluster: Cluster) -> None:
    """No worker of an earlier run is left on it."""
    assert not workers(cluster.raylet)
    assert any("raylet" in line for line in below(os.getpid()).values())


def test_deadly_and_slow_kernels_get_their_local_results(cluster: Cluster, tmp_path: Path) -> None:
    """A kernel that kills its process, one that hangs, and one whose worker holds up the end."""
    options = ("--keep-going", "--cases-per-group", "0", "--timeout", "3", "--device", "any")
    code, printed = finished(started(cluster.address, tmp_path, "deadly", *options))
    run = records.read(tmp_path)
    errored = {result.kernel: result for result in run.results if result.verdict is Verdict.ERRORED}
    assert Counter(result.verdict for result in run.results) == {Verdict.PASSED: 4 * 50 - 2, Verdict.ERRORED: 2}
    assert code == 2, printed
    assert "[2,7]" in errored["kills"].case
    assert errored["kills"].reason.startswith("the process died in this case without an exception")
    assert "[2,11]" in errored["hangs"].case
    assert errored["hangs"].reason.startswith("no result after 3 s (--timeout)")


def test_a_device_that_the_cluster_lacks_is_an_error_before_anything_starts(cluster: Cluster, tmp_path: Path) -> None:
    code, printed = finished(started(cluster.address, tmp_path, "kernels", "--device", "cuda"))
    assert code == 2
    assert "cuda" in printed and "Traceback" not in printed
    assert not workers(cluster.raylet)


def test_ctrl_c_reports_what_is_there_and_leaves_nothing(settings: Path, tmp_path: Path) -> None:
    process = started("local", tmp_path, "kernels", "--keep-going")
    until(lambda: recorded(tmp_path) >= 20, process)
    running = below(process.pid)
    assert any("raylet" in line for line in running.values())
    process.send_signal(signal.SIGINT)
    code, printed = finished(process)
    assert code == 130, printed
    assert "interrupted" in printed and "records in" in printed
    latest = time.monotonic() + 10
    while left := [line for pid, line in running.items() if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < latest, left
        time.sleep(0.1)
