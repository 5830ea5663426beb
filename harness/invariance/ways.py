"""Properties of the same inputs under another way of calling: again, on a stream, as a graph, compiled."""

from __future__ import annotations

from harness.invariance.again import RUN_TO_RUN
from harness.invariance.compiled import COMPILED
from harness.invariance.fusion import FP_FUSION
from harness.invariance.graphs import GRAPH
from harness.invariance.other_device import DEVICE
from harness.invariance.property import Property
from harness.invariance.streams import CONTENTION, STREAM

WAYS: tuple[Property, ...] = (RUN_TO_RUN, STREAM, GRAPH, COMPILED, CONTENTION, DEVICE, FP_FUSION)
