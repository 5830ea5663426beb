"""Within the capture of a CUDA graph another path is taken, as with a workspace that cannot grow there."""

import torch
from planted_sums import rms_norm

from lastbit.kernel import kernel


@kernel("rms_norm", contract="fp32_multiply", name="planted[when captured]")
def when_captured(x, weight, *, eps):
    captured = x.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return rms_norm(x, weight, eps, 1 if captured else 8)
