"""Chains: an op made of ops, each of which takes what an earlier one gives.

    first_then_second = chain("first_then_second", Part(first), Part(second, takes={"x": "output"}))

The reference of a chain calls those of its parts, one after the other. Between two kernels a tensor is stored in its
dtype; a fused kernel may skip that. So each stage that is passed on has an axis of its own: by default it is rounded as
the part rounds it, and under `unrounded_STAGE` it goes on in fp32. A fused kernel is held to the unfused chain, and one
that rounds less is told by the name of the stage.
"""

from __future__ import annotations

from lastbit.chains.build import chain
from lastbit.chains.chain_parts import Part

__all__ = ["Part", "chain"]
