"""How much of a correct RMSNorm is decided, by dtype, width and what is known of its sum.

The table is in docs/numerics.md:

    python3 docs/measurements/decided.py

The kernel adds by a tree of height log2(N). Eight rows of normal numbers, and of integers up to 8, from seed 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lastbit import assert_contract

ROWS, WIDTHS, EPS = 8, (32, 256, 4096), 1e-6
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    terms = x.float().square()
    while terms.shape[-1] > 1:
        terms = terms[..., ::2] + terms[..., 1::2]
    return (x.float() * torch.rsqrt(terms / x.shape[-1] + EPS) * weight.float()).to(x.dtype)


def measured(x: Tensor, weight: Tensor, depth: int | None) -> str:
    """Return the share of elements with one legal value, and the share decided when rows count."""
    y = rms_norm(x, weight)
    judgement = assert_contract("rms_norm", y, x=x, weight=weight, eps=EPS, contract="fp32_multiply", depth=depth)
    found = judgement.stages[0].cumulative
    return f"{found.decided / found.numel:.3f} / {judgement.decided['output']:.3f}"


def main() -> None:
    print("| dtype, N | any order | depth | integers |\n|---|---|---|---|")
    for dtype in DTYPES:
        for width in WIDTHS:
            generator = torch.Generator().manual_seed(0)
            x = torch.randn(ROWS, width, generator=generator).to(dtype)
            integers = torch.randint(-8, 9, (ROWS, width), generator=generator).to(dtype)
            weight = torch.randn(width, generator=generator).to(dtype)
            cells = [measured(x, weight, None), measured(x, weight, width.bit_length() - 1)]
            cells.append(measured(integers, weight, None))
            print(f"| {str(dtype).removeprefix('torch.')}, {width} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
