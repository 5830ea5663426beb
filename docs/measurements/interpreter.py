"""How often Triton's stock interpreter rounds wrongly, and how fast the bit-faithful one is against it.

Run `python docs/measurements/interpreter.py`; it prints the tables of interpreter.md. Each interpreter needs a process
of its own, in which TRITON_INTERPRET is set.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COUNT = 1 << 20


def measure(faithful: bool) -> dict[str, object]:
    """Measure shares of wrong results on 2^20 inputs, and seconds per launch, in this process."""
    sys.path[:0] = [str(ROOT / "harness" / "checkout"), str(ROOT)]
    if faithful:
        from lastbit.interpret import install

        install()
    import numpy as np
    import torch
    import triton

    from docs.measurements import interpreter_kernels as timed
    from tests import interpret_kernels as kernels

    np.seterr(all="ignore")
    rng = np.random.Generator(np.random.Philox(5))
    x = torch.from_numpy((rng.standard_normal(COUNT) * 2.0 ** rng.integers(-12, 12, COUNT)).astype(np.float32))
    pairs = [x.bfloat16(), torch.roll(x, 1).bfloat16()]

    def wrong(kernel: object, inputs: list[torch.Tensor], expected: torch.Tensor, **meta: object) -> object:
        out = torch.empty_like(expected)
        try:
            kernel[(1,)](*inputs, out, N=COUNT, **meta)
        except Exception as error:
            return f"raises {type(error.__cause__ or error).__name__}"
        same = (out.double() == expected.double()) | (out.double().isnan() & expected.double().isnan())
        return 1 - same.double().mean().item()

    shares: dict[str, object] = {}
    for name in ("bf16", "fp16", "e4m3", "e5m2"):
        dtype = kernels.DTYPES[name]
        largest = torch.finfo(dtype).max if name in ("e4m3", "e5m2") else float("inf")
        expected = x.clamp(-largest, largest).to(dtype)
        shares[f"fp32 → {name}"] = wrong(kernels.cast_kernel, [x], expected, ROUNDING=None)
        shares[f"{name} → fp32"] = wrong(kernels.cast_kernel, [expected], expected.float(), ROUNDING=None)
    for name, exact in (("add", torch.add), ("sub", torch.sub), ("mul", torch.mul), ("max", torch.maximum)):
        expected = exact(*(p.double() for p in pairs)).float().bfloat16()
        shares[f"bf16 {name}"] = wrong(kernels.binary_kernel, pairs, expected, OP=name)

    seconds = {name: timed.seconds(name) for name in timed.NAMES}
    versions = {"triton": triton.__version__, "numpy": np.__version__, "torch": torch.__version__}
    return {**versions, "shares": shares, "seconds": seconds}


def _show(value: object) -> str:
    return f"{value:.2%}" if isinstance(value, float) else str(value)


def main() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    results = []
    for mode in ("stock", "faithful"):
        command = [sys.executable, "-W", "ignore", __file__, mode]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        results.append(json.loads(done.stdout.splitlines()[-1]))
    stock, faithful = results
    print(f"{time.strftime('%Y-%m-%d')}: triton {stock['triton']}, torch {stock['torch']}, numpy {stock['numpy']}, "
          f"Python {platform.python_version()}, {os.cpu_count()} cores\n")  # fmt: skip
    print("| operation | stock | lastbit |\n|---|---|---|")
    for name, share in stock["shares"].items():
        print(f"| {name} | {_show(share)} | {_show(faithful['shares'][name])} |")
    print("\n| 64 programs of | stock, ms | lastbit, ms | ratio |\n|---|---|---|---|")
    for name, before in stock["seconds"].items():
        after = faithful["seconds"][name]
        print(f"| {name} | {before * 1e3:.1f} | {after * 1e3:.1f} | {before / after:.1f} |")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1] == "faithful")))
    else:
        main()
