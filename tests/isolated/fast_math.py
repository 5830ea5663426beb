"""A file that flushes subnormal numbers to zero when it is loaded, as a library that was linked with -ffast-math."""

import torch

from kernels import right
from lastbit.kernel import kernel

torch.set_flush_denormal(True)


@kernel("rms_norm")
def fast_math(x, weight, *, eps):
    return right(x, weight, eps)
