"""A run: one pytest process per type of device, its workers' records brought together.

Triton decides at import whether it compiles or interprets, so the CPU (interpreted) and an accelerator (compiled) need
processes of their own.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

import torch

from harness.calibrate import load_premises
from harness.config import Config
from harness.result import CaseResult
from harness.verify import suite
from harness.verify.notes import Notes
from harness.verify.project import BUILT_IN

_OF_PYTEST = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD")
"""Variables by which a test run beside lastbit is set up: they must not choose what is verified."""

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


def start(config: Config, arguments: Sequence[str]) -> list[Child]:
    """Start the processes of a run; `arguments` go to pytest."""
    path = config.save()
    return [_start(config, path, device_type, arguments) for device_type in config.device_plan.types]


def environment_for(device_type: str, site: Sequence[str] = ()) -> dict[str, str]:
    """Environment of a process that runs Triton on devices of one type: interpreted on the CPU, else compiled.

    Packages in the folders `site` come before installed ones.
    """
    # The working directory comes last: a folder `reports` or `harness` there must not hide lastbit's own.
    path = os.pathsep.join(filter(None, [*site, str(BUILT_IN), os.environ.get("PYTHONPATH"), os.getcwd()]))
    mode = "1" if device_type == "cpu" else "0"
    return dict(os.environ, PYTHONPATH=path, PYTHONSAFEPATH="1", TRITON_INTERPRET=mode)


def _start(config: Config, path: Path, device_type: str, arguments: Sequence[str]) -> Child:
    environment = dict(environment_for(device_type, config.site), LASTBIT_CONFIG=str(path), LASTBIT_DEVICE=device_type)
    environment = {name: value for name, value in environment.items() if name not in _OF_PYTEST}
    log = Path(config.folder) / f"{device_type}.log"
    file = Path(suite.__file__)
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(file.parent), str(file)]
    command += ["-p", "harness.plugin", "-p", "no:hypothesispytest", "--no-header", "-q", "-rN"]
    command += ["-o", f"cache_dir={Path('.lastbit', 'cache').resolve()}", "--max-worker-restart=10000", *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    return Child(device_type, process, log)


class Results:
    """The results of a run as its workers record them; each line is read once."""

    def __init__(self, config: Config, parse: Parse) -> None:
        self._folder, self._parse = Path(config.folder), parse
        self._read: dict[Path, int] = {}
        self.all: list[CaseResult] = []

    def new(self) -> list[CaseResult]:
        """The results that have come since the last call. A line that is still being written is left for the next."""
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
    """Number of cases that the processes will run, once all of them know."""
    plans = [child.notes.read("plan") for child in children]
    return sum(int(item["cases"]) for plan in plans for item in plan["items"]) if all(plans) else None


def wait(children: Sequence[Child], tick: Callable[[], None], pause: float = 1.0) -> bool:
    """Wait for all processes, calling `tick` now and then; True if an interrupt stopped them."""
    try:
        while any(c.process.poll() is None for c in children):
            tick()
            time.sleep(pause)
    except KeyboardInterrupt:
        return True
    finally:
        for child in children:
            child.process.terminate()
            child.process.wait()
        tick()
    return False


def environment_of(config: Config) -> dict[str, str]:
    """Versions, devices and settings that results depend on."""
    packages = {name: _version(name, config.site) for name in _PACKAGES}
    devices = [torch.device(d) for d in config.devices]
    accelerators = [torch.get_device_module(d).get_device_name(d) for d in devices if d.type != "cpu"]
    return {
        "python": platform.python_version(),
        **packages,
        "devices": ", ".join(config.devices),
        "device_plan": str(config.device_plan),
        "accelerators": ", ".join(accelerators),
        "premises": "; ".join(f"{d}: {load_premises(d).device}" for d in devices),
        "options": options_of(config),
        "base": ", ".join(config.revisions),
        "profile": config.profile,
        "seed": str(config.seed),
        "cases_per_group": str(config.cases_per_group),
        "records": config.folder,
    }


def options_of(config: Config) -> str:
    """The options that say where kernels and ops are, for a command that runs a case of this run again."""
    folders = [("--kernels", f) for f in config.kernel_folders] + [("--project", f) for f in config.projects]
    return " ".join([*(f"{option} {shlex.quote(folder)}" for option, folder in folders), *["--strict"] * config.strict])


def _version(package: str, site: Sequence[str]) -> str:
    """The version that the processes of the run import, those in the folders `site` first."""
    found = next(iter(distributions(name=package, path=[*site, *sys.path])), None)
    return found.version if found else "not installed"
