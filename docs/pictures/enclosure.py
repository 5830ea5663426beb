"""Draw enclosure.svg: two elements of an RMSNorm on the number line, with the values that their contract allows.

Run `python docs/pictures/enclosure.py`. All numbers are what lastbit computes for the case below.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CASE = "rms_norm x=bf16[4,300] weight=bf16[300] eps=1e-06 seed=1"
DECIDED, FREE = (0, 3), (3, 177)
RTOL, ATOL = 1.6e-2, 1e-5  # of torch.testing.assert_close in bf16
WIDTH, LEFT, RIGHT = 880, 40, 840
STYLE = """
text { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #1f2328 }
.title { font-weight: bold } .small { font-size: 11px; fill: #59636e }
.axis, .tick { stroke: #59636e } .band { fill: #d29922; opacity: .25 }
.interval { stroke: #0969da; stroke-width: 6 } .exact { stroke: #0969da; stroke-width: 2 }
.allowed { fill: #1a7f37 } .wrong { fill: #d1242f } .boundary { stroke: #59636e; stroke-dasharray: 3 3 }
text.allowed, text.wrong { font-weight: bold } text.interval { fill: #0969da; stroke: none }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .small { fill: #9198a1 } .axis, .tick, .boundary { stroke: #9198a1 }
  .allowed { fill: #3fb950 } .wrong { fill: #f85149 }
  .exact, .interval { stroke: #4493f8 } text.interval { fill: #4493f8 }
}
"""


@dataclass(frozen=True)
class Line:
    """A number line with the values of a format as ticks.

    Attributes:
        title, note: text above.
        ticks: neighbouring values of the format, all that are shown.
        interval: what the value may be before it is rounded, and its exact value.
        allowed: values that the contract allows.
        wrong: a kernel's value that it does not, with what to say; or none.
        band: what a tolerance allows; or none.
    """

    title: str
    note: str
    ticks: Sequence[float]
    interval: tuple[float, float, float]
    allowed: Sequence[float]
    wrong: tuple[float, str] | None = None
    band: tuple[float, float] | None = None

    def x(self, value: float) -> float:
        low, high = self.ticks[0], self.ticks[-1]
        return LEFT + (RIGHT - LEFT) * (value - low) / (high - low)

    def drawn(self, top: float) -> Iterator[str]:
        axis = top + 84
        yield text(LEFT, top + 14, self.title, "title")
        yield text(LEFT, top + 32, self.note, "small")
        if self.band is not None:
            low, high = (min(max(self.x(v), LEFT), RIGHT) for v in self.band)
            yield f'<rect class="band" x="{low:.1f}" y="{axis - 20}" width="{high - low:.1f}" height="40"/>'
        yield stroke("axis", LEFT, axis, RIGHT, axis)
        for tick in self.ticks:
            yield stroke("tick", self.x(tick), axis - 7, self.x(tick), axis + 7)
            kind = "allowed" if tick in self.allowed else "small"
            yield text(self.x(tick), axis + 36, f"{tick:.10g}", kind, "middle")
        for middle in (self.x((a + b) / 2) for a, b in pairwise(self.ticks)):
            yield stroke("boundary", middle, axis - 14, middle, axis + 14)
        low, exact, high = map(self.x, self.interval)
        yield stroke("interval", min(low, exact - 1), axis, max(high, exact + 1), axis)
        yield stroke("exact", exact, axis - 24, exact, axis + 10)
        yield text(exact, axis - 30, f"unrounded {self.interval[1]:.9g}", "interval", "middle")
        for value in self.allowed:
            yield f'<circle class="allowed" cx="{self.x(value):.1f}" cy="{axis}" r="6"/>'
        if self.wrong is not None:
            value, said = self.wrong
            yield f'<circle class="wrong" cx="{self.x(value):.1f}" cy="{axis}" r="6"/>'
            yield text(self.x(value), axis + 54, said, "wrong", "middle")


def stroke(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def text(x: float, y: float, said: str, kind: str, anchor: str = "start") -> str:
    escaped = said.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escaped}</text>'


def neighbours(value: float, below: int, above: int) -> list[float]:
    """List bf16 numbers around one, in order."""
    import torch

    near = torch.tensor(value, dtype=torch.bfloat16)
    steps = range(-below, above + 1)
    spacing = 2.0 ** (math.floor(math.log2(abs(float(near)))) - 7)
    return [float(near) + step * spacing for step in steps]


def lines() -> list[Line]:
    import torch

    from lastbit.case import parse_case
    from lastbit.config import Config
    from lastbit.inputs import build
    from lastbit.judging.problem import Problem
    from lastbit.verify.project import open_project

    case = parse_case(CASE)
    tensors = build(case, torch.device("cpu")).tensors
    op = open_project(Config(folder="")).op("rms_norm")
    problem = Problem(op, op.contract("native_multiply"), tensors, case.params)
    x, weight = tensors["x"], tensors["weight"]
    root = problem.trace.enclosure("inv_rms")
    normalized, output = (problem.trace.enclosure(stage) for stage in ("normalized", "output"))

    def before(at: tuple[int, int]) -> tuple[float, float, float]:
        ends = [float(x[at]) * float(getattr(root, end)[at[0], 0]) for end in ("lo", "exact", "hi")]
        return min(ends), ends[1], max(ends)

    def allowed(enclosure: Any, at: tuple[int, int]) -> list[float]:
        return sorted({float(enclosure.lo[at]), float(enclosure.hi[at])})

    other = op.contract("fp32_multiply")
    kernel = float(Problem(op, other, tensors, case.params).trace.enclosure("output").value[DECIDED])
    own, low = float(output.value[DECIDED]), float(normalized.value[DECIDED])
    product = low * float(weight[DECIDED[1]])
    unrounded = float(output.exact[DECIDED])
    tolerance = ATOL + RTOL * abs(own)
    return [
        Line(
            "1  normalized = x · inv_rms: one value is allowed",
            f"x = {float(x[DECIDED]):g}. The enclosure (blue) is narrow and lies between two rounding boundaries "
            "(dashed): whatever the order of the sum.",
            neighbours(low, 3, 3),
            before(DECIDED),
            allowed(normalized, DECIDED),
        ),
        Line(
            "2  output = normalized · weight: the kernel that rounds once is seen",
            f"{low:g} · {float(weight[DECIDED[1]])} = {product:.9g}, rounded. assert_close takes everything in the "
            f"band: {int(tolerance / 2**-8) * 2 + 1} numbers.",
            neighbours(own, 4, 4),
            (product, product, product),
            allowed(output, DECIDED),
            wrong=(kernel, f"kernel that multiplies in fp32: {unrounded:.6g}, rounded"),
            band=(own - tolerance, own + tolerance),
        ),
        Line(
            "3  normalized, of another element: two values are allowed",
            f"x = {float(x[FREE]):g}. Here a boundary lies within the enclosure, so that the order of the sum decides. "
            "Either value keeps the contract.",
            neighbours(float(normalized.value[FREE]), 3, 3),
            before(FREE),
            allowed(normalized, FREE),
        ),
    ]


def main() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path[:0] = [str(ROOT / "harness" / "checkout"), str(ROOT)]
    body: list[str] = []
    for number, one in enumerate(lines()):
        body += one.drawn(12 + 160 * number)
    height = 160 * 3 + 4
    label = "Enclosures of two elements of an RMSNorm in bf16 on the number line"
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label}">'
    parts = [head, f"<style>{STYLE}</style>", *body, "</svg>"]
    Path(__file__).with_suffix(".svg").write_text("\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
