"""Groups of cases for combinations of dtypes and options, in which every two that go together meet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lastbit import DRAWN, Accepted, Chosen, Option, combinations

AS_X = "as x"
"""The option of a tensor that is given, in the dtype of x; None is the one to leave it out."""

OTHER = {"bf16": "fp32", "fp16": "fp32", "fp32": "bf16"}
"""Dtype of a tensor → another one that those beside it have, such as weights."""


@dataclass(frozen=True)
class Combination:
    """Fixed facts of a group: options of the axes, of which the first is a dtype, and the range of columns."""

    options: Mapping[str, Any]
    narrow: int
    wide: int

    def __getitem__(self, axis: str) -> Any:
        return self.options[axis]

    def choices(self, params: Mapping[str, Sequence[Option]]) -> dict[str, tuple[Option, ...]]:
        """Return the choices of parameters, those that are axes with their one option unless that is to be drawn."""
        own = {name: self.options.get(name, DRAWN) for name in params}
        return {name: tuple(params[name]) if own[name] == DRAWN else (own[name],) for name in params}

    def __str__(self) -> str:
        """Name the row by what is given: `bf16-weight_fp32-residual-static-N65to128`."""
        (_, first), *others = self.options.items()
        words = [first]
        for axis, option in others:
            name, _, of_tensor = axis.partition(" ")
            if option in (AS_X, DRAWN, True, first):
                words.append(name)
            elif option is not None:
                words.append(option if isinstance(option, str) and not of_tensor else f"{name}_{option}")
        return "-".join([*words, f"N{self.narrow}to{self.wide}"])


def rows_of(
    axes: Mapping[str, Sequence[Option]],
    together: Callable[[Mapping[str, Any]], bool],
    accepts: frozenset[str],
    ranges: Sequence[tuple[int, int]],
    *,
    strength: int = 2,
) -> Iterator[Combination]:
    """Yield the rows of `combinations` that a kernel takes, with ranges of columns in turn, those with one it takes."""
    ranges = accepts.ranges("x columns", ranges) if isinstance(accepts, Accepted) else ranges
    for number, options in enumerate(combinations(axes, together, accepts=accepts, strength=strength)):
        yield Combination(options, *ranges[number % len(ranges)])


def given(chosen: Chosen, params: Iterable[str]) -> dict[str, Any]:
    """Return those of the parameters that were chosen and not left out."""
    return {name: chosen[name] for name in params if chosen.get(name) is not None}
