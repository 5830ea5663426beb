"""Time of a comparison on a GPU against a device copy of the bytes that it must read, and against assert_close.

PYTHONPATH=harness/checkout python docs/measurements/compare.py [compare.py of another revision]
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from types import ModuleType

import torch
import triton
from torch import Tensor

from lastbit.judging import fused_compare, torch_compare
from lastbit.judging.compare import compare, outside_count
from lastbit.judging.fused_compare import FLOATS, Sort
from lastbit.numerics import Enclosure
from lastbit.numerics.formats import BF16

DEVICE = torch.device("cuda", 0)
SHAPES = ((16384, 7168), (8192, 4096), (64, 256))


def milliseconds(call: Callable[[], object], count: int) -> float:
    """Return the median, from idle device to idle device."""
    for _ in range(3):
        call()
    times = []
    for _ in range(count):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def problem(shape: tuple[int, int], parts: int, share: float) -> tuple[Tensor, Enclosure]:
    """Return a bf16 tensor of which a share differs from the contract's value, and an enclosure of 1, 2 or 4 parts."""
    generator = torch.Generator(device=DEVICE).manual_seed(1)
    exact = torch.randn(shape, generator=generator, dtype=torch.float64, device=DEVICE)
    value = exact.to(torch.bfloat16)
    other = torch.rand(shape, generator=generator, device=DEVICE) < share
    actual = torch.where(other, (value.float() * (1 + 2.0**-8 + 2.0**-10)).to(torch.bfloat16), value)
    v = value.double()
    far = (v * (1 + 2.0**-12 * 17)).to(torch.bfloat16).double()
    all_parts = [exact, v, torch.minimum(v, far), torch.maximum(v, far)]
    return actual, Enclosure(torch.stack(all_parts[:parts] if parts > 1 else [v]))


def row(shape: tuple[int, int], parts: int, share: float, before: ModuleType | None) -> str:
    actual, expected = problem(shape, parts, share)
    same, size = actual + 0, actual.numel() * 2 + expected.parts.numel() * 8
    source = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    count = 200 if actual.numel() < 2**20 else 15
    copy = milliseconds(lambda: target.copy_(source), 20)
    now = milliseconds(lambda: compare(actual, expected, BF16), count)
    close = milliseconds(lambda: torch.testing.assert_close(actual, same), 9)
    outside = milliseconds(lambda: outside_count(actual, expected), count)
    then = milliseconds(lambda: before.compare(actual, expected, BF16), 3) if before else float("nan")
    return (
        f"| {shape[0]} × {shape[1]} | {parts} | {share:.1%} | {now:.3f} | {copy:.3f} | {copy / 2 / now:.2f} "
        f"| {close:.3f} | {close / now:.2f} | {then:.1f} | {then / now:.0f} | {outside:.3f} |"
    )


def main() -> None:
    print(torch.__version__, triton.__version__, torch.cuda.get_device_name(0))
    before = None
    if len(sys.argv) > 1:
        spec = importlib.util.spec_from_file_location("before", sys.argv[1])
        assert spec is not None
        assert spec.loader is not None
        before = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(before)
    for dtype in sorted(FLOATS, key=str):
        for parts in (1, 2, 4):
            print(dtype, parts, fused_compare.difference(Sort(DEVICE, dtype, parts, flat=True, large=True)) or "agrees")
    for shape in SHAPES:
        for parts in (4, 2, 1):
            for share in (0.001, 0.01):
                print(row(shape, parts, share, before), flush=True)
    actual, expected = problem((1024, 1024), 4, 0.01)
    assert fused_compare.agree(compare(actual, expected, BF16), torch_compare.compare(actual, expected, BF16))


if __name__ == "__main__":
    main()
