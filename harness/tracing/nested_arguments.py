"""The values in an operation's arguments, however deep in lists and tuples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def flat(values: Iterable[Any]) -> Iterator[Any]:
    """Yield every value that is neither list nor tuple, however deep it is nested."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from flat(value)
        else:
            yield value


def swapped(value: Any, by: Mapping[int, Any]) -> Any:
    """Return the value with objects in it replaced; `by` maps the id of an object to its replacement."""
    if isinstance(value, (list, tuple)):
        return [swapped(x, by) for x in value]
    if isinstance(value, dict):
        return {name: swapped(x, by) for name, x in value.items()}
    return by.get(id(value), value)
