"""Products of matrices that torch gives a kernel on a CPU, and that no order of their sum in fp32 can give."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from lastbit.case import Case
from lastbit.dtypes import DTYPE_NAMES
from lastbit.inputs import build
from lastbit.judging.torch_compare import outside_mask
from lastbit.numerics import Enclosure, Premises, dot, format_of, using
from lastbit.shadows.aten import UncompiledMode
from lastbit.verify.check import Subject

# Arbitrary: some tenths of a second of one core in fp64.
MOST = 1 << 28
"""Multiplications of a product up to which it is looked at."""
_PREMISES = Premises(flushes_subnormals=True)  # the loosest, as oneDNN's products by AMX are of numbers without these


def wrong_product(subject: Subject, case: Case) -> str:
    """Return the first element of a product that lies outside, as a sentence; empty if there is none.

    The kernel is called once more, on the CPU. Its products by `mm` and `bmm` are looked at, each by its own operands.
    """
    watch = _Products()
    with suppress(Exception), watch:  # of the kernel, which may take another way under a mode of torch
        subject.kernel.call(**build(case.gathered(), subject.device).tensors, **case.params)
    return watch.found


class _Products(UncompiledMode):
    """Dispatch mode of torch that describes the first wrong product of matrices."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not self.found and func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            self.found = _outside(f"torch.ops.{func.overloadpacket}", args[0], args[1], made)
        return made


def _outside(operation: str, a: Tensor, b: Tensor, made: Tensor) -> str:
    """Describe the first element of a product that its own operands exclude; empty if there is none."""
    if any(t.device.type != "cpu" or not _is_judged(t) for t in (a, b, made)) or a.numel() * b.shape[-1] > MOST:
        return ""
    with using(_PREMISES):
        allowed = dot(*(Enclosure.point(t.detach().double()) for t in (a, b))).rounded(format_of(made.dtype))
    places = outside_mask(made.detach(), allowed).nonzero()
    if not len(places):
        return ""
    index = tuple(places[0].tolist())
    value, low, high = (float(t[index]) for t in (made, allowed.lo, allowed.hi))
    words = " and ".join(f"{DTYPE_NAMES[t.dtype]} {list(t.shape)}" for t in (a, b))
    return (
        f"{operation} gives {value:.9g} at {list(index)} of the product of {words}, where a sum in fp32 gives "
        f"{low:.9g} to {high:.9g} in any order: that is torch, not the kernel."
    )


def _is_judged(tensor: Tensor) -> bool:
    """Return whether torch multiplies these in fp32, without subnormal operands, which it may flush to zero."""
    if tensor.dtype is torch.float32:
        own = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
        if torch.get_float32_matmul_precision() != "highest" or own not in ("none", "ieee"):
            return False
    elif tensor.dtype not in (torch.bfloat16, torch.float16):
        return False
    return not bool(((tensor != 0) & (tensor.abs() < torch.finfo(torch.float32).tiny)).any())
