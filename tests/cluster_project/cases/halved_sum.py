"""Cases of halved_sum: sixteen groups, of which every fifth one also draws cases."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from hypothesis import strategies as st

from lastbit.case import Case, Chosen, Group, TensorSpec
from lastbit.inputs import chosen_tensor, tensor_choices

GROUPS = 16
_DTYPES = ("bf16", "fp16", "fp32")
_REGIMES = ("normal", "huge")


def groups(accepts: frozenset[str], *, small: bool) -> Iterator[Group]:
    """Group number i has one dtype, and i + 1 columns at most."""
    for number in range(GROUPS):
        dtype, name = _DTYPES[number % 3], f"{number:02}"
        example = Case("halved_sum", tuple(TensorSpec(t, dtype, (2, number + 1)) for t in "xy"), {}, number)
        if number % 5:
            yield Group(name, examples=(example,))
        else:
            choices = {key: options for t in "xy" for key, options in tensor_choices(t, (dtype,), _REGIMES).items()}
            yield Group(name, partial(_cases, number + 1), examples=(example,), choices=choices)


@st.composite
def _cases(draw: st.DrawFn, most: int, chosen: Chosen) -> Case:
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, most)))
    return Case("halved_sum", tuple(chosen_tensor(t, chosen, shape) for t in "xy"), {}, draw(st.integers(0, 2**32 - 1)))
