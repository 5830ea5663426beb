"""The provenance of a golden: the code of the kernel and its revision, and what it ran on. No host and no user."""

from __future__ import annotations

import ast
import functools
import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions, version
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lastbit.errors import LastbitError
from lastbit.history.revisions import Repository
from lastbit.reports.golden import ProvenanceDifference
from lastbit.trees import checkout_of, imported, of_repository
from lastbit.verify.check import Subject

REVISION_VARIABLE = "LASTBIT_REVISION"
"""Variable that names the revision of the kernels, for an exported tree that has no repository."""

_REVISION, _SOURCE, _IMPORTS, _PACKAGES = "revision", "source", "imports", "packages"

_OWN_ITEM = ("torch", "triton", "lastbit")
"""Packages with an item of their own, which pin what they need; the bits of lastbit's own goldens know its revision."""


def kind_of(device: torch.device) -> str:
    """Return the kind of a device as goldens are kept for it, such as `cpu` or `nvidia-h200`."""
    if device.type == "cpu":
        return "cpu"
    return re.sub(r"[^a-z0-9.]+", "-", _name_of(device).lower()).strip("-")


def provenance(subject: Subject) -> dict[str, str]:
    """Return what decides the bits of a kernel besides its inputs, which has run in this process; "" if not known.

    `source` is a hash of the kernel's file and of those beside it that it imports, `imports` one of the other modules
    of its repository, and `packages` has the versions of what all of these import.
    """
    file = Path(subject.kernel.source.rpartition(":")[0])
    found, waiting = set[Path](), [file] if file.is_file() else []
    while waiting:  # a file and the siblings that it imports, directly or not
        path = waiting.pop()
        if path not in found:
            found.add(path)
            siblings = (path.parent / f"{name.lstrip('.').partition('.')[0]}.py" for name in _names_in(path))
            waiting += filter(Path.is_file, siblings)
    files = sorted(found)
    modules = _repository_modules(files)
    return {
        _SOURCE: _hash_of(files),
        _IMPORTS: _hash_of(modules),
        _PACKAGES: _packages([*files, *modules]),
        _REVISION: os.environ.get(REVISION_VARIABLE) or _revision_of([*files, *modules]),
        "device": _name_of(subject.device),
        "driver": _driver(subject.device),
        "torch": torch.__version__,
        "triton": version("triton"),
    }


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[ProvenanceDifference, ...]:
    """Return the items that differ, of packages one by one; the revision counts only where the code differs."""
    before, after = _one_by_one(before), _one_by_one(after)
    pairs = ((item, before.get(item, ""), after.get(item, "")) for item in {**before, **after})
    differing = [ProvenanceDifference(*pair) for pair in pairs if pair[1] != pair[2]]
    moved = any(difference.item in (_SOURCE, _IMPORTS) for difference in differing)
    return tuple(difference for difference in differing if moved or difference.item != _REVISION)


def _one_by_one(items: Mapping[str, str]) -> dict[str, str]:
    packages = (package.rpartition(" ") for package in filter(None, items.get(_PACKAGES, "").split(", ")))
    own = {item: value for item, value in items.items() if item != _PACKAGES}
    return own | {name: number for name, _, number in packages}


def _hash_of(files: Iterable[Path]) -> str:
    """Return the hash of the names and contents of files."""
    contents = [(path.name, path.read_bytes()) for path in files]
    return hashlib.sha256(repr(contents).encode()).hexdigest()[:16] if contents else ""


def _names_in(path: Path) -> tuple[str, ...]:
    """Return the names of the modules that a file may import; a dot in front for each level of a relative one."""
    return _names_of(path.read_bytes()) if path.suffix == ".py" else ()


@functools.cache
def _names_of(text: bytes) -> tuple[str, ...]:
    found: list[str] = []
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import(names=aliases):
                found += [alias.name for alias in aliases]
            case ast.ImportFrom(module=module, names=aliases, level=level):
                base = "." * level + (module or "")
                found += [base] if module else []
                found += [f"{base}{'.' if module else ''}{alias.name}" for alias in aliases]
    return tuple(found)


def _repository_modules(files: Sequence[Path]) -> list[Path]:
    """Return the modules of the repository, not beside a kernel, that its files imported, directly or not.

    A module that no kernel of the folder names was imported by a name made at run time, and counts for each of them.
    """
    checkout = checkout_of(files[0].resolve()) if files else None
    if checkout is None:
        return []
    folder = files[0].resolve().parent
    known = of_repository(checkout, imported(), copied=True)
    known = {name: file for name, file in known.items() if file.parent != folder}
    if not known:
        return []
    unnamed = set(known) - set(_reached(folder.glob("*.py"), known))
    return sorted({known[name] for name in {*_reached(files, known), *unnamed, *_reached_from(unnamed, known)}})


def _reached(files: Iterable[Path], known: Mapping[str, Path]) -> set[str]:
    """Return those of the `known` modules that files outside of any package import, directly or not."""
    return _reached_from({part for file in files for name in _names_in(file) for part in _with_packages(name)}, known)


def _reached_from(names: Iterable[str], known: Mapping[str, Path]) -> set[str]:
    found: set[str] = set()
    waiting = [name for name in names if name in known]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        package = name if known[name].stem == "__init__" else name.rpartition(".")[0]
        for other in _names_in(known[name]):
            levels = len(other) - len(other.lstrip("."))
            parts = package.split(".")[: len(package.split(".")) - levels + 1] if levels else []
            waiting += [part for part in _with_packages(".".join([*parts, other.lstrip(".")])) if part in known]
    return found


def _with_packages(name: str) -> Iterator[str]:
    """Yield a module's name and those of the packages that it is in, which are imported before it."""
    parts = name.split(".")
    return (".".join(parts[:length]) for length in range(1, len(parts) + 1))


def _packages(files: Iterable[Path]) -> str:
    """Return the names and versions of the packages that files import, and of those that these require."""
    providers = _providers()
    tops = {name.partition(".")[0] for file in files for name in _names_in(file)}
    waiting = [package for top in tops for package in providers.get(top, ())]
    found: dict[str, str] = {}
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found or name in _OWN_ITEM:
            continue
        try:
            package = distribution(name)
        except PackageNotFoundError:  # a requirement that this platform does without
            continue
        found[name] = package.version
        required = map(Requirement, package.requires or ())
        waiting += [r.name for r in required if r.marker is None or r.marker.evaluate({"extra": ""})]
    return ", ".join(f"{name} {number}" for name, number in sorted(found.items()))


_providers = functools.cache(packages_distributions)


def _name_of(device: torch.device) -> str:
    if device.type != "cpu":
        return str(torch.get_device_module(device).get_device_name(device))
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


def _driver(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    return _command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]


def _revision_of(files: Sequence[Path]) -> str:
    """Return the git commit of files, with `-dirty` if one of them is not as it was committed; empty without git."""
    if not files:
        return ""
    checkout = checkout_of(files[0].resolve())
    own = [str(path.resolve()) for path in files if checkout_of(path.resolve()) == checkout]
    repository = Repository(files[0].parent)
    try:
        revision = repository.git("rev-parse", "HEAD")
        changed = repository.git("status", "--porcelain", "--", *own)
    except LastbitError:
        return ""
    return f"{revision}-dirty" if changed else revision


def _command(*words: str) -> str:
    """Return the output of a command; empty if it fails or does not exist."""
    try:  # a driver that hangs is to be told from a slow one: nvidia-smi takes seconds where nothing holds the GPU
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
