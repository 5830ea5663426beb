"""State of the process that a kernel must leave as it was: folder, defaults of torch, arithmetic.

The number of threads and the environment are put back as well, without a word, because libraries set them when they are
first used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lastbit.floating_point import FloatingPoint, end_openmp_threads
from lastbit.result import Finding

KIND = "process_state"
ARITHMETIC = "floating-point arithmetic"


def _folder() -> str:
    """Return the working directory; an empty string if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def _enter(folder: str) -> None:
    if folder:
        os.chdir(folder)


def _set_default_device(device: torch.device) -> None:
    # None takes torch's hook away, which a device would leave in place: under it every call of torch is slower.
    torch.set_default_device(None if device.type == "cpu" else device)


def _set_environment(variables: dict[str, str]) -> None:
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


def _set_floating_point(settings: FloatingPoint) -> None:
    settings.restore()
    end_openmp_threads()


def _set_threads(number: int) -> None:
    torch.set_num_threads(number)
    end_openmp_threads()  # those that a kernel started in a moment of other floating-point settings have these for good


_ASPECTS: tuple[tuple[str, Callable[[], Any], Callable[[Any], object]], ...] = (
    (ARITHMETIC, FloatingPoint.now, _set_floating_point),
    ("working directory", _folder, _enter),
    ("default device", torch.get_default_device, _set_default_device),
    ("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    ("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    ("", torch.get_num_threads, _set_threads),
    ("", lambda: dict(os.environ), _set_environment),
)
"""Settings of the whole process, how to read and to restore them; a change of one without a name is nobody's fault."""


@contextmanager
def kept_process_state() -> Iterator[list[Finding]]:
    """Put the state of the process back after the block, and then list what a kernel must not have changed."""
    before = [read() for _, read, _ in _ASPECTS]
    found: list[Finding] = []
    try:
        yield found
    finally:
        for (name, read, restore), value in zip(_ASPECTS, before, strict=True):
            if (now := read()) != value:
                restore(value)
                left = f"left the {name} of the process at {now}, where it was {value}"
                found += [Finding(KIND, name, f"{left}; whatever runs next finds it changed")] if name else []


def left_by_loading(arithmetic: str, source: str) -> Iterator[Finding]:
    """Yield what there is to say of a kernel whose file left other floating-point settings: see `Kernel.arithmetic`."""
    if arithmetic:
        file = Path(source.rpartition(":")[0]).name or "its file"
        sentence = (
            f"loading {file} left the {ARITHMETIC} of the process at {arithmetic}, "
            "as a library does that was linked with -ffast-math; whatever runs next finds it changed"
        )
        yield Finding(KIND, ARITHMETIC, sentence)
