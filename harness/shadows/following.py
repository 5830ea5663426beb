"""Kernels followed on residues: they run unchanged, and the residues of their results are computed beside.

A kernel may declare that a Python function stands for a primitive, such as a polynomial of its own for exp. Nothing is
followed within it.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from inspect import unwrap
from pathlib import Path
from types import FunctionType
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lastbit.calling.performing import named_results
from lastbit.interpret import installed
from lastbit.kernel import Kernel
from lastbit.numerics import residues
from lastbit.numerics.algebraic import FORMULAS
from lastbit.numerics.residues import Residues, products_of
from lastbit.shadows.aten import Following, Opaque, as_written
from lastbit.shadows.shadow_memory import ShadowMemory


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


_RULES = Path(__file__).parent, Path(residues.__file__).parent


@dataclass(frozen=True)
class Followed:
    """The residues of a followed kernel.

    Attributes:
        results: name → residues, OPEN where an operation has none; empty if the kernel could not be followed.
        opaque: the operations that have none, each with its place in the kernel's text and the reason.
        told: the process of the kernel says so, which may say what it likes.
        cut: the time was not enough for all programs of the last launch; what the others write is OPEN.
    """

    results: Mapping[str, Residues]
    opaque: tuple[str, ...]
    told: bool = False
    cut: bool = False


def follow(
    kernel: Kernel,
    tensors: Mapping[str, Tensor],
    params: Mapping[str, Any],
    results: Collection[str],
    constants: Sequence[float],
    device_type: str = "cpu",
    seconds: float = math.inf,
) -> Followed:
    """Call a kernel on tensors of the CPU, which it may write to, and follow what it computes.

    `constants` are the numbers of the case that the kernel's own may be made of. Where operations of PyTorch round in
    between, they are those of `device_type`. After so many `seconds`, no more programs of a launch are begun.

    Where that raises, a rule has failed, or this one call of a kernel that passed others: no formula is known then.
    """
    memory = ShadowMemory()
    watching: AbstractContextManager[object] = nullcontext()
    programs = None
    if installed():  # not before: Triton decides while it is imported whether it compiles
        from lastbit.interpret.watching import watched
        from lastbit.shadows.programs import Shadowing

        programs = Shadowing(memory, kernel.primitives, time.monotonic() + seconds)
        watching = watched(programs)
    operations = Following(memory, device_type, programs.require_whole if programs else lambda: None)
    for tensor in tensors.values():
        if tensor.is_floating_point():
            memory.register(tensor)
    memory.unseen = operations.unseen
    try:
        with products_of(constants), as_written():
            with standing(kernel, operations), watching, operations:
                returned = kernel.call(**tensors, **params)
            named = named_results(returned, tuple(results))
            read, ended = {name: memory.read(tensor) for name, tensor in named.items()}, []
    except Exception as why:
        frame = traceback.extract_tb(why.__traceback__)[-1]
        is_rule = any(Path(frame.filename).is_relative_to(folder) for folder in _RULES)
        what, who = ("following", "a rule of the field") if is_rule else ("call", "the kernel, called once more,")
        raised = f"{who} raised {type(why).__name__}: {why}"
        read, ended = {}, [Opaque(what, f"{frame.filename}:{frame.lineno}", raised)]
    seen = [Opaque(*entry) for entry in programs.opaque] if programs else []
    opaque = dict.fromkeys(map(str, (*operations.opaque, *seen, *ended)))
    return Followed(read, tuple(opaque), cut=programs is not None and programs.cut)
