"""Refusals: errors by which a package says that it does not take a call, before it has started anything.

    @kernel("rms_norm", refuses=(RuntimeError, AssertionError))

Such an error makes a case UNSUPPORTED, with the package's words as the reason. It counts as a refusal only if the same
call, made once more under watch, raises one again before it launches a Triton program and before an operation of torch
has computed or written anything: views, new memory and copies may come before. Of other errors, of those after a launch
and of memory that ran out a case stays ERRORED. What extensions do that torch does not know, or NumPy, is not seen.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import Any

from lastbit.errors import LastbitError, UnsupportedCase, is_out_of_memory

_NEVER = frozenset({"RecursionError", "AcceleratorError"})
"""RuntimeErrors that refuse nothing: of a bug, and torch's of a launch that failed."""


def is_refusals(given: object) -> bool:
    """Check whether a declaration is a tuple of types of errors, none of which is every error, or lastbit's own."""
    return isinstance(given, tuple) and all(
        isinstance(kind, type) and issubclass(kind, Exception) and kind is not Exception
        and not issubclass(kind, LastbitError)
        for kind in given
    )  # fmt: skip


def refusing(function: Callable[..., Any], kinds: tuple[type[Exception], ...]) -> Callable[..., Any]:
    """Return a function that raises `UnsupportedCase` where the given one refuses a call; itself without `kinds`."""
    if not kinds:
        return function

    @functools.wraps(function)
    def called(*args: Any, **arguments: Any) -> Any:
        try:
            return function(*args, **arguments)
        except kinds as error:
            if not _may_refuse(error):
                raise
            first = error
        from lastbit.started import Launched  # imports torch, which takes long

        try:
            with Launched() as started:
                function(*args, **arguments)
        except kinds as error:
            if _may_refuse(error) and not started.any:
                lines = str(error).strip().splitlines()  # or of an error without words the line that raised it
                said = lines[0] if lines else traceback.extract_tb(error.__traceback__)[-1].line
                raise UnsupportedCase(f"{type(error).__name__}: {said}") from first
        except Exception:  # the first one is told
            pass
        raise first

    return called


def _may_refuse(error: Exception) -> bool:
    return _NEVER.isdisjoint(kind.__name__ for kind in type(error).__mro__) and not is_out_of_memory(error)
