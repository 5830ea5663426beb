"""Cases of op_name: one group per dtype, and a few fixed ones."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from hypothesis import strategies as st

from lastbit import (
    Case,
    Chosen,
    Group,
    TensorSpec,
    chosen_tensor,
    leading_dims,
    least_rows,
    row_layouts,
    tensor_choices,
)

# Named ways to make values; `lastbit list regimes` describes them all. Take those that your op can stumble over: values
# that overflow, vanish or cancel, rows of zeros, NaN and infinities ("special").
_REGIMES = ("normal", "rows", "tiny", "huge", "zero_rows", "subnormal", "special")
_WEIGHTS = ("normal", "ones", "zeros", "signs")

_WIDTHS = (100, 300)
"""From fewer columns than the Triton kernel takes at a time, 128, to so many that its loop runs three times."""


def groups(accepts: frozenset[str], *, small: bool) -> Iterator[Group]:
    """Return groups for a kernel that takes tensors and parameters `accepts`; `small` where an interpreter runs it."""
    yield Group("edges", examples=tuple(_edges("weight" in accepts)))
    rows = 8 if small else 4096
    for dtype in ("bf16", "fp16", "fp32"):
        # What is one of a few goes into `choices`: each option is judged before anything is left to chance, and the
        # coverage of a run says which were. Numbers, such as sizes and seeds, are drawn below.
        choices = tensor_choices("x", (dtype,), _REGIMES, row_layouts(rows))
        if "weight" in accepts:
            choices = {**choices, **tensor_choices("weight", (dtype,), _WEIGHTS)}
        yield Group(dtype, partial(_cases, rows, "weight" in accepts), choices=choices)


@st.composite
def _cases(draw: st.DrawFn, rows: int, weighted: bool, chosen: Chosen) -> Case:
    shape = (*draw(leading_dims(rows, least_rows(chosen))), draw(st.integers(*_WIDTHS)))
    tensors = [chosen_tensor("x", chosen, shape)]
    if weighted:
        tensors.append(chosen_tensor("weight", chosen, shape[-1:]))
    # The third argument has the parameters: {"eps": 1e-6}, or {"eps": chosen["eps"]} with `eps` among the choices.
    return Case("op_name", tuple(tensors), {}, draw(st.integers(0, 2**32 - 1)))


def _edges(weighted: bool) -> Iterator[Case]:
    """Return cases that kernels may branch on and chance hardly meets: no rows, one number, widths beside a block's."""
    for rows, width in ((0, 16), (1, 1), (3, 127), (3, 128), (3, 129)):
        tensors = [TensorSpec("x", "bf16", (rows, width))]
        if weighted:
            tensors.append(TensorSpec("weight", "bf16", (width,)))
        yield Case("op_name", tuple(tensors), {}, seed=width)
