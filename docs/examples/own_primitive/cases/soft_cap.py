"""Scores of ordinary size in bf16 and fp16."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import strategies as st

from lastbit import Case, Group, TensorSpec


def groups(accepts: frozenset[str], *, small: bool) -> Iterator[Group]:
    """One group per dtype; `small` makes no difference."""
    for dtype in ("bf16", "fp16"):
        yield Group(dtype, _cases(dtype))


@st.composite
def _cases(draw: st.DrawFn, dtype: str) -> Case:
    shape = draw(st.integers(1, 8)), draw(st.integers(1, 256))
    cap = draw(st.sampled_from((30.0, 50.0)))
    return Case("soft_cap", (TensorSpec("scores", dtype, shape),), {"cap": cap}, draw(st.integers(0, 2**32 - 1)))
