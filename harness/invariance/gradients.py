"""Grad: inputs that require it, as those of a model in training do."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import Tensor

from lastbit.calling.uses_compile import is_compiled
from lastbit.invariance.basis import Basis
from lastbit.invariance.direct import called, require_direct
from lastbit.invariance.property import Pairs, Property
from lastbit.kernel import Kernel
from lastbit.relations import NotApplicable, same


def show(basis: Basis, pairs: Pairs) -> None:
    """Compare a call on inputs that require grad with the call on the same ones that do not."""
    require_direct(basis, "called on inputs that require grad")
    if not basis.thorough and is_compiled(basis.kernel.call):
        raise NotApplicable("it would be compiled anew, which lastbit invariance has done")
    if not any(_is_differentiable(basis.kernel, guard.name, guard.tensor) for guard in basis.inputs.guards):
        raise NotApplicable("no input can require grad: none is floating-point and not overwritten")
    results = called(basis, basis.inputs, _requiring_grad(basis.kernel))
    pairs.compare(basis, "inputs that require grad", same(basis.results, results), basis.inputs, results)


def _requiring_grad(kernel: Kernel) -> Any:
    """Return a kernel as a function that lets its floating-point inputs require grad, but for those it overwrites."""

    @wraps(kernel.call)
    def call(**arguments: Any) -> object:
        for name, value in arguments.items():
            if isinstance(value, Tensor) and _is_differentiable(kernel, name, value):
                value.requires_grad_()
        with torch.enable_grad():
            return kernel.call(**arguments)

    return call


def _is_differentiable(kernel: Kernel, name: str, tensor: Tensor) -> bool:
    return tensor.is_floating_point() and name not in {*kernel.mutates, *kernel.held}


GRAD = Property("grad", "inputs that require grad give the same bits as the same ones that do not", show)
