"""Faults: named changes to the source text of a kernel, planted in a copy of its folder and loaded like any other."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from harness.kernel import Kernel, load_kernels

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
        hidden: the same when the kernel returns its results only.
        op: the op of the kernel.
        variant: the kernel: what stands in brackets in its name, `triton[VARIANT]`.
        options: the options of the cases in which the fault can be seen, see `catalogue.GROUPS`.
        dtypes: dtypes of the op's first input for which the copy computes something else.
        equivalent: why no input can show the fault, empty where one can.
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

    def __str__(self) -> str:
        return f"{self.op}: {self.name}"


class Outdated(AssertionError):
    """The kernel has changed so that a fault no longer applies; the fault must follow."""


def alternatives(expected: str) -> tuple[str, ...]:
    """The names in `exposed` or `hidden`."""
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
    """The kernel of `fault.variant` with the fault; its source exists as long as the context is open.

    Triton reads a kernel's source from its file, so that the copy has to be one.
    """
    with TemporaryDirectory(prefix="fault") as parent:
        folder = Path(parent) / "kernels"
        shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"))
        for name, text in mutated(fault, read_sources()).items():
            (folder / name).write_text(text)
        yield kernel_of(load_kernels(folder), fault.variant)


def kernel_of(kernels: Iterable[Kernel], variant: str, family: str = "triton") -> Kernel:
    """The kernel of that name; a variant that the family lacks is what stands before its last `+`."""
    named = {k.name: k for k in kernels}
    return named.get(f"{family}[{variant}]") or named[f"{family}[{variant.rpartition('+')[0]}]"]
