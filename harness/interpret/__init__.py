"""A bit-faithful Triton interpreter: Triton's own, with the number formats of the hardware put in.

Triton runs kernels on the CPU when TRITON_INTERPRET=1 was set before it was imported. That interpreter truncates
fp32 → bf16, multiplies bf16 as 16-bit integers, mis-rounds fp8 and lets scalar arguments follow numpy's promotion
rules. `install` replaces its arithmetic, its reductions and its launcher, and leaves Triton's language layer, which
decides what promotes to what, as it is: the compiler uses the same layer.

The language layer sees types and constants, never values. So it runs once: a tape keeps what it asked for, and later
programs run from the tape, many of a grid at a time. That is right as long as none of them uses what another one
stores. Where one does, all are taken back and run one after the other. `one_by_one` is the definition: every program by
Python, in order, without a tape. A `Watcher` sees what a kernel does; for it, programs run in that way, too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from lastbit.errors import InterpreterError
from lastbit.interpret.watching import Descent, descending, one_by_one, races

__all__ = [
    "KNOWN_TRITON",
    "Descent",
    "another_has_run",
    "descending",
    "install",
    "installed",
    "interpret_triton",
    "one_by_one",
    "races",
    "untraced",
]

KNOWN_TRITON = ("3.6", "3.7", "3.8", "3.9")
"""Releases whose interpreter was read and tested; any other one must pass a self-test at installation."""

_installed = False


def install() -> None:
    """Make Triton's interpreter in this process round as NVIDIA hardware does; calling it again does nothing.

    Kernels may be defined before or after. Raises `InterpreterError` when Triton is missing, was imported without
    TRITON_INTERPRET=1, or is an unknown release on which the replaced interpreter fails its self-test.
    """
    global _installed
    if _installed:
        return
    value = os.environ.get("TRITON_INTERPRET")
    fix = (
        "Set TRITON_INTERPRET=1 in the environment before the first `import triton`: in the shell, or by "
        "lastbit.interpret_triton() at the top of conftest.py, or by pytest -p lastbit.pytest_interpreter."
    )
    try:
        import triton
        from triton.language.standard import _sum_combine
        from triton.runtime.interpreter import InterpretedFunction
    except ImportError as error:
        raise InterpreterError(f"Triton cannot be imported ({error}). Install triton 3.6 or later.") from error
    if not triton.knobs.runtime.interpret:
        raise InterpreterError(f"TRITON_INTERPRET is {value!r}, so Triton compiles kernels. {fix}")
    if not isinstance(_sum_combine, InterpretedFunction):
        raise InterpreterError(f"TRITON_INTERPRET is {value!r} now but was not when Triton was imported. {fix}")
    version = str(triton.__version__)
    from lastbit.interpret import driver, language, launch, libdevice, reduction, selftest

    try:
        launch.replace_launcher()
        reduction.replace_reductions()
        language.patch_language()
        selftest.check_that_one_builder_is_asked()
        libdevice.replace_libdevice()
        language.replace_constructors()
        driver.replace_benchmarks()
        driver.stand_in_for_gpu()
    except (AttributeError, ImportError, TypeError) as error:
        raise InterpreterError(
            f"the interpreter of Triton {version} is built differently ({error}). "
            f"Known to work: {', '.join(KNOWN_TRITON)}."
        ) from error
    if not version.startswith(tuple(f"{known}." for known in KNOWN_TRITON)) and (wrong := selftest.differences()):
        raise InterpreterError(
            f"the interpreter failed its self-test on Triton {version}: {'; '.join(wrong)}. "
            f"Known to work: {', '.join(KNOWN_TRITON)}."
        )
    _installed = True


def interpret_triton() -> None:
    """Run the Triton kernels of this process on tensors in the memory of the CPU, rounded as NVIDIA hardware rounds.

    For tests on a machine without a GPU. Call it before anything imports triton, at the top of a conftest.py or of the
    test's module: Triton decides while it is imported whether it compiles. Calling it again does nothing.

    Raises:
        InterpreterError: Triton is missing, was imported before and compiles, or is a release on which the
            interpreter fails its self-test.
    """
    if "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
    install()


def installed() -> bool:
    """Return whether `install` has been called in this process."""
    return _installed


@contextmanager
def untraced() -> Iterator[None]:
    """Keep Dynamo from tracing code that interprets a program: it would put other arithmetic in its place.

    To torch.compile, launches of interpreted programs are then one opaque step each, as those of compiled kernels are.
    """
    if not _installed:
        yield
        return
    from unittest.mock import patch  # which takes a while

    import torch

    from lastbit.interpret.launch import Launcher

    with patch.object(Launcher, "__call__", torch.compiler.disable(Launcher.__call__)):
        yield


def another_has_run() -> bool:
    """Return whether Triton's own interpreter has run a kernel in this process, in place of this one."""
    builder = getattr(sys.modules.get("triton.runtime.interpreter"), "interpreter_builder", None)
    return not _installed and hasattr(builder, "grid_dim")  # which a launch sets
