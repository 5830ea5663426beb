"""The call that others are compared with, and the comparison."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random

import torch
from torch import Tensor

from harness.case import Case, TensorSpec
from harness.dtypes import DTYPE_NAMES
from harness.inputs import Inputs, bits_of, holding
from harness.kernel import Kernel
from harness.numerics import format_of
from harness.numerics.formats import ordinals
from harness.op import Op
from harness.relation import Matched, Related, Tensors

Call = Callable[[Inputs], Tensors]


@dataclass(frozen=True, eq=False)
class Basis:
    """A kernel, and its call on a case, which every other call is compared with.

    Attributes:
        kernel, op, device: what is asked.
        inputs: of the case.
        results: what the kernel gave for them, copies.
        call: the kernel on other inputs: its results, copies.
        allows: whether the contract allows the results of a call on these inputs.
        direct: the kernel may be called in this process, in other ways than `call` does.
        thorough: pairs may cost seconds.
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
    anew: Callable[[Mapping[str, str]], Tensors] | None = None

    @property
    def case(self) -> Case:
        return self.inputs.case

    @property
    def random(self) -> Random:
        """Random numbers that depend on the case alone."""
        return Random(self.case.seed)

    def related(self, related: Related) -> Inputs:
        """The inputs of a related call: contiguous where their shape is another one."""
        own = {spec.name: spec for spec in self.case.tensors}
        specs = tuple(_spec(name, tensor, own.get(name)) for name, tensor in related.tensors.items())
        case = replace(self.case, tensors=specs, params={**self.case.params, **related.params})
        return holding(case, related.tensors, self.device)


def _spec(name: str, tensor: Tensor, own: TensorSpec | None) -> TensorSpec:
    shape, dtype = tuple(tensor.shape), DTYPE_NAMES[tensor.dtype]
    if own is None:
        return TensorSpec(name, dtype, shape)
    return own if own.shape == shape else replace(own, shape=shape, dtype=dtype, strides=None, offset=0)


@dataclass(frozen=True)
class Difference:
    """Elements of a result in which two calls differ.

    Attributes:
        result: its name.
        elements, numel: how many differ, of how many.
        rows: indices of the rows that these are in, as far as the first `_MOST_ROWS`.
        ulp: the largest distance.
    """

    result: str
    elements: int
    numel: int
    rows: tuple[int, ...] = ()
    row_count: int = 0
    ulp: float = 0.0


_MOST_ROWS = 256


def difference(matched: Matched) -> Difference | None:
    """The result of which most elements differ in a bit, or None if every bit is the same."""
    found = [d for name, (a, b) in matched.items() if (d := _difference(name, a, b)) is not None]
    return max(found, key=lambda d: d.elements, default=None)


def _difference(name: str, a: Tensor, b: Tensor) -> Difference | None:
    if a.shape != b.shape or a.dtype != b.dtype:
        return Difference(name, max(a.numel(), b.numel()), max(a.numel(), b.numel()), ulp=math.inf)
    a, b = a.detach(), b.detach().to(a.device)
    changed = bits_of(a) != bits_of(b)
    elements = int(changed.sum())
    if not elements:
        return None
    rows = changed.reshape(-1, changed.shape[-1]).any(-1).nonzero().flatten() if changed.ndim > 1 else changed.nonzero()
    first = tuple(rows[:_MOST_ROWS].flatten().tolist())
    return Difference(name, elements, a.numel(), first, len(rows), ulp_distance(a[changed], b[changed]))


def ulp_distance(a: Tensor, b: Tensor) -> float:
    """The largest number of steps between two tensors of one dtype; infinite where one alone is NaN."""
    if not a.is_floating_point():
        return float((a.double() - b.double()).abs().max())
    if bool((a.isnan() != b.isnan()).any()):
        return math.inf
    positions = (ordinals(t.double().nan_to_num(0.0, math.inf, -math.inf), format_of(t.dtype)) for t in (a, b))
    return float(torch.sub(*positions).abs().max())
