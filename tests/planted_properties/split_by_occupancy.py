"""Rows are cut into parts that keep the processors busy: the order of a row's sum follows from rows and processors."""

import torch
from planted_sums import normalized, striped

from lastbit.kernel import kernel

CPU_PROCESSORS = 24
MOST_PARTS = 8


def processors(device):
    """Multiprocessors of a GPU; on a CPU a number that a test may set."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else CPU_PROCESSORS


def parts(rows, device):
    """As many as there are processors for each row."""
    return min(max(processors(device) // max(rows, 1), 1), MOST_PARTS)


@kernel("rms_norm", contract="fp32_multiply", name="planted[split by occupancy]")
def split_by_occupancy(x, weight, *, eps):
    squares = x.float().square()
    length = -(-x.shape[-1] // parts(x.shape[:-1].numel(), x.device))
    total = torch.zeros_like(squares[..., :1])
    for part in squares.split(length, dim=-1):
        total = total + striped(part, 1)
    return normalized(x, total, weight, eps)
