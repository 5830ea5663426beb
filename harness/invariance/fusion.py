"""Multiplications and additions that Triton's compiler may fuse, or not."""

from __future__ import annotations

from lastbit.invariance.basis import Basis
from lastbit.invariance.direct import require_direct
from lastbit.invariance.property import Pairs, Property
from lastbit.relations import NotApplicable, same

FUSION = "TRITON_DEFAULT_FP_FUSION"
"""Triton reads it when it compiles, and it is part of the key of what is kept on disk."""


def show(basis: Basis, pairs: Pairs) -> None:
    """Compare a call where everything was compiled without fusion with one where it was compiled with it.

    Both are made in new processes, because a process keeps what it has compiled.
    """
    if basis.device.type == "cpu":
        raise NotApplicable("on the CPU programs are interpreted, and nothing is fused")
    require_direct(basis, "called in another one, where they are compiled anew")
    if basis.anew is None:
        raise NotApplicable("the kernel cannot be called in a new process, where it is compiled anew")
    fused, apart = (basis.anew({FUSION: value}) for value in "10")
    pairs.compare(basis, f"{FUSION}=0", same(fused, apart), basis.inputs, apart)


FP_FUSION = Property("fp fusion", "the bits are the same with and without fused multiply-add", show, quick=False)
