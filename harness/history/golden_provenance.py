"""Where a golden comes from: the source of the kernel and its revision, and what it ran on. No host and no user."""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from harness.errors import LastbitError
from harness.history.revisions import Repository
from harness.outcomes.golden import Difference
from harness.verify.check import Subject

REVISION_VARIABLE = "LASTBIT_REVISION"
"""Variable that names the revision of the kernels, for an exported tree that has no repository."""

_REVISION, _SOURCE = "revision", "source"


def kind_of(device: torch.device) -> str:
    """The kind of a device as goldens are kept for it, such as `cpu` or `nvidia-h200`."""
    if device.type == "cpu":
        return "cpu"
    return re.sub(r"[^a-z0-9.]+", "-", _name_of(device).lower()).strip("-")


def provenance(subject: Subject) -> dict[str, str]:
    """What decides the bits of a kernel besides its inputs; empty where it is not known."""
    files = _sources(Path(subject.kernel.source.rpartition(":")[0]))
    return {
        _SOURCE: _hash_of(files),
        _REVISION: os.environ.get(REVISION_VARIABLE) or _revision_of(files),
        "device": _name_of(subject.device),
        "driver": _driver(subject.device),
        "torch": torch.__version__,
        "triton": version("triton"),
    }


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[Difference, ...]:
    """The items that differ; the revision counts only where the source does."""
    pairs = ((item, before.get(item, ""), after.get(item, "")) for item in {**before, **after})
    differing = [Difference(*pair) for pair in pairs if pair[1] != pair[2]]
    moved = any(difference.item == _SOURCE for difference in differing)
    return tuple(difference for difference in differing if moved or difference.item != _REVISION)


def _sources(file: Path) -> list[Path]:
    """A file and the siblings that it imports, directly or not; nothing if there is no such file."""
    found: list[Path] = []
    waiting = [file] if file.is_file() else []
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.append(path)
            waiting += _siblings(path)
    return sorted(found)


def _hash_of(files: Iterable[Path]) -> str:
    """Hash of the names and contents of files."""
    contents = [(path.name, path.read_bytes()) for path in files]
    return hashlib.sha256(repr(contents).encode()).hexdigest()[:16] if contents else ""


def _siblings(path: Path) -> Iterator[Path]:
    """Files of the same folder that a file imports by name."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        match node:
            case ast.Import(names=aliases):
                names = [alias.name for alias in aliases]
            case ast.ImportFrom(module=None, names=aliases):
                names = [alias.name for alias in aliases]
            case ast.ImportFrom(module=str(module)):
                names = [module]
            case _:
                continue
        siblings = (path.parent / f"{name.partition('.')[0]}.py" for name in names)
        yield from (sibling for sibling in siblings if sibling.is_file())


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
    """The git commit that files are at, with `-dirty` if one of them is not as it was committed; empty without git."""
    if not files:
        return ""
    repository = Repository(files[0].parent)
    try:
        revision = repository.git("rev-parse", "HEAD")
        changed = repository.git("status", "--porcelain", "--", *(path.name for path in files))
    except LastbitError:
        return ""
    return f"{revision}-dirty" if changed else revision


def _command(*words: str) -> str:
    """What a command prints; empty if it fails or does not exist."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
