"""How often correct gradients of norms fail, and how many of their rows are explained: random tensors, counted.

Run `python docs/measurements/false_alarms_of_latents.py [--tensors N] [--seed S]`; it prints a table. The gradients are
those of LayerNorm and RMSNorm, in groups, gated or not, in forms that the contract leaves free: orders of the sums,
products fused into sums and differences or not, orders of products, two forms of c2, means by a reciprocal.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import reduce
from operator import mul
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "harness" / "checkout"), str(ROOT), str(ROOT / "tests" / "orders")]

from layer_norm_gated_orders import sigmoid_by_exp, sigmoid_of_torch  # noqa: E402
from summation import SUMS, running  # noqa: E402

from lastbit.case import Case, TensorSpec  # noqa: E402
from lastbit.cases.layer_norm_gated_backward import _ANY as REGIMES  # noqa: E402
from lastbit.inputs import build  # noqa: E402
from lastbit.judging.problem import Problem  # noqa: E402
from lastbit.judging.verdict import judge  # noqa: E402
from lastbit.numerics import Premises  # noqa: E402
from lastbit.numerics.formats import sum_to_odd  # noqa: E402
from lastbit.references.layer_norm_gated_backward import layer_norm_gated_backward as op  # noqa: E402
from lastbit.result import Verdict  # noqa: E402

GROUPS = ((1, 1), (2, 1), (3, 1), (4, 1), (6, 2), (8, 1), (16, 1), (16, 4), (24, 1), (32, 1), (32, 2), (33, 1), (64, 1))
GROUPS += ((64, 8), (100, 1), (128, 2), (256, 1), (257, 1), (512, 4), (1000, 1), (1024, 1), (2048, 1), (4096, 1))


@dataclass(frozen=True)
class GradientForm:
    """The choices of one kernel."""

    rng: random.Random

    def either(self, *options):
        return self.rng.choice(options)

    def product(self, *factors: Tensor) -> Tensor:
        """Multiply the factors in some order, from the left."""
        return reduce(mul, self.rng.sample(factors, len(factors)))

    def multiply_add(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return fma(a, b, c) if self.either(True, False) else a * b + c


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Compute a · b + c, rounded once."""
    a, b, c = torch.broadcast_tensors(a.double(), b.double(), c.double())
    return sum_to_odd(a * b, c).float()


def fused_total(a: Tensor, b: Tensor) -> Tensor:
    """Add the products a · b, one FMA after the other."""
    total = torch.zeros_like(a[..., :1])
    for i in range(a.shape[-1]):
        total = fma(a[..., i : i + 1], b[..., i : i + 1], total)
    return total


def gradients(
    form: GradientForm, total, scaled: bool, x, dy, weight, rstd, mean=None, bias=None, z=None, *, norm_before_gate
):
    """Compute correct gradients, whatever `form` chooses; sums by `total`."""
    groups, size = rstd.shape[-1], x.shape[-1] // rstd.shape[-1]
    gating, slope = [], []
    if z is not None:
        s = form.either(sigmoid_of_torch, sigmoid_by_exp)(z.float())
        gating, slope = [z.float(), s], [s, form.multiply_add(z.float(), 1 - s, torch.ones(()))]

    def grouped(t: Tensor) -> Tensor:
        return t.float().unflatten(-1, (groups, -1))

    def total_of_products(a: Tensor, b: Tensor) -> Tensor:
        fused = a.numel() <= 1 << 14 and form.rng.random() < 0.3
        return fused_total(a, b) if fused else total(a * b)

    def mean_of(sums: Tensor) -> Tensor:
        return form.either(sums / size, sums * (1.0 / torch.tensor(float(size))))

    after, before = (gating, []) if norm_before_gate else ([], gating)
    value = grouped(form.product(x.float(), *before))
    if mean is not None:
        center = mean[..., None]
        first, *rest = (grouped(t) for t in form.rng.sample([x, *before], 1 + len(before)))
        value = fma(first, reduce(mul, rest), -center) if rest and form.either(True, False) else value - center
    normalized = value * rstd[..., None]
    flat, gain, results = normalized.flatten(-2), grouped(weight), {}
    if after:
        affine = flat * weight.float() if bias is None else form.multiply_add(flat, weight.float(), bias.float())
        results["dz"] = form.product(dy.float(), affine, *slope).to(z.dtype)
    daffine = form.product(dy.float(), *after)
    results["dw"] = over_rows(daffine * flat).to(weight.dtype)
    if bias is not None:
        results["db"] = over_rows(daffine).to(bias.dtype)
    da = grouped(daffine)
    d = da * gain
    if scaled:
        s1 = total_of_products(normalized, d)
        n = torch.tensor(float(size))
        part = normalized * s1
        dx = form.either(d * n - part, fma(-normalized, s1, d * n), fma(d, n, -part)) * (rstd[..., None] / size)
    else:
        c1 = mean_of(total_of_products(normalized, d))
        if mean is None:
            part = normalized * c1
            difference = form.either(d - part, fma(-normalized, c1, d), fma(da, gain, -part))
        else:
            c2 = mean_of(form.either(total(d), total_of_products(da, gain.expand_as(da))))
            shift = form.multiply_add(normalized, c1, c2)
            difference = form.either(d - shift, fma(da, gain, -shift))
        dx = difference * rstd[..., None]
    dx = dx.flatten(-2)
    if before:
        results["dz"] = form.product(dx, x.float(), *slope).to(z.dtype)
    return results | {"dx": form.product(dx, *before).to(x.dtype)}


def over_rows(terms: Tensor) -> Tensor:
    return running(terms.flatten(0, -2).t().contiguous())[..., 0]


def random_case(rng: random.Random, seed: int) -> Case:
    width, groups = rng.choice(GROUPS)
    rows = rng.choice((1, 2, 3, 8, 16) if width > 300 else (1, 3, 16, 64))
    dtype = rng.choice(("fp32", "fp32", "bf16", "fp16"))
    layer, gate = rng.random() < 0.5, rng.choice(("none", "none", "after", "before"))
    shapes = {"x": (rows, width), "dy": (rows, width), "weight": (width,), "rstd": (rows, groups)}
    shapes |= {"mean": (rows, groups), "bias": (width,)} if layer else {}
    shapes |= {"z": (rows, width)} if gate != "none" else {}
    specs = [
        TensorSpec(name, "fp32" if name in ("rstd", "mean") else dtype, shape, regime=rng.choice(REGIMES[name]))
        for name, shape in shapes.items()
    ]
    return Case(op.name, tuple(specs), {"norm_before_gate": gate != "before"}, seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    options = parser.parse_args()
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    start = time.monotonic()
    for number in range(options.tensors):
        if time.monotonic() - start > options.seconds:
            break
        seed = options.seed * 1_000_000 + number
        rng = random.Random(seed)
        case = random_case(rng, seed)
        tensors = dict(build(case, "cpu").tensors)
        layer, (order, (total, _)) = "mean" in tensors, rng.choice(list(SUMS.items()))
        scaled = not layer and rng.random() < 0.5
        statistics = {"rstd": tensors["rstd"]} | ({"mean": tensors["mean"]} if layer else {})
        if rng.random() < 0.5:  # those of x itself
            x = tensors["x"].float().unflatten(-1, (statistics["rstd"].shape[-1], -1))
            mean = x.mean(-1) if layer else torch.zeros_like(x[..., 0])
            statistics["rstd"] = torch.rsqrt((x - mean[..., None]).square().mean(-1) + 1e-5)
            statistics |= {"mean": mean} if layer else {}
        tensors |= statistics
        actual = gradients(GradientForm(rng), total, scaled, **tensors, **case.params)
        contract = op.contract("scaled_sums" if scaled else "")
        premises = Premises(depth=None)
        judgement = judge(Problem(op, contract, tensors, case.params, premises), actual, alternatives=False)
        tally, rows = counts[f"{'layer' if layer else 'rms'} {case.tensors[0].dtype}"], judgement.rows
        tally["tensors"] += 1
        tally["failed"] += judgement.verdict is Verdict.FAILED
        tally["rows"] += case.tensors[0].shape[0]
        if rows is not None:
            tally.update(
                {"tried": rows.rows, "explained": rows.explained, "split": rows.split, "unexplained": rows.unexplained}
            )
        if judgement.verdict is Verdict.FAILED:
            print("FAILED", order, scaled, seed, case, [f.sentence for f in judgement.findings], flush=True)
    print("| gradients | tensors | rows | tried | explained | split | unexplained | failed tensors |")
    print("|---|---|---|---|---|---|---|---|")
    for name, tally in sorted(counts.items()):
        keys = ("tensors", "rows", "tried", "explained", "split", "unexplained", "failed")
        print(f"| {name} | " + " | ".join(f"{tally[key]:,}" for key in keys) + " |")
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
