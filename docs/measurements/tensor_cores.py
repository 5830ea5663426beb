"""How the tensor cores of the current GPU add: what they cut off, and how far a dot errs. Prints Markdown.

python3 docs/measurements/tensor_cores.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "harness" / "checkout"))

from lastbit.calibrate.store import documented_premises
from lastbit.numerics.premises import U

TILES = ((16, 64, 64), (64, 64, 64), (128, 128, 64), (16, 16, 16))
DTYPES = (torch.bfloat16, torch.float16)
LENGTHS = (64, 256, 1024, 7168)
DRAWS = 30


@triton.jit
def _dot_kernel(a_ptr, b_ptr, c_ptr, K, M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    row, column, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK)
    total = tl.zeros([M, N], tl.float32)
    for start in range(0, K, BLOCK):
        a = tl.load(a_ptr + row[:, None] * K + (start + inner)[None, :])
        b = tl.load(b_ptr + (start + inner)[:, None] * N + column[None, :])
        total = tl.dot(a, b, total, input_precision="ieee")
    tl.store(c_ptr + row[:, None] * N + column[None, :], total)


def dot(a: Tensor, b: Tensor, tile: tuple[int, int, int]) -> Tensor:
    """Compute a [M, K] @ b [K, N] in fp32 by one program."""
    m, n, block = tile
    c = torch.empty(m, n, device=a.device)
    _dot_kernel[(1,)](a, b, c, a.shape[1], M=m, N=n, BLOCK=block)
    return c


def cut_off(exponent: int, place: int, tile: tuple[int, int, int], dtype: torch.dtype) -> float:
    """Measure what 63 products 2**-exponent add to one of 1, in units of 2**-23."""
    a = torch.full((tile[0], 64), 2.0 ** -(exponent // 2), dtype=dtype, device="cuda")
    b = torch.full((64, tile[1]), 2.0 ** -(exponent - exponent // 2), dtype=dtype, device="cuda")
    a[:, place] = b[place] = 1.0
    found = {float(x) for x in dot(a, b, tile).double().flatten()}
    assert len(found) == 1, f"elements of one dot differ: {found}"
    return (found.pop() - 1.0) * 2**23


def beside(first: tuple[float, float], others: tuple[float, float], tile: tuple[int, int, int]) -> set[float]:
    """Measure how much is left of each of 63 equal products of fp16 beside one that is subtracted again."""
    a = torch.full((tile[0], 64), others[0], dtype=torch.float16, device="cuda")
    b = torch.full((64, tile[1]), others[1], dtype=torch.float16, device="cuda")
    a[:, 0], b[0] = first
    rest = dot(a, b, tile).double() - a[0, 0].double() * b[0, 0].double()
    return {float(x) / (others[0] * others[1]) for x in rest.flatten()}


def normal(m: int, k: int, n: int, draw: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(draw)
    return torch.randn(m, k, generator=generator), torch.randn(k, n, generator=generator)


def magnitudes(m: int, k: int, n: int, draw: int) -> tuple[Tensor, Tensor]:
    a, b = normal(m, k, n, draw)
    return a.abs(), b.abs()


def scales(m: int, k: int, n: int, draw: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(draw + DRAWS)
    a, b = normal(m, k, n, draw)
    exponents = (torch.randint(-12, 1, x.shape, generator=generator).float() for x in (a, b))
    a_scale, b_scale = (e.exp2() for e in exponents)
    return a * a_scale, b * b_scale


def one_large(m: int, k: int, n: int, draw: int) -> tuple[Tensor, Tensor]:
    a, b = (x * 2.0 ** -(11 + draw % 4 / 2) for x in magnitudes(m, k, n, draw))
    a[:, 0] = b[0] = 1.0
    return a, b


def worst(make: Callable[[int, int, int, int], tuple[Tensor, Tensor]], length: int, dtype: torch.dtype) -> float:
    """Find the largest error of a dot in units of u · Σ|a·b|."""
    largest = 0.0
    for tile in TILES[:3]:
        for draw in range(DRAWS):
            a, b = (x.to(dtype).cuda() for x in make(tile[0], length, tile[1], draw))
            error = (dot(a, b, tile).double() - a.double() @ b.double()).abs()
            largest = max(largest, float((error / (a.double().abs() @ b.double().abs())).max()) / U)
    return largest


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}\n")
    print("| e | exact | 1 first | 1 last |\n|---|---|---|---|")
    for exponent in range(22, 29):
        found = [{cut_off(exponent, place, t, d) for t in TILES for d in DTYPES} for place in (0, 63)]
        first, last = (" or ".join(f"{x:g}" for x in sorted(values)) for values in found)
        print(f"| {exponent} | {63 * 2.0 ** (23 - exponent):.4g} | {first} | {last} |")
    tiny = 2.0**-24
    for name, first, others in (
        ("subnormal beside subnormal times 8", (3 * tiny, 8.0), (3 * tiny, 2.0**-13)),
        ("small beside 0 times 2^15", (0.0, 2.0**15), (0.5, tiny)),
    ):
        print(f"\n{name}: of 63 equal products {[beside(first, others, t) for t in TILES]} are left")
    print("\n| data | " + " | ".join(f"K = {k}" for k in LENGTHS) + " |\n|" + "---|" * (len(LENGTHS) + 1))
    for make in (normal, magnitudes, scales, one_large):
        for dtype in DTYPES:
            errors = " | ".join(f"{worst(make, k, dtype):.1f}" for k in LENGTHS)
            print(f"| {make.__name__.replace('_', ' ')}, {str(dtype).removeprefix('torch.')} | {errors} |")
    cores = documented_premises(torch.device("cuda")).tensor_cores
    assert cores is not None
    print("| the bound | " + " | ".join(f"{cores.height(k):,}" for k in LENGTHS) + " |")


if __name__ == "__main__":
    main()
