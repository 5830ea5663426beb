"""The items of a run whose kernels are called in processes of their own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from lastbit.config import Config
from lastbit.files import IMPORTED_FROM
from lastbit.isolation.declared import Kernels
from lastbit.isolation.isolated import Isolated
from lastbit.isolation.process import ForkServer
from lastbit.verify.plan import Item
from lastbit.verify.run import caches_of

_SLACK = 60.0  # seconds after which the judge of a kernel in another process is taken to hang itself


def limit_of(config: Config) -> float:
    """Seconds that a case may take where it is judged: a kernel in another process is ended there before."""
    return config.timeout + _SLACK * config.isolate


def kernels_for(config: Config, device_type: str, *, caches: Path | None = None) -> Kernels:
    """What loads and calls the kernels of a run on devices of one type, in processes that begin to start now.

    What they compile lies in `caches`, or where the run that was started on this machine has it.
    """
    server = ForkServer()
    server.begin()
    readable = (*(Path(folder).resolve() for folder in config.site), *_on_the_path())
    return Kernels(server, device_type, readable=readable, caches=caches or caches_of(config), printed=_print)


def _on_the_path() -> Iterator[Path]:
    """What kernels may import of the working directory and of PYTHONPATH, lastbit's own folder left out there."""
    named = (Path(name) for name in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(name))
    for folder in dict.fromkeys([Path.cwd(), *(folder for folder in named if folder != IMPORTED_FROM)]):
        if os.path.isdir(folder) and os.access(folder, os.R_OK | os.X_OK):
            yield from _importable(folder)


def _importable(folder: Path) -> Iterator[Path]:
    """The modules of a folder that kernels may import: not all that it holds, such as the records of runs."""
    for path in folder.iterdir():
        if path.suffix == ".py" or (path / "__init__.py").is_file():
            yield path


def _print(whose: str, text: str) -> None:
    print(f"printed in a process of {whose}:\n{text}", file=sys.stderr)


@contextmanager
def in_processes(item: Item, kernels: Kernels | None, timeout: float) -> Iterator[Item]:
    """The item with its kernel in processes that have loaded it, which end with the context; without `kernels` as is.

    Raises:
        LastbitError: its file cannot be loaded.
    """
    if kernels is None:
        yield item
        return
    subject = item.subject
    with kernels.pair(subject.kernel, timeout) as pair:
        yield replace(item, subject=replace(subject, performer=Isolated(pair, subject.device)))
