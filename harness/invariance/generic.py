"""Properties that mean something for any op that has rows, layouts or results in place."""

from __future__ import annotations

from lastbit.invariance.batches import PADDING, PERMUTATION
from lastbit.invariance.in_place import IN_PLACE
from lastbit.invariance.layouts import LAYOUT
from lastbit.invariance.property import Property
from lastbit.invariance.rows import ROWS

GENERIC: tuple[Property, ...] = (ROWS, PERMUTATION, PADDING, LAYOUT, IN_PLACE)
