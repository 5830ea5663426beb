"""Checkouts of a repository, and which of them the modules of this process come from.

A revision is measured in a worktree of its own, in a process of its own. Where its kernels import a package that lies
beside them in the repository, `sys.path` decides whose package that is: the revision's, that of the working tree, or a
copy that was installed. The last two make every revision the same one, so they are an error here.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import sysconfig
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from lastbit.errors import LastbitError, UsageError
from lastbit.files import BUILT_IN, PACKAGE

_OWN = (PACKAGE, *(BUILT_IN / name for name in ("reports", "references", "cases", "tests")))
_BY_PATH = re.compile(r"lastbit_.*_[0-9a-f]{12}\.")  # names that `lastbit.kernel.load_file` gives
_STDLIB = Path(sysconfig.get_path("stdlib"))


class MixedTrees(LastbitError):
    """A revision whose kernels import modules of the repository that are not the revision's."""


@dataclass(frozen=True)
class Checkout:
    """A folder with files of a repository.

    Attributes:
        root: where `.git` is.
        git: the folder that all worktrees of the repository share, below which its submodules keep theirs.
    """

    root: Path
    git: Path

    def is_of(self, other: Checkout) -> bool:
        """Return whether this is a checkout of the repository of `other`, or of a submodule of it."""
        return self.git.is_relative_to(other.git)


def checkout_of(path: Path) -> Checkout | None:
    """Return the checkout that a resolved path is in, as git finds it; None outside of any."""
    for folder in (path, *path.parents):
        mark = folder / ".git"
        if mark.is_dir():
            return Checkout(folder, mark.resolve())
        if mark.is_file():  # of a worktree or a submodule
            own = Path(folder, mark.read_text().partition("gitdir:")[2].strip()).resolve()
            shared = own / "commondir"
            return Checkout(folder, Path(own, shared.read_text().strip()).resolve() if shared.is_file() else own)
    return None


def image(path: str, tree: str) -> str:
    """Return what a path of another checkout of the repository is called in the worktree `tree`; others as they are."""
    here, there = checkout_of(Path(tree).resolve()), checkout_of(Path(path).resolve())
    if here is None or there is None or there.git != here.git or is_installed(Path(path)):
        return os.path.abspath(path)
    return str(here.root / Path(path).resolve().relative_to(there.root))


def imported(before: Collection[str] = ()) -> dict[str, Path]:
    """Return name → file of the modules of this process, those named `before` and those loaded by path left out."""
    new = ((name, module) for name, module in list(sys.modules.items()) if name not in before)
    files = ((name, getattr(module, "__file__", None)) for name, module in new)
    return {
        name: Path(file)
        for name, file in files
        if isinstance(file, str) and os.path.isabs(file) and not _BY_PATH.match(name)
    }


def outermost(modules: Mapping[str, Path]) -> dict[str, Path]:
    """Return those modules that lie in no folder of a package that is among them."""

    def inside(name: str, file: Path) -> bool:
        package = modules.get(name.rpartition(".")[0])
        return package is not None and package.stem == "__init__" and file.is_relative_to(package.parent)

    return {name: file for name, file in modules.items() if not inside(name, file)}


def of_repository(checkout: Checkout | None, modules: Mapping[str, Path], *, copied: bool) -> dict[str, Path]:
    """Return those modules that lie in a checkout of the repository, or of any if it is None, lastbit's own left out.

    With `copied`, those that were installed from one are among them.
    """
    copies = _installed_from(checkout) if copied and checkout else frozenset()
    found = {}
    for name, file in modules.items():
        if is_installed(file):
            if file in copies and not any(folder in file.parents for folder in _OWN):
                found[name] = file
            continue
        file = file.resolve()
        if any(folder in file.parents for folder in _OWN):
            continue
        there = checkout_of(file.parent)
        if there is not None and (checkout is None or there.is_of(checkout)):
            found[name] = file
    return found


def check_trees(folders: Iterable[Path], modules: Mapping[str, Path], *, revision: str, together: bool) -> None:
    """Raise `MixedTrees` if a module of the repository is not of the checkout that the folders of kernels are in.

    A copy that was installed from the repository is one and the same for every `revision`; where that is empty, it is
    what the user asked for. On a node of a cluster, folders of a revision lie in no checkout: there, none is theirs.
    With `together`, kernels of several revisions share this process.
    """
    folders = [folder.resolve() for folder in folders]
    for checkout in {checkout_of(folder) for folder in folders} - ({None} if not revision else set()):
        for name, file in of_repository(checkout, outermost(modules), copied=bool(revision)).items():
            if any(file.is_relative_to(folder) for folder in folders):
                continue
            if together:
                raise MixedTrees(
                    f"kernels of several revisions in one process would share the module {name} ({file}); "
                    "compare them by `lastbit verify --base`, which runs each revision in a process of its own"
                )
            if is_installed(file) or checkout is None or not file.is_relative_to(checkout.root):
                copied, whose = is_installed(file), revision or str(checkout and checkout.root)
                what = "which was installed from this repository" if copied else "which is of another checkout"
                raise MixedTrees(
                    f"the kernels of {whose} import {name} from {file}, {what}, and not the code beside them. Let "
                    "them put its folder first, as in sys.path.insert(0, str(Path(__file__).resolve().parents[1])), "
                    "or name it in PYTHONPATH, of which each revision gets its own. What is compiled must be built in "
                    "each, see --build"
                )


def is_installed(file: Path) -> bool:
    return bool({"site-packages", "dist-packages"} & set(file.parts)) or file.is_relative_to(_STDLIB)


@functools.cache
def _installed_from(checkout: Checkout) -> frozenset[Path]:
    """Return the files that pip copied out of a checkout of the repository, as PEP 610 has them."""
    found: set[Path] = set()
    for distribution in distributions():
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        copied = "vcs_info" in origin or not origin.get("dir_info", {"editable": True}).get("editable", False)
        address = urlsplit(origin.get("url", ""))
        if copied and address.scheme == "file":
            source = checkout_of(Path(url2pathname(address.path)).resolve())
            if source is not None and source.is_of(checkout):
                found |= {Path(str(distribution.locate_file(file))) for file in distribution.files or ()}
    return frozenset(found)


def folders_of_package(name: str) -> tuple[Path, ...]:
    """Return the folders that have an installed package, or the file of a module.

    Raises:
        UsageError: there is none of that name.
    """
    spec = None
    with suppress(ImportError, ValueError):
        spec = find_spec(name)
    places = () if spec is None else spec.submodule_search_locations or filter(None, [spec.origin])
    found = tuple(Path(place).resolve() for place in places)
    if not found:
        raise UsageError(f"there is no installed package {name!r} to watch; give the name that Python imports it by")
    return found
