"""A run: one pytest process per type of device, whose workers' records are put together.

Triton decides at import whether it compiles or interprets, so the CPU (interpreted) and an accelerator (compiled) need
processes of their own.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from lastbit.config import Config
from lastbit.devices import usable_cores
from lastbit.files import IMPORTED_FROM
from lastbit.isolation.folders import remove
from lastbit.result import CaseResult
from lastbit.trees import image
from lastbit.verify.notes import Notes

_OF_PYTEST = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD")
"""Variables by which a test run beside lastbit is set up: they must not choose what is verified."""

_SUITE = Path(__file__).with_name("suite.py")

# Arbitrary: each takes memory for torch, and they share the memory bus.
MOST_ON_CPU = 8
"""Worker processes on a CPU, if it has as many cores: each of them uses one."""

PER_ACCELERATOR = 8
"""Worker processes for each accelerator: the host is what a case waits for, and the device is mostly idle.

On an H200 beside 16 cores, 8 of them verified 3.7 times as many cases as 2 (docs/measurements/bench_h200.md).
"""

# Arbitrary: they have nothing to save, as records are written line by line.
_GRACE = 1.0  # seconds that processes have to end themselves when they are told to
# Arbitrary: longer is seen when a run ends, shorter takes CPU from the workers.
_PAUSE = 0.1  # seconds between two looks at processes that run

_PACKAGES = ("lastbit", "torch", "triton", "hypothesis", "numpy", "ml_dtypes")
Parse = Callable[[bytes, str], CaseResult]


@dataclass(frozen=True)
class Child:
    """The pytest process of one type of device."""

    device_type: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def notes(self) -> Notes:
        return Notes(self.log.parent, self.device_type)


@contextmanager
def processes(config: Config, arguments: Sequence[str]) -> Iterator[list[Child]]:
    """Start the processes of a run, which end with the context at the latest; `arguments` go to pytest."""
    path = config.save()
    path.with_name(".gitignore").write_text("*\n")  # records are no sources
    children: list[Child] = []
    try:
        for device_type in config.device_plan.types:
            children.append(_start(config, path, device_type, arguments))
        yield children
    finally:
        end(children)
        if config.isolate:
            remove(caches_of(config))


def workers_for(device_type: str, config: Config) -> int:
    """Return the number of worker processes for a type of device, unless -n says otherwise.

    Several share an accelerator: a case there waits for the host.
    """
    devices = sum(device.partition(":")[0] == device_type for device in config.devices)
    return min(usable_cores(), MOST_ON_CPU if device_type == "cpu" else PER_ACCELERATOR * devices)


def environment_for(device_type: str, site: Sequence[str] = (), tree: str = "") -> dict[str, str]:
    """Return the environment of a process that runs Triton on devices of one type: interpreted on the CPU, or compiled.

    Packages in the folders `site` come before installed ones. With the `tree` of a revision, folders of other checkouts
    of its repository are that one's: those of PYTHONPATH, those that editable installations add, and the last one.
    """
    # The working directory comes last: what lies there must not hide what was installed.
    named = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    if tree:
        added = (folder for folder in sys.path if os.path.isabs(folder) and image(folder, tree) != folder)
        named = [image(folder, tree) for folder in [*named, *added]]
    path = os.pathsep.join(dict.fromkeys([*site, str(IMPORTED_FROM), *named, working_folder(tree)]))
    mode = "1" if device_type == "cpu" else "0"
    environment = dict(os.environ, PYTHONPATH=path, PYTHONSAFEPATH="1", TRITON_INTERPRET=mode)
    # numpy would start a thread for each core in every worker, which spins for some milliseconds after larger products.
    return environment | {"OPENBLAS_NUM_THREADS": "1"}


def working_folder(tree: str) -> str:
    """Return the working directory of a process of a revision: today's, as it is called in the revision's worktree."""
    folder = image(os.getcwd(), tree) if tree else os.getcwd()
    return folder if os.path.isdir(folder) else tree


def caches_of(config: Config) -> Path:
    """Return the folder of compiled kernels of an isolated run, common to its workers; it is removed with the run."""
    name = hashlib.sha256(str(Path(config.folder).resolve()).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir(), f"lastbit-{name}")


def _start(config: Config, path: Path, device_type: str, arguments: Sequence[str]) -> Child:
    environment = environment_for(device_type, config.site, config.tree)
    environment |= {"LASTBIT_CONFIG": str(path.resolve()), "LASTBIT_DEVICE": device_type}
    environment = {name: value for name, value in environment.items() if name not in _OF_PYTEST}
    log = Path(config.folder) / f"{device_type}.log"
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(_SUITE.parent), str(_SUITE)]
    command += ["-p", "lastbit.plugin", "-p", "no:hypothesispytest", "--no-header", "-q", "-rN"]
    command += ["--assert=plain"]  # to rewrite the assertions of Hypothesis, a plugin of pytest, takes a second
    command += ["-o", f"cache_dir={Path('.lastbit', 'cache').resolve()}", "--max-worker-restart=10000"]
    command += ["-n", str(workers_for(device_type, config)), *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=working_folder(config.tree),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that it ends with all its workers, and only when it is told to
        )
    return Child(device_type, process, log)


class RunResults:
    """The results of a run as its workers record them; each line is read once."""

    def __init__(self, config: Config, parse: Parse) -> None:
        self._folder, self._parse = Path(config.folder), parse
        self._read: dict[Path, int] = {}
        self.all: list[CaseResult] = []

    def new(self) -> list[CaseResult]:
        """Return the results recorded since the last call; a line that is still being written is left for the next."""
        found: list[CaseResult] = []
        for path in sorted(self._folder.glob("*-*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                complete, newline, _ = file.read().rpartition(b"\n")
            self._read[path] = self._read.get(path, 0) + len(complete) + len(newline)
            found += [self._parse(line, str(path)) for line in complete.splitlines()]
        self.all += found
        return found


def planned(children: Sequence[Child]) -> int | None:
    """Count the cases that the processes will run; None until all of them have a plan."""
    plans = [child.notes.read("plan") for child in children]
    return sum(int(item["cases"]) for plan in plans for item in plan["items"]) if plans and all(plans) else None


def wait(children: Sequence[Child], tick: Callable[[], None]) -> None:
    """Wait for all processes, calling `tick` now and then."""
    while any(child.process.poll() is None for child in children):
        tick()
        time.sleep(_PAUSE)


def end(children: Sequence[Child]) -> None:
    """End running processes and all that they started; kill them after a moment."""
    running = [child for child in children if child.process.poll() is None]
    try:
        _signal(running, signal.SIGTERM)
        latest = time.monotonic() + _GRACE
        for child in running:
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(max(latest - time.monotonic(), 0))
    finally:
        _signal(running, signal.SIGKILL)
        for child in running:
            child.process.wait()


def _signal(children: Sequence[Child], number: signal.Signals) -> None:
    """Send a signal to the sessions of processes; ignore those that have ended."""
    for child in children:
        with suppress(ProcessLookupError):
            os.killpg(child.process.pid, number)


def environment_of(config: Config) -> dict[str, str]:
    """Return the versions, devices and settings that results depend on."""
    import torch

    from lastbit.calibrate import load_premises

    devices = [torch.device(d) for d in config.devices]
    accelerators = [torch.get_device_module(d).get_device_name(d) for d in devices if d.type != "cpu"]
    return {
        **versions(config.site),
        **settings_of(
            config,
            accelerators=", ".join(accelerators),
            premises="; ".join(f"{d}: {load_premises(d).device}" for d in devices),
        ),
    }


def versions(site: Sequence[str] = ()) -> dict[str, str]:
    """Return the versions of Python and of packages that results depend on, as processes of a run import them."""
    return {"python": platform.python_version(), **{name: _version(name, site) for name in _PACKAGES}}


def settings_of(config: Config, *, accelerators: str, premises: str) -> dict[str, str]:
    """Return the devices and settings of a run, given the names of its accelerators and premises."""
    return {
        "devices": ", ".join(config.devices),
        "device_plan": str(config.device_plan),
        "accelerators": accelerators,
        "premises": premises,
        "options": options_of(config),
        "profile": config.profile,
        "seed": "random" if config.random else str(config.seed),
        "cases_per_group": str(config.cases_per_group),
        "records": config.folder,
    }


def options_of(config: Config) -> str:
    """Return the command-line options that reproduce where kernels and ops are, and how this run calls them."""
    folders = [("--kernels", f) for f in config.kernel_folders] + [("--project", f) for f in config.projects]
    return " ".join(
        [
            *(f"{option} {shlex.quote(folder)}" for option, folder in folders),
            *["--strict"] * config.strict,
            *["--isolate"] * config.isolate,
        ]
    )


def _version(package: str, site: Sequence[str]) -> str:
    """Return the version of a package that the run's processes import, from the folders `site` first."""
    found = next(iter(distributions(name=package, path=[*site, *sys.path])), None)
    return found.version if found else "not installed"
