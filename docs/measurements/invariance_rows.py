"""Whether a row of a norm has the same bits whatever number of rows shares its launch: a witness without judgement.

    python3 docs/measurements/invariance_rows.py                       # the norms of kernels/external that run here
    python3 docs/measurements/invariance_rows.py --kernel 'vllm-0.33.0[rms_norm]' --width 4096
    python3 docs/measurements/invariance_rows.py --device cpu --rows 64 --width 256 --kernels DIR

The same rows are computed in launches of exactly M rows, for each M of a list; the last launch ends with the last row.
For small M the first rows alone are computed, as many as --launches reach. Bits are compared with those of the M before
it in the list. Where they differ, the M at which they change is bisected, and the rest up to the next M asked again.
`lastbit invariance` is not used.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "harness" / "checkout"))

from lastbit.kernel import Kernel, UnsupportedCase, load_kernels

EXTERNAL = Path(__file__).resolve().parent.parent.parent / "kernels" / "external"
MOST_ROWS = 4096
MOST_LAUNCHES = 256
ROWS = (1, 2, 3, 4, 7, 8, 16, 32, 64, 128, 132, 133, 255, 256, 257, 511, 512, 1024, 2048, 4096)
WIDTHS = (2048, 4096, 7168, 8192)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
COMPILED_PER_SIZE = ("torch.compile[rms_norm]",)
"""Compiled anew for every M: asked at one width, and not bisected."""
ONE_WIDTH = 4096
EPS = 1e-6

Results = dict[str, torch.Tensor]


@dataclass(frozen=True)
class BitChange:
    """Bits that differ between launches of two numbers of rows."""

    before: int
    after: int
    elements: int
    rows: int
    compared: int

    def __str__(self) -> str:
        where = f"{self.elements} elements in {self.rows} of {self.compared} rows"
        return f"changes between {self.before} and {self.after} rows: {where}"


def inputs(kernel: Kernel, rows: int, width: int, dtype: torch.dtype, device: str) -> Results:
    """Draw a normal x and residual, and a weight near one, from a fixed seed on the device."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    found = {"x": normal(rows, width), "weight": 1 + normal(width) / 4, "residual": normal(rows, width)}
    return {n: t.to(dtype) for n, t in found.items() if n != "residual" or n in kernel.requires}


def in_launches(kernel: Kernel, given: Results, rows: int, launches: int) -> Results:
    """Launch `rows` rows at a time, and return the results of the first ones; the inputs stay as they are."""
    total = min(given["x"].shape[0], rows * launches)
    found: Results = {}
    for first in range(0, total, rows):
        start = min(first, total - rows)
        part = slice(start, start + rows)
        arguments = {n: t if n == "weight" else t[part].clone() for n, t in given.items()}
        results = kernel.call(**arguments, eps=EPS)
        for name, tensor in (results if isinstance(results, dict) else {"output": results}).items():
            if name not in found:
                found[name] = torch.empty(total, *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device)
            found[name][part] = tensor
    return found


def change(before: int, after: int, one: Results, other: Results) -> BitChange | None:
    """Describe what differs in the bits of two runs of 16-bit results, None if nothing does."""
    compared = min(len(tensor) for run in (one, other) for tensor in run.values())
    differing = [one[name][:compared].view(torch.int16) != other[name][:compared].view(torch.int16) for name in one]
    elements = sum(int(d.sum()) for d in differing)
    rows = int(torch.stack([d.flatten(1).any(1) for d in differing]).any(0).sum())
    return BitChange(before, after, elements, rows, compared) if elements else None


def bisected(run: Callable[[int], Results], before: int, after: int) -> BitChange:
    """Find neighbouring numbers of rows between which bits change first, where `before` and `after` differ."""
    first, last = run(before), run(after)
    while after - before > 1:
        middle = (before + after) // 2
        between = run(middle)
        if change(before, middle, first, between) is None:
            before, first = middle, between
        else:
            after, last = middle, between
    found = change(before, after, first, last)
    if found is None:
        raise RuntimeError(f"launches of {before} rows differ from call to call")
    return found


def changes(run: Callable[[int], Results], sizes: Sequence[int]) -> Iterator[BitChange]:
    """Find the changes along the list of sizes, in order; behind a change the rest is asked again."""
    for before, after in itertools.pairwise(sizes):
        while change(before, after, run(before), run(after)) is not None:
            yield (found := bisected(run, before, after))
            before = found.after


def unlike_the_largest(run: Callable[[int], Results], sizes: Sequence[int]) -> str:
    """Count the other sizes that give other bits than the largest one."""
    largest = run(sizes[-1])
    differing = [size for size in sizes[:-1] if change(size, sizes[-1], run(size), largest) is not None]
    return f"{len(differing)} of {len(sizes) - 1} sizes differ from {sizes[-1]}: {differing}"


def answer(kernel: Kernel, sizes: Sequence[int], given: Results, launches: int) -> str:
    """Phrase what is printed for one kernel, width and dtype."""

    @functools.lru_cache(maxsize=2)
    def run(rows: int) -> Results:
        return in_launches(kernel, given, rows, launches)

    if kernel.name in COMPILED_PER_SIZE:
        return unlike_the_largest(run, sizes)
    found = list(changes(run, sizes))
    return "; ".join(map(str, found)) or "the same bits for every number of rows"


def asked(kernel: Kernel, options: argparse.Namespace) -> Iterator[tuple[int, str]]:
    """Return widths and dtypes for a kernel."""
    widths = options.width or (WIDTHS if kernel.name not in COMPILED_PER_SIZE else (ONE_WIDTH,))
    for width in widths:
        for dtype in options.dtype or DTYPES:
            yield width, dtype


def reported(kernel: Kernel, options: argparse.Namespace) -> Iterator[str]:
    """Yield a line for each width and dtype; what a kernel cannot do, or raises, is a line as well."""
    sizes = [size for size in ROWS if size <= options.rows]
    for width, dtype in asked(kernel, options):
        began = time.monotonic()
        try:
            given = inputs(kernel, options.rows, width, DTYPES[dtype], options.device)
            text = answer(kernel, sizes, given, options.launches)
        except UnsupportedCase as error:
            yield f"{kernel.name}: not run: {error}"
            return
        except Exception as error:  # a package that fails must not stop the others
            yield f"{kernel.name} N={width} {dtype}: {type(error).__name__}: {error}".replace("\n", " ")[:300]
            continue
        yield f"{kernel.name} N={width} {dtype}: {text} ({time.monotonic() - began:.1f} s)"


def chosen(options: argparse.Namespace) -> list[Kernel]:
    """Choose kernels of rms_norm that need nothing beside x, a weight and a residual, and run on the device."""
    found = [k for folder in options.kernels for k in load_kernels(folder) if k.op == "rms_norm"]
    able = [k for k in found if k.requires <= {"x", "weight", "residual", "eps"}]
    able = [k for k in able if not k.devices or options.device in k.devices]
    return [k for k in able if not options.kernel or k.name in options.kernel]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=Path, action="append", help="folder of kernels (default kernels/external)")
    parser.add_argument("--kernel", action="append", help="only this kernel (repeatable)")
    parser.add_argument("--width", type=int, action="append")
    parser.add_argument("--dtype", choices=DTYPES, action="append")
    parser.add_argument("--rows", type=int, default=MOST_ROWS)
    parser.add_argument("--launches", type=int, default=MOST_LAUNCHES, help="at most so many per number of rows")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    options.kernels = options.kernels or [EXTERNAL]
    kernels = chosen(options)
    if not kernels:
        parser.error(
            f"no kernel of rms_norm in {options.kernels} runs on {options.device} and is named {options.kernel}"
        )
    for kernel in kernels:
        for line in reported(kernel, options):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
