"""Properties of the same inputs under another way of calling: again, on a stream, as a graph, compiled."""

from __future__ import annotations

from lastbit.invariance.again import RUN_TO_RUN
from lastbit.invariance.compiled import COMPILED
from lastbit.invariance.fusion import FP_FUSION
from lastbit.invariance.graphs import GRAPH
from lastbit.invariance.other_device import DEVICE
from lastbit.invariance.property import Property
from lastbit.invariance.streams import CONTENTION, STREAM

WAYS: tuple[Property, ...] = (RUN_TO_RUN, STREAM, GRAPH, COMPILED, CONTENTION, DEVICE, FP_FUSION)
