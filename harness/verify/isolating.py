"""Isolation of a run's kernels: each item calls its kernel in processes of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from lastbit.config import Config
from lastbit.files import IMPORTED_FROM
from lastbit.isolation.elsewhere import Kernels
from lastbit.isolation.isolated import Isolated
from lastbit.isolation.process import ForkServer
from lastbit.verify.plan import Item
from lastbit.verify.processes import caches_of


def kernels_for(config: Config, device_type: str, *, caches: Path | None = None) -> Kernels:
    """Start a fork server and return the loader of a run's kernels on devices of one type.

    Compiled kernels are kept in `caches`, by default in the temporary folder of a run that was started on this machine.
    """
    server = ForkServer()
    server.begin()
    readable = (*(Path(folder).resolve() for folder in config.site), *_on_the_path())
    return Kernels(server, device_type, readable=readable, caches=caches or caches_of(config))


def _on_the_path() -> Iterator[Path]:
    """Yield the modules that kernels may import from the working directory and PYTHONPATH, except for lastbit's."""
    named = (Path(name) for name in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(name))
    for folder in dict.fromkeys([Path.cwd(), *(folder for folder in named if folder != IMPORTED_FROM)]):
        if os.path.isdir(folder) and os.access(folder, os.R_OK | os.X_OK):
            for path in folder.iterdir():  # nothing else in it, such as records of runs
                if path.suffix == ".py" or (path / "__init__.py").is_file():
                    yield path


@contextmanager
def in_processes(item: Item, kernels: Kernels | None, timeout: float) -> Iterator[Item]:
    """Yield the item with its kernel loaded in processes that end with the context; unchanged without `kernels`.

    Raises:
        LastbitError: its file cannot be loaded.
    """
    if kernels is None:
        yield item
        return
    subject = item.subject
    with kernels.pair(subject.kernel, timeout) as pair:
        yield replace(item, subject=replace(subject, performer=Isolated(pair, subject.device)))
