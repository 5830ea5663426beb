"""The answers of kernel processes, read as data of a stranger.

Every field is looked at before it is used: names from tables, numbers within bounds, texts cut.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from lastbit.children.child import name_of_signal, too_long
from lastbit.dtypes import BY_NAME
from lastbit.errors import LastbitError
from lastbit.inputs.poison import Poison
from lastbit.isolation.runner import ALIGNMENT
from lastbit.result import Finding

T = TypeVar("T")

_TEXT, _NAME, _MOST = 20_000, 200, 1_000
_DIMENSIONS, _ELEMENTS = 64, 1 << 48
_KINDS = frozenset(
    {
        *("wrote_outside", "rebound_input", "process_state", "reused_memory"),
        *("out_of_bounds", "uninitialised", "race", "masked"),
    }
)
"""Kinds of findings that the process of a call can see."""

_OTHER_DTYPES = ("bool", "int8", "int16", "uint16", "uint32", "uint64", "complex64", "complex128", "float64")
_DTYPES = {
    name: getattr(torch, name)
    for name in dict.fromkeys((*(dtype.torch_name for dtype in BY_NAME.values()), *_OTHER_DTYPES))
    if hasattr(torch, name)
}


class Unreadable(LastbitError):
    """An error: an answer that no kernel process of lastbit gives."""


class KernelProcessEnded(LastbitError):
    """A kernel process is there no more: it ended itself, or was ended because it took too long.

    Attributes:
        code: its exit code, if it exited.
        signal: what ended it, if a signal did.
        limit: the seconds that it had, if it took longer.
        used: what it used more of than it may, in words.
    """

    def __init__(
        self, code: int | None = None, signal: int | None = None, limit: float | None = None, used: str = ""
    ) -> None:
        if used:
            said = f"its process was ended: {used}"
        elif limit is not None:
            said = too_long(limit)
        elif signal is not None:
            said = f"its process was ended by signal {name_of_signal(signal)}"
        else:
            said = "its process ended" + (f" with exit code {code}, without an exception" if code is not None else "")
        super().__init__(said)
        self.code, self.signal, self.limit, self.used = code, signal, limit, used

    def within(self, limit: float) -> KernelProcessEnded:
        """Return this error with `limit`, the seconds of the whole case, in place of those that were left of it."""
        return self if self.limit is None else KernelProcessEnded(limit=limit, used=self.used)


class Raised(LastbitError):
    """The error that a kernel raised in its process.

    Attributes:
        kind: the name of its type.
        kinds: names of that type and those that it derives from.
        traceback: of the other process.
        lost: that process cannot use its device any more.
    """

    def __init__(self, kinds: tuple[str, ...], text: str, traceback: str, *, lost: bool = False) -> None:
        super().__init__(text)
        self.kinds, self.kind, self.traceback, self.lost = kinds, kinds[0], traceback, lost


@dataclass(frozen=True)
class Result:
    """A tensor that a kernel returned, without gaps: `at` which byte of the memory of results it starts, or -1."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: torch.device
    at: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def parsed(text: bytes | bytearray, number: str) -> Mapping[str, Any]:
    """Return the fields of an answer to the message of this `number`, which nobody could know before.

    Raises:
        Unreadable: it is no JSON object, or answers something else.
        Raised: it says that the kernel raised.
    """
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        raise Unreadable("the kernel process gave an answer that is no JSON") from None
    if not isinstance(answer, dict):
        raise Unreadable("the kernel process gave an answer that is no object")
    if answer.get("number") != number:
        raise Unreadable("the kernel process gave an answer that nobody waits for")
    if "raised" in answer:
        fields = mapping(answer["raised"])
        kinds = many(fields.get("kinds"), name_of) or ("Exception",)
        texts = text_of(fields.get("text")), text_of(fields.get("traceback"))
        raise Raised(kinds, *texts, lost=flag(fields.get("lost")))
    return answer


def results_of(answer: Mapping[str, Any]) -> tuple[list[Result], int]:
    """Return the tensors of an answer, each at the place where it is expected, and the bytes that they take."""
    results = list(many(answer.get("returned"), _result))
    if len({result.name for result in results}) < len(results):
        raise Unreadable("the kernel process names a result twice")
    needed = 0
    for result in results:
        if result.at < 0 and result.nbytes and result.device.type != "meta":
            raise Unreadable(f"the kernel process has no memory for {result.name!r}")
        if result.at >= 0:
            if result.at != needed or result.nbytes == 0:
                raise Unreadable(f"the kernel process puts {result.name!r} where nobody expects it")
            needed += -(-result.nbytes // ALIGNMENT) * ALIGNMENT
    return results, needed


def _result(given: object) -> Result:
    fields = mapping(given)
    shape = many(fields.get("shape"), lambda size: integer(size, 0, _ELEMENTS), most=_DIMENSIONS)
    dtype = _DTYPES.get(name_of(fields.get("dtype")))
    if dtype is None:
        raise Unreadable(f"the kernel returned a tensor of {name_of(fields['dtype'])}, which lastbit does not know")
    if math.prod(shape) > _ELEMENTS:
        raise Unreadable(f"the kernel returned a tensor of shape {list(shape)}, which is too large")
    strides = many(fields.get("strides"), lambda stride: integer(stride, 0, _ELEMENTS), most=_DIMENSIONS)
    # A tensor takes as many elements of memory as it has, in whatever order of dimensions.
    dense, reach = len(shape) == len(strides), 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=False) if size > 1):
        dense, reach = dense and stride == reach, reach * size
    if 0 not in shape and not dense:
        raise Unreadable("the kernel process gave strides that leave gaps, or make elements overlap")
    at = integer(fields.get("at"), -1, _ELEMENTS)
    return Result(name_of(fields.get("name")), dtype, shape, strides, device_of(fields.get("device")), at)


def device_of(given: object) -> torch.device:
    """Return a device that torch may know, whether or not it exists."""
    kind, _, index = name_of(given).partition(":")
    if kind not in ("cpu", "meta", "cuda", "xpu", "hpu", "mps", "npu") or (index and not index.isdecimal()):
        raise Unreadable("the kernel returned a tensor on a device that lastbit does not know")
    return torch.device(kind, integer(int(index), 0, 127)) if index else torch.device(kind)


def findings(given: object) -> tuple[Finding, ...]:
    """Return findings of the kinds that a call can have."""
    found = []
    for kind, name, sentence in (map(text_of, fields) for fields in rows(given, 3)):
        if kind not in _KINDS:
            raise Unreadable("the kernel process found what it cannot see")
        found.append(Finding(kind, name[:_NAME], sentence))
    return tuple(found)


def warnings(given: object) -> tuple[tuple[Any, ...], ...]:
    """Return warnings, each of them a text, or a text, the name of a tensor and two devices."""
    found = many(given, lambda row: many(row, lambda part: part, most=4))
    if any(len(row) not in (1, 4) for row in found):
        raise Unreadable("the kernel process gave a warning that is none")
    return found


def rows(given: object, length: int) -> tuple[tuple[Any, ...], ...]:
    """Return a list of lists of `length` fields each."""
    found = many(given, lambda row: many(row, lambda part: part, most=length))
    if any(len(row) != length for row in found):
        raise Unreadable("the kernel process gave a list of another length")
    return found


def pair(given: object) -> tuple[str, str]:
    """Return two names."""
    first, second = _two(many(given, name_of, most=2))
    return first, second


def poison(given: object) -> Poison:
    """Return the poisons that the memory of a result was filled with."""
    own, others = _two(many(given, lambda part: part, most=2))
    return Poison(None if own is None else integer(own, 0, 255), frozenset(many(others, lambda n: integer(n, 0, 255))))


def _two(given: tuple[T, ...]) -> tuple[T, ...]:
    if len(given) != 2:
        raise Unreadable("the kernel process gave something else than a pair")
    return given


def flag(given: object) -> bool:
    """Return True or False."""
    if not isinstance(given, bool):
        raise Unreadable("the kernel process gave something else than yes or no")
    return given


def integer(given: object, least: int, most: int) -> int:
    """Return an integer within bounds."""
    if not isinstance(given, int) or isinstance(given, bool) or not least <= given <= most:
        raise Unreadable("the kernel process gave a number out of bounds")
    return given


def text_of(given: object) -> str:
    """Return a text, cut where it is long, with escapes for characters that cannot be printed."""
    if not isinstance(given, str):
        raise Unreadable("the kernel process gave something else than a text")
    shown = (c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in given[:_TEXT])
    return "".join(shown)


def name_of(given: object) -> str:
    """Return a name, cut where it is long."""
    return text_of(given)[:_NAME]


def mapping(given: object) -> dict[str, Any]:
    """Return fields by name, as they were given."""
    if not isinstance(given, dict) or len(given) > _MOST:
        raise Unreadable("the kernel process gave something else than named fields")
    return given


def named(given: object, read: Callable[[Any], T]) -> dict[str, T]:
    """Return name → what is read of each value."""
    return {name_of(name): read(value) for name, value in mapping(given).items()}


def many(given: object, read: Callable[[Any], T], *, most: int = _MOST) -> tuple[T, ...]:
    """Return what is read of each part of a list."""
    if not isinstance(given, list) or len(given) > most:
        raise Unreadable("the kernel process gave something else than a list, or a long one")
    return tuple(read(part) for part in given)
