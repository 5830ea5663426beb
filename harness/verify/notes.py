"""Notes that a pytest process of a run writes for the process that started it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lastbit.errors import LastbitError
from lastbit.files import replace_file
from lastbit.trees import MixedTrees

TIME = ".time.json"
"""Suffix of the file in which a worker notes where its time went, part by part."""

LEFT = ".left.json"
"""Suffix of the file in which a worker notes what it left because a kernel had failed: kernel, device, group, cases."""

STAGES = ".stages"
"""Suffix of the file in which a worker keeps the stages that it found in kernels which declare none, a line each."""

ANSWERS = ".answers"
"""Suffix of the file in which a worker keeps which contracts can be told apart on which cases, a line each."""

HAS_FAILED = "stopped after its first failure; --keep-going runs the rest"


class Unrecorded(LastbitError):
    """A result could not be written."""


@dataclass(frozen=True)
class Notes:
    """Notes of the pytest process of one type of device, in the run's folder; each is written whole or not at all.

    `refused`: why there is no plan, or no run, and whether kernels imported code of another checkout. `plan`: its
    items, its omissions, and the isolation of kernel processes. `selected`: ids of the items that pytest did not
    deselect, in its order. `crashed`: names of the worker processes that ended in the middle of an item. `done`: how
    the session ended.
    """

    folder: Path
    device_type: str

    def write(self, name: str, content: object) -> None:
        write_json(self._path(name), content)

    def refuse(self, error: LastbitError) -> None:
        """Note that the run fails, and why."""
        self.write("refused", {"reason": str(error), "mixed": isinstance(error, MixedTrees)})

    def read(self, name: str) -> Any:
        """Read a note; None if there is none."""
        path = self._path(name)
        return read_json(path) if path.is_file() else None

    def _path(self, name: str) -> Path:
        return self.folder / f"{self.device_type}.{name}.json"


class KnownFailures(Protocol):
    """Register of a run's kernels that have failed."""

    def add(self, kernel: str, device: str) -> None:
        """Note a failure."""

    def has(self, kernel: str, device: str) -> bool:
        """Return whether a kernel has failed on a device."""


@dataclass(frozen=True)
class Failures:
    """Register of failed kernels, shared by a run's workers as empty files in its folder."""

    folder: Path

    def add(self, kernel: str, device: str) -> None:
        """Note a failure; raise `Unrecorded` if that cannot be written."""
        path = self._path(kernel, device)
        with written(path):
            path.touch()

    def has(self, kernel: str, device: str) -> bool:
        return self._path(kernel, device).exists()

    def _path(self, kernel: str, device: str) -> Path:
        return self.folder / f"{hashlib.sha256(repr((kernel, device)).encode()).hexdigest()[:16]}.failed"


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Turn errors of the system on writing a file into `Unrecorded`."""
    try:
        yield
    except OSError as error:
        raise Unrecorded(f"cannot write {path}: {error.strerror or error}") from error


def write_json(path: Path, content: object) -> None:
    """Write a JSON file whole, so that other processes never read half of it."""
    replace_file(path, lambda beside: beside.write_text(json.dumps(content)))


def read_json(path: Path) -> Any:
    """Read a file that `write_json` wrote."""
    return json.loads(path.read_text())
