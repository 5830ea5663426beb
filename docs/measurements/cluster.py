"""How many cases per second one worker verifies in a Ray cluster of this machine, and two: on cores, or on GPUs.

    python3 docs/measurements/cluster.py cores
    python3 docs/measurements/cluster.py gpus [--warm]
    python3 docs/measurements/cluster.py poison

Each run is `lastbit verify --cluster ADDRESS` on a cluster that has one core or GPU for it, or two. The rate is that of
the time from the first result to the last; the whole time is that of the command. What CPU the cluster and its workers
took is beside it, because a machine on which others work makes the time longer, and not that.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parents[2]
PROJECT = HERE / "tests" / "cluster_project"
ON_CORES = ("--op", "rms_norm", "--device", "cpu", "--profile", "smoke")
ON_GPUS = ("--op", "rms_norm", "--device", "cuda", "--profile", "ci")
POISON = ("--op", "halved_sum", "--project", str(PROJECT), "--kernels", str(PROJECT / "poisonous"), "--keep-going")
PER_GPU = 8


@dataclass(frozen=True)
class Measured:
    """A run: how many results, seconds from the first to the last, of the whole command, and of CPU."""

    results: int
    between: float
    whole: float
    cpu: float
    said: str

    @property
    def rate(self) -> float:
        return self.results / self.between

    def __str__(self) -> str:
        return (
            f"{self.results:,} results, {self.between:.1f} s from the first to the last, {self.rate:.1f} per second, "
            f"{self.whole:.1f} s in all, {self.cpu:.1f} s of CPU · {self.said}"
        )


def main(what: str, *options: str) -> None:
    if what == "poison":
        with cluster(cores=2 * PER_GPU, gpus=2) as address:
            print(measured(address, [*POISON, "--device", "cuda"], show=True))
        return
    compared(ON_CORES if what == "cores" else ON_GPUS, gpus=what == "gpus", warm="--warm" in options)


def compared(options: Sequence[str], *, gpus: bool, warm: bool) -> None:
    """Print the rates of one worker and of two, on clusters of their own."""
    found: list[Measured] = []
    for count in (2,) if warm else (1, 2):
        with cluster(cores=count * (PER_GPU if gpus else 1), gpus=count if gpus else 0) as address:
            found.append(measured(address, options))
        print(f"{count} {'GPU' if gpus else 'core'}{'s' * (count > 1)}: {found[-1]}", flush=True)
    if not warm:
        first, second = found
        print(f"two of one: {second.rate / first.rate:.2f} × per second, {first.whole / second.whole:.2f} × in all")
        print(f"results per second of CPU: {first.results / first.cpu:.1f} and {second.results / second.cpu:.1f}")


@contextmanager
def cluster(*, cores: int, gpus: int) -> Iterator[str]:
    """A cluster of this machine, and its address."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": cores, "num_gpus": gpus, "include_dashboard": False, "object_store_memory": 100 << 20}
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        os.environ["RAY_AUTH_MODE"] = "disabled"
        started = Cluster(initialize_head=True, head_node_args={**head, "temp_dir": folder})
        try:
            yield started.address
        finally:
            started.shutdown()


def measured(address: str, options: Sequence[str], *, show: bool = False) -> Measured:
    """A run on the cluster; what it prints goes to the terminal where it is to be shown."""
    with tempfile.TemporaryDirectory(prefix="run") as name:
        folder, began, before = Path(name, "run"), time.monotonic(), cpu_below(os.getpid())
        command = [
            sys.executable,
            "-m",
            "harness",
            "verify",
            "--cluster",
            address,
            "--run-folder",
            str(folder),
            *options,
        ]
        with Path(name, "printed").open("w+") as printed:
            process = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT, cwd=HERE)
            moments: list[tuple[float, int]] = []
            used = before
            while process.poll() is None:
                moments.append((time.monotonic(), recorded(folder)))
                used = max(used, cpu_below(os.getpid()))
                time.sleep(0.05)
            whole = time.monotonic() - began
            printed.seek(0)
            text = printed.read()
    if show:
        print(text)
    total = max((count for _, count in moments), default=0)
    first = next((moment for moment, count in moments if count), began)
    last = next((moment for moment, count in moments if count >= total), began)
    return Measured(total, max(last - first, 1e-9), whole, used - before, (text.splitlines() or [""])[-1])


def recorded(folder: Path) -> int:
    """How many results of a run have come so far."""
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("*-*.jsonl"))


def cpu_below(root: int) -> float:
    """Seconds of CPU, of users and system, that the processes below one took, those that have ended included."""
    ticks: dict[int, float] = {}
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(path.parent.name)] = int(fields[1])
        ticks[int(path.parent.name)] = sum(map(int, fields[11:15]))

    def descends(pid: int) -> bool:
        return pid in parents and (parents[pid] == root or descends(parents[pid]))

    return sum(ticks[pid] for pid in ticks if descends(pid)) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main(*sys.argv[1:])
