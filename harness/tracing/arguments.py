"""What the arguments of an operation hold, however deep in lists and tuples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def flat(values: Iterable[Any]) -> Iterator[Any]:
    """Everything in `values` that is no list or tuple."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from flat(value)
        else:
            yield value


def swapped(value: Any, by: Mapping[int, Any]) -> Any:
    """The same with other objects in place of some; `by` has these by the id of what they stand for."""
    if isinstance(value, (list, tuple)):
        return [swapped(x, by) for x in value]
    if isinstance(value, dict):
        return {name: swapped(x, by) for name, x in value.items()}
    return by.get(id(value), value)
