"""What lastbit calls exact against 60 decimals: drawn cases of the ops, whose references run on numbers of MPFR.

Run `python docs/measurements/exact.py [--cases N] [--seed N] [--op OP] [--processes N] [--limit-s S] [--out FILE]`; it
writes exact.md. It takes gmpy2 beside what lastbit takes. The same reference functions run twice: on enclosures, in
which fp64 is known to 2^-40 or nothing is called exact, and on the `Digits` below, after each function that a reference
imports from `lastbit.numerics` was replaced by one of gmpy2.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import multiprocessing
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import gmpy2
import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "harness" / "checkout"), str(ROOT)]

from lastbit import numerics  # noqa: E402
from lastbit.case import Case  # noqa: E402
from lastbit.config import Config  # noqa: E402
from lastbit.errors import UsageError  # noqa: E402
from lastbit.inputs import build  # noqa: E402
from lastbit.judging.expected import KNOWN, Exact, Numbers, known_exactly  # noqa: E402
from lastbit.judging.problem import Problem  # noqa: E402
from lastbit.numerics import Enclosure, format_of  # noqa: E402
from lastbit.ops import Op  # noqa: E402
from lastbit.verify.drawing import drawing, free  # noqa: E402
from lastbit.verify.project import Project, open_project  # noqa: E402

WIDEST = 1 << 10  # elements of the largest input of a case, cut to its first row
TOGETHER = 100  # cases that a process takes at once
HEAD = """# What is called exact, against 60 decimals

`{command}`, {date}, {minutes:.1f} min on a CPU: torch {torch}, gmpy2 {gmpy2}.

A case is the first row of a case that Hypothesis drew, of at most {widest:,} elements, under a contract drawn at
random; of `attention`, `moe_lora` and `moe_lora_backward` it is the whole. *Different* counts what is left of the cases
without those that were drawn more than once. An element is *known* where the enclosure of its exact value, in fp64, is
no wider than 2^-40 of it: only then does lastbit call a number exact. Integers are known. *Off* counts known elements
that are farther than that from MPFR with 200 bits. What is not finite in fp64 does not count. The last column is the
largest distance of an element that is *not* known, of which lastbit shows no exact value.

| op | cases | different | elements | known | off | largest distance, known | not known |
|---|---|---|---|---|---|---|---|
"""
CONTEXT = gmpy2.context(
    precision=200,  # 60 decimals
    round=gmpy2.RoundAwayZero,  # what is not 0 stays so
    emin=gmpy2.get_emin_min(),
    emax=gmpy2.get_emax_max(),
)


def each(function: Callable[..., Any], count: int = 1) -> Callable[..., Digits]:
    """Turn a function of `count` numbers into one of `Digits`."""
    on_arrays = np.frompyfunc(function, count, 1)
    return lambda *operands: Digits(on_arrays(*map(raw, operands)))


def raw(operand: Any) -> Any:
    """Return the numbers of an operand; a Python number reaches a kernel as fp32."""
    return operand.numbers if isinstance(operand, Digits) else gmpy2.mpfr(ctypes.c_float(operand).value)


number = np.frompyfunc(gmpy2.mpfr, 1, 1)


class Digits:
    """An array of numbers of 60 decimals, with what references ask of an enclosure."""

    def __init__(self, numbers: Any) -> None:
        self.numbers = np.asarray(numbers, dtype=object)

    @classmethod
    def point(cls, values: Any) -> Digits:
        return cls(number(torch.as_tensor(values).double().numpy().astype(object)))

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.numbers.shape)

    @property
    def value(self) -> torch.Tensor:
        return torch.from_numpy(self.numbers.astype(np.float64))

    lo = hi = value

    @property
    def transposed(self) -> Digits:
        return Digits(self.numbers.swapaxes(-1, -2))

    def __getitem__(self, index: Any) -> Digits:
        return Digits(self.numbers[index])

    def in_groups(self, size: int) -> Digits:
        return Digits(self.numbers.reshape(*self.shape[:-1], -1, size))

    def joined(self) -> Digits:
        return Digits(self.numbers.reshape(*self.shape[:-2], self.shape[-2] * self.shape[-1]))

    def reshape(self, *shape: int) -> Digits:
        return Digits(self.numbers.reshape(shape))

    def permute(self, *dims: int) -> Digits:
        return Digits(self.numbers.transpose(dims))

    def expand(self, *shape: int) -> Digits:
        return Digits(np.broadcast_to(self.numbers, shape))

    def zero_where(self, mask: torch.Tensor) -> Digits:
        return where(mask, 0.0, self)

    def unknown_where(self, *_: object) -> Digits:
        return self

    def rounded(self, _: object) -> Digits:
        return self

    def then(self, function: Callable[..., Digits], *others: Digits) -> Digits:
        return function(self, *others)

    def __add__(self, other: Any) -> Digits:
        return Digits(self.numbers + raw(other))

    def __sub__(self, other: Any) -> Digits:
        return Digits(self.numbers - raw(other))

    def __rsub__(self, other: Any) -> Digits:
        return Digits(raw(other) - self.numbers)

    def __mul__(self, other: Any) -> Digits:
        return Digits(self.numbers * raw(other))

    def __neg__(self) -> Digits:
        return Digits(-self.numbers)

    def __truediv__(self, other: Any) -> Digits:
        return Digits(self.numbers / raw(other))

    def __gt__(self, other: Any) -> Any:
        return self.numbers > raw(other)

    __radd__, __rmul__ = __add__, __mul__


def where(condition: Any, a: Any, b: Any) -> Digits:
    return Digits(np.where(np.asarray(condition, dtype=bool), raw(a), raw(b)))


def product(*factors: Any) -> Digits:
    first, *others = factors
    result = first if isinstance(first, Digits) else Digits(raw(first))
    for factor in others:
        result = result * factor
    return result


def total(x: Digits) -> Digits:
    return Digits(x.numbers.sum(-1, keepdims=True) + gmpy2.mpfr(0))


def mean(x: Digits) -> Digits:
    return Digits(total(x).numbers / x.shape[-1])


def rows(x: Digits) -> Digits:
    return Digits(x.numbers.reshape(-1, x.shape[-1]).sum(0) + gmpy2.mpfr(0))


def dot(a: Digits, b: Digits, *_: object) -> Digits:
    return Digits(a.numbers @ b.numbers + gmpy2.mpfr(0))


def grouped_dot(x: Digits, groups: numerics.Groups, matrices: Callable[..., Digits], width: int, *_: int) -> Digits:
    products = Digits.point(torch.zeros(x.shape[0], width))
    for group, numbers in groups.rows.items():
        products.numbers[numbers.numpy()] = dot(x[numbers.numpy()], matrices(torch.tensor([group]))[0]).numbers
    return products


def grouped_outer(left: Digits, right: Digits, groups: numerics.Groups) -> Digits:
    sums = Digits.point(torch.zeros(groups.count, left.shape[1], right.shape[1]))
    for group, numbers in groups.rows.items():
        sums.numbers[group] = dot(left[numbers.numpy()].transposed, right[numbers.numpy()]).numbers
    return sums


def largest(x: Digits) -> Digits:
    return Digits(x.numbers.max(-1, keepdims=True))


def variance(x: Digits, center: Digits) -> Digits:
    return mean(product(x - center, x - center))


def log_sum_exp(x: Digits, folded: bool = False) -> Digits:
    shift = largest(x)
    return log(total(exp(x - shift))) + shift


def log_softmax(x: Digits, folded: bool = False) -> Digits:
    """Compute without cancellation, for 60 decimals are too few for some."""
    at = x.numbers.argmax(-1)[..., None]
    top = Digits(np.take_along_axis(x.numbers, at, -1))
    others = exp(x - top).numbers
    np.put_along_axis(others, at, gmpy2.mpfr(0), -1)
    return (x - top) - log1p(total(Digits(others)))


def softmax(x: Digits, folded: bool = False, empty: str = "nan") -> Digits:
    shares = exp(log_softmax(x))
    return where(largest(x).numbers == -math.inf, 0.0, shares) if empty == "zero" else shares


class Shares:
    """The exponentials that `softmax` of the references asks for, divided by the largest one."""

    def __init__(self, x: Digits, folded: bool = False) -> None:
        terms = exp(x - largest(x))
        self.shown, self.hollow = (terms, total(terms)), largest(x).numbers == -math.inf

    def settled(self, x: Digits, empty: float | None) -> Digits:
        return x if empty is None else where(self.hollow, empty, x)


class DigitsFactor:
    """The right side of a dot, which is its numbers."""

    @staticmethod
    def right(x: Digits) -> Digits:
        return x


def without_cancellation(computed: Digits, formula: Callable[[], Digits]) -> Digits:
    """Compute by a formula where a difference is so small that it may have lost digits."""
    return where(absolute(computed) > 1e-15, computed, formula())


def rescaled(tiles: list[Digits], factors: list[Digits]) -> list[Digits]:
    return [product(tile, *factors[i:]) for i, tile in enumerate(tiles)]


def gather(x: Digits, index: torch.Tensor, dim: int = -1) -> Digits:
    return Digits(np.take_along_axis(x.numbers, index.long().numpy(), dim))


def power_of_two(x: Any, *, above: bool) -> Any:
    """Return the power of two next to a number, of those that fp32 has as normal numbers."""
    if not 0 < x < gmpy2.inf():
        return x if x >= 0 else gmpy2.nan()
    exponent, significand = gmpy2.frexp(x)
    exponent -= not above or significand == 0.5
    least = gmpy2.exp2(-126) if above else gmpy2.mpfr(0)
    return least if exponent < -126 else gmpy2.inf() if exponent > 127 else gmpy2.exp2(exponent)


exp, log, log1p, absolute = each(gmpy2.exp), each(gmpy2.log), each(gmpy2.log1p), each(abs)
divide = each(lambda a, b: a / b, 2)
FUNCTIONS: dict[str, Any] = {
    "Enclosure": Digits,
    "Factor": DigitsFactor,
    "amax": largest,
    "at_least": each(lambda x, low: max(x, low), 2),
    "ceil": each(gmpy2.rint_ceil),
    "clamp": each(lambda x, low, high: low if x < low else min(x, high), 3),
    "concatenate": lambda *xs, dim=-1: Digits(np.concatenate([x.numbers for x in xs], dim)),
    "dequantized": lambda *codes, **how: Digits.point(numerics.dequantized(*codes, **how).exact),  # as fp64 holds it
    "difference_of_products": lambda a, b, r: (a - b) * r,
    "divide": divide,
    "divide_rn": divide,
    "dot": dot,
    "exp": exp,
    "exp2": each(gmpy2.exp2),
    "expm1": each(gmpy2.expm1),
    "exponentials": Shares,
    "fusible_product": product,
    "gather": gather,
    "grouped_dot": grouped_dot,
    "grouped_outer": grouped_outer,
    "hull": lambda first, *_: first,
    "in_reals": without_cancellation,
    "largest_magnitude": lambda x: largest(each(lambda x: gmpy2.mpfr(0) if gmpy2.is_nan(x) else abs(x))(x)),
    "log": log,
    "log2": each(gmpy2.log2),
    "log_softmax": log_softmax,
    "log_sum_exp": log_sum_exp,
    "maximum": each(max, 2),
    "mean": mean,
    "mean_and_variance": lambda x: (mean(x), variance(x, mean(x))),
    "mean_of_products": lambda a, b: mean(a * b),
    "mean_of_squares": lambda x: mean(x * x),
    "multiply_add": lambda a, b, c: product(a, b) + c,
    "of_base_two": each(lambda x: x * gmpy2.const_log2()),
    "power_of_two_from": each(lambda x: power_of_two(x, above=True)),
    "power_of_two_to": each(lambda x: power_of_two(x, above=False)),
    "product_in_any_order": product,
    "rescaled": rescaled,
    "rescaled_dot": dot,
    "round_half_away": each(gmpy2.rint_round),
    "rsqrt": each(gmpy2.rec_sqrt),
    "shifted_exponential": lambda x, shift, below=True: exp(x - shift),
    "sigmoid": each(lambda x: 1 / (1 + gmpy2.exp(-x))),
    "softmax": softmax,
    "sqrt": each(gmpy2.sqrt),
    "stack": lambda *xs: Digits(np.stack([x.numbers for x in xs], -1)),
    "sum_in_any_order": lambda xs, *_: sum(xs[1:], xs[0]),
    "sum_of_row_products": lambda a, b: rows(a * b),
    "sum_of_rows": rows,
    "tanh": each(gmpy2.tanh),
    "total": total,
    "total_of_products": lambda a, b: total(a * b),
    "trunc": each(gmpy2.rint_trunc),
    "two_to_the": each(lambda n: n if n != n else gmpy2.exp2(max(n, gmpy2.mpfr(-126))) if n > -math.inf else 0),
    "variance_about": variance,
    "where": where,
}


class DigitsRecorder:
    """Keeps the stages of a reference that runs on `Digits`."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.stages = problem, {}

    def __call__(self, name: str, value: Any, *, result: bool = False) -> Any:
        self.stages[name] = value
        return value

    def format_of(self, name: str) -> Any:
        return format_of(self.problem.tensors[name].dtype)


@cache
def replaced() -> list[tuple[dict[str, Any], str, Any, Any]]:
    """Return names in references that stand for functions of numerics: each with the function and its stand-in."""
    files = str(ROOT / "references")
    modules = [m for m in list(sys.modules.values()) if (getattr(m, "__file__", None) or "").startswith(files)]
    ours = {id(getattr(numerics, name)): function for name, function in FUNCTIONS.items()}
    found = [(vars(m), name, value) for m in modules for name, value in vars(m).items() if id(value) in ours]
    return [(names, name, value, ours[id(value)]) for names, name, value in found]


@contextmanager
def on_digits() -> Iterator[None]:
    """Let references compute with `Digits`."""
    try:
        for names, name, _, ours in replaced():
            names[name] = ours
        yield
    finally:
        for names, name, before, _ in replaced():
            names[name] = before


def digits_of(problem: Problem) -> dict[str, Any]:
    """Return the stages of a problem in 60 decimals."""
    op, recorder = problem.op, DigitsRecorder(problem)
    inputs = [problem._operand(name) for name in op.inputs]
    inputs = [Digits.point(i.value) if isinstance(i, Enclosure) else i for i in inputs]
    with on_digits():
        op.reference(*inputs, **problem.params, contract=problem.contract, stage=recorder)
    return recorder.stages


@dataclass
class Seen:
    """The counts of an op; `+=` joins them with those of other cases.

    Attributes:
        counts: cases, elements, those that are known, and those of them that are off.
        worst: known or not → the largest distance.
        cases: the cases, each under its contract.
        off: what to print of elements that are off.
    """

    counts: Counter[str] = field(default_factory=Counter)
    worst: dict[bool, float] = field(default_factory=dict)
    cases: set[str] = field(default_factory=set)
    off: list[str] = field(default_factory=list)

    def __iadd__(self, other: Seen) -> Seen:
        self.counts += other.counts
        self.cases |= other.cases
        self.off += other.off
        for known, distance in other.worst.items():
            self.worst[known] = max(self.worst.get(known, 0.0), distance)
        return self

    def add(self, exact: Any, known: Any, truth: Any, place: str) -> None:
        """Count elements of a stage: arrays of what fp64 has, whether that is known, and of what is right."""
        finite = np.frompyfunc(gmpy2.is_finite, 1, 1)(truth).astype(bool)
        some = np.isfinite(exact) & (finite | known)
        exact, known, truth, finite = number(exact[some].astype(object)), known[some], truth[some], finite[some]
        distance = np.where(truth == 0, exact != 0, abs((exact - truth) / truth)).astype(np.float64)
        distance[~finite] = np.inf
        off = known & (distance > KNOWN)
        self.counts.update(elements=len(exact), known=int(known.sum()), off=int(off.sum()))
        for which in (True, False):
            if (known == which).any():
                self.worst[which] = max(self.worst.get(which, 0.0), float(distance[known == which].max()))
        if off.any():
            at = int(off.argmax())
            self.off.append(f"off: {place}: {float(exact[at])!r} for {truth[at]:.20g}")

    def row(self, op: str) -> str:
        """Return the row of the table."""
        counts = self.counts
        share = f"{counts['known'] / max(1, counts['elements']):.2%}"
        figures = f"{counts['cases']:,} | {len(self.cases):,} | {counts['elements']:,} | {share} | {counts['off']}"
        return f"| {op} | {figures} | {bits(self.worst.get(True))} | {bits(self.worst.get(False))} |"


def bits(distance: float | None) -> str:
    """Format a relative distance as a power of two."""
    return "none" if distance is None else "0" if not distance else f"2^{math.log2(distance):.1f}"


def compared(problem: Problem, seen: Seen, case: str) -> None:
    """Count the elements of all stages."""
    trace, digits = problem.unrounded.evaluate(), digits_of(problem)
    for name, expected in trace.stages.items():
        expected = expected.finished
        if isinstance(expected, Exact):
            right = expected.values == digits[name]
            seen.counts.update(elements=right.numel(), known=right.numel(), off=int((~right).sum()))
        elif isinstance(expected, Numbers):
            exact = expected.enclosure.exact.reshape(-1)
            known = ~torch.isnan(known_exactly(expected)).reshape(-1)
            truth = np.broadcast_to(digits[name].numbers, tuple(expected.shape)).reshape(-1)
            seen.add(exact.numpy(), known.numpy(), truth, f"{case} {problem.contract} {name}")


@cache
def project() -> Project:
    return open_project(Config(folder=tempfile.mkdtemp()))


def cases_of(op: Op, seed: int) -> Iterator[Case]:
    """Draw cases of an op without end, group by group."""
    groups = [g for g in project().groups(op.name, frozenset((*op.inputs, *op.params)), small=True) if g.choices]
    while True:
        drawn: list[list[Case]] = []
        for group in groups:
            drawn.append([])
            drawing(free(group), drawn[-1].append, count=max(3, TOGETHER // len(groups)), seed_=seed)
        yield from (case for cases in drawn for case in cases[1:])  # the first one is the simplest, of every seed
        seed += 1 << 32


def first_rows(op: Op, case: Case) -> dict[str, torch.Tensor] | None:
    """Make the tensors of a case, cut to the first row; None if they are large all the same."""
    leading = next(len(spec.shape) - 1 for spec in case.tensors if spec.name == op.inputs[0])
    first = (slice(0, 1),) * leading
    sizes = [math.prod(s.shape[leading:] if s.name in op.rows else s.shape) for s in case.tensors]
    if max(sizes) > WIDEST or max(spec.numel for spec in case.tensors) > 64 * WIDEST:
        return None
    tensors = build(case, "cpu").tensors
    return {n: t[first[: t.ndim]] if n in op.rows else t for n, t in tensors.items()}


def judged(name: str, count: int, seed: int, until: float) -> Seen:
    """Count in so many cases of an op, or in those before a time."""
    torch.set_num_threads(1)
    np.seterr(all="ignore")
    gmpy2.set_context(CONTEXT)
    op, choose, seen = project().op(name), random.Random(seed), Seen()
    for case in cases_of(op, seed):
        if seen.counts["cases"] == count or time.time() > until:
            break
        if (tensors := first_rows(op, case)) is None:
            continue
        problem, own = Problem(op, choose.choice(op.contracts()), tensors, dict(case.params)), Seen()
        try:
            compared(problem, own, str(case))
        except (UsageError, ValueError):
            continue  # the contract has no meaning with these parameters
        except Exception as error:
            own.counts.update(elements=1, off=1)
            own.off.append(f"{case} {problem.contract}: {error!r}")
        if own.counts["elements"]:
            own.counts["cases"], own.cases = 1, {f"{case} {problem.contract}"}
            seen += own
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000, help="cases of each op")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--op", action="append", help="an op, or several; all of them")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=math.inf, help="seconds after which it ends with what it has")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    options = parser.parse_args()
    began, names = time.time(), options.op or sorted(project().ops)
    total = {name: Seen() for name in names}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, mp_context=spawn) as pool:
        work = {}
        for start in range(0, options.cases, TOGETHER):
            for name in names:
                count, seed = min(TOGETHER, options.cases - start), options.seed + start
                work[pool.submit(judged, name, count, seed, began + options.limit_s)] = name
        for done in as_completed(work):
            total[work[done]] += done.result()
    lines = [seen.row(name) for name, seen in total.items()]
    print(*(line for seen in total.values() for line in seen.off[:10]), *lines, sep="\n")
    head = HEAD.format(
        command=" ".join(["python", "docs/measurements/exact.py", *sys.argv[1:]]),
        date=time.strftime("%Y-%m-%d"),
        minutes=(time.time() - began) / 60,
        widest=WIDEST,
        torch=torch.__version__,
        gmpy2=gmpy2.version(),
    )
    options.out.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
