"""Calls of a kernel in this process, in another way than it is called otherwise, and the same values elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from lastbit.calling.performing import CallRequest, results_of
from lastbit.inputs import Inputs, build, holding
from lastbit.inputs.guards import ALIGNMENT
from lastbit.invariance.basis import Basis
from lastbit.relations import NotApplicable, Tensors

# All twelve are of one kind by chance one time in 2,048.
_TRIES = 12


def require_direct(basis: Basis, how: str) -> None:
    """Raise `NotApplicable` for a kernel that only runs in processes of its own."""
    if not basis.direct:
        raise NotApplicable(f"kernels in processes of their own cannot be {how}")


def require_accelerator(basis: Basis, what: str, *kinds: str) -> None:
    """Raise `NotApplicable` on the CPU, and on other devices than those of `kinds` where some are named."""
    if basis.device.type == "cpu" or (kinds and basis.device.type not in kinds):
        raise NotApplicable(f"{basis.device} has no {what}")


def called(
    basis: Basis,
    inputs: Inputs,
    function: Callable[..., Any] | None = None,
    device: torch.device | None = None,
) -> Tensors:
    """Call the kernel, or `function` in its place, and return copies of the results; the inputs are restored."""
    try:
        call, asked = function or basis.kernel.call, CallRequest(basis.case.params, tuple(basis.results))
        given = results_of(call, asked, device or basis.device, inputs.hand_out())
        return {name: given[name].detach().clone() for name in basis.results}
    finally:
        inputs.restore()


def elsewhere(basis: Basis, steps: int = 0) -> Inputs:
    """Copy the inputs to other memory, `steps` times 256 bytes beyond where an allocation would put them."""
    tensors = basis.case.tensors
    further = tuple(replace(s, offset=s.offset + steps * ALIGNMENT // s.torch_dtype.itemsize) for s in tensors)
    return holding(replace(basis.case, tensors=further), basis.inputs.tensors, basis.device)


def oddly_elsewhere(basis: Basis) -> Inputs:
    """Return the same in other memory, the first tensor an odd multiple of 256 bytes away if a few tries find that.

    Steps of 0, 1, 1, 2, 2 find it in the third try at most where each allocation lies as far behind the one before.
    """
    own = _place(basis.inputs)
    tried = [elsewhere(basis)]
    while (_place(tried[-1]) - own) % 2 == 0 and len(tried) < _TRIES:
        tried.append(elsewhere(basis, steps=(len(tried) + 1) // 2))
    return tried[-1]


def _place(inputs: Inputs) -> int:
    return inputs.guards[0].tensor.data_ptr() // ALIGNMENT


def other_values(basis: Basis) -> Inputs:
    """Build inputs of the same shapes and layouts with the values of another seed."""
    return build(replace(basis.case, seed=basis.case.seed + 1), basis.device)


def said(error: Exception) -> str:
    """Return type and first line of an exception."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".rstrip(": ")
