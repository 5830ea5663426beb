"""Changes of the tensor objects that a kernel was handed, as opposed to the elements in memory.

`x.data = y`, `x.set_()` and `x.resize_()` give the tensor of the caller another shape or other memory, and resizing its
storage takes the memory away from under it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from lastbit.inputs.guards import Guarded, is_whole


@dataclass(frozen=True, slots=True)
class Rebound:
    """A tensor that is not what the kernel was handed; `change` completes "it now has"."""

    tensor: str
    change: str
    kind: str = "rebound_input"

    @property
    def sentence(self) -> str:
        """The change in words."""
        return f"rebound {self.tensor}: it now has {self.change}"


def rebound(handed: Tensor, guarded: Guarded) -> Rebound | None:
    """Return how `handed`, an alias of `guarded.tensor` that a kernel got, differs from it now; None if it does not."""
    changes = list(_changes(handed, guarded))
    return Rebound(guarded.name, ", ".join(changes)) if changes else None


def _changes(handed: Tensor, guarded: Guarded) -> Iterator[str]:
    tensor = guarded.tensor
    if not is_whole(guarded):
        storage, size = guarded.words.untyped_storage(), guarded.words.nbytes
        yield f"a storage of {storage.nbytes():,} bytes in place of {size:,}"
    elif handed.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
        yield "other memory"
    elif moved := int(handed.storage_offset() - tensor.storage_offset()):
        yield f"its first element {abs(moved):,} elements {'after' if moved > 0 else 'before'} the one that it had"
    pairs = {
        "dtype": (handed.dtype, tensor.dtype),
        "shape": (list(handed.shape), list(tensor.shape)),
        "strides": (handed.stride(), tensor.stride()),
    }
    for what, (now, before) in pairs.items():
        if now != before:
            yield f"{what} {_text(now)} in place of {_text(before)}"


def _text(value: object) -> str:
    return str(list(value) if isinstance(value, tuple) else value).removeprefix("torch.")
