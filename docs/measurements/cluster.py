"""How many cases per second one worker of a Ray cluster verifies, and two; and what one poisoned GPU of two costs.

    python3 docs/measurements/cluster.py cores       # clusters of one core and of two
    python3 docs/measurements/cluster.py gpus        # of one GPU and of two; `gpus 2` first, so that all is compiled
    python3 docs/measurements/cluster.py poison      # of two GPUs, one of which a kernel leaves unusable

The clusters are started on this machine, one after the other, and run the same items. The rate
is that of the time from the first result to the last. What CPU the cluster and the driver took in that time stands
beside it: where others use the machine, the time grows, and that hardly does.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from lastbit.config import Config
from lastbit.crew.campaign import Campaign, Machines, on_cluster
from lastbit.crew.ray_calls import RayPool
from lastbit.result import CaseResult
from lastbit.run import Run
from lastbit.verify.processes import PER_ACCELERATOR

PROJECT = Path(__file__).parents[2] / "tests" / "cluster_project"
RULES = ("rounded_sum", "unrounded_sum", "rounded_value")
EAGER = tuple(f"eager[{weight}_multiply+{rule}]" for weight in ("fp32", "native") for rule in RULES)
ON_CORES = Config(folder="", ops=("rms_norm",), kernels=("F.rms_norm", "eager[fp32_multiply+rounded_sum]"))
ON_GPUS = Config(folder="", ops=("rms_norm",), kernels=("F.rms_norm", *EAGER), cases=24)
POISON = Config(
    folder="",
    ops=("halved_sum",),
    projects=(str(PROJECT),),
    kernel_folders=(str(PROJECT / "poisonous"),),
    cases=4,
    keep_going=True,
)
_LOOK = 0.5  # seconds between two looks at the CPU that was taken


@dataclass(frozen=True)
class Measured:
    """A run by when its results came, with the CPU that the cluster and the driver had taken by then; seconds, all."""

    times: list[tuple[float, float]]
    whole: float

    @property
    def seconds(self) -> float:
        """From the first result to the last."""
        return self.times[-1][0] - self.times[0][0]

    @property
    def cpu(self) -> float:
        """CPU between these."""
        return self.times[-1][1] - self.times[0][1]

    @property
    def rate(self) -> float:
        """Results per second."""
        return (len(self.times) - 1) / self.seconds

    def __str__(self) -> str:
        return (
            f"{len(self.times):,} results in {self.seconds:.1f} s from first to last, {self.rate:.1f} per second, "
            f"{1e3 * self.cpu / len(self.times):.1f} ms of CPU each, {self.whole:.1f} s until the actors had ended"
        )


def main(what: str, *counts: str) -> None:
    if what == "poison":
        poisoned()
    else:
        compared(what == "gpus", tuple(map(int, counts)) or (1, 2))


def compared(gpus: bool, counts: Sequence[int]) -> None:
    """Print the rates of so many cores or GPUs, and what more of them gain."""
    found: list[Measured] = []
    for count in counts:
        cores = count * (PER_ACCELERATOR if gpus else 1)
        one, run = measured(ON_GPUS if gpus else ON_CORES, gpus=count if gpus else 0, cores=cores)
        found.append(one)
        print(f"{count} {'GPU' if gpus else 'core'}{'s' * (count > 1)}: {one} · {verdicts(run)}", flush=True)
        print(f"  {one.rate / found[0].rate:.2f} × the first per second, {found[0].whole / one.whole:.2f} × in all")


def poisoned() -> None:
    """Print what comes of a run in which a kernel leaves a GPU unusable."""
    _, run = measured(POISON, gpus=2, cores=4)
    print(verdicts(run), f"· broken: {run.broken or 'no'}")
    for result in run.results:
        if result.verdict != "PASSED":
            print(f"{result.verdict} {result.kernel} {result.group} {result.case}: {result.reason}")
    for note in run.not_run:
        print(f"not run: {note.what}: {note.reason}")


def verdicts(run: Run) -> str:
    return ", ".join(f"{verdict} {count:,}" for verdict, count in Counter(r.verdict for r in run.results).items())


def measured(config: Config, *, cores: int, gpus: int) -> tuple[Measured, Run]:
    """Run on a cluster of its own, and return the figures."""
    with tempfile.TemporaryDirectory(prefix="run") as folder, cluster(cores, gpus) as address:
        began = time.monotonic()
        with on_cluster(replace(config, folder=folder), address, "cuda" if gpus else "cpu", None) as connected:
            times, campaign = followed(connected)
        whole = time.monotonic() - began
        print(Path(folder, "cluster.log").read_text(), end="")
        return Measured(times, whole), campaign.run


def followed(connected: Machines) -> tuple[list[tuple[float, float]], Campaign]:
    """Return what was done on a cluster, and for each result when it came and the CPU that was taken by then."""
    times: list[tuple[float, float]] = []
    looked = [-_LOOK, 0.0]

    def tell(result: CaseResult) -> None:
        if time.monotonic() - looked[0] > _LOOK:
            looked[:] = [time.monotonic(), cpu_below(os.getpid())]
        times.append((time.monotonic(), looked[1]))

    pool = RayPool(connected.config.devices)
    campaign = Campaign(connected, pool)
    campaign.tell = tell
    try:
        campaign.open()
        campaign.work()
        return times, campaign
    finally:
        pool.close()


@contextmanager
def cluster(cores: int, gpus: int) -> Iterator[str]:
    """Start a cluster of this machine, yield its address, and stop it."""
    from ray.cluster_utils import Cluster as RayCluster

    head = {"num_cpus": cores, "num_gpus": gpus, "include_dashboard": False, "object_store_memory": 100 << 20}
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": folder}
        started = RayCluster(initialize_head=True, head_node_args=head)
        try:
            yield started.address
        finally:
            started.shutdown()


def cpu_below(root: int) -> float:
    """Add the seconds of CPU, of users and system, that the processes below one took, those that ended included."""
    ticks: dict[int, int] = {}
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
