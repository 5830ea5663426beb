"""The call that others are compared with, and the comparison."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random

import torch
from torch import Tensor

from lastbit.case import Case, TensorSpec
from lastbit.dtypes import DTYPE_NAMES
from lastbit.errors import UsageError
from lastbit.inputs import Inputs, build, holding, unequal
from lastbit.inputs.bits import bits_with_one_nan, distance
from lastbit.kernel import Kernel
from lastbit.ops import Op
from lastbit.relations import Matched, Related, Tensors

Call = Callable[[Inputs], Tensors]
Anew = Callable[[Mapping[str, str]], Tensors]
"""The results of a call with these variables in the environment of its process."""


@dataclass(frozen=True, eq=False)
class Basis:
    """A kernel and its call on a case, with which every other call is compared.

    Attributes:
        kernel, op, device: what is asked.
        inputs: of the case.
        results: what the kernel gave for them, copies.
        call: the kernel on other inputs: its results, copies.
        allows: whether the contract allows the results of a call on these inputs.
        direct: the kernel may be called in this process, in other ways than `call` does.
        thorough: pairs may cost seconds.
        line: the case line of the inputs; empty where that is the line of their case.
        anew: the results of the call in a new process with these environment variables, where one can be started.
    """

    kernel: Kernel
    op: Op
    device: torch.device
    inputs: Inputs
    results: Tensors
    call: Call
    allows: Callable[[Inputs, Tensors], bool]
    direct: bool = True
    thorough: bool = False
    line: str = ""
    anew: Anew | None = None

    @property
    def case(self) -> Case:
        return self.inputs.case

    @cached_property
    def allowed(self) -> bool:
        """Return whether the contract allows the results of the call itself."""
        return self.allows(self.inputs, self.results)

    @property
    def random(self) -> Random:
        """Random numbers that depend on the case alone."""
        return Random(self.case.seed)

    def related(self, related: Related) -> Inputs:
        """Return the inputs of a related call; contiguous where their shape is new or elements share memory."""
        own = {spec.name: spec for spec in self.case.tensors}
        specs = tuple(_spec(name, tensor, own.get(name)) for name, tensor in related.tensors.items())
        case = replace(self.case, tensors=specs, params={**self.case.params, **related.params})
        return holding(case, related.tensors, self.device)


def _spec(name: str, tensor: Tensor, own: TensorSpec | None) -> TensorSpec:
    shape, dtype = tuple(tensor.shape), DTYPE_NAMES[tensor.dtype]
    if own is None:
        return TensorSpec(name, dtype, shape)
    kept = own.shape == shape and not own.repeats
    return own if kept else replace(own, shape=shape, dtype=dtype, strides=None, offset=0)


def contiguous(basis: Basis) -> Basis:
    """Return the basis with contiguous, aligned copies of the inputs; itself if no tensor has strides or an offset."""
    specs = basis.case.tensors
    if all(spec.strides is None and not spec.offset for spec in specs):
        return basis
    case = replace(basis.case, tensors=tuple(replace(spec, strides=None, offset=0) for spec in specs))
    inputs = holding(case, basis.inputs.tensors, basis.device)
    line = f"{basis.case}, its tensors contiguous" if any(spec.repeats for spec in specs) else ""
    return replace(basis, inputs=inputs, results=basis.call(inputs), line=line)


def line_of(inputs: Inputs, device: torch.device) -> str:
    """Return the case line that builds these inputs; empty if its regimes and seed build other values."""
    try:
        built = build(inputs.case, device)
    except UsageError:  # given values for another number of elements
        return ""
    pairs = ((built.tensors[name], tensor) for name, tensor in inputs.tensors.items())
    return str(inputs.case) if not any(unequal(list(pairs))) else ""


@dataclass(frozen=True)
class BitDifference:
    """Elements of a result in which two calls differ; NaNs are equal, whatever their sign and payload.

    Attributes:
        result: its name.
        elements, numel: how many differ, of how many.
        rows: indices of the rows that these are in, as far as the first `_MOST_ROWS`.
        row_count: how many there are; 0 for a result of one dimension or none.
        ulp: the largest distance.
    """

    result: str
    elements: int
    numel: int
    rows: tuple[int, ...] = ()
    row_count: int = 0
    ulp: float = 0.0


# Of more, sentences name a range or a number; a result keeps these in its record.
_MOST_ROWS = 256


def difference(matched: Matched) -> BitDifference | None:
    """Return the difference of the result with the most differing elements; None if all results are bitwise equal."""
    found = [d for name, (a, b) in matched.items() if (d := _difference(name, a, b)) is not None]
    return max(found, key=lambda d: d.elements, default=None)


def _difference(name: str, a: Tensor, b: Tensor) -> BitDifference | None:
    if a.shape != b.shape or a.dtype != b.dtype:
        return BitDifference(name, max(a.numel(), b.numel()), max(a.numel(), b.numel()), ulp=math.inf)
    a, b = a.detach(), b.detach().to(a.device)
    changed = bits_with_one_nan(a) != bits_with_one_nan(b)
    elements = int(changed.sum())
    if not elements:
        return None
    ulp = float(distance(a[changed], b[changed]).max())
    if changed.ndim < 2:
        return BitDifference(name, elements, a.numel(), ulp=ulp)
    rows = changed.reshape(-1, changed.shape[-1]).any(-1).nonzero().flatten()
    return BitDifference(name, elements, a.numel(), tuple(rows[:_MOST_ROWS].tolist()), len(rows), ulp)
