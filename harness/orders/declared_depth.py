"""The height that a kernel declares of its sums, held against the tree of one of them at a few terms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext, suppress
from itertools import islice

import torch

from lastbit.case import Case, TensorSpec
from lastbit.dtypes import DTYPE_NAMES, DTYPES
from lastbit.errors import KernelError
from lastbit.kernel import Kernel
from lastbit.ops import ProbedSum
from lastbit.orders.of_kernel import Probe, order_of_subject
from lastbit.verify.check import Subject, unsupported

_TERMS = (48, 64, 96, 128)
"""Terms of a sum: more take longer, 0.1 s for each fifty in an interpreted kernel, and fewer hide what is declared."""

_ROWS = 512  # so many questions in a call; 2,048 took longer
_DTYPES = ("fp32", "bf16", "fp16")  # in bf16 an ulp of a sum of squares takes ten times as many questions

_known: dict[tuple[int, int, str], tuple[Kernel, str]] = {}
"""Function, declaration and device of a kernel → the kernel, so that these live on, and what was said of it."""


def too_deep(subject: Subject) -> str:
    """Say of the first sum of a kernel that shows its tree that it is higher than declared; empty if it is not.

    Also empty where none but dots shows its tree, or where no tree of so few terms is higher than declared. Known of a
    kernel in this process after the first time.
    """
    kernel = subject.kernel
    key = id(kernel.call), id(kernel.depth), str(subject.device)
    if key not in _known:
        try:
            said = _found(subject)
        except Exception:  # of the kernel, which may not be made for probes, or of its declaration
            said = ""
        _known[key] = kernel, said
    return _known[key][1]


def _found(subject: Subject) -> str:
    for name in (name for name, summed in subject.op.sums.items() if not summed.dot):  # to ask a dot takes seconds
        for probe in _probes(subject, name):
            with suppress(KernelError):  # of a dtype that the kernel does not take
                order = order_of_subject(subject, probe, nullcontext())
                if order.tree is None:
                    break
                broken = [one.said for one in order.declared if one.what == "depth" and not one.kept]
                if not broken or any("more bits" in note for note in order.notes):
                    return ""
                options = f"--sum {name} --columns {probe.terms} --rows {probe.rows} --dtype {probe.dtype}"
                command = f"lastbit order {probe.kernel} {options}"
                return f"{broken[0]} in {order.about} ({name}) of {probe.terms} terms: {command}"
    return ""


def _probes(subject: Subject, name: str) -> Iterator[Probe]:
    """Yield a probe of a sum for each dtype that the kernel takes, of terms among which too high a tree fits."""
    kernel, depth = subject.kernel, subject.kernel.depth
    assert depth is not None
    telling = sorted((n for n in _TERMS if depth(n) < n - 1), key=lambda n: (2 * depth(n) > n, n))
    for dtype in _DTYPES:
        taken = (n for n in telling if not unsupported(kernel, _case(subject, subject.op.sums[name], n, dtype)))
        yield from (Probe(kernel.name, name, terms, _ROWS, dtype) for terms in islice(taken, 1))


def _case(subject: Subject, summed: ProbedSum, terms: int, dtype: str) -> Case:
    """Return a case with tensors such as those of a probe."""
    given = summed.arguments(torch.zeros(_ROWS, terms, dtype=DTYPES[dtype]), 1.0)
    own = {name: value for name, value in given.items() if name in subject.kernel.accepts}
    tensors = {name: value for name, value in own.items() if isinstance(value, torch.Tensor)}
    specs = (TensorSpec(name, DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items())
    return Case(subject.op.name, tuple(specs), {name: v for name, v in own.items() if name not in tensors})
