"""Variance in one pass, far from zero: who sees E[x²] - E[x]² in place of mean((x - mean)²).

Run `python docs/measurements/one_pass.py [--device cuda] [--out FILE]`; it writes one_pass.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OFFSETS = (0, 3, 10, 30, 100, 300, 1000)
DTYPES = ("bf16", "fp32")
ROWS, WIDTH = 200, 1024
HEAD = """# Variance in one pass, far from zero

`{command}`, {date}: {versions}, {device}.

LayerNorm of {rows} rows of {width} normal values of standard deviation 1 plus an offset, by
`kernels/layer_norm_gated.py` as it is (two passes) and by a copy that computes the variance as E[x²] − E[x]² (the
planted fault *one pass*). *Variance*: rows whose stored variance is not possible, seen from the kernel's own mean.
*Output*: rows that no inverse deviation explains, and elements that are not possible, when the kernel returns its
output only. *lastbit*: the verdict with stages stored, and on the output only. `assert_close`:
`torch.testing.assert_close` with its defaults, against the eager kernel.

| offset | x | kernel | variance | output | lastbit | `assert_close` |
|---|---|---|---|---|---|---|
"""


def problem(offset: int, dtype: Any, device: Any) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(offset)
    x = (torch.randn(ROWS, WIDTH, generator=generator) + offset).to(dtype)
    weight = torch.ones(WIDTH, dtype=dtype)
    return {"x": x.to(device), "weight": weight.to(device)}


def row(kernel: Any, eager: Any, offset: int, dtype: str, device: Any) -> list[str]:
    """Return the cells of one line of the table."""
    import torch

    from lastbit.dtypes import DTYPES as TORCH
    from lastbit.judging.problem import Problem
    from lastbit.judging.verdict import judge
    from tests.faults.hunt import project, subject_of

    tensors, params = problem(offset, TORCH[dtype], device), {"eps": 1e-5}
    subject = subject_of(kernel, device)
    op = project().op(kernel.op)
    stored = kernel.call(**tensors, **params, stages=kernel.stages)
    output = {"output": kernel.call(**tensors, **params)}
    own = Problem(op, subject.contract, tensors, params, subject.bounds)
    exposed, hidden = (judge(own, a) for a in (stored, output))
    variance = next(s for s in exposed.stages if s.name == "variance").isolated.outside
    unexplained = hidden.rows.unexplained if hidden.rows else 0
    elements = hidden.stages[0].cumulative.outside
    try:
        torch.testing.assert_close(output["output"], eager.call(**tensors, **params))
        close = "passes"
    except AssertionError:
        close = "alarms"
    seen = f"{unexplained} rows, {elements:,} elements"
    return [f"{variance} of {ROWS}", seen, f"{exposed.verdict} / {hidden.verdict}", close]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    options = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "1" if options.device == "cpu" else "0"
    sys.path[:0] = [str(ROOT / "harness" / "checkout"), str(ROOT)]
    import torch
    import triton

    from lastbit.interpret import install
    from tests.faults import hunt
    from tests.faults.catalogue import FAULTS
    from tests.faults.plant import planted

    if options.device == "cpu":
        install()
    device = torch.device(options.device)
    fault = next(f for f in FAULTS if f.name == "one pass")
    text = HEAD.format(
        command=shlex.join(["python", "docs/measurements/one_pass.py", *sys.argv[1:]]),
        date=time.strftime("%Y-%m-%d"),
        versions=f"triton {triton.__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        device="Triton interpreted on the CPU" if options.device == "cpu" else torch.cuda.get_device_name(device),
        rows=ROWS,
        width=WIDTH,
    )
    eager = hunt.clean(fault, "eager")
    with planted(fault) as faulty:
        for name, kernel in (("two passes", hunt.clean(fault)), ("one pass", faulty)):
            for dtype in DTYPES:
                for offset in OFFSETS:
                    cells = row(kernel, eager, offset, dtype, device)
                    text += f"| {' | '.join([str(offset), dtype, name, *cells])} |\n"
    options.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
