"""`lastbit new`."""

from __future__ import annotations

import argparse
import keyword
import re
from collections.abc import Sequence
from pathlib import Path

from lastbit.commands.reference import add_reference
from lastbit.config import Config
from lastbit.errors import UsageError
from lastbit.files import PACKAGE
from lastbit.reports.paper import line, make_console
from lastbit.verify.project import open_project

TEMPLATES = PACKAGE / "templates"

_NAME = "op_name"
"""What stands for the name of the op in the templates."""


def add_new(parser: argparse.ArgumentParser) -> None:
    """Make a parser that of the command."""
    actions = parser.add_subparsers(required=True, metavar="WHAT")
    add_reference(actions.add_parser("reference", help="write the reference of an op from a PyTorch function"))
    parser = actions.add_parser("op", help="write the files of a new op, which run at once")
    parser.description = (
        "Write the files of a new op: reference, cases, kernels and a test. They run at once, as max(x, 0)² · weight, "
        "and their comments say what to put in its place."
    )
    parser.set_defaults(command=_new)
    parser.add_argument("name", help="its name: a word of lower-case letters, digits and _, such as softcap")
    parser.add_argument("--project", default=".", metavar="DIR", help="the folder that gets them (default: this one)")


def _new(options: argparse.Namespace, rest: Sequence[str]) -> int:
    console, folder = make_console(), Path(options.project)
    for path, what in written(options.name, folder).items():
        line(console, f"wrote {path}: {what}")
    line(console, f"lastbit verify --project {folder} {folder / 'kernels'} --op {options.name}")
    line(console, f"python3 -m pytest {folder / 'tests' / f'test_{options.name}.py'}")
    return 0


_FILES = {
    "references": "what it computes, and where it may round",
    "cases": "what it is tried on",
    "cases/sizes": "its dimensions, and how long they get",
    "kernels": "three implementations of it",
    "tests": "a test of the reference, and of what it tells apart",
}


def written(name: str, folder: Path) -> dict[Path, str]:
    """Write the files of an op of this name, all of them or none, and return their texts by path.

    Raises:
        UsageError: the name is none, there is such an op, or one of the files is there.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise UsageError(f"{name!r} cannot be the name of an op: use lower-case letters, digits and _, as in 'softcap'")
    sources = {path: what for what in _FILES for path in sorted((TEMPLATES / what).glob(f"*{_NAME}.*"))}
    files = {path: folder / what / path.name.replace(_NAME, name) for path, what in sources.items()}
    texts = {files[path]: path.read_text().replace(_NAME, name) for path in sources}
    if there := [str(path) for path in texts if path.exists()]:
        raise UsageError(f"left as it is: {', '.join(there)}; choose another name for the op, or remove this first")
    known = open_project(Config(folder="", projects=(str(folder),) if folder.is_dir() else ())).ops
    if name in known:
        raise UsageError(f"there is an op {name!r} already; `lastbit list ops --op {name}` describes it")
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return {files[path]: _FILES[what] for path, what in sources.items()}
