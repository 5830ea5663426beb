"""Results and runs in types that JSON has, and back; a float that JSON cannot spell is a string."""

from __future__ import annotations

import functools
import json
import math
import reprlib
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any


def encoded(value: Any) -> Any:
    """Convert `value` to types that JSON has."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, tuple | list):
        return [encoded(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): encoded(item) for key, item in value.items()}
    kind: Any = type(value)
    return {name: encoded(getattr(value, name)) for name in names_of(kind)}


def as_text(value: Any) -> str:
    """Write `value` as JSON for a reader, a line for each item; what it has no number for is `Infinity` or `NaN`."""
    return json.dumps(encoded(value), indent=1, allow_nan=False, ensure_ascii=False)


@functools.cache
def names_of(kind: type) -> tuple[str, ...]:
    """Return the names of the fields of a dataclass."""
    return tuple(field.name for field in fields(kind))


def decoded(hint: Any, value: Any) -> Any:
    """Invert `encoded` for a value of type `hint`; raise ValueError or TypeError if it is none."""
    return _decoder(hint)(value)


@functools.cache
def _decoder(hint: Any) -> Callable[[Any], Any]:
    """Make `decoded` for one type, which is inspected once."""
    arguments, origin = typing.get_args(hint), typing.get_origin(hint)
    if isinstance(hint, types.UnionType):
        some = _decoder(arguments[0])
        return lambda value: None if value is None else some(value)
    if origin is tuple:
        item = _decoder(arguments[0])
        return lambda value: tuple(map(item, _of_type(list, value)))
    if origin is not None:
        item = _decoder(arguments[1])
        return lambda value: {key: item(each) for key, each in _of_type(dict, value).items()}
    if is_dataclass(hint):
        make: Any = hint
        decoders = {name: _decoder(kind) for name, kind in typing.get_type_hints(hint).items()}

        def of_fields(value: Any) -> Any:
            if unknown := _of_type(dict, value).keys() - decoders.keys():
                raise ValueError(f"unknown field {', '.join(sorted(unknown))}")
            return make(**{name: decoders[name](item) for name, item in value.items()})

        return of_fields
    return hint if hint is float or issubclass(hint, Enum) else functools.partial(_of_type, hint)


def _of_type(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, found {reprlib.repr(value)}")
    return value
