"""Numbers of rows at which kernels are known to choose another way: powers of two, and multiples of processors."""

from __future__ import annotations

import torch


def sizes_up_to(count: int, device: torch.device, *, few: bool = False) -> list[int]:
    """List numbers of rows below `count`, in order: 2^k and its neighbours, and multiples of the multiprocessors.

    A few are the powers, 3, all rows but one, and the number of processors with the next one.
    """
    powers = [1 << k for k in range(count.bit_length())]
    multiples = [factor * own for factor in (1, 2, 4, 8)] if (own := processors(device)) else []
    if few:
        near = {*powers, 3, count - 1, *(size + step for size in multiples[:1] for step in (0, 1))}
    else:
        near = {size + step for size in [*powers, *multiples, count] for step in (-1, 0, 1)}
    return sorted(size for size in near if 0 < size < count)


def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 0 for other devices."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0
