"""A 64-bit hash of a tensor's dtype, shape and elements that does not depend on device, strides or torch version."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from lastbit.inputs import fused
from lastbit.inputs.bits import INTEGER_OF_SIZE, NAN_BITS, bits_of, finalize, key_of, numbers, signed
from lastbit.inputs.blocks import block_budget, pieces
from lastbit.inputs.fused import flat_lines
from lastbit.trust import fuses, trusted

_INDEX, _BITS = signed(0xD6E8FEB86659FD93), signed(0xA0761D6478BD642F)
# Its arithmetic is of integers: where it is wrong, it is so in nearly every element.
_SAMPLE = 1 << 14  # elements at most that a fused kernel is compared on


def fingerprint(tensor: Tensor) -> str:
    """Return 16 hex digits; equal for equal dtype, shape and element bits in logical order.

    Every element contributes a hash of its index and bits, and the contributions are added modulo 2**64, so that the
    order and size of the pieces do not matter but exchanged elements and flipped signs do.
    """
    return fingerprints_of([tensor])[0]


def fingerprints_of(tensors: Sequence[Tensor], *, values: bool = False) -> list[str]:
    """Return the fingerprints of several tensors, or of their values, for which a device is waited for once."""
    totals = [_total(tensor, values=values) for tensor in tensors]
    return [
        f"{key_of(str(_seen_as(tensor.dtype) if values else tensor.dtype), tuple(tensor.shape), total % 2**64):016x}"
        for tensor, total in zip(tensors, numbers(totals), strict=True)
    ]


def combined(fingerprints: Mapping[str, str]) -> str:
    """Return one fingerprint of several named ones; the order of the names does not matter."""
    return f"{key_of(*sorted(fingerprints.items())):016x}"


def _seen_as(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that holds the values of narrower floating-point dtypes, fp32; else the dtype itself."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 8 else dtype


def _total(tensor: Tensor, *, values: bool) -> Tensor:
    """Return the sum of the hashes of all elements modulo 2**64, int64 [1] on the device of the tensor."""
    total = torch.zeros(1, dtype=torch.int64, device=tensor.device)
    if tensor.numel() and not (fuses(tensor) and _added_at_once(total, tensor, values=values)):
        for part, start in _parts(tensor):
            total += _contribution(_bits(part, values=values), start)
    return total


def _added_at_once(total: Tensor, tensor: Tensor, *, values: bool) -> bool:
    """Add the hashes of all elements to `total` by one kernel that is trusted; return whether it was done."""
    lines = flat_lines(tensor)
    if lines is None:
        return False

    def difference() -> str:
        part = next(_parts(tensor, _SAMPLE))[0]
        sample = flat_lines(part)
        assert sample is not None
        actual, expected = torch.zeros_like(total), _contribution(_bits(part, values=values), 0)
        fused.add_hashes(actual, part, sample, (_INDEX, _BITS), values=values)
        return "" if torch.equal(actual[0], expected) else f"it adds up {int(actual)} and not {int(expected)}"

    key = fused.add_hashes, tensor.dtype, values, lines.tile
    if not trusted(tensor.device, key, f"fingerprints of {tensor.dtype}", difference):
        return False
    fused.add_hashes(total, tensor, lines, (_INDEX, _BITS), values=values)
    return True


def _parts(tensor: Tensor, budget: int | None = None) -> Iterator[tuple[Tensor, int]]:
    """Yield parts of a tensor, and the logical index of the first element of each; every element is in one."""
    start = 0
    for (part,) in pieces(tensor, budget=budget or block_budget(tensor.device)):
        yield part, start
        start += part.numel()


def _bits(part: Tensor, *, values: bool) -> Tensor:
    """Return the bits that are hashed, int64 [numel]."""
    if not values or not part.is_floating_point():
        return bits_of(part).flatten().to(torch.int64)
    seen = part.to(_seen_as(part.dtype))
    bits = seen.flatten().view(INTEGER_OF_SIZE[seen.element_size()]).to(torch.int64)
    return bits.masked_fill(seen.isnan().flatten(), NAN_BITS[seen.dtype])


def _contribution(bits: Tensor, start: int) -> Tensor:
    """Return the sum of the hashes of consecutive elements, the first of which has logical index `start`."""
    index = torch.arange(start, start + bits.numel(), device=bits.device)
    return finalize(index.mul_(_INDEX).add_(bits, alpha=_BITS)).sum()
