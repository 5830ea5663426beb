"""What lastbit calls exact against 60 decimals: drawn cases of the ops, whose references run on numbers of mpmath.

Run `python docs/measurements/exact.py [--cases N] [--seed N] [--op OP] [--out FILE]`; it writes exact.md. The same
reference functions run twice: on enclosures, in which fp64 is known to 2^-40 or nothing is called exact, and on the
`Digits` below, after each function that a reference imports from `lastbit.numerics` was replaced by one of mpmath.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import mpmath
import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "harness" / "checkout"), str(ROOT)]

from lastbit import numerics  # noqa: E402
from lastbit.config import Config  # noqa: E402
from lastbit.errors import UsageError  # noqa: E402
from lastbit.inputs import build  # noqa: E402
from lastbit.judging.expected import Numbers  # noqa: E402
from lastbit.judging.observation import KNOWN  # noqa: E402
from lastbit.judging.problem import Problem  # noqa: E402
from lastbit.numerics import Enclosure, format_of  # noqa: E402
from lastbit.verify.drawing import draw  # noqa: E402
from lastbit.verify.project import open_project  # noqa: E402

LEFT_OUT = {
    "attention": "works on the parts of enclosures",
    "completion_mask": "integers alone",
    "moe_lora": "products of groups of matrices",
    "moe_lora_backward": "products of groups of matrices",
}
WIDEST = 1 << 9  # elements of the largest input of a case, cut to its first row
HEAD = """# What is called exact, against 60 decimals

`{command}`, {date}, {minutes:.1f} min on a CPU: torch {torch}, mpmath {mpmath}.

A case is the first row of a case that Hypothesis drew, of at most {widest} elements, under a contract drawn at random.
An element is *known* where the enclosure of its exact value, in fp64, is no wider than 2^-40 of it: only then does a
finding call a number exact. *Off* counts known elements that are farther than that from mpmath. The last column is the
largest distance of an element that is *not* known, which a finding shows no exact value of.

Left out: {left_out}.

| op | cases | elements | known | off | largest distance, known | not known |
|---|---|---|---|---|---|---|
"""
mpmath.mp.dps = 60
number = np.frompyfunc(mpmath.mpf, 1, 1)


def applied(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of numbers on arrays of them, NaN where it is not defined."""

    def safe(*numbers: Any) -> Any:
        try:
            result = function(*numbers)
        except (ZeroDivisionError, ValueError):
            return mpmath.nan
        return result if isinstance(result, mpmath.mpf) else mpmath.nan  # of a negative number it would be complex

    return np.frompyfunc(safe, function.__code__.co_argcount if hasattr(function, "__code__") else 1, 1)


def quotient(a: Any, b: Any) -> Any:
    """a / b, infinite by zero."""
    if b == 0:
        return mpmath.nan if a == 0 or mpmath.isnan(a) else mpmath.sign(a) * mpmath.inf
    return a / b


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

    def __getitem__(self, index: Any) -> Digits:
        return Digits(self.numbers[index])

    def in_groups(self, size: int) -> Digits:
        return Digits(self.numbers.reshape(*self.shape[:-1], -1, size))

    def joined(self) -> Digits:
        return Digits(self.numbers.reshape(*self.shape[:-2], self.shape[-2] * self.shape[-1]))

    def reshape(self, *shape: int) -> Digits:
        return Digits(self.numbers.reshape(shape))

    def zero_where(self, mask: torch.Tensor) -> Digits:
        return where(mask, 0.0, self)

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
        return divide(self, other)

    def __gt__(self, other: Any) -> Any:
        return self.numbers > raw(other)

    __radd__, __rmul__ = __add__, __mul__


def raw(operand: Any) -> Any:
    """The numbers of an operand; a Python number reaches a kernel as fp32."""
    return operand.numbers if isinstance(operand, Digits) else mpmath.mpf(ctypes.c_float(operand).value)


def each(function: Callable[..., Any]) -> Callable[..., Digits]:
    """A function of numbers as one of `Digits`."""
    on_arrays = applied(function)
    return lambda *operands: Digits(on_arrays(*map(raw, operands)))


def where(condition: Any, a: Any, b: Any) -> Digits:
    return Digits(np.where(np.asarray(condition, dtype=bool), raw(a), raw(b)))


def product(*factors: Any) -> Digits:
    first, *others = factors
    result = first if isinstance(first, Digits) else Digits(raw(first))
    for factor in others:
        result = result * factor
    return result


def total(x: Digits) -> Digits:
    return Digits(x.numbers.sum(-1, keepdims=True) + mpmath.mpf(0))


def mean(x: Digits) -> Digits:
    return Digits(total(x).numbers / x.shape[-1])


def rows(x: Digits) -> Digits:
    return Digits(x.numbers.reshape(-1, x.shape[-1]).sum(0) + mpmath.mpf(0))


def largest(x: Digits) -> Digits:
    return Digits(x.numbers.max(-1, keepdims=True))


def variance(x: Digits, center: Digits) -> Digits:
    return mean(product(x - center, x - center))


def log_sum_exp(x: Digits) -> Digits:
    shift = largest(x)
    return log(total(exp(x - shift))) + shift


def log_softmax(x: Digits, *_: Any) -> Digits:
    """Without cancellation, for 60 decimals are too few for some."""
    at = x.numbers.argmax(-1)[..., None]
    top = Digits(np.take_along_axis(x.numbers, at, -1))
    others = exp(x - top).numbers
    np.put_along_axis(others, at, mpmath.mpf(0), -1)
    return (x - top) - log1p(total(Digits(others)))


def without_cancellation(computed: Digits, formula: Callable[[], Digits]) -> Digits:
    """By a formula where a difference is so small that it may have lost digits."""
    return where(absolute(computed) > 1e-15, computed, formula())


class Shares:
    """What `softmax` of the references asks of `exponentials`, divided by the largest one."""

    def __init__(self, x: Digits, _: bool = False) -> None:
        terms = exp(x - largest(x))
        self.shown = terms, total(terms)

    def settled(self, x: Digits, _: object) -> Digits:
        return x


def gather(x: Digits, index: torch.Tensor, dim: int = -1) -> Digits:
    return Digits(np.take_along_axis(x.numbers, index.long().numpy(), dim))


exp, log, divide = each(lambda x: mpmath.exp(x)), each(lambda x: mpmath.log(x)), each(quotient)
log1p = each(lambda x: mpmath.log1p(x))
absolute, is_nan = each(lambda x: abs(x)), each(lambda x: mpmath.mpf(mpmath.isnan(x)))
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "amax": largest,
    "at_least": each(lambda x, low: x if x >= low or mpmath.isnan(x) else low),
    "clamp": each(lambda x, low, high: x if mpmath.isnan(x) else min(max(x, low), high)),
    "ceil": each(lambda x: mpmath.ceil(x)),
    "concatenate": lambda *xs, dim=-1: Digits(np.concatenate([x.numbers for x in xs], dim)),
    "difference_of_products": lambda a, b, r: (a - b) * r,
    "divide": divide,
    "divide_rn": divide,
    "exp": exp,
    "exp2": each(lambda x: mpmath.mpf(2) ** x),
    "expm1": each(lambda x: mpmath.expm1(x)),
    "exponentials": Shares,
    "fusible_product": product,
    "gather": gather,
    "hull": lambda first, *_: first,
    "in_reals": without_cancellation,
    "largest_magnitude": lambda x: largest(where(is_nan(x).numbers != 0, 0.0, absolute(x))),
    "log": log,
    "log2": each(lambda x: mpmath.log(x, 2)),
    "log_softmax": log_softmax,
    "log_sum_exp": log_sum_exp,
    "mean": mean,
    "mean_and_variance": lambda x: (mean(x), variance(x, mean(x))),
    "mean_of_products": lambda a, b: mean(a * b),
    "mean_of_squares": lambda x: mean(x * x),
    "multiply_add": lambda a, b, c: product(a, b) + c,
    "power_of_two_from": each(lambda x: mpmath.mpf(2) ** mpmath.ceil(mpmath.log(x, 2))),
    "power_of_two_to": each(lambda x: mpmath.mpf(2) ** mpmath.floor(mpmath.log(x, 2))),
    "product_in_any_order": product,
    "round_half_away": each(lambda x: mpmath.sign(x) * mpmath.floor(abs(x) + mpmath.mpf(0.5))),
    "rsqrt": each(lambda x: mpmath.inf if x == 0 else 1 / mpmath.sqrt(x)),
    "sigmoid": each(lambda x: 1 / (1 + mpmath.exp(-x))),
    "softmax": lambda x, *_: exp(log_softmax(x)),
    "sqrt": each(lambda x: mpmath.sqrt(x)),
    "stack": lambda *xs: Digits(np.stack([x.numbers for x in xs], -1)),
    "sum_in_any_order": lambda xs, *_: sum(xs[1:], xs[0]),
    "sum_of_row_products": lambda a, b: rows(a * b),
    "sum_of_rows": rows,
    "tanh": each(lambda x: mpmath.tanh(x)),
    "total": total,
    "total_of_products": lambda a, b: total(a * b),
    "trunc": each(lambda x: mpmath.sign(x) * mpmath.floor(abs(x))),
    "two_to_the": each(lambda x: mpmath.mpf(2) ** x),
    "variance_about": variance,
    "where": where,
}


class Recorder:
    """Keeps the stages of a reference that runs on `Digits`."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.stages = problem, {}

    def __call__(self, name: str, value: Any, *, result: bool = False) -> Any:
        self.stages[name] = value
        return value

    def format_of(self, name: str) -> Any:
        return format_of(self.problem.tensors[name].dtype)


def digits_of(problem: Problem) -> dict[str, Any]:
    """The stages of a problem in 60 decimals."""
    op, recorder = problem.op, Recorder(problem)
    files = str(ROOT / "references")
    modules = [m for m in list(sys.modules.values()) if (getattr(m, "__file__", None) or "").startswith(files)]
    ours = {id(getattr(numerics, name)): function for name, function in {**FUNCTIONS, "Enclosure": Digits}.items()}
    names = (
        (module, name, ours[id(value)])
        for module in modules
        for name, value in vars(module).items()
        if id(value) in ours
    )
    patches = [mock.patch.object(*replaced) for replaced in names]
    inputs = [problem._operand(name) for name in op.inputs]
    inputs = [Digits.point(i.value) if isinstance(i, Enclosure) else i for i in inputs]
    try:
        for patch in patches:
            patch.start()
        op.reference(*inputs, **problem.params, contract=problem.contract, stage=recorder)
    finally:
        for patch in reversed(patches):
            patch.stop()
    return recorder.stages


def problems(project: Any, name: str, count: int, seed: int) -> Iterator[Problem]:
    """Problems of an op: the first rows of drawn cases, under contracts at random."""
    op, choose, made = project.op(name), random.Random(seed), 0
    groups = [g for g in project.groups(name, frozenset((*op.inputs, *op.params)), small=True) if g.choices]
    while made < count:
        seed += 1
        for group in groups:
            for case in draw(group, max(1, count // len(groups)), seed):
                if made == count or max(spec.numel for spec in case.tensors) > 64 * WIDEST:
                    continue
                tensors = build(case, "cpu").tensors
                first = tuple(slice(0, 1) for _ in tensors[op.inputs[0]].shape[:-1])
                tensors = {n: t[first[: t.ndim]] if n in op.rows else t for n, t in tensors.items()}
                if max(t.numel() for t in tensors.values()) <= WIDEST:
                    made += 1
                    yield Problem(op, choose.choice(op.contracts()), tensors, dict(case.params))


def compared(problem: Problem, seen: Counter[str], worst: dict[str, float]) -> None:
    """Count the elements of all stages, those whose exact value is known, and those that are off."""
    trace = problem.unrounded.evaluate()
    digits = digits_of(problem)
    for name, expected in trace.stages.items():
        finished = expected.finished
        if not isinstance(finished, Numbers) or not finished.enclosure.parts.numel():
            continue
        exact, _, lo, hi = (part.flatten().tolist() for part in finished.enclosure.full)
        truth = np.broadcast_to(digits[name].numbers, tuple(finished.shape)).ravel()
        for x, low, high, true in zip(exact, lo, hi, truth, strict=True):
            if not math.isfinite(x) or not mpmath.isfinite(true):
                continue  # what is infinite or NaN has no digits
            known = low == high or high - low <= KNOWN * abs(x)
            distance = float(abs((mpmath.mpf(x) - true) / true)) if true else float(x != 0)
            seen.update(elements=1, known=known, off=known and distance > KNOWN)
            worst[known] = max(worst.get(known, 0.0), distance)
            if known and distance > KNOWN:
                print(f"off: {problem.op.name} {problem.contract} {name}: {x} for {mpmath.nstr(true, 20)}")


def bits(distance: float | None) -> str:
    """A relative distance as a power of two."""
    return "none" if distance is None else "0" if not distance else f"2^{math.log2(distance):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000, help="cases of each op")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--op", action="append", help="an op, or several; all of them")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    began, lines = time.monotonic(), []
    project = open_project(Config(folder=tempfile.mkdtemp()))
    for name in options.op or sorted(project.ops.keys() - LEFT_OUT.keys()):
        seen, worst = Counter[str](), dict[bool, float]()
        for problem in problems(project, name, options.cases, options.seed):
            try:
                compared(problem, seen, worst)
            except (UsageError, ValueError):
                seen["refused"] += 1  # the contract has no meaning with these parameters
            seen["cases"] += 1
        cases = seen["cases"] - seen["refused"]
        share = f"{seen['known'] / max(1, seen['elements']):.2%}"
        figures = f"{cases:,} | {seen['elements']:,} | {share} | {seen['off']}"
        lines.append(f"| {name} | {figures} | {bits(worst.get(True))} | {bits(worst.get(False))} |")
        print(lines[-1], flush=True)
    head = HEAD.format(
        command=" ".join(["python", "docs/measurements/exact.py", *sys.argv[1:]]),
        date=time.strftime("%Y-%m-%d"),
        minutes=(time.monotonic() - began) / 60,
        widest=WIDEST,
        torch=torch.__version__,
        mpmath=mpmath.__version__,
        left_out="; ".join(f"`{name}` ({why})" for name, why in LEFT_OUT.items()),
    )
    options.out.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
