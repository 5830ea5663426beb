"""Properties that mean something for any op that has rows, layouts or results in place."""

from __future__ import annotations

from harness.invariance.batches import PADDING, PERMUTATION
from harness.invariance.in_place import IN_PLACE
from harness.invariance.layouts import LAYOUT
from harness.invariance.property import Property
from harness.invariance.rows import ROWS

GENERIC: tuple[Property, ...] = (ROWS, PERMUTATION, PADDING, LAYOUT, IN_PLACE)
