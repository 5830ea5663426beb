"""The folders of a run on their way to the nodes of a cluster, where they are called otherwise.

Ray carries one folder to every node and makes it the working directory of the actors (`working_dir`). It holds the
code of lastbit where that is a checkout, the folders that the run names, and what the run was asked to do.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from harness.config import Config
from harness.devices import DevicePlan
from harness.files import BUILT_IN
from harness.verify.notes import read_json, write_json

_CODE = ("harness", "references", "cases", "reports", "kernels")
_OF_A_PROJECT = ("references", "cases", "kernels")
_STAY = (".*", "__pycache__", "*.pyc", "golden", "node_modules", "*.egg-info")
_FOLDERS, _ASKED, _HOMES = "travelled", "asked", "homes.json"


@dataclass(frozen=True)
class Travelled:
    """What a run was asked to do, on a node.

    Attributes:
        config: with the folders as they are called here.
        homes: folder here → what it is called where the run was started.
    """

    config: Config
    homes: Mapping[str, str]

    def at_home(self, text: str) -> str:
        """A text with its paths as they are called where the run was started."""
        for here in sorted(self.homes, key=len, reverse=True):
            text = text.replace(here, self.homes[here])
        return text


@contextmanager
def packed(config: Config) -> Iterator[Path]:
    """The folder that travels for a run; it is gone afterwards.

    Raises:
        UsageError: a folder that the run names does not exist.
    """
    config.check_places()
    with tempfile.TemporaryDirectory(prefix="lastbit-travel-") as name:
        folder = Path(name)
        homes: dict[str, str] = {}
        if _is_checkout(BUILT_IN):
            _copy_parts(BUILT_IN, folder, _CODE)
            homes["."] = str(BUILT_IN)
        kernels = [_travelling(folder, homes, path) for path in config.kernel_folders]
        projects = [_travelling(folder, homes, path, _OF_A_PROJECT) for path in config.projects]
        replace(
            config,
            kernel_folders=tuple(kernels),
            projects=tuple(projects),
            tree="",
            folder=str(folder / _ASKED),
        ).save()
        write_json(folder / _ASKED / _HOMES, homes)
        yield folder


def unpacked(folder: Path, devices: Sequence[str]) -> Travelled:
    """What `packed` put into a folder that has come to a node, for a process there that has these devices."""
    config = Config.load(folder / _ASKED / "config.json")
    config = replace(
        config,
        folder="",
        device_plan=DevicePlan(tuple(devices), ("of the cluster",) * len(devices)),
        kernel_folders=tuple(str(folder / path) for path in config.kernel_folders),
        projects=tuple(str(folder / path) for path in config.projects),
    )
    homes = read_json(folder / _ASKED / _HOMES)
    return Travelled(config, {os.path.normpath(folder / here): home for here, home in homes.items()})


def _travelling(into: Path, homes: dict[str, str], path: str, parts: Sequence[str] = ()) -> str:
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


def _copy_parts(source: Path, into: Path, parts: Sequence[str]) -> None:
    for part in parts:
        if (source / part).is_dir():
            shutil.copytree(source / part, into / part, ignore=shutil.ignore_patterns(*_STAY))


def _is_checkout(folder: Path) -> bool:
    """Whether lastbit is a checkout, and not installed, as it then is on the nodes."""
    return (folder / "kernels").is_dir() and (folder / "pyproject.toml").is_file()
