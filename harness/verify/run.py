"""A run: one pytest process per type of device, its workers' records brought together.

Triton decides at import whether it compiles or interprets, so the CPU (interpreted) and an accelerator (compiled) need
processes of their own.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

from harness.calibrate import load_premises
from harness.case import parse_case
from harness.config import Config
from harness.errors import LastbitError
from harness.result import BAD, CaseResult, NotRun, Run, Verdict
from harness.verify import suite
from harness.verify.power import agreement_of, power_of
from harness.verify.project import BUILT_IN, open_project

PLAN_FILE, DONE_FILE = "{device}.plan.json", "{device}.done.json"
_RAN, _STOPPED = (0, 1, 5), 2  # statuses of pytest: all passed, some failed, nothing selected; stopped by -x
_PACKAGES = ("lastbit", "torch", "triton", "hypothesis", "numpy", "ml_dtypes")
Parse = Callable[[bytes, str], CaseResult]


@dataclass(frozen=True)
class Child:
    """The pytest process of one type of device."""

    device_type: str
    process: subprocess.Popen[bytes]
    log: Path


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


def planned(config: Config, children: Sequence[Child]) -> int | None:
    """Number of cases that the processes will run, once all of them know."""
    plans = [_plan_of(config, c) for c in children]
    return sum(int(p["cases"]) for p in plans) if all(plans) else None


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


def collect(config: Config, children: Sequence[Child], recorded: Sequence[CaseResult]) -> Run:
    """The finished run.

    Raises:
        LastbitError: a process could not make its plan; the message is its own.
    """
    for child in children:
        if not _plan_of(config, child):
            raise LastbitError(_last_words(child.log))
    results = [*recorded, *_died(config)]
    not_run = [NotRun(**n) for c in children for n in _plan_of(config, c)["not_run"]]
    if not torch.accelerator.is_available():
        not_run.append(NotRun("every kernel on an accelerator", "torch finds none; the CPU runs Triton interpreted"))
    statuses = {c: _status(config, c) for c in children}
    stopped = any(r.verdict in BAD for r in results)
    if stopped and _STOPPED in statuses.values():
        not_run.append(NotRun("what came after the first failure", "-x or --maxfail stopped pytest"))
    ended = (*_RAN, _STOPPED) if stopped else _RAN
    broken = [f"pytest for {c.device_type} ended early; see {c.log}" for c, s in statuses.items() if s not in ended]
    return Run(
        results=tuple(results),
        broken="; ".join(broken),
        power=power_of(results, open_project(config)),
        not_run=tuple(not_run),
        agreement=agreement_of(results),
        environment=environment_of(config),
    )


def _plan_of(config: Config, child: Child) -> dict[str, Any]:
    """The plan that the process wrote down, empty if it could not make one."""
    path = Path(config.folder) / PLAN_FILE.format(device=child.device_type)
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def _status(config: Config, child: Child) -> int | None:
    """The status with which pytest said that it ended, None if it did not come to say so."""
    path = Path(config.folder) / DONE_FILE.format(device=child.device_type)
    return int(json.loads(path.read_text())["status"]) if path.is_file() else None


def _last_words(log: Path) -> str:
    """The error that ended a process: from the first line that says so, or else the last lines."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    first = next((i for i, line in enumerate(lines) if line.startswith("ERROR: ")), len(lines) - 20)
    return "\n".join(lines[max(first, 0) :]).removeprefix("ERROR: ")


def _died(config: Config) -> Iterator[CaseResult]:
    """A result for every case in the middle of which a worker process ended."""
    for path in sorted(Path(config.folder).glob("*.started")):
        under_way = json.loads(path.read_text())
        trace = path.with_suffix(".trace")
        hung = trace.is_file() and "Timeout" in trace.read_text()
        reason = (
            f"no result after {under_way['limit']:g} s (--timeout), so its process was stopped; see {trace}"
            if hung
            else "the process died in this case without an exception; the other cases of its group did not run"
        )
        case = parse_case(under_way["case"])
        yield CaseResult(
            case=under_way["case"],
            op=case.op,
            kernel=under_way["kernel"],
            contract=under_way["contract"],
            device=under_way["device"],
            dtypes=case.dtypes,
            verdict=Verdict.ERRORED,
            reason=reason,
            group=under_way["group"],
            source=under_way["source"],
        )


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
