"""Options that several commands share, and the configuration that they make."""

from __future__ import annotations

import argparse
import re
import secrets
import time
from collections.abc import Callable, Mapping
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
from lastbit.verify.processes import MOST_ON_CPU, PER_ACCELERATOR

RUNS = Path(".lastbit", "runs")
"""Where runs are kept unless they are told otherwise, below the working directory."""


_SHARED: Mapping[str, Mapping[str, Any]] = {
    "--device": {"default": "cpu", "help": "auto, or torch devices as in cpu,cuda:1 (default: cpu)"},
    "--timeout": {
        "type": float,
        "metavar": "SECONDS",
        "default": 120.0,
        "help": "seconds that one case may take (default: 120)",
    },
    "--uncovered": {
        "action": "store_true",
        "help": "list every branch of the kernels' own files that no case reached",
    },
    "--isolate": {
        "action": "store_true",
        "help": "call kernels in processes of their own, which have neither reference nor seeds nor records",
    },
    "-v": {
        "action": "count",
        "dest": "verbose",
        "default": 0,
        "help": "print the table of stages, statistics and notices, too; "
        "-vv: coverage, and what the run could not have seen",
    },
}


def add_shared(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add options that mean the same in every command that has them."""
    for name in names:
        parser.add_argument(name, **_SHARED[name])


KERNEL = "the path of kernels (my_kernels, my_kernels/norms.py, my_kernels/norms.py::norm), or the name of one (norm)"
CASE = (
    "a case: its line, in quotes, as verify prints it with a finding or as you write it ('OP x=bf16[1,70] … seed=11')"
)
NO_KERNEL = "no kernel of {} is here; give the path of yours, as in my_kernels or my_kernels/norms.py"


def add_words(parser: argparse.ArgumentParser, shape: str, help: str = "") -> None:
    """Add the words that name kernels and cases, of which `shape` says how many, and what says where ops are.

    `config_of` reads them, wherever they stand.
    """
    parser.usage = f"%(prog)s {shape} [--OPTION …]"
    about = help or "; ".join([KERNEL] * ("KERNEL" in shape) + [CASE] * ("CASE" in shape))
    parser.add_argument(
        "words", nargs="*", metavar=" ".join(re.findall(r"'?[A-Z]+'?", shape.partition(" --")[0])), help=about
    )
    help = "a folder with references/, cases/ and kernels/ of yours (repeatable)"
    parser.add_argument("--project", action="append", default=[], metavar="DIR", help=help)


def add_tried(parser: argparse.ArgumentParser, per_group: int | None) -> None:
    """Add on which cases contracts are tried, `per_group` or as many as a profile says, and how many combinations."""
    help = "take the case lines of this file instead of generated cases"
    parser.add_argument("--cases", type=Path, metavar="FILE", help=help)
    many = f" (default: {per_group})" if per_group else ", in place of the profile's"
    parser.add_argument(
        "--cases-per-group", type=int, metavar="N", default=per_group, help=f"generated cases per group{many}"
    )
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="seed of the generated cases")
    help = "most combinations to try (default: 5000)"
    parser.add_argument("--combinations", type=int, metavar="N", default=5000, help=help)


def add_run(parser: argparse.ArgumentParser, *, workers: str | None = None) -> None:
    """Add what a run of worker processes needs: as many of them as `workers` says, or as the devices call for."""
    add_shared(parser, "--timeout")
    help = "notices fail a case, and a kernel is inconclusive if no case reached code of it that handles inputs"
    parser.add_argument("--strict", action="store_true", help=help)
    help = "where the records go (default: below .lastbit/runs)"
    parser.add_argument("--run-folder", type=Path, metavar="FOLDER", help=help)
    own = f"one for each core, at most {MOST_ON_CPU}, or {PER_ACCELERATOR} for each accelerator; for a given case one"
    help = f"worker processes per type of device (default: {workers or own})"
    parser.add_argument("-n", dest="workers", metavar="N", type=_workers, default=workers, help=help)


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


def seed(text: str) -> int | None:
    """Parse a number, or `random` as None: a seed for each case that nobody knows before it runs."""
    if text != "random" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor random")
    return None if text == "random" else int(text)


def whole_number(least: int, other: str = "") -> Callable[[str], int]:
    """Make a parser of whole numbers from `least` on; its error ends in what else the option takes."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} on{other}")
        return int(text)

    return read


def workers_of(options: argparse.Namespace) -> int | None:
    """Return the number of workers of -n; None where it is left to the devices."""
    asked, on_cluster = options.workers or "", vars(options).get("cluster") is not None
    return int(asked) if asked.isdecimal() else usable_cores() if asked and not on_cluster else None


def _workers(text: str) -> str:
    """Parse the number of workers; even one is a process of its own, so that a kernel that ends it ends no run."""
    return text if text in ("auto", "logical") else str(whole_number(1, ", nor auto")(text))


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
