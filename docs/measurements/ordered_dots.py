"""What a declared order decides of long dots, whether dots keep within its bound, and what it costs. Prints Markdown.

    python3 docs/measurements/ordered_dots.py [decided] [dots] [layers]

The first part is the same everywhere. The others run kernels, on the current GPU or interpreted.
"""

from __future__ import annotations

import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "harness" / "checkout"))

import triton
import triton.language as tl

from lastbit import assert_contract
from lastbit.calibrate.store import documented_premises
from lastbit.interpret import install
from lastbit.kernel import Kernel, load_kernels
from lastbit.numerics import BY_CAPABILITY, LOOSEST, Enclosure, Premises, dot, format_of, round_to, using
from lastbit.numerics import dots as products

CUDA = os.environ["TRITON_INTERPRET"] == "0"
DEVICE = torch.device("cuda" if CUDA else "cpu")
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 7168)
DTYPES = (torch.bfloat16, torch.float16)
MODELS = {"rounded": None, "H100 and H200": BY_CAPABILITY[9, 0], "A100": BY_CAPABILITY[8, 0], "unknown": LOOSEST}
RULES = ("any order", "depth", "order 64", "order 16")


def depth(block: int) -> Callable[[int], int]:
    return lambda n: min(n, block + triton.cdiv(n, block))


def normal(m: int, k: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(k)
    a, b = torch.randn(m, k, generator=generator), torch.randn(k, n, generator=generator)
    return a.to(dtype), (b / math.sqrt(k)).to(dtype)


# How much is decided


def share(a: Tensor, b: Tensor, premises: Premises) -> float:
    fmt = format_of(a.dtype)
    with using(premises):
        found = dot(Enclosure.point(a), Enclosure.point(b))
    return float((round_to(found.lo, fmt) == round_to(found.hi, fmt)).double().mean())


def decided() -> None:
    products.SHORTEST = 1
    print("| model | dtype, K | " + " | ".join(RULES) + " |\n|" + "---|" * (len(RULES) + 2))
    for name, cores in MODELS.items():
        for dtype in DTYPES:
            for length in LENGTHS:
                a, b = normal(16, length, 128, dtype)
                known = Premises(tensor_cores=cores, depth=depth(64))
                rules = (Premises(tensor_cores=cores), known, replace(known, order=64), replace(known, order=16))
                cells = " | ".join(f"{100 * share(a, b, rule):.1f} %" for rule in rules)
                print(f"| {name} | {str(dtype).removeprefix('torch.')}, {length} | {cells} |", flush=True)


# Whether dots keep within the bound


@triton.jit(do_not_specialize=["K"])
def _dot_kernel(a_ptr, b_ptr, c_ptr, K, M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, ALONE: tl.constexpr):
    row, column, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK)
    total = tl.zeros([M, N], tl.float32)
    for start in range(0, K, BLOCK):
        k = start + inner
        a = tl.load(a_ptr + row[:, None] * K + k[None, :], mask=(k < K)[None, :], other=0.0)
        b = tl.load(b_ptr + k[:, None] * N + column[None, :], mask=(k < K)[:, None], other=0.0)
        if ALONE:
            total += tl.dot(a, b, input_precision="ieee")
        else:
            total = tl.dot(a, b, total, input_precision="ieee")
    tl.store(c_ptr + row[:, None] * N + column[None, :], total)


def walked(a: Tensor, b: Tensor, block: int, *, alone: bool = False) -> Tensor:
    """Compute a [M, K] @ b [K, N] in fp32 by one program, `block` terms at a time, each alone or into the sum."""
    c = torch.empty(a.shape[0], b.shape[1], device=a.device)
    _dot_kernel[(1,)](a, b, c, a.shape[1], M=a.shape[0], N=b.shape[1], BLOCK=block, ALONE=alone)
    return c


def data(m: int, k: int, n: int, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Draw numbers, of one sign and of many scales; and such as a walk loses most of."""
    generator = torch.Generator().manual_seed(k)
    a, b = torch.randn(m, k, generator=generator), torch.randn(k, n, generator=generator)
    yield "normal", a.to(dtype), b.to(dtype)
    yield "magnitudes", a.abs().to(dtype), b.abs().to(dtype)
    scale = torch.randint(-12, 1, (2, max(k, 1)), generator=generator).float().exp2()
    yield "scales", (a * scale[0]).to(dtype), (b * scale[1][:, None]).to(dtype)
    small = 2.0**-12
    for name, place in (("first", 0), ("middle", k // 2), ("last", k - 1)):
        left, right = a.abs() * small, b.abs() * small
        left[:, place] = right[place] = 1.0
        yield f"one large, {name}", left.to(dtype), right.to(dtype)
    left, right = a.abs() * small, b.abs() * small
    left[:, 0], right[0], left[:, k - 1], right[k - 1] = 1.0, 1.0, 1.0, -1.0
    yield "one large, taken back", left.to(dtype), right.to(dtype)
    half = k // 2
    yield (
        "all taken back",
        torch.cat([a[:, :half], a[:, : k - half]], 1).to(dtype),
        (torch.cat([b[:half], -b[: k - half]]) * (1 + 2.0**-7 * torch.rand(k, 1, generator=generator))).to(dtype),
    )
    growing = torch.linspace(-10, 3, k).exp2()
    yield "growing", (a.abs() * growing).to(dtype), b.abs().to(dtype)
    yield "falling", (a.abs() * growing.flip(0)).to(dtype), b.abs().to(dtype)
    tiny = 2.0**-22 if dtype is torch.float16 else 2.0**-130
    yield "subnormal", (a * tiny).to(dtype), (b * 8).to(dtype)


def dots() -> None:
    premises = documented_premises(DEVICE)
    print(f"\n{premises.device}\n\n| data | outside | farthest, of the bound |\n|---|---|---|")
    counts: dict[str, tuple[int, int, float]] = {}
    lengths = (300, 1024, 4096, 7168) if CUDA else (300, 1024)
    tiles = ((16, 16), (128, 64)) if CUDA else ((16, 16),)
    for dtype in DTYPES:
        for length in lengths:
            for m, n in tiles:
                for name, a, b in data(m, length, n, dtype):
                    a, b = a.to(DEVICE), b.to(DEVICE)
                    for block in (16, 32, 64, 128):
                        known = replace(premises, depth=depth(block), order=block)
                        with using(known):
                            bound = dot(Enclosure.point(a), Enclosure.point(b))
                        for alone in (False, True):
                            found = walked(a, b, block, alone=alone).double()
                            out, all_, far = counts.get(name, (0, 0, 0.0))
                            wrong = int(((found < bound.lo) | (found > bound.hi)).sum())
                            radius = ((bound.hi - bound.lo) / 2).clamp(min=1e-300)
                            error = (found - (bound.hi + bound.lo) / 2).abs()
                            worst = float(torch.where(bound.hi > bound.lo, error / radius, 0.0).max())
                            counts[name] = out + wrong, all_ + found.numel(), max(far, worst)
    for name, (out, numel, far) in counts.items():
        print(f"| {name} | {out:,} of {numel:,} | {far:.3f} |", flush=True)


# Whole layers


def layer(hidden: int, width: int, tokens: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Draw tensors of a layer of four experts with two slots per token, and of its gradient."""
    generator = torch.Generator().manual_seed(hidden)
    experts, slots, rank = 4, 2, 16

    def random(*shape: int, terms: int = 1) -> Tensor:
        return (torch.randn(*shape, generator=generator) / math.sqrt(terms)).to(dtype)

    tensors = {"x": random(tokens, hidden), "grad_output": random(tokens, hidden)}
    tensors["expert_ids"] = torch.randint(0, experts, (tokens, slots), generator=generator)
    tensors["routing_weights"] = torch.rand(tokens, slots, generator=generator)
    for name, n, k in (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)):
        tensors[f"{name}_proj"] = random(experts, n, k, terms=k)
        tensors[f"{name}_lora_a"] = random(experts, rank, k, terms=k)
        tensors[f"{name}_lora_b"] = random(experts, n, rank, terms=rank)
    return {name: tensor.to(DEVICE) for name, tensor in tensors.items()}


def judged(kernel: Kernel, actual: dict[str, Tensor], arguments: dict[str, object], rule: str) -> dict[str, float]:
    """Return result → share decided, and the seconds of judging the second time."""
    own = {"any order": {}, "depth": {"depth": kernel.depth}, "order": {"depth": kernel.depth, "order": kernel.order}}
    clock = time.perf_counter if CUDA else time.process_time
    for _ in range(2 if CUDA else 1):
        start = clock()
        found = assert_contract(kernel.op, actual, contract=kernel.contract, **own[rule], **arguments)
        seconds = clock() - start
    return {**found.decided, "seconds": seconds}


def layers() -> None:
    kernels = {k.name: k for k in load_kernels(Path(__file__).resolve().parents[2] / "kernels")}
    names = ("triton[moe_lora+fused]", "triton[moe_lora_backward+fused]")
    sizes = ((2048, 1024, 64), (4096, 1408, 64)) if CUDA else ((2048, 256, 6),)
    for hidden, width, tokens in sizes:
        tensors = layer(hidden, width, tokens, torch.bfloat16)
        print(f"\nH = {hidden}, I = {width}, {tokens} tokens, bf16\n\n| kernel, result | any order | depth | order |")
        print("|---|---|---|---|")
        for name in names:
            kernel = kernels[name]
            given = {n: t for n, t in tensors.items() if n in kernel.accepts} | {"scaling": 2.0}
            actual = kernel.call(**given)
            tensors |= {n: actual[n] for n in ("saved_gate", "saved_up", "intermediate") if n in actual}
            found = [judged(kernel, actual, given, rule) for rule in ("any order", "depth", "order")]
            for result in found[0]:
                form = ".2f" if result == "seconds" else ".1%"
                cells = " | ".join(f"{f[result]:{form}}" for f in found)
                print(f"| {name}, {result} | {cells} |", flush=True)


PARTS = {"decided": decided, "dots": dots, "layers": layers}


def main(names: list[str]) -> None:
    if not CUDA:
        install()
    torch.set_num_threads(1)
    where = torch.cuda.get_device_name() if CUDA else "CPU, interpreted"
    print(f"{where}, torch {torch.__version__}, triton {triton.__version__}\n")
    shortest = products.SHORTEST
    for name in names or PARTS:
        try:
            PARTS[name]()
        except Exception:
            traceback.print_exc(file=sys.stdout)
        products.SHORTEST = shortest


if __name__ == "__main__":
    main(sys.argv[1:])
