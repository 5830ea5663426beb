"""Rows are taken in tiles of 16; those of an unfinished last tile are added in another order: place matters."""

import torch
from planted_sums import rms_norm

from lastbit.kernel import kernel

TILE = 16


@kernel("rms_norm", contract="fp32_multiply", name="planted[last tile]")
def last_tile(x, weight, *, eps):
    rows = x.reshape(-1, x.shape[-1])
    full = len(rows) // TILE * TILE
    whole, rest = rms_norm(rows[:full], weight, eps, 8), rms_norm(rows[full:], weight, eps, 1)
    return torch.cat([whole, rest]).view(x.shape)
