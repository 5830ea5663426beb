"""What torch.testing.assert_close says of the correct RMSNorm kernel and of one that multiplies in fp32.

Run `PYTHONPATH=harness/checkout python docs/measurements/assert_close.py` on a machine with a GPU; assert_close.md has
the figures.
"""

from __future__ import annotations

from pathlib import Path

import torch

from lastbit.kernel import load_kernels

SHAPES = ((2048, 4096), (4096, 1024), (16384, 7168))
CORRECT, WRONG = "triton[native_multiply+rounded_sum]", "triton[fp32_multiply+rounded_sum]"
EXPECTED = "eager[native_multiply+rounded_sum]"


def verdict(actual: torch.Tensor, expected: torch.Tensor) -> str:
    """Return `passes` or `fails`, with the share of elements that differ."""
    share = (actual != expected).double().mean().item()
    try:
        torch.testing.assert_close(actual, expected)
    except AssertionError:
        return f"fails, {share:.1e}"
    return f"passes, {share:.1e}"


def main() -> None:
    kernels = {k.name: k.call for k in load_kernels(Path("kernels"))}
    for shape in SHAPES:
        for dtype in (torch.bfloat16, torch.float16):
            for seed in range(3):
                generator = torch.Generator("cuda").manual_seed(seed)
                x = torch.randn(shape, generator=generator, device="cuda").to(dtype)
                weight = torch.randn(shape[-1], generator=generator, device="cuda").to(dtype)
                expected = kernels[EXPECTED](x, weight, eps=1e-6)["output"]
                words = [verdict(kernels[name](x, weight, eps=1e-6), expected) for name in (CORRECT, WRONG)]
                print(f"| {shape} | {dtype} | {seed} | {' | '.join(words)} |", flush=True)


if __name__ == "__main__":
    main()
