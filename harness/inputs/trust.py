"""Fused kernels are used where they have given the bits of the torch functions that define them.

Whether a compiler keeps every rounding cannot be read off a kernel, so each one is compared with torch at its first use
on a device, on part of what it is used for. Where one differs or does not compile, torch does the work from then on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable

import torch

_proven: set[tuple[torch.device, Hashable]] = set()
_refused: set[torch.device] = set()


def trusted(device: torch.device, kernel: Hashable, agrees: Callable[[], bool]) -> bool:
    """Whether `kernel` may be used on `device`; `agrees` runs it and torch, and compares all bits.

    Warns once per device that none may.
    """
    if device in _refused:
        return False
    if (device, kernel) in _proven:
        return True
    try:
        reason = "" if agrees() else "it gives other bits than torch"
    except Exception as error:  # whatever a compiler raises: torch says the same where the device itself is at fault
        reason = f"{type(error).__name__}: {error}"
    if reason:
        _refused.add(device)
        warnings.warn(f"inputs and fingerprints are made without fused kernels on {device}: {reason}", stacklevel=2)
        return False
    _proven.add((device, kernel))
    return True
