"""Chains: an op made of ops, each of which takes what an earlier one gives.

    first_then_second = chain("first_then_second", Part(first), Part(second, takes={"x": "output"}))

The reference of a chain calls those of its parts, one after the other. Between two kernels a tensor is stored in its
dtype; a fused kernel may skip that. So each stage that is passed on has an axis of its own: by default it is rounded as
the part rounds it, and under `unrounded_STAGE` it goes on in fp32. A fused kernel is held to the unfused chain, and one
that rounds less is told by the name of the stage.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from lastbit.chains.build import made
from lastbit.chains.chain_parts import Part
from lastbit.ops import Op

__all__ = ["Part", "chain"]


def chain(
    name: str,
    *parts: Part,
    shared: tuple[str, ...] = (),
    returned: tuple[str, ...] = (),
    latent_of: str = "",
    presets: Mapping[str, str] | None = None,
) -> Op:
    """Make the op that computes the parts one after the other.

    Its inputs, parameters, axes and stages are those of the parts, less the inputs that are taken and what is fixed.
    Stages and options keep their names where only one part has them; otherwise the label of the part and an underscore
    stand before them. A result that is passed on is a stage of the chain and no result, unless `returned` names it.

    Args:
        name: of the op.
        parts: in the order in which they are computed.
        shared: inputs and parameters that several parts have, and that are one in the chain.
        returned: stages that are passed on and are results of the chain as well.
        latent_of: label of the part whose `Latent` the chain has, where several parts have one.
        presets: name → the text of a contract, as in `op`; a part's own are not taken over.

    Raises:
        OpError: the parts do not fit; the message says which name is wrong, or in the way of another.
    """
    frame = sys._getframe(1)
    place, module = f"{frame.f_code.co_filename}:{frame.f_lineno}", str(frame.f_globals.get("__name__", ""))
    return made(name, parts, shared, returned, latent_of, presets or {}, (place, module))
