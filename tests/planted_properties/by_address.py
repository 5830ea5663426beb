"""The path is chosen by the last bits of x's address, so that equal tensors at other addresses have other bits.

A CUDA graph that is captured on one address and replayed on tensors copied there gives the bits of that address.
"""

from planted_sums import rms_norm

from lastbit.kernel import kernel

ALIGNMENT = 256


@kernel("rms_norm", contract="fp32_multiply", name="planted[by address]")
def by_address(x, weight, *, eps):
    return rms_norm(x, weight, eps, 8 if x.data_ptr() % ALIGNMENT == 0 else 1)
