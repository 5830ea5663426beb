"""What a pytest process of a run writes down for the process that started it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import LastbitError
from harness.files import replace_file

TIME = ".time.json"
"""Suffix of the file in which a worker notes where its time went, part by part."""


class Unrecorded(LastbitError):
    """A result that could not be written down."""


@dataclass(frozen=True)
class Notes:
    """Notes of the pytest process of one type of device, in the run's folder; each is there as a whole or not at all.

    `refused`: why there is no plan, where a name or a declaration means nothing. `plan`: its items, and what it leaves
    out. `selected`: ids of the items that pytest did not deselect, in its order. `crashed`: names of the worker
    processes that ended in the middle of an item. `done`: how the session ended.
    """

    folder: Path
    device_type: str

    def write(self, name: str, content: object) -> None:
        write_json(self._path(name), content)

    def read(self, name: str) -> Any:
        """The content of a note, None where there is none."""
        path = self._path(name)
        return read_json(path) if path.is_file() else None

    def _path(self, name: str) -> Path:
        return self.folder / f"{self.device_type}.{name}.json"


def write_json(path: Path, content: object) -> None:
    """Write a file that other processes read, so that they never see half of it."""
    replace_file(path, lambda beside: beside.write_text(json.dumps(content)))


def read_json(path: Path) -> Any:
    """What `write_json` wrote."""
    return json.loads(path.read_text())
