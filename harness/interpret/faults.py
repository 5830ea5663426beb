"""Faults of programs that need not show in a result, such as accesses outside of the tensors of a launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from lastbit.errors import InterpreterError
from lastbit.interpret.watching import Setting

if TYPE_CHECKING:
    from lastbit.interpret.address_ranges import Given
    from lastbit.interpret.numpy_formats import Array
    from lastbit.interpret.places import Place


@dataclass(frozen=True)
class Fault:
    """One operation of a kernel that went wrong.

    Attributes:
        kind: `out_of_bounds`, `uninitialised`, `race` or `masked`.
        tensor: the parameter of the kernel that it concerns, or is nearest.
        place: in the kernel; None if its source could not be read.
        sentence: what happened, for a reader.
        address: of the first byte concerned.
        start: address of that tensor.
    """

    kind: str
    tensor: str
    place: Place | None
    sentence: str
    address: int
    start: int


Blank = Callable[[Tensor], int | None]
"""The bits of an element of a tensor to which nothing was written; None if these are not known."""


@dataclass
class Collected:
    """The faults of the launches within a context.

    Attributes:
        blank: what memory holds that was not written.
        faults: the first of each kind and place.
    """

    blank: Blank
    faults: dict[tuple[str, Place | None], Fault] = field(default_factory=dict)


_collected: Setting[Collected | None] = Setting(None)


@contextmanager
def collected(blank: Blank = lambda tensor: None) -> Iterator[Collected]:
    """Collect the faults of every launch within the context; outside of any such context they are raised."""
    found = Collected(blank)
    with _collected.within(found):
        yield found


def blank_of(tensor: Tensor) -> int | None:
    """Return the value that elements of `tensor` hold to which nothing was written; None if it is not known."""
    return None if _collected.now is None else _collected.now.blank(tensor)


def noted(fault: Fault) -> None:
    """Record a fault in the current collection; raise `InterpreterError` if there is none."""
    if _collected.now is None:
        raise InterpreterError(fault.sentence)
    _collected.now.faults.setdefault((fault.kind, fault.place), fault)


def outside(
    kind: str, place: Place | None, tensors: list[Given], where: Array, width: int, program: tuple[int, ...]
) -> Fault:
    """Return the fault of an access at addresses that no tensor has; `tensors` are those that may have been meant."""
    address = int(where[0])
    did = {"load": "loads", "store": "stores"}.get(kind, "updates")
    count = "an element" if len(where) == 1 else f"{len(where):,} elements, the first"
    if not tensors:
        sentence = f"program {list(program)} {did} {count} at address {address:#x}, and was given no tensor; {place}"
        return Fault("out_of_bounds", "", place, sentence, address, 0)
    nearest = min(tensors, key=lambda x: max(x.start - address, address + width - x.stop, 0))
    sentence = f"program {list(program)} {did} {count} {_position(nearest, address, width)}; {place}"
    return Fault("out_of_bounds", nearest.name, place, sentence, address, nearest.start)


def uninitialised(place: Place | None, tensor: Given, where: Array, program: tuple[int, ...]) -> Fault:
    """Return the fault of loading memory to which nothing was written."""
    address = int(where[0])
    count = "an element" if len(where) == 1 else f"{len(where):,} elements, the first"
    element = (address - tensor.start) // tensor.itemsize
    sentence = f"program {list(program)} loads {count} at {element:,} of {tensor}, where nothing was written; {place}"
    return Fault("uninitialised", tensor.name, place, sentence, address, tensor.start)


def masked(place: Place | None, tensor: Given) -> Fault:
    """Return the fault of storing to `tensor` the undefined values of masked lanes."""
    sentence = f"what masked lanes of a load without `other` hold, which is undefined, reaches {tensor}; {place}"
    return Fault("masked", tensor.name, place, sentence, tensor.start, tensor.start)


def _position(tensor: Given, address: int, width: int) -> str:
    if address < tensor.start:
        return f"{_elements(tensor.start - address, tensor)} in front of {tensor}"
    if address + width > tensor.stop:
        return f"{_elements(address + width - tensor.stop, tensor)} behind the end of {tensor}"
    offset, index = address - tensor.start, []
    run, dims = tensor.layout
    for stride, size in dims:
        index.append(str(min(offset // stride, size - 1)))
        offset -= min(offset // stride, size - 1) * stride
    behind = f"{_elements(offset - run + tensor.itemsize, tensor)} behind the end of row [{', '.join(index)}]"
    return f"in a gap of {tensor}, {behind}"


def _elements(distance: int, tensor: Given) -> str:
    whole, rest = divmod(distance, tensor.itemsize)
    return f"{distance:,} bytes" if rest else f"{whole:,} element{'s' * (whole != 1)}"
