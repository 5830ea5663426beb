"""Errors that lastbit raises on purpose; each message shows the offending value and, where known, the fix."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from difflib import get_close_matches
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class LastbitError(Exception):
    """An error that the user can act on: bad input, a broken kernel or a broken configuration (exit code 2)."""


class UsageError(LastbitError):
    """A command line, case line, contract, dtype or name that means nothing here."""


class OpError(LastbitError):
    """An op whose declaration names what it does not have, or whose reference does what it must not."""


class KernelError(LastbitError):
    """A kernel that raised, or whose result has the wrong names, shape, dtype or device."""


class InterpreterError(LastbitError):
    """The bit-faithful interpreter cannot be installed in this process."""


class DeviceLost(LastbitError):
    """An accelerator that the process cannot use any more, as after an illegal access to memory; another one can."""


class UnsupportedCase(LastbitError):
    """Raised by a kernel, before any launch, for a case that it does not claim to handle; the text is the reason."""


_OF_MEMORY = frozenset({"OutOfMemoryError", "MemoryError"})
_PHRASES = ("out of memory", "can't allocate memory")  # of CUDA and Triton, of torch on the CPU


def is_out_of_memory(error: BaseException, kinds: Collection[str] = ()) -> bool:
    """Return whether an error says that memory ran out; `kinds` name its types, where it stands for another one."""
    kinds = kinds or [kind.__name__ for kind in type(error).__mro__]
    known = not _OF_MEMORY.isdisjoint(kinds)
    return known or ("RuntimeError" in kinds and any(phrase in str(error).lower() for phrase in _PHRASES))


def no_stage(name: str, stages: Iterable[str]) -> KernelError:
    """Return the error of a kernel that returned what is none of the stages of its op."""
    return KernelError(f"the kernel returned {name!r}, which is no stage here: {', '.join(map(repr, stages))}")


def wrong_kind(name: str, what: str, actual: object, expected: object) -> KernelError:
    """Return the error of a kernel whose result has another shape, dtype or device than its op requires."""
    advice = ""
    if what == "dtype":
        advice = (
            f"; convert it, here with .to({expected}), or write @kernel(…, takes='one dtype') if its inputs have one"
        )
    return KernelError(f"result {name!r} has {what} {actual}, but the op requires {expected}{advice}")


# Arbitrary: about three lines of a terminal.
MOST_NAMES = 20
"""Known names that are told to somebody who gave an unknown one."""


def unknown(what: str, value: object, known: Iterable[str]) -> UsageError:
    """Make a `UsageError` for a name that is not among `known`, with the nearest one suggested."""
    return UsageError(no_such(what, value, known))


def no_kernel(name: str, known: Iterable[str]) -> UsageError:
    """Return the error of a word that was taken for the name of a kernel; it may be meant for a file or folder."""
    names = sorted(known)
    here = [entry.name for entry in os.scandir() if entry.is_dir() or entry.name.endswith(".py")]
    near = nearest(name, {*names, *here})
    return UsageError(f"no kernel is called {name!r}, and no file or folder here{near} {_known(name, names)}")


def no_such(what: str, value: object, known: Iterable[str]) -> str:
    """Make the sentence about an unknown name; it suggests the nearest of `known`, and lists the most similar."""
    names = sorted(known)
    return f"unknown {what} {value!r}{nearest(value, names)} {_known(value, names)}"


def _known(value: object, names: Sequence[str]) -> str:
    shown = names if len(names) <= MOST_NAMES else get_close_matches(str(value), names, n=MOST_NAMES, cutoff=0.0)
    more = f" and {len(names) - len(shown)} more" if len(shown) < len(names) else ""
    return f"Known: {', '.join(shown) or 'none'}{more}."


def nearest(value: object, known: Iterable[str]) -> str:
    """End a sentence about a name by suggesting the most similar of the `known` ones, if any is similar."""
    near = get_close_matches(str(value), sorted(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else "."


def told_to_the_caller(*kinds: type[Exception]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function of the API: tracebacks of its `kinds` of errors, and of LastbitError, end where it is called.

    What lies below is lastbit's, and says nothing to a reader of a test. pytest leaves out the last frame, too.
    """
    told: tuple[type[Exception], ...] = (LastbitError, *kinds)

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def telling(*args: P.args, **kwargs: P.kwargs) -> R:
            __tracebackhide__ = True
            try:
                return function(*args, **kwargs)
            except told as error:
                caught = error
            raise caught.with_traceback(None)

        return telling

    return decorate
