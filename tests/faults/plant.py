"""Faults: named changes to the source text of a kernel, planted in a copy of its folder and loaded like any other."""

from __future__ import annotations

import functools
import importlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

from lastbit.kernel import Kernel, _collect, load_kernels
from lastbit.siblings import siblings

FOLDER = Path(__file__).resolve().parents[2] / "kernels"
Sources = Mapping[str, str]
FP32_MULTIPLY = "fp32_multiply+rounded_sum"
ALL = ("bf16", "fp16", "fp32")


@dataclass(frozen=True)
class Edit:
    """One replacement in one file; `old` must occur exactly once."""

    old: str
    new: str
    file: str = "rms_norm.py"


@dataclass(frozen=True)
class Fault:
    """A copy of a kernel that differs from it in one deed.

    Attributes:
        name: unique among the faults of the op.
        description: completes "a copy of the kernel that ...".
        edits: what makes the copy.
        exposed: what the harness must name when the kernel stores its stages: a stage, or a kind of finding. Several,
            with "or" between them, where the fault is in several stages and a case may show it in any of them first.
        hidden: the same when the kernel returns its results only; empty where that is not tried.
        op: the op of the kernel.
        variant: the kernel: what stands in brackets in its name, `triton[VARIANT]`.
        options: the options of the cases in which the fault can be seen, see `catalogue.GROUPS`.
        dtypes: dtypes of the op's first input for which the copy computes something else.
        equivalent: why no input can show the fault, empty where one can.
        family: what stands before the brackets in its name.
    """

    name: str
    description: str
    edits: tuple[Edit, ...]
    exposed: str
    hidden: str
    op: str = "rms_norm"
    variant: str = "native_multiply+rounded_sum"
    options: str = "plain"
    dtypes: tuple[str, ...] = ("bf16", "fp16")
    equivalent: str = ""
    family: str = "triton"

    def __str__(self) -> str:
        return f"{self.op}: {self.name}"


class Outdated(AssertionError):
    """The kernel has changed so that a fault no longer applies; the fault must follow."""


def alternatives(expected: str) -> tuple[str, ...]:
    """Return the names in `exposed` or `hidden`."""
    return tuple(expected.split(" or "))


def mutated(fault: Fault, sources: Sources) -> dict[str, str]:
    """File name → text of the files that `fault` changes.

    Raises:
        Outdated: a text that is to be replaced does not occur exactly once.
    """
    changed: dict[str, str] = {}
    for edit in fault.edits:
        text = changed.get(edit.file, sources[edit.file])
        if (found := text.count(edit.old)) != 1:
            raise Outdated(f"fault {str(fault)!r}: {edit.file} has {found} places that read {edit.old!r}, not one")
        changed[edit.file] = text.replace(edit.old, edit.new)
    return changed


def read_sources(folder: Path = FOLDER) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.glob("*.py")}


@contextmanager
def planted(fault: Fault) -> Iterator[Kernel]:
    """Yield the kernel of `fault.variant` with the fault; its source exists as long as the context is open.

    Triton reads a kernel's source from its file, so that the copy has to be one. Files that have nothing to do with the
    fault are those of `without_faults`, so that what the interpreter and the harness know of them holds here as well.
    """
    sources = read_sources()
    changed = mutated(fault, sources)
    with TemporaryDirectory(prefix="fault") as parent:
        folder = Path(parent) / "kernels"
        folder.mkdir()
        for name in _users(changed, sources):
            (folder / name).write_text({**sources, **changed}[name])
        with _lent(folder):
            kernel = kernel_of(load_kernels(folder), fault.variant, fault.family)
        yield replace(kernel, depth=kernel_of(without_faults().kernels, fault.variant, fault.family).depth)


def _users(names: Iterable[str], sources: Sources) -> frozenset[str]:
    """Those files and all that import one of them, or one that does."""
    found = frozenset(names)
    imports = re.compile(rf"^(from|import) ({'|'.join(Path(name).stem for name in found)})\b", re.MULTILINE)
    users = found.union(name for name, text in sources.items() if imports.search(text))
    return found if users == found else _users(users, sources)


@dataclass(frozen=True)
class Folder:
    """The kernels of a folder, and its files by the names under which they import each other."""

    kernels: tuple[Kernel, ...]
    modules: Mapping[str, ModuleType]


@functools.cache
def without_faults() -> Folder:
    """Return the folder as it is."""
    names = [path.stem for path in sorted(FOLDER.glob("*.py"))]
    with _collect() as declared, siblings(FOLDER):
        modules = {name: importlib.import_module(name) for name in names}
    return Folder(tuple(one.kernel for one in declared), modules)


@contextmanager
def _lent(folder: Path) -> Iterator[None]:
    """Let the files of a folder import those that it lacks."""
    lent = {name: module for name, module in without_faults().modules.items() if not (folder / f"{name}.py").exists()}
    sys.modules.update(lent)
    try:
        yield
    finally:
        for name in lent:
            del sys.modules[name]


def kernel_of(kernels: Iterable[Kernel], variant: str, family: str = "triton") -> Kernel:
    """Find the kernel of that name; a variant that the family lacks is what stands before its last `+`."""
    named = {k.name: k for k in kernels}
    return named.get(f"{family}[{variant}]") or named[f"{family}[{variant.rpartition('+')[0]}]"]
