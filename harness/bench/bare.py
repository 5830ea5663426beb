"""A kernel that does next to nothing: what is left of the time of its call is a launch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

_ELEMENTS = 256


@triton.jit  # type: ignore[untyped-decorator]
def _copy(source, target, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + place, tl.load(source + place, mask=place < n), mask=place < n)


def bare_launch(device: torch.device) -> Callable[[], object]:
    """Make a launch of one program with three arguments and a constant, as most people launch a kernel."""
    source = torch.zeros(_ELEMENTS, device=device)
    target = torch.empty_like(source)
    return lambda: _copy[(1,)](source, target, _ELEMENTS, BLOCK=_ELEMENTS)
