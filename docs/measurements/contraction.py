"""Which product a compiler puts into a fused multiply-add, told from the bits of results. Prints Markdown.

PYTHONPATH=harness/checkout python3 docs/measurements/contraction.py

Needs a CUDA device. Of packages it needs conch-triton-kernels and liger-kernel for the second table alone.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "harness" / "checkout"), str(ROOT / "kernels" / "external")]

COUNT, BLOCK = 8192, 512
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
NEITHER, FIRST, SECOND = "neither", "a·b", "c·d"


class Terms(NamedTuple):
    """An expression of a · b and a second term, c · d or c, with the signs of both."""

    text: str
    signs: tuple[int, int]
    two: bool


FORMS = (
    Terms("a*b + c", (1, 1), two=False),
    Terms("c + a*b", (1, 1), two=False),
    Terms("a*b - c", (1, -1), two=False),
    Terms("c - a*b", (-1, 1), two=False),
    Terms("a*b + c*d", (1, 1), two=True),
    Terms("a*b - c*d", (1, -1), two=True),
    Terms("a*b + c*d, a*b stored", (1, 1), two=True),
    Terms("a*b - c*d, a*b stored", (1, -1), two=True),
)
LOADS = ("abcd", "cdab", "cabd", "bdca")
"""Orders in which the four are loaded. The last two are x1, x2, cos, sin and cos, sin, x1, x2 of x2·cos + x1·sin."""
MIXED = ((torch.float32, torch.bfloat16, torch.float32), (torch.bfloat16, torch.float32, torch.bfloat16))
"""Dtypes of what is computed, of a and c, and of b and d, as in ropes that convert heads to the dtype of tables."""


@triton.jit
def _load(ptr, at, DTYPE: tl.constexpr):
    return tl.load(ptr + at).to(DTYPE)


@triton.jit
def _sum_kernel(a_ptr, b_ptr, c_ptr, d_ptr, y_ptr, p_ptr, FORM: tl.constexpr, LOADS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    if LOADS == "abcd":
        a, b = _load(a_ptr, at, DTYPE), _load(b_ptr, at, DTYPE)
        c, d = _load(c_ptr, at, DTYPE), _load(d_ptr, at, DTYPE)
    elif LOADS == "cdab":
        c, d = _load(c_ptr, at, DTYPE), _load(d_ptr, at, DTYPE)
        a, b = _load(a_ptr, at, DTYPE), _load(b_ptr, at, DTYPE)
    elif LOADS == "cabd":
        c, a = _load(c_ptr, at, DTYPE), _load(a_ptr, at, DTYPE)
        b, d = _load(b_ptr, at, DTYPE), _load(d_ptr, at, DTYPE)
    else:
        b, d = _load(b_ptr, at, DTYPE), _load(d_ptr, at, DTYPE)
        c, a = _load(c_ptr, at, DTYPE), _load(a_ptr, at, DTYPE)
    if FORM == "a*b + c":
        y = a * b + c
    elif FORM == "c + a*b":
        y = c + a * b
    elif FORM == "a*b - c":
        y = a * b - c
    elif FORM == "c - a*b":
        y = c - a * b
    else:
        p, q = a * b, c * d
        y = p + q if FORM == "a*b + c*d" or FORM == "a*b + c*d, a*b stored" else p - q
        if FORM == "a*b + c*d, a*b stored" or FORM == "a*b - c*d, a*b stored":
            tl.store(p_ptr + at, p)
    tl.store(y_ptr + at, y)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round fp64 numbers to the nearest of a narrower dtype, ties to even, within its range; they stay fp64."""
    limits = torch.finfo(dtype)
    least = torch.frexp(torch.tensor(limits.smallest_normal, dtype=torch.float64))[1]
    digits = 2 - int(torch.frexp(torch.tensor(limits.eps, dtype=torch.float64))[1])
    unit = torch.ldexp(torch.ones_like(x), torch.maximum(torch.frexp(x)[1], least.to(x.device)) - digits)
    return torch.round(x / unit) * unit


def to_odd(x: Tensor, y: Tensor) -> Tensor:
    """Add in fp64; of the two numbers beside an inexact sum, return the odd one, which rounds as the sum does."""
    total = x + y
    part = total - x
    lost = (x - (total - part)) + (y - part)  # exact: Knuth's TwoSum
    even = (total.view(torch.int64) & 1) == 0
    beyond = torch.nextafter(total, torch.copysign(torch.full_like(total, torch.inf), lost))
    return torch.where((lost != 0) & even, beyond, total)


def possible(form: Terms, numbers: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return what a processor computes for each choice of the product that goes unrounded into the sum."""
    a, b, c, d = (numbers[name].double() for name in "abcd")
    first, second = form.signs[0] * (a * b), form.signs[1] * (c * d if form.two else c)  # exact: 24 + 24 bits
    near_first, near_second = rounded(first, dtype), rounded(second, dtype)
    sums = {NEITHER: to_odd(near_first, near_second), FIRST: to_odd(first, near_second)}
    if form.two:
        sums[SECOND] = to_odd(near_first, second)
    return {name: rounded(total, dtype) for name, total in sums.items()}


def differing(y: Tensor, candidates: Mapping[str, Tensor]) -> dict[str, int]:
    """Count the elements in which y differs from each candidate."""
    return {name: int((y.double() != other).sum()) for name, other in candidates.items()}


def draw(dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """Draw numbers of either sign around one, so that nothing overflows and sums cancel at times."""
    generator = torch.Generator().manual_seed(7)
    found = {}
    for name, dtype in dtypes.items():
        drawn = torch.rand(COUNT, generator=generator) + 0.5
        signs = 1 - 2 * torch.randint(0, 2, (COUNT,), generator=generator)
        found[name] = (drawn * signs).to(dtype)
    return found


def rows(device: str) -> Iterator[tuple[str, ...]]:
    """Yield a row of the first table for each dtype, expression and order of loads."""
    of_one = [(dtype, dtype, dtype) for dtype in NAMES]
    for dtype, of_numbers, of_tables in [*of_one, *MIXED]:
        given = draw({"a": of_numbers, "b": of_tables, "c": of_numbers, "d": of_tables})
        arguments = [x.to(device) for x in given.values()]
        converted = {name: x.to(dtype) for name, x in given.items()}
        mixed = "" if of_numbers is of_tables else f", a and c {NAMES[of_numbers]}, b and d {NAMES[of_tables]}"
        for form in FORMS if of_numbers is of_tables else FORMS[4:6]:
            candidates = possible(form, converted, dtype)
            for loads in LOADS if form.two else LOADS[:1]:
                y, p = (torch.empty(COUNT, dtype=dtype, device=device) for _ in range(2))
                launch = _sum_kernel[(COUNT // BLOCK,)]
                compiled = launch(*arguments, y, p, FORM=form.text, LOADS=loads, BLOCK=BLOCK)
                counts = differing(y.cpu(), candidates)
                kept = " or ".join(name for name, count in counts.items() if not count) or "another one"
                yield NAMES[dtype] + mixed, f"`{form.text}`", loads, kept, told(counts), instructions(compiled)


def told(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


def instructions(compiled: object) -> str:
    """Count the multiplications and fused multiply-adds in the PTX of a kernel."""
    text = getattr(compiled, "asm", {}).get("ptx", "")
    names = re.findall(r"^\s*((?:fma|mul)\.(?:rn\.)?b?f\d+(?:x2)?)\s", text, re.MULTILINE)
    return ", ".join(f"{names.count(name)} {name}" for name in sorted({*names}))


def print_table(heads: tuple[str, ...], cells: Iterator[tuple[str, ...]]) -> None:
    print("| " + " | ".join(heads) + " |", "|" + "---|" * len(heads), sep="\n")
    for row in cells:
        print("| " + " | ".join(row) + " |", flush=True)
    print()


def heads(dtype: torch.dtype, tables: torch.dtype, shape: tuple[int, int, int, int], device: str) -> dict[str, Tensor]:
    """Draw q and k of that many tokens, heads, heads of k and columns, and tables of angles."""
    tokens, count, of_k, width = shape
    generator = torch.Generator().manual_seed(tokens * width)
    made = {n: torch.randn(tokens, h, width, generator=generator).to(dtype) for n, h in (("q", count), ("k", of_k))}
    angles = 6.3 * torch.rand(tokens, width // 2, generator=generator)
    made |= {"cos": angles.cos().to(tables), "sin": angles.sin().to(tables), "positions": torch.arange(tokens)}
    return {name: x.to(device) for name, x in made.items()}


Rope = Callable[..., dict[str, Tensor]]

SHAPES = ((64, 4, 2, 64), (64, 8, 8, 128), (33, 3, 1, 66), (40, 2, 2, 20))
"""Tokens, heads of q and of k, and columns."""


def outside(rope: Rope, dtype: torch.dtype, tables: torch.dtype, device: str) -> dict[str, tuple[str, ...]]:
    """Return for each contract how many elements of q and of k lie outside of what it allows."""
    from lastbit.judging.problem import Problem
    from lastbit.judging.verdict import judge
    from lastbit.references.rotary import rotary

    results = ("q_rotated", "k_rotated")
    contracts = [contract for contract in rotary.contracts() if not contract.has("rounded_table")]
    counts = {str(contract): dict.fromkeys(results, 0) for contract in contracts}
    elements = dict.fromkeys(results, 0)
    for shape in SHAPES:
        given = heads(dtype, tables, shape, device)
        found = {name: y.to(dtype).cpu() for name, y in rope(**given).items()}
        given = {name: x.cpu() for name, x in given.items()}
        for name in results:
            elements[name] += found[name].numel()
        for contract in contracts:
            judgement = judge(Problem(rotary, contract, given, {}), found, alternatives=False)
            for stage in judgement.stages:
                if stage.name in results:
                    counts[str(contract)][stage.name] += stage.cumulative.outside
    return {
        contract: tuple(f"{own[name]:,} of {elements[name]:,}" for name in results) for contract, own in counts.items()
    }


def rope_rows(device: str) -> Iterator[tuple[str, ...]]:
    """Yield a row of the second table for each rope, dtype and contract."""
    import ropes

    from lastbit.errors import UnsupportedCase

    for name, rope in (("conch", ropes.conch), ("Liger", ropes.liger)):
        for dtype in (torch.bfloat16, torch.float16):
            for tables in (dtype, torch.float32):
                beginning = name, NAMES[dtype], NAMES[tables]
                try:
                    counts = outside(rope, dtype, tables, device)
                except UnsupportedCase as error:
                    yield *beginning, f"not run: {error}", "", ""
                else:
                    yield from ((*beginning, f"`{contract}`", *both) for contract, both in counts.items())


def main() -> int:
    if not torch.cuda.is_available():
        print("This needs a CUDA device: it tells from results what a compiler for one has made of a kernel.")
        return 1
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}\n")
    print(f"Elements of {COUNT:,} that differ from each possibility; the product that is named is not rounded.\n")
    print_table(("dtype", "expression", "loads", "in the FMA", "elements that differ", "PTX"), rows("cuda"))
    print("Elements that each contract of rotary does not allow:\n")
    print_table(("rope", "q and k", "tables", "contract", "q", "k"), rope_rows("cuda"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
