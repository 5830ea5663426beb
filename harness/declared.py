"""Checks of the declaration of an op or a kernel: names exist, and options can be told apart."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from lastbit.errors import OpError, no_such

PASSED_BY_HARNESS = ("contract", "stage")
"""Keyword-only parameters of every reference."""


def place_of(function: Callable[..., Any]) -> str:
    """Return the file and line where a function is defined, or those in its attribute `place`."""
    if place := getattr(function, "place", ""):
        return str(place)
    plain = inspect.unwrap(getattr(function, "func", function))
    code = getattr(plain, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)


def is_names(value: object) -> bool:
    """Check whether a declaration lists names; a string alone would count as its letters."""
    return (
        isinstance(value, Collection) and not isinstance(value, str | bytes) and all(isinstance(v, str) for v in value)
    )


def is_order(value: object) -> bool:
    """Check whether a declared order of dots is a positive number of terms per partial sum, or None for any order."""
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0)


def check_signature(where: str, parameters: Collection[inspect.Parameter]) -> None:
    """Raise `OpError` unless a reference takes inputs, then keyword-only parameters, `contract` and `stage` among them.

    `where` names the op and its file, here and below.
    """
    kinds = {p.name: p.kind for p in parameters}
    for name in PASSED_BY_HARNESS:
        if kinds.get(name) is not inspect.Parameter.KEYWORD_ONLY:
            raise OpError(f"{where}: the reference must take {name!r} as a keyword-only parameter, after *")
    for p in parameters:
        if p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            raise OpError(f"{where}: the reference takes {str(p)!r}; name every input and parameter")
        if p.kind is p.POSITIONAL_OR_KEYWORD and p.default not in (p.empty, None):
            raise OpError(f"{where}: the input {p.name!r} has the default {p.default!r}; an optional one has None")
        if p.name == "stages":
            raise OpError(f"{where}: {p.name!r} cannot be an input or parameter: kernels are told by it what to store")
    if parameters and next(iter(parameters)).kind is inspect.Parameter.KEYWORD_ONLY:
        raise OpError(f"{where}: the reference takes no input")


def check_names(where: str, what: str, given: Any, known: Collection[str]) -> None:
    """Raise `OpError` unless `given` is a tuple of names that are all `known`."""
    if not is_names(given):
        raise OpError(f"{where}: {what}={given!r} must be a tuple of names, such as ({next(iter(known), 'x')!r},)")
    for name in given:
        if name not in known:
            raise OpError(no_such(f"name in {what} of {where}:", name, known))


def check_contracts(
    where: str,
    axes: Mapping[str, Mapping[str, Mapping[str, str]]],
    presets: Collection[str],
    rounds: Mapping[str, str],
    targets: Collection[str],
    directions: Collection[str],
) -> None:
    """Raise `OpError` unless the contracts of an op can be told apart, and round to one of `targets` each.

    Every option has a name of its own that can be part of a contract's text. The first option of an axis may be
    nameless: it is what holds where no other option of the axis is named. One of `directions` may follow a target, as
    in `x:zero`.
    """
    seen: dict[str, str] = {}
    for axis, choices in axes.items():
        if not choices:
            raise OpError(f"{where}: the axis {axis!r} has no option")
        for number, option in enumerate(choices):
            if option == "" and number == 0:
                continue
            if not option or "+" in option or any(letter.isspace() for letter in option):
                raise OpError(f"{where}: the option {option!r} of axis {axis!r} must be a word without + and spaces")
            if option in presets:
                raise OpError(f"{where}: the option {option!r} of axis {axis!r} has the name of a preset")
            if option in seen:
                raise OpError(f"{where}: the option {option!r} is on two axes, {seen[option]!r} and {axis!r}")
            seen[option] = axis
    for each in (rounds, *(of_option for choices in axes.values() for of_option in choices.values())):
        for stage, text in each.items():
            target, colon, direction = text.partition(":")
            if target not in targets:
                raise OpError(no_such(f"rounding of {where}: {stage!r} is rounded to", target, targets))
            if colon and direction not in directions:
                raise OpError(no_such(f"direction of {where}: {stage!r} is rounded", direction, directions))
