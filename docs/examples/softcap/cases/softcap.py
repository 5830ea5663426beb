"""Cases of softcap: one group per dtype, and a few fixed ones."""

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

_REGIMES = ("normal", "rows", "tiny", "huge", "zero_rows", "subnormal", "special")
_CAPS = (30.0, 50.0, 1.0, 0.3)
"""Those of the logits and of the attention of Gemma 2, one that changes nothing, and one that has no exact inverse."""

_WIDTHS = (100, 300)
"""From fewer columns than the Triton kernel takes at a time, 128, to so many that its loop runs three times."""


def groups(accepts: frozenset[str], *, small: bool) -> Iterator[Group]:
    """Yield groups for a kernel that takes the tensors and parameters `accepts`; `small` for an interpreter."""
    yield Group("edges", examples=tuple(_edges()))
    rows = 8 if small else 4096
    for dtype in ("bf16", "fp16", "fp32"):
        choices = {**tensor_choices("x", (dtype,), _REGIMES, row_layouts(rows)), "cap": _CAPS}
        yield Group(dtype, partial(_cases, rows), choices=choices)


@st.composite
def _cases(draw: st.DrawFn, rows: int, chosen: Chosen) -> Case:
    shape = (*draw(leading_dims(rows, least_rows(chosen))), draw(st.integers(*_WIDTHS)))
    tensors = (chosen_tensor("x", chosen, shape),)
    return Case("softcap", tensors, {"cap": chosen["cap"]}, draw(st.integers(0, 2**32 - 1)))


def _edges() -> Iterator[Case]:
    """Yield no rows, one number, and widths beside those of a block."""
    for rows, width in ((0, 16), (1, 1), (3, 127), (3, 128), (3, 129)):
        yield Case("softcap", (TensorSpec("x", "bf16", (rows, width)),), {"cap": 30.0}, seed=width)
