"""Versions of a package between two versions, each installed into a throw-away folder while it is measured."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from packaging.version import InvalidVersion, Version

from lastbit.errors import LastbitError, UsageError, unknown
from lastbit.history.bisection import RevisionPlace
from lastbit.reports.bisection import Mark, Point, Recipe
from lastbit.verify.processes import environment_for

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_LISTED = re.compile(r"^Available versions: (.*)$", re.MULTILINE)

_PROBE = """\
import importlib.metadata, importlib.util, sys

distribution = importlib.metadata.distribution(sys.argv[1])
print(distribution.version)
files = {file.parts[0].removesuffix(".py") for file in distribution.files or () if file.suffix == ".py"}
for module in sorted(filter(str.isidentifier, files)):
    found = importlib.util.find_spec(module)
    print(found and found.origin or "")
"""
"""Prints the version of the package that a process imports, and the files of its modules."""


def open_versions(package: str, good: str, bad: str, *, device_type: str) -> Versions:
    """Return the versions from `good` to `bad` that pip finds; pre-releases only if an end is one.

    Where pip looks is up to its own variables and files, such as PIP_INDEX_URL and PIP_FIND_LINKS.

    Raises:
        UsageError: a version is malformed or not to be had, or `bad` does not come after `good`.
        LastbitError: pip finds no versions.
    """
    if not _NAME.fullmatch(package):
        raise UsageError(f"--package {package!r} is no name of a package, such as triton")
    first, last = (_version(option, text) for option, text in (("--good", good), ("--bad", bad)))
    if first >= last:
        raise UsageError(f"--bad {bad} must be a later version than --good {good}")
    pre = ["--pre"] if first.is_prerelease or last.is_prerelease else []
    printed = _pip("index", "versions", package, *pre)
    found = _LISTED.search(printed)
    if found is None:
        raise LastbitError(f"pip names no versions of {package!r}; it said: {printed.strip()}")
    listed = sorted(Version(text) for text in found[1].split(", "))
    for end in (first, last):
        if end not in listed:
            raise unknown(f"version of {package}", str(end), map(str, listed))
    return Versions(package, tuple(str(v) for v in listed if first <= v <= last), device_type)


def _version(option: str, text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion as error:
        raise UsageError(f"{option} {text!r} is no version, such as 3.6.0") from error


def _pip(*arguments: str) -> str:
    """Run pip, and return its output.

    Raises:
        LastbitError: it fails; the message is its own.
    """
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")] or [done.stderr.strip()]
        raise LastbitError(f"pip {arguments[0]}: {errors[-1].removeprefix('ERROR: ')}")
    return done.stdout


class Versions:
    """The `Space` of versions; see `open_versions`."""

    what = "version"

    def __init__(self, package: str, versions: Sequence[str], device_type: str) -> None:
        """Take `versions` in order, the ends included; `device_type` is that of the processes that import them."""
        self.package, self.versions, self.device_type = package, list(versions), device_type
        self.good, self.bad = self.versions[0], self.versions[-1]
        self._good, self._bad = 0, len(self.versions) - 1

    def candidates(self) -> list[str]:
        return self.versions[self._good + 1 : self._bad + 1]

    def best(self, untried: Collection[str]) -> str:
        """Return the version nearest to the middle of those that are left."""
        middle = (self._good + self._bad) / 2
        return min(untried, key=lambda name: abs(self.versions.index(name) - middle))

    def mark(self, name: str, mark: Mark) -> None:
        if mark is Mark.GOOD:
            self._good = self.versions.index(name)
        if mark is Mark.BAD:
            self._bad = self.versions.index(name)

    def point(self, name: str) -> Point:
        return Point(name, name)

    def key(self, name: str) -> str:
        return name

    @contextmanager
    def place(self, name: str) -> Iterator[RevisionPlace]:
        """Yield a folder with the package alone; what it needs comes from this environment."""
        with tempfile.TemporaryDirectory(prefix="lastbit-bisect-") as temporary:
            root = str(Path(temporary).resolve())
            _pip("install", "--quiet", "--no-deps", "--no-compile", "--target", root, f"{self.package}=={name}")
            self._check(name, root)
            yield RevisionPlace(root, site=root)

    def _check(self, name: str, site: str) -> None:
        """Ask a process like those of a run which version it imports."""
        command = [sys.executable, "-c", _PROBE, self.package]
        done = subprocess.run(command, env=environment_for(self.device_type, [site]), capture_output=True, text=True)
        if done.returncode:
            raise LastbitError(f"{self.package} {name} cannot be looked up: {done.stderr.strip().splitlines()[-1]}")
        version, *origins = done.stdout.splitlines()
        if Version(version) != Version(name):
            raise LastbitError(f"{self.package} {name} was installed, but a process finds version {version}")
        if outside := [origin for origin in origins if origin and not origin.startswith(f"{site}/")]:
            raise LastbitError(f"{self.package} {name} was installed, but a process would import {outside[0]}")

    def recipe(self, name: str) -> Recipe:
        """Return the commands that install a version into a folder of the working directory."""
        folder = shlex.quote(f"{self.package}-{name}")
        setup = f"python3 -m pip install --no-deps --target {folder} {shlex.quote(f'{self.package}=={name}')}"
        return Recipe(setup, prefix=f"PYTHONPATH={folder} ")
