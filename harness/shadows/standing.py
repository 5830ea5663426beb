"""Python functions that a kernel declares to stand for a primitive, such as a polynomial of its own for exp."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import unwrap
from types import FunctionType
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lastbit.kernel import Kernel
from lastbit.numerics.algebraic import FORMULAS
from lastbit.numerics.residues import Residues
from lastbit.shadows.aten import Following


def python_primitives(kernel: Kernel) -> dict[str, FunctionType]:
    """Return name → Python function in the module of a kernel that it declares to stand for a primitive."""
    namespace = getattr(unwrap(kernel.call), "__globals__", {})
    return {name: own for name in kernel.primitives if isinstance(own := namespace.get(name), FunctionType)}


@contextmanager
def standing(kernel: Kernel, operations: Following) -> Iterator[None]:
    """Give the results of such functions the residues of their primitives, and follow nothing within them."""
    replaced = []
    for name, function in python_primitives(kernel).items():
        instead = _with_residues_of(FORMULAS[kernel.primitives[name]], function, operations)
        for namespace in (unwrap(kernel.call).__globals__, function.__globals__):
            if namespace.get(name) is function:
                namespace[name] = instead
                replaced.append((namespace, name, function))
    try:
        yield
    finally:
        for namespace, name, function in replaced:
            namespace[name] = function


def _with_residues_of(
    formula: Callable[..., Residues], function: FunctionType, operations: Following
) -> Callable[..., Any]:
    @wraps(function)
    def instead(*args: Any, **kwargs: Any) -> Any:
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()]
        residues = formula(*map(operations.of, given)) if given else None
        with _disable_current_modes():
            out = function(*args, **kwargs)
            if residues is not None and isinstance(out, Tensor) and out.is_floating_point():
                operations.give(out, residues)
        return out

    return instead
