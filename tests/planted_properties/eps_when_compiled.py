"""eps is added in fp64 under torch.compile and in fp32 else, as in vLLM #57123.

Both are within the bound of the inverse root, so that the contract allows both.
"""

import torch
from planted_sums import normalized, striped

from lastbit.kernel import kernel

LANES = 8


@kernel("rms_norm", contract="fp32_multiply", name="planted[eps when compiled]")
def eps_when_compiled(x, weight, *, eps):
    total = striped(x.float().square(), LANES)
    if not torch.compiler.is_compiling():
        return normalized(x, total, weight, eps)
    inverse = torch.rsqrt(total.double() / x.shape[-1] + eps).float()
    return (x.float() * inverse * weight.float()).to(x.dtype)
