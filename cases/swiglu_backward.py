"""Cases of the gradient of SwiGLU: those of the forward pass, with a gradient of the output."""

from __future__ import annotations

from collections.abc import Iterator

from lastbit import Group
from lastbit.cases.swiglu import groups_of


def groups(accepts: frozenset[str], *, small: bool) -> Iterator[Group]:
    """Yield the groups for a kernel that takes the tensors and parameters `accepts`; `small` cuts the rows."""
    yield from groups_of("swiglu_backward", accepts, small=small)
