"""Options that several commands share, and the configuration that they make."""

from __future__ import annotations

import argparse
import secrets
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from lastbit.case import parse_case
from lastbit.command_line import read_words
from lastbit.config import Config
from lastbit.devices import plan_devices, usable_cores
from lastbit.errors import UsageError
from lastbit.files import BUILT_IN, PACKAGE
from lastbit.verify.case_files import read_cases

RUNS = Path(".lastbit", "runs")
"""Where runs are kept unless they are told otherwise, below the working directory."""


NO_KERNEL = "no kernel of {} is here; give the path of yours, as in my_kernels or my_kernels/norms.py"


def kernels_here(options: argparse.Namespace) -> dict[str, Any] | None:
    """Return the settings for the kernels of the working directory where no word names any, None if it has none.

    In a checkout of lastbit, and where words or --project say it, there is nothing to set.
    """
    asked = read_words(options.words)
    at_home = BUILT_IN != PACKAGE and Path.cwd().is_relative_to(BUILT_IN)
    if at_home or asked.paths or asked.kernels or options.project:
        return {}
    if "kernels" not in (folders := kernel_folders_here()):
        return None
    return {"kernel_folders": ("kernels",), "projects": (".",) * bool(folders & {"references", "cases"})}


def kernel_folders_here() -> set[str]:
    """Return the names of folders of the working directory with files that name lastbit: others are none of its."""

    def names_lastbit(file: Path) -> bool:
        return file.is_file() and "lastbit" in file.read_text(encoding="utf-8", errors="replace")

    return {path.name for path in Path().iterdir() if any(map(names_lastbit, path.glob("*.py")))}


def workers_of(options: argparse.Namespace) -> int | None:
    """Return the number of workers of -n; None where it is left to the devices."""
    asked, on_cluster = options.workers or "", vars(options).get("cluster") is not None
    return int(asked) if asked.isdecimal() else usable_cores() if asked and not on_cluster else None


def config_of(options: argparse.Namespace, **changes: Any) -> Config:
    """Return the configuration that words, the options of the functions above and --cases make, with `changes`.

    Where kernels are is checked first: to ask for devices imports torch, which takes seconds.
    """
    given = vars(options)
    asked = read_words(given.get("words", ()))
    cases = [parse_case(line) for line in asked.cases]
    if given.get("cases") is not None:
        cases += read_cases(options.cases)
    settings: dict[str, Any] = {
        "kernels": asked.kernels,
        "projects": tuple(options.project),
        "kernel_folders": asked.paths,
        "lines": tuple(map(str, cases)),
        "properties": tuple(given.get("property", ())),
        **{name: given.get(name, False) for name in ("strict", "sanitize", "isolate")},
    }
    if "timeout" in given:
        settings["timeout"] = options.timeout
    if "run_folder" in given:  # `Config.save` makes it when the run begins, so that bad input leaves none behind
        folder = options.run_folder or Path(RUNS, f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}")
        if options.run_folder is not None and folder.exists() and any(folder.iterdir()):
            raise UsageError(f"run folder {str(folder)!r} is not empty; a run needs a folder of its own")
        settings["folder"] = str(folder)
    config = Config(**{"folder": "", **settings, **changes})
    config.check_places()
    on_cluster = given.get("cluster") is not None  # which says itself what devices it has
    return config if on_cluster else replace(config, device_plan=plan_devices(options.device))
