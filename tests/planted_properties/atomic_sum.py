"""Parts of a row are added by atomics, in the order in which they are ready: bits differ from call to call.

The order is drawn anew in every call, from a counter that only this file sees. The kernel says that it is unordered.
"""

import itertools

import torch
from planted_sums import normalized, striped

from lastbit.kernel import kernel

PARTS = 8

_calls = itertools.count()


@kernel("rms_norm", contract="fp32_multiply", name="planted[atomics]", unordered=("output",))
def atomic_sum(x, weight, *, eps):
    squares = x.float().square()
    found = squares.split(max(-(-x.shape[-1] // PARTS), 1), dim=-1)
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(next(_calls)))
    total = torch.zeros_like(squares[..., :1])
    for part in order.tolist():
        total = total + striped(found[part], 1)
    return normalized(x, total, weight, eps)
