"""The inputs that a kernel takes, as it declares it: layouts, sizes, dtypes, values of parameters. Cases are drawn
inside.

    @kernel("rms_norm", takes="contiguous")
    @kernel("rms_norm", takes=("contiguous rows", "non-empty"))
    @kernel("rms_norm", takes={"x layout": "contiguous", "x columns": range(64, 8193, 64), "quant": "static"})
    @kernel("attention", takes={"q columns": (64, 128), "v columns": "q columns", "sinks dtype": ("q dtype", "fp32")})

A word of `WORDS` alone, or several, hold for every tensor, as the key `tensors` of a mapping does. Its other keys are
`T layout`, with words for the tensor T; `T dtype`; `T columns`, the last dimension, and `T size N`, dimension N, with
sizes; and a parameter with its values, None for a call without it. A dtype or size may be that of another tensor.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from lastbit.case import Case, Option, TensorSpec, contiguous_strides
from lastbit.dtypes import BY_NAME
from lastbit.errors import UsageError, unknown

Takes = Mapping[str, tuple[Option, ...] | range]
"""Key → words or values, as `declared_takes` makes it of what a kernel declares."""

TENSORS = "tensors"
ONE_DTYPE, PACKED_ROWS = "one dtype", "packed rows"
"""Words for all tensors together: `packed rows` are a first tensor of two dimensions, and all tensors contiguous."""

_ALIGNMENT = 16  # bytes of a vector load
_MATRIX = 2  # dimensions
_OF_TENSOR = re.compile(r"(?P<tensor>\w+) (?P<what>layout|dtype|columns|size (?P<dimension>-?\d+))")


def _is_contiguous(tensor: TensorSpec) -> bool:
    steps = zip(tensor.shape, tensor.element_strides, contiguous_strides(tensor.shape), strict=True)
    return tensor.numel == 0 or all(own == dense for size, own, dense in steps if size > 1)


WORDS: Mapping[str, Callable[[TensorSpec], bool]] = {
    "contiguous": _is_contiguous,
    "contiguous rows": lambda tensor: (
        tensor.numel == 0 or tensor.shape[-1:] in ((), (1,)) or tensor.element_strides[-1] == 1
    ),
    "aligned": lambda tensor: tensor.offset * BY_NAME[tensor.dtype].itemsize % _ALIGNMENT == 0,
    "distinct": lambda tensor: not tensor.repeats,
    "non-empty": lambda tensor: tensor.numel > 0,
}
"""Word → whether a tensor is so: `contiguous` as torch's `is_contiguous()`; `contiguous rows` with a last stride of 1;
`aligned` with its first element at a multiple of 16 bytes; `distinct` without a stride of 0; `non-empty`."""


def declared_takes(given: object, where: str) -> Takes:
    """Return what a kernel declares it takes as key → words or values; `where` names the kernel.

    Raises:
        UsageError: it is neither a word, nor words, nor a mapping of names to such or to values.
    """
    if isinstance(given, Mapping):
        return {str(key): _options(str(key), options, where) for key, options in given.items()}
    return {TENSORS: _options(TENSORS, given, where)} if given else {}


def _options(key: str, given: Any, where: str) -> tuple[Option, ...] | range:
    if isinstance(given, range) and given:
        return given
    options = (given,) if _is_option(given) else given
    if not isinstance(options, tuple | list) or not options or not all(map(_is_option, options)):
        raise UsageError(f"takes of {where}: {key!r} has {given!r}; give a word, a number, a range or a tuple of these")
    return tuple(options)


def _is_option(given: object) -> bool:
    return given is None or isinstance(given, bool | int | float | str)


def check_takes(
    takes: Takes, where: str, inputs: Collection[str], params: Collection[str], rows: Collection[str] = ()
) -> None:
    """Raise `UsageError` unless a declaration speaks of these inputs and parameters, and in words that there are.

    `rows` are the inputs whose leading dimensions index independent rows.
    """
    for key, options in takes.items():
        found = _OF_TENSOR.fullmatch(key)
        if found and found["tensor"] not in inputs:
            raise unknown(f"tensor in takes of {where}:", found["tensor"], inputs)
        if not found and key not in (TENSORS, *params):
            of_tensors = (f"{name} {what}" for name in inputs for what in ("layout", "dtype", "columns", "size 0"))
            raise unknown(f"name in takes of {where}:", key, (TENSORS, *params, *of_tensors))
        for option in (options[0], options[-1]) if isinstance(options, range) else options:
            if key == TENSORS or (found and found["what"] == "layout"):
                known = (*WORDS, *[ONE_DTYPE, PACKED_ROWS] * (key == TENSORS))
                if option not in known:
                    wrong = unknown(f"word in takes of {where}: {key!r} has", option, known)
                    first = next(iter(inputs), "x")
                    raise UsageError(f"{wrong} For sizes, dtypes and values give a mapping: {told(sizes_of(first))}.")
                if option == PACKED_ROWS and not rows:
                    raise UsageError(f"takes of {where}: {key!r} has {option!r}, but the op has no inputs of rows")
            elif found and (other := _OF_TENSOR.fullmatch(str(option))):
                if other["tensor"] not in inputs or _kind(other) != _kind(found):
                    raise UsageError(
                        f"takes of {where}: {key!r} cannot be {option!r}; name a {_kind(found)} of an input"
                    )
            elif found and found["what"] == "dtype" and option not in BY_NAME:
                raise unknown(f"dtype in takes of {where}: {key!r} has", option, BY_NAME)
            elif found and found["what"] != "dtype" and (type(option) is not int or option < 0):
                raise UsageError(f"takes of {where}: {key!r} has {option!r}, which is no size")


def beyond(takes: Takes, case: Case) -> str:
    """Return what a case would have to be for a declaration to take it; an empty string if it does."""
    for key, options in takes.items():
        found = _OF_TENSOR.fullmatch(key)
        if not found and key != TENSORS:
            if case.params.get(key) not in options:
                return f"{key} must be {_spelled(options)}"
            continue
        concerned = [tensor for tensor in case.tensors if not found or tensor.name == found["tensor"]]
        if found and found["what"] != "layout":
            others = (_OF_TENSOR.fullmatch(option) for option in options if isinstance(option, str))
            same = [_value(t, other) for other in others if other for t in case.tensors if t.name == other["tensor"]]
            value = _value(concerned[0], found) if concerned else None
            if concerned and (value is None or (value not in options and value not in same)):
                return f"{key} must be {_spelled(options)}"
            continue
        for word in map(str, options):
            if word == ONE_DTYPE:
                if len({tensor.dtype for tensor in concerned if BY_NAME[tensor.dtype].floating}) > 1:
                    return "all tensors must have one dtype"
            elif word == PACKED_ROWS:
                if len(concerned[0].shape) != _MATRIX or not all(map(_is_contiguous, concerned)):
                    return f"{concerned[0].name} must be packed rows, and all other tensors contiguous"
            elif wrong := [tensor.name for tensor in concerned if not WORDS[word](tensor)]:
                return f"{wrong[0]} must be {word}"
    return ""


def _value(tensor: TensorSpec, found: re.Match[str]) -> Option:
    """Return the dtype or size of a tensor that a key names; None if there is no such dimension."""
    if found["what"] == "dtype":
        return tensor.dtype
    place = int(found["dimension"] or -1)
    return tensor.shape[place] if -len(tensor.shape) <= place < len(tensor.shape) else None


def _kind(found: re.Match[str]) -> str:
    what = found["what"]
    return what if what in ("layout", "dtype") else "dimension"


def options_of(takes: Takes, key: str) -> Collection[Option] | None:
    """Return the options that a declaration names for a key; None if it names none, or what another tensor has."""
    options = takes.get(key)
    named = options if isinstance(options, tuple) else ()
    return None if any(_OF_TENSOR.fullmatch(option) for option in named if isinstance(option, str)) else options


def _spelled(options: tuple[Option, ...] | range) -> str:
    if isinstance(options, range):
        return f"from {options[0]} to {options[-1]}{f' in steps of {options.step}' if options.step != 1 else ''}"
    return " or ".join("left out" if option is None else str(option) for option in options)


def words_of(takes: Takes, tensor: str) -> tuple[str, ...]:
    """Return the words that a declaration has for a tensor."""
    words = [str(word) for key in (TENSORS, f"{tensor} layout") for word in takes.get(key, ())]
    return tuple(word for word in (*words, *["contiguous"] * (PACKED_ROWS in words)) if word in WORDS)


def placed_inside(takes: Takes, case: Case) -> Case:
    """Return the case with every tensor contiguous, or at an aligned address, that is not placed as it is declared.

    Where one of several in a storage is not, they lie there one after the other. Of a kernel of packed rows, tensors
    with the leading dimensions of the first one have all rows along one dimension.
    """
    tensors = case.tensors
    # The rows of one vector nobody could tell from a weight.
    if PACKED_ROWS in takes.get(TENSORS, ()) and len(leading := tensors[0].shape[:-1]) >= _MATRIX:
        rows = (math.prod(leading),)
        tensors = tuple(
            replace(t, shape=rows + t.shape[-1:], strides=None) if t.shape[:-1] == leading else t for t in tensors
        )
    placed = []
    for tensor in tensors:
        words = words_of(takes, tensor.name)
        if not all(WORDS[word](tensor) for word in words if word not in ("aligned", "non-empty")):
            tensor = replace(tensor, strides=None)
        aligned = "aligned" not in words or WORDS["aligned"](tensor)
        placed.append(tensor if aligned else replace(tensor, offset=0))
    moved = {own.owner for own, now in zip(case.tensors, placed, strict=True) if own != now}
    for owner in moved.intersection(tensor.memory for tensor in placed):
        end, together = 0, [place for place, tensor in enumerate(placed) if tensor.owner == owner]
        for place in sorted(together, key=lambda place: case.tensors[place].offset):
            tensor = placed[place]
            unit = _ALIGNMENT // BY_NAME[tensor.dtype].itemsize if "aligned" in words_of(takes, tensor.name) else 1
            placed[place] = replace(tensor, strides=None, offset=-(-end // unit) * unit)
            end = placed[place].offset + tensor.numel
    return replace(case, tensors=tuple(placed))


def told(takes: Takes) -> str:
    """Return a declaration as a kernel's file may have it.

    >>> told({"tensors": ("contiguous", "non-empty")}), told({"tensors": ("aligned",), "quant": ("static",)})
    ("takes=('contiguous', 'non-empty')", "takes={'tensors': 'aligned', 'quant': 'static'}")
    """
    short = {key: options[0] if len(options) == 1 else options for key, options in takes.items()}
    return f"takes={(short[TENSORS] if list(short) == [TENSORS] else short)!r}"


def sizes_of(tensor: str) -> Takes:
    """Return an example of a declaration by sizes."""
    return {f"{tensor} columns": (64, 128, 256)}


def as_text(takes: Takes) -> str:
    """Return a declaration as JSON, which `of_text` reads."""
    ranges = {key: {"range": [o.start, o.stop, o.step]} for key, o in takes.items() if isinstance(o, range)}
    return json.dumps({**takes, **ranges})


def of_text(text: str, where: str) -> Takes:
    """Return the declaration that `as_text` wrote.

    Raises:
        UsageError: the text is none; it may come from a stranger's process.
    """
    try:
        loaded = json.loads(text)
        found = {key: range(*o["range"]) if isinstance(o, dict) else o for key, o in loaded.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise UsageError(f"takes of {where} cannot be read") from None
    return declared_takes(found, where)
