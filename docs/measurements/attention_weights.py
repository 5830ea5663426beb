"""Which weights torch's attention on a CPU rounds to the wrong neighbour, and whether its exponential explains them.

Figures in docs/contracts/attention.md:

    python3 docs/measurements/attention_weights.py

A query sees a key with score 0 and one with score -|n|, n normal. The second value is 1, the first minus the nearest
weight, so that an output is 0 exactly where the weight is the nearest one. The polynomial is that of `fexp_u20` in the
header `ATen/cpu/vec/vec512/vec512_float.h` of torch 2.13.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

SCORES, KEYS, WIDTH = 4096, 32, 16  # at least 16 keys: fewer fill no vector, and take another exponential
UNSEEN = -2000.0


def fast_exp(x: Tensor) -> Tensor:
    """Compute 2^(x log2 e) in fp32 by a polynomial of degree 3 in the fraction, with its fused multiply-adds."""
    scaled = x.float() * torch.tensor(math.log2(math.e))
    fraction = scaled - scaled.floor()
    constants = torch.tensor([0.00010703434948458272, 0.30354260500649682, -0.22433836478672356, -0.079204240219773236])
    error = constants[3]
    for constant in constants[:3].flip(0):
        error = (fraction.double() * error.double() + constant.double()).float()
    return (2.0**23 * (scaled - error).double() + 2.0**23 * 127).float().int().view(torch.float32)


def off_by_one(scores: Tensor) -> Tensor:
    """Return [SCORES], bool: torch's weight is not the nearest number of the dtype."""
    query = torch.zeros(SCORES, 1, 1, WIDTH, dtype=scores.dtype)
    key = torch.zeros(SCORES, 1, KEYS, WIDTH, dtype=scores.dtype)
    value = torch.zeros_like(key)
    query[..., 0] = 1
    key[:, 0, 1, 0], key[:, 0, 2:, 0] = scores, UNSEEN
    value[:, 0, 0, 0], value[:, 0, 1, 0] = -scores.double().exp().to(scores.dtype), 1
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        return F.scaled_dot_product_attention(query, key, value, scale=1.0)[:, 0, 0, 0] != 0


def main() -> None:
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    for dtype in (torch.bfloat16, torch.float16):
        scores = -torch.randn(SCORES, generator=torch.Generator().manual_seed(0)).abs().to(dtype)
        wrong = off_by_one(scores)
        explained = fast_exp(scores).to(dtype) != scores.double().exp().to(dtype)
        print(f"{dtype}: {wrong.sum()} of {SCORES} wrong; the polynomial has {(wrong & explained).sum()} of them, "
              f"and {(explained & ~wrong).sum()} others")  # fmt: skip
    score = torch.tensor([-0.53125])
    print(f"exp({score.item()}) = {score.double().exp().item():.7f}, polynomial {fast_exp(score).item():.7f}")


if __name__ == "__main__":
    main()
