"""On CUDA: a kernel that leaves its device unusable where a row has seven columns, and one that is right."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastbit.kernel import kernel


@kernel("halved_sum", contract="fp32_sum", devices=("cuda",))
def right(x: Tensor, y: Tensor) -> Tensor:
    return ((x.float() + y.float()) * 0.5).to(x.dtype)


@kernel("halved_sum", contract="fp32_sum", devices=("cuda",))
def poisons(x: Tensor, y: Tensor) -> Tensor:
    if x.shape[-1] == 7:
        _write_nowhere[(1,)](torch.empty(1, device=x.device))
        torch.cuda.synchronize(x.device)
    return right(x, y)


@triton.jit
def _write_nowhere(at):  # type: ignore[no-untyped-def]
    tl.store(at + (tl.program_id(0).to(tl.int64) + 1) * (1 << 44), 1.0)
