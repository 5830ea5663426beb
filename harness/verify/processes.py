"""The processes of a run or a command that run kernels: how many, in which environment, and what results depend on.

Triton decides at import whether it compiles or interprets, so the CPU (interpreted) and an accelerator (compiled) need
processes of their own.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from lastbit.children.child import ChildProcess, may_fork
from lastbit.config import Config
from lastbit.devices import usable_cores
from lastbit.files import IMPORTED_FROM
from lastbit.trees import image

# Arbitrary: each takes memory for torch, and they share the memory bus.
MOST_ON_CPU = 8
"""Worker processes on a CPU, if it has as many cores: each of them uses one."""

PER_ACCELERATOR = 8
"""Worker processes for each accelerator: the host is what a case waits for, and the device is mostly idle.

On an H200 beside 16 cores, 8 of them verified 3.7 times as many cases as 2 (docs/measurements/bench_h200.md).
"""

_PACKAGES = ("lastbit", "torch", "triton", "hypothesis", "numpy", "ml_dtypes")


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


_READ_AT_IMPORT = {"triton": "TRITON_INTERPRET", "numpy": "OPENBLAS_NUM_THREADS"}
"""Module → the variable of the environment that it reads when it is imported, and never again."""


def child_for(
    config: Config,
    device_type: str,
    serve: Callable[[int], None],
    log: IO[bytes] | None,
    launcher: Sequence[str] = (),
    environ: Mapping[str, str] = MappingProxyType({}),
    **of_channel: Any,
) -> ChildProcess:
    """Start a process for a configuration's kernels on devices of one type, in which `serve` gets a channel.

    It is forked where a fork of this process does what a new one would, and need not import torch again.
    """
    other = launcher or environ or config.site or config.tree or config.revisions
    environ = {**environment_for(device_type, config.site, config.tree), **environ}
    alike = all(
        module not in sys.modules or os.environ.get(variable) == environ[variable]
        for module, variable in _READ_AT_IMPORT.items()
    )
    if not other and device_type == "cpu" and alike and may_fork():
        return ChildProcess.forked(serve, environ, log=log, **of_channel)
    name, module = serve.__name__, serve.__module__
    program = f"import sys; from {module} import {name}; {name}(int(sys.argv[1]))"
    return ChildProcess(
        lambda descriptor: [*launcher, sys.executable, "-c", program, str(descriptor)],
        environ,
        folder=working_folder(config.tree),
        log=log,
        **of_channel,
    )


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
