"""Tensors of several ranks: the own one, x, and those of the peers, which are placed and made like it."""

from __future__ import annotations

from collections.abc import Sequence

from lastbit import Chosen, Option, TensorSpec, chosen_tensor, tensor_choices

REGIMES = ("normal", "rows", "outlier", "lattice", "zero_rows", "subnormal", "huge", "special")


def peers(ranks: int) -> tuple[str, ...]:
    """Name the tensors of the other ranks."""
    return tuple(f"peer_{number}" for number in range(1, ranks))


def rank_choices(dtype: str, layouts: Sequence[str], regimes: Sequence[str] = REGIMES) -> dict[str, tuple[Option, ...]]:
    """Map x and its first peer to their options; the other peers are like that one."""
    found: dict[str, tuple[Option, ...]] = {}
    for name in ("x", "peer_1"):
        found |= tensor_choices(name, (dtype,), regimes, layouts)
    return found


def rank_tensors(ranks: int, chosen: Chosen, shape: tuple[int, ...]) -> list[TensorSpec]:
    """Make the tensors of all ranks as chosen."""
    first = chosen_tensor("peer_1", chosen, shape)
    others = [TensorSpec(name, first.dtype, shape, first.strides, first.offset, first.regime) for name in peers(ranks)]
    return [chosen_tensor("x", chosen, shape), *others]
