"""What the classes of kt-kernel that quantize activations compute: a formula, and how many elements it leaves.

`python docs/measurements/ktransformers/quantized.py CLASS` prints a line of JSON. ../kt_kernel.py runs it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
from problem import KtProblem, problem, relative
from torch import Tensor

SEEDS = 8
Codes = tuple[Tensor, Tensor]
"""Codes, and the scale of each row."""


def of_int8(weight: Tensor) -> Codes:
    """Code weights as AMXInt8_SFT_MOE does."""
    scale = weight.abs().amax(-1, keepdim=True) * torch.tensor(1 / 127)
    return (weight * (1 / scale)).round().clamp(-128, 127), scale


def of_int4(weight: Tensor) -> Codes:
    """Code weights as AMXInt4_SFT_MOE does: in eight bits, then in four, times 16."""
    scale = weight.abs().amax(-1, keepdim=True) / 112
    eight = (weight * (1 / scale)).round().clamp(-128, 127)
    return eight.sign() * torch.div((eight.abs() + 8).clamp(max=127), 16, rounding_mode="floor") * 16, scale


def of_activations(rows: Tensor) -> Codes:
    """Code activations in eight bits, with a scale per row."""
    scale = rows.abs().amax(-1, keepdim=True) / 127
    return (rows * torch.where(scale > 0, 1 / scale, 0)).round(), scale


WEIGHTS: dict[str, Callable[[Tensor], Codes]] = {"AMXInt8_SFT_MOE": of_int8, "AMXInt4_SFT_MOE": of_int4}


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def output(p: KtProblem) -> Tensor:
    """Compute `per_matrix` with base products Σ codes · codes · (scale · scale), the sum exact in int32."""
    total = torch.zeros_like(p.x, dtype=torch.float32)
    for slot in range(p.ids.shape[1]):
        gate, up = (project(p, p.x.float(), key, p.ids[:, slot]) for key in ("gate", "up"))
        intermediate = rounded(gate * torch.sigmoid(gate) * up)
        total += p.weights[:, slot, None] * project(p, intermediate, "down", p.ids[:, slot])
    return total.bfloat16()


def project(p: KtProblem, rows: Tensor, key: str, ids: Tensor) -> Tensor:
    codes, scale = of_activations(rows)
    weights, scales = (t[ids] for t in WEIGHTS[p.name](p.base[f"{key}_proj"].float()))
    base = rounded(torch.einsum("tnk,tk->tn", weights.double(), codes.double()).float() * (scale * scales[..., 0]))
    a, b = (p.adapters[f"{key}_lora_{part}"][ids].double() for part in "ab")
    lora = torch.einsum("tnr,trk,tk->tn", b, a, rows.double())
    return rounded((base.double() + p.scaling * lora).float())


def report(name: str) -> dict[str, float]:
    """Count elements of the output, and those that the formula does not give; find its largest relative error."""
    found = {"elements": 0, "differ": 0, "error": 0.0}
    for seed in range(SEEDS):
        p = problem(name, hidden=256, width=256, seed=seed)
        actual, formula = p.layer().forward(p.x, p.ids, p.weights), output(p)
        found["elements"] += actual.numel()
        found["differ"] += int((actual != formula).sum())
        found["error"] = max(found["error"], relative(actual, formula))
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"\nseen: {json.dumps(report(sys.argv[1]))}", flush=True)
