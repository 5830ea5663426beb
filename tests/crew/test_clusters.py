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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lastbit.cli import main
from lastbit.commands.running import execute
from lastbit.config import Config
from lastbit.crew.campaign import Campaign, on_cluster
from lastbit.crew.ray_calls import RayPool
from lastbit.devices import plan_devices
from lastbit.reports import records
from lastbit.result import CaseResult, Verdict
from lastbit.run import Run

Cluster = pytest.importorskip("ray.cluster_utils", reason="lastbit[cluster] is not installed").Cluster

pytestmark = pytest.mark.slow

PROJECT = Path(__file__).parents[1] / "cluster_project"
ITEMS = 160
CORES = 2  # with the node that goes, three workers
STORE = {"object_store_memory": 100 << 20}
LONGEST = 120.0  # seconds that anything may take here


@pytest.fixture(scope="module")
def settings() -> Iterator[Path]:
    """Make a folder for what Ray keeps, whose name is short because sockets lie in it, and hide the user's token."""
    with tempfile.TemporaryDirectory(prefix="ray") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", folder)
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("DAWDLED", str(Path(folder, "dawdled")))
        yield Path(folder)


@pytest.fixture(scope="module")
def cluster(settings: Path) -> Iterator[Cluster]:
    """Start a cluster of one node, as somebody else would."""
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": CORES, "include_dashboard": False, **STORE})
    try:
        yield started
    finally:
        started.shutdown()


@pytest.fixture(scope="module")
def local(settings: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run the 160 items on this machine, without a cluster."""
    return execute(config_in(tmp_path_factory.mktemp("local")), workers=2, quiet=True)


def config_in(folder: Path) -> Config:
    """160 items, with a folder for their records; no case is left out because another one failed."""
    return Config(
        folder=str(folder),
        device_plan=plan_devices("cpu"),
        projects=(str(PROJECT),),
        kernel_folders=(str(PROJECT / "kernels"),),
        ops=("halved_sum",),
        cases=1,
        timeout=4.0,
        keep_going=True,
    )


def ran(config: Config, address: str, tell: Callable[[CaseResult], None]) -> Run:
    """Run on a cluster, driven by this process, which is told of each result."""
    with on_cluster(config, address, "cpu", None) as cluster:
        pool = RayPool(cluster.config.devices)
        try:
            campaign = Campaign(cluster, pool)
            campaign.tell = tell
            campaign.open()
            campaign.work()
        finally:
            pool.close()
    return campaign.run


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


def workers(cluster: Cluster) -> list[int]:
    """List the actors on the first node: those that Ray has called by their class, and that are not idle or its own."""
    raylet = cluster.head_node.all_processes["raylet"][0].process.pid
    own = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
    return sorted(pid for pid, line in below(raylet).items() if line.startswith("ray::") and not line.startswith(own))


class Trouble:
    """Does something to a cluster as soon as so many results have come."""

    def __init__(self, deeds: dict[int, Callable[[], None]]) -> None:
        self._deeds, self.results = deeds, 0

    def __call__(self, result: CaseResult) -> None:
        self.results += 1
        self._deeds.get(self.results, lambda: None)()


def test_workers_and_nodes_that_are_lost_change_no_result(cluster: Cluster, local: Run, tmp_path: Path) -> None:
    """In the middle of 160 items one worker stops without a word, two are killed, and one goes with its node."""
    sent: list[int] = []

    def send(number: signal.Signals) -> None:
        sent.append(next(pid for pid in workers(cluster) if pid not in sent))
        os.kill(sent[-1], number)

    node = cluster.add_node(num_cpus=1, **STORE)
    trouble = Trouble(
        {
            20: partial(send, signal.SIGSTOP),
            60: partial(send, signal.SIGKILL),
            100: partial(send, signal.SIGKILL),
            135: partial(cluster.remove_node, node, allow_graceful=False),
        }
    )
    run = ran(config_in(tmp_path), cluster.address, trouble)
    assert len({(r.kernel, r.device, r.group) for r in run.results}) == ITEMS
    assert [key_of(result) for result in run.results] == [key_of(result) for result in local.results]
    assert comparable(run.results) == comparable(local.results)
    assert (run.broken, run.power, run.coverage) == ("", local.power, local.coverage)
    assert run.exit_code == local.exit_code
    lost = (tmp_path / "cluster.log").read_text().count("was lost")
    assert lost >= 2, "of the two that were killed; one that stopped, or went before it had begun, may not be missed"


def key_of(result: CaseResult) -> tuple[Any, ...]:
    return result.kernel, result.device, result.group, result.case, result.counted


def comparable(results: tuple[CaseResult, ...]) -> list[str]:
    """Results without what differs from run to run; as text, since an exact value that is not known is NaN."""
    return [repr(replace(result, seconds=0.0)) for result in results]


def test_a_cluster_that_was_there_lives_on(cluster: Cluster) -> None:
    """No worker of an earlier run is left on it; Ray ends one that is stopped after five seconds."""
    until(lambda: not workers(cluster))
    assert cluster.head_node.remaining_processes_alive()


def verify(where: str, folder: Path, kernels: str, *options: str) -> list[str]:
    """Return the arguments of `lastbit verify` for a folder of kernels on a cluster."""
    choice = ["--op", "halved_sum", "--project", str(PROJECT), str(PROJECT / kernels)]
    return ["verify", "--cluster", where, *choice, "--run-folder", str(folder), *options]


def test_deadly_and_slow_kernels_get_their_local_results(cluster: Cluster, settings: Path, tmp_path: Path) -> None:
    """A kernel that kills its process, one that hangs, and one whose worker holds up the end."""
    lines = settings / "lines.txt"
    sizes = (5, 7, 11, *(13,) * 40, 17)
    lines.write_text("".join(f"halved_sum x=fp32[2,{n}] y=fp32[2,{n}] seed={i}\n" for i, n in enumerate(sizes)))
    options = ("--cases", str(lines), "--timeout", "4", "--device", "any")
    assert main(verify(cluster.address, tmp_path, "deadly", *options)) == 2
    results = records.read(tmp_path).results
    errored = {result.kernel: result for result in results if result.verdict is Verdict.ERRORED}
    assert Counter(result.kernel for result in results) == {"right": 44, "dawdles": 44, "kills": 2, "hangs": 3}
    assert "[2,7]" in errored["kills"].case
    assert errored["kills"].reason.startswith("the process died in this case without an exception")
    assert "[2,11]" in errored["hangs"].case
    assert errored["hangs"].reason.startswith("no result after 4 s (--timeout)")
    assert all(result.verdict is Verdict.PASSED for result in results if result not in errored.values())
    assert Path(os.environ["DAWDLED"]).read_text().isdecimal(), "nobody else ran the item that held up the end"


def test_isolated_kernels_end_their_own_processes_alone(cluster: Cluster, settings: Path, tmp_path: Path) -> None:
    """No worker is lost by a kernel that kills its process, and what it printed comes back."""
    lines = settings / "isolated.txt"
    lines.write_text("".join(f"halved_sum x=fp32[2,{n}] y=fp32[2,{n}] seed=1\n" for n in (5, 7)))
    options = ("--cases", str(lines), "--isolate", "right", "kills", "--device", "cpu")
    assert main(verify(cluster.address, tmp_path, "deadly", *options)) == 2
    results = records.read(tmp_path).results
    assert Counter(result.verdict for result in results) == {Verdict.PASSED: 3, Verdict.ERRORED: 1}
    [errored] = [result for result in results if result.verdict is Verdict.ERRORED]
    assert "[2,7]" in errored.case and errored.reason.startswith("its process was ended by signal SIGKILL")
    assert "was lost" not in (tmp_path / "cluster.log").read_text()
    assert "printed in a process of halved_sum.py:\nthe end of it" in (tmp_path / "cpu.log").read_text()


def test_a_device_that_the_cluster_lacks_is_an_error_before_anything_starts(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    until(lambda: not workers(cluster))  # those of a test before this one end a moment after it
    assert main(verify(cluster.address, tmp_path, "kernels", "--device", "cuda")) == 2
    assert "device 'cuda' was asked for, but the cluster has cpu (2 cores)" in capsys.readouterr().err
    assert not workers(cluster)


@pytest.mark.skipif(
    "PYTEST_XDIST_WORKER" in os.environ,
    reason="beside other tests Ray takes a minute to begin, and the interruption comes too late: run it without -n",
)
def test_ctrl_c_reports_what_is_there_and_leaves_nothing(settings: Path, tmp_path: Path) -> None:
    begun = Path(os.environ["DAWDLED"])
    begun.unlink(missing_ok=True)
    command = [sys.executable, "-m", "lastbit", *verify("local", tmp_path, "deadly", "dawdles", "-n", "1")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        until(begun.exists)
        running = below(process.pid)
        process.send_signal(signal.SIGINT)
        printed = process.communicate(timeout=LONGEST)[0]
    assert process.returncode == 130, printed
    assert "interrupted" in printed and "records in" in printed
    assert {result.verdict for result in records.read(tmp_path).results} == {Verdict.PASSED}
    assert any("raylet" in line for line in running.values())
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in running))


def until(condition: Callable[[], object]) -> None:
    """Wait for something to be true."""
    latest = time.monotonic() + LONGEST
    while not condition():
        assert time.monotonic() < latest, "it did not happen"
        time.sleep(0.05)
