"""Two ranks, bf16, with a residual."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import strategies as st

from lastbit import Case, Group, TensorSpec


def groups(accepts: frozenset[str], *, small: bool) -> Iterator[Group]:
    """One group; `small` makes no difference."""
    yield Group("bf16-ranks2", _cases())


@st.composite
def _cases(draw: st.DrawFn) -> Case:
    shape = draw(st.integers(1, 8)), draw(st.integers(1, 256))
    tensors = [TensorSpec(name, "bf16", shape) for name in ("x", "peer_1", "residual")]
    tensors += [TensorSpec("weight", "bf16", shape[-1:]), TensorSpec("scale", "fp32", (1,), regime="scale_random")]
    return Case("all_reduce_rms_norm_codes", tuple(tensors), {"eps": 1e-6}, draw(st.integers(0, 2**32 - 1)))
