"""The sum of squares is taken in fewer lanes where inputs require grad, as in a path of its own for training."""

import torch
from planted_sums import normalized, striped

from lastbit.kernel import kernel


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        return normalized(x, striped(x.float().square(), 8), weight, eps)


@kernel("rms_norm", contract="fp32_multiply", name="planted[when training]")
def when_training(x, weight, *, eps):
    if x.requires_grad or weight.requires_grad:
        return Norm.apply(x, weight, eps)
    return normalized(x, striped(x.float().square(), 16), weight, eps)
