"""How much of cross entropy and of its gradient is decided, by dtype, classes and what is known of their sums.

The table is in docs/contracts/cross_entropy.md:

    python3 docs/measurements/decided_losses.py

Four rows of normal logits times 3, from seed 0. The height is that of the Triton kernels.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from lastbit import assert_contract
from lastbit.judging.problem import Problem
from lastbit.kernel import load_file
from lastbit.numerics import Premises

ROOT = Path(__file__).resolve().parents[2]
ROWS, CLASSES = 4, (512, 32000, 128256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def height(terms: int) -> int:
    return min(terms, math.ceil(terms / 1024) + 24)


def decided(logits: Tensor, labels: Tensor) -> list[str]:
    """Return the share of the gradient with one legal value, for sums in any order and of that height."""
    grad_output = torch.randn(ROWS, generator=torch.Generator().manual_seed(1))
    probs = torch.exp(logits.float() - torch.logsumexp(logits.double(), -1, keepdim=True).float())
    onehot = torch.arange(logits.shape[1]) == labels[:, None]
    grad = ((probs - onehot.float()) * grad_output[:, None]).to(logits.dtype)
    given = {"logits": logits, "labels": labels, "grad_output": grad_output}
    judged = (assert_contract("cross_entropy_backward", grad, depth=depth, **given) for depth in (None, height))
    return [f"{j.stages[0].cumulative.decided / grad.numel():.3f}" for j in judged]


def widths(logits: Tensor, labels: Tensor) -> list[str]:
    """Return the median width of the enclosures of the losses, in ulp."""
    op = load_file(ROOT / "references" / "cross_entropy.py").cross_entropy
    found = []
    for depth in (None, height):
        problem = Problem(op, op.contract(), {"logits": logits, "labels": labels}, {}, Premises(depth=depth))
        losses = problem.trace.stages["losses"].allowed
        ulp = 2.0 ** (torch.floor(torch.log2(losses.value)) - 23)
        found.append(f"{float(((losses.hi - losses.lo) / ulp).median()):,.0f} ulp")
    return found


def main() -> None:
    print("| dtype, V | gradient: any order | height | loss: any order | height |\n|---|---|---|---|---|")
    for dtype in DTYPES:
        for classes in CLASSES:
            generator = torch.Generator().manual_seed(0)
            logits = (torch.randn(ROWS, classes, generator=generator) * 3).to(dtype)
            labels = torch.randint(classes, (ROWS,), generator=generator)
            cells = [*decided(logits, labels), *widths(logits, labels)]
            print(f"| {str(dtype).removeprefix('torch.')}, {classes} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
