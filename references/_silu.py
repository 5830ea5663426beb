"""The derivative of silu, as gradients of gates have it."""

from __future__ import annotations

from lastbit.numerics import Enclosure, hull, multiply_add, product_in_any_order


def times_silu_slope(factors: tuple[Enclosure, ...], z: Enclosure, s: Enclosure) -> Enclosure:
    """Multiply the factors by silu'(z) in any order: s · (1 + z · (1 - s)) or s + z · s · (1 - s), s = sigmoid(z)."""
    rest = 1.0 + -s
    expanded = hull(multiply_add(z * s, rest, s), multiply_add(z, s * rest, s))
    return hull(product_in_any_order(*factors, s, multiply_add(z, rest, 1.0)), product_in_any_order(*factors, expanded))
