"""The folders of a run on their way to the nodes of a cluster, where they are called otherwise.

Ray carries one folder to every node and makes it the working directory of the actors (`working_dir`). It holds the
code of lastbit where that is a checkout, the folders that the run names, and what the run was asked to do.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from lastbit.config import Config
from lastbit.devices import DevicePlan
from lastbit.files import BUILT_IN, PACKAGE

_CODE = {name: f"lastbit/{name}" for name in ("references", "cases", "reports")}
_CODE |= {"harness": "lastbit", "kernels": "lastbit/_kernels"}
"""Folder of a checkout → what it is called where lastbit is installed, and so on a node."""
_OF_A_PROJECT = {name: name for name in ("references", "cases", "kernels")}
_STAY = (".*", "__pycache__", "*.pyc", "golden", "node_modules", "*.egg-info")
_FOLDERS, _ASKED, _HOMES = "travelled", "asked", "homes.json"


@dataclass(frozen=True)
class Travelled:
    """The request of a run, on a node.

    Attributes:
        config: with the folders as they are called here.
        homes: folder here → what it is called where the run was started.
    """

    config: Config
    homes: Mapping[str, str]

    def at_home(self, text: str) -> str:
        """Replace paths of the node in a text by those of the machine where the run was started."""
        for here in sorted(self.homes, key=len, reverse=True):
            text = text.replace(here, self.homes[here])
        return text


@contextmanager
def packed(config: Config) -> Iterator[Path]:
    """Pack the folder that travels for a run; it is removed afterwards.

    Raises:
        UsageError: a folder that the run names does not exist.
    """
    config.check_places()
    with tempfile.TemporaryDirectory(prefix="lastbit-travel-") as name:
        folder = Path(name)
        homes: dict[str, str] = {}
        if BUILT_IN != PACKAGE:
            _copy_parts(BUILT_IN, folder, _CODE)
            shutil.rmtree(folder / "lastbit" / "checkout")
            homes |= {there: str(BUILT_IN / here) for here, there in _CODE.items()}
        kernels = [_travelling(folder, homes, path) for path in config.kernel_folders]
        projects = [_travelling(folder, homes, path, _OF_A_PROJECT) for path in config.projects]
        replace(
            config,
            kernel_folders=tuple(kernels),
            projects=tuple(projects),
            tree="",
            folder=str(folder / _ASKED),
        ).save()
        (folder / _ASKED / _HOMES).write_text(json.dumps(homes))
        yield folder


def unpacked(folder: Path, devices: Sequence[str]) -> Travelled:
    """Read on a node the folder that `packed` made, for a process there that has these devices."""
    config = Config.load(folder / _ASKED / "config.json")
    config = replace(
        config,
        folder="",
        device_plan=DevicePlan(tuple(devices), ("of the cluster",) * len(devices)),
        kernel_folders=tuple(str(folder / path) for path in config.kernel_folders),
        projects=tuple(str(folder / path) for path in config.projects),
    )
    homes = json.loads((folder / _ASKED / _HOMES).read_text())
    return Travelled(config, {os.path.normpath(folder / here): home for here, home in homes.items()})


def _travelling(into: Path, homes: dict[str, str], path: str, parts: Mapping[str, str] | None = None) -> str:
    """Copy a folder, or parts of it, or the folder of a file; return what the path is called in `into`."""
    source = Path(path).absolute()
    if source.is_file():
        return f"{_travelling(into, homes, str(source.parent))}/{source.name}"
    name = f"{_FOLDERS}/{len(homes)}/{source.name}"
    if parts:
        (into / name).mkdir(parents=True)
        _copy_parts(source, into / name, parts)
    elif source.is_dir():
        shutil.copytree(source, into / name, ignore=shutil.ignore_patterns(*_STAY))
    homes[name] = str(source)
    return name


def _copy_parts(source: Path, into: Path, parts: Mapping[str, str]) -> None:
    for here, there in parts.items():
        if (source / here).is_dir():
            shutil.copytree(source / here, into / there, ignore=shutil.ignore_patterns(*_STAY), dirs_exist_ok=True)
