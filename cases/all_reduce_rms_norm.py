"""Cases of all-reduce and RMSNorm: two and four ranks, with a residual and without, and edges."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from hypothesis import strategies as st

from lastbit import (
    Case,
    Choices,
    Chosen,
    Group,
    chosen_tensor,
    layouts_like,
    leading_dims,
    least_rows,
    row_layouts,
    tensor_choices,
)
from lastbit.cases._edges import edges
from lastbit.cases._ranks import peers, rank_choices, rank_tensors

_SMALL_ELEMENTS = 1 << 11  # of x where a CPU takes part
_LARGE_ELEMENTS = 1 << 21


@dataclass(frozen=True)
class _AllReduceNormOptions:
    """The fixed facts of a group; without a weight and residual for a kernel that takes none."""

    ranks: int
    dtype: str
    weight: str | None
    residual: bool

    def without(self, accepts: frozenset[str]) -> _AllReduceNormOptions:
        weight = self.weight if "weight" in accepts else None
        return _AllReduceNormOptions(self.ranks, self.dtype, weight, self.residual and "residual" in accepts)

    def __str__(self) -> str:
        words = [self.dtype, f"weight_{self.weight}" if self.weight else "", "residual" if self.residual else ""]
        return "-".join([*filter(None, words), f"ranks{self.ranks}"])


_GROUPS = (
    _AllReduceNormOptions(2, "bf16", "bf16", True),
    _AllReduceNormOptions(4, "bf16", "fp32", True),
    _AllReduceNormOptions(2, "fp16", "fp16", False),
)


def groups(accepts: frozenset[str], *, small: bool) -> Iterator[Group]:
    """Yield the groups for a kernel that takes the tensors and parameters `accepts`; `small` cuts the rows."""
    yield Group("edges", examples=tuple(edges("all_reduce_rms_norm", accepts, small=small)))
    most = _SMALL_ELEMENTS if small else _LARGE_ELEMENTS
    for options in dict.fromkeys(o.without(accepts) for o in _GROUPS if accepts.issuperset(peers(o.ranks))):
        yield Group(str(options), partial(_cases, options, most), choices=_choices(options, most // 64))


def _choices(options: _AllReduceNormOptions, rows: int) -> Choices:
    found = rank_choices(options.ranks, options.dtype, rows)
    if options.weight is not None:
        found |= tensor_choices("weight", (options.weight,), ("normal", "near_one", "signs"), layouts_like(64))
    if options.residual:
        found |= tensor_choices("residual", (options.dtype,), ("normal", "rows", "outlier"), row_layouts(rows))
    return {**found, "eps": (1e-6, 1e-5)}


@st.composite
def _cases(draw: st.DrawFn, options: _AllReduceNormOptions, most: int, chosen: Chosen) -> Case:
    width = draw(st.integers(1, most // 8))
    shape = (*draw(leading_dims(most // width, least_rows(chosen))), width)
    tensors = rank_tensors(options.ranks, chosen, shape)
    tensors += [chosen_tensor("weight", chosen, (width,))] if options.weight is not None else []
    tensors += [chosen_tensor("residual", chosen, shape)] if options.residual else []
    seed = draw(st.integers(0, 2**32 - 1))
    return Case("all_reduce_rms_norm", tuple(tensors), {"eps": chosen["eps"]}, seed)
