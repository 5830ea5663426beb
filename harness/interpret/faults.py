"""What programs do that no result need show: accesses outside of the tensors that a launch was given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from harness.errors import InterpreterError
from harness.interpret.formats import Array
from harness.interpret.given import Given
from harness.interpret.places import Place


@dataclass(frozen=True)
class Fault:
    """One operation of a kernel that went wrong.

    Attributes:
        kind: `out_of_bounds`.
        tensor: the parameter of the kernel that it concerns, or is nearest.
        place: in the kernel; None if its source could not be read.
        sentence: what happened, for a reader.
        address: of the first byte concerned.
    """

    kind: str
    tensor: str
    place: Place | None
    sentence: str
    address: int


_watched: dict[tuple[str, Place | None], Fault] | None = None


@contextmanager
def watched() -> Iterator[dict[tuple[str, Place | None], Fault]]:
    """Collects the faults of every launch within, the first of each kind and place; without it they are raised."""
    global _watched
    outer, _watched = _watched, {}
    try:
        yield _watched
    finally:
        _watched = outer


def noted(fault: Fault) -> None:
    """A fault has happened."""
    if _watched is None:
        raise InterpreterError(fault.sentence)
    _watched.setdefault((fault.kind, fault.place), fault)


def fault(
    kind: str, place: Place | None, tensors: list[Given], where: Array, width: int, ids: tuple[Array, ...]
) -> Fault:
    """Accesses of kind `kind` at addresses that no tensor has."""
    address = int(where[0])
    program = ", ".join(str(int(x.item(0))) for x in ids)
    did = {"load": "loads", "store": "stores"}.get(kind, "updates")
    count = "an element" if len(where) == 1 else f"{len(where):,} elements, the first"
    nearest, position = _position(tensors, address, width)
    sentence = f"program ({program}) {did} {count} {position}; {place or 'its source could not be read'}"
    return Fault("out_of_bounds", nearest, place, sentence, address)


def _position(tensors: list[Given], address: int, width: int) -> tuple[str, str]:
    if not tensors:
        return "", f"at address {address:#x}, and the launch was given no tensor"
    nearest = min(tensors, key=lambda x: max(x.start - address, address + width - x.stop, 0))
    if address < nearest.start:
        distance = nearest.start - address
        return nearest.name, f"{_elements(distance, nearest)} in front of {nearest}"
    if address + width > nearest.stop:
        return nearest.name, f"{_elements(address - nearest.stop, nearest)} behind the end of {nearest}"
    return nearest.name, f"in a gap of {nearest}, {_in_gap(nearest, address)}"


def _elements(distance: int, tensor: Given) -> str:
    whole, rest = divmod(distance, tensor.itemsize)
    return f"{distance:,} bytes" if rest else f"{whole:,} element{'s' * (whole != 1)}"


def _in_gap(tensor: Given, address: int) -> str:
    offset, index = address - tensor.start, []
    run, dims = tensor.layout
    for stride, size in dims:
        index.append(str(min(offset // stride, size - 1)))
        offset -= min(offset // stride, size - 1) * stride
    return f"{_elements(offset - run, tensor)} behind the end of row [{', '.join(index)}]"
