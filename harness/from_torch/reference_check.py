"""The trial of a written reference: at each stage it must allow the value that the function itself gives."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from lastbit.case import Case
from lastbit.dtypes import DTYPE_NAMES
from lastbit.errors import LastbitError
from lastbit.from_torch.reference_file import Written
from lastbit.from_torch.tracing import HALVES, Example, traced
from lastbit.inputs import build
from lastbit.judging.problem import Problem
from lastbit.kernel import load_file
from lastbit.numerics import Enclosure
from lastbit.ops import Op
from lastbit.verify.declarations import check_op

# Arbitrary: a translation that is wrong is so for nearly all numbers.
SEEDS = 3


@dataclass(frozen=True)
class Tried:
    """The outcome of a trial: how many calls, elements and stages were compared, and the values that were not allowed.

    Attributes:
        broken: stage → a sentence about its first element that is not allowed, given the stages before it.
    """

    calls: int
    elements: int
    stages: int
    broken: Mapping[str, str]


def tried(written: Written, function: Callable[..., Any], case: Case, fixed: Mapping[str, object]) -> Tried:
    """Compare the function on the CPU with its reference, on the case with other seeds and dtypes of 16 bits.

    Each stage is judged from the function's own stages before it, so that the one that is wrong is told.

    Raises:
        LastbitError: the reference does not load, or gives a stage another shape than the function does.
    """
    op = load_op(written.text, case.op)
    calls = elements = 0
    broken: dict[str, str] = {}
    halves = [t.name for t in case.tensors if t.torch_dtype in HALVES]
    for dtype, seed in itertools.product([DTYPE_NAMES[d] for d in HALVES] if halves else [""], range(SEEDS)):
        own_dtypes = tuple(replace(t, dtype=dtype) if t.name in halves else t for t in case.tensors)
        variant = replace(case, tensors=own_dtypes, seed=case.seed + seed)
        tensors = dict(build(variant, "cpu").tensors)
        own = traced(function, Example(tensors, variant.params, fixed))  # type: ignore[arg-type]
        nodes = dict(zip(written.followed.traced.used, own.used, strict=True))
        given = {stage: own.values[nodes[node]] for node, stage in written.stages.items()}
        contract = op.contract("rounded_scalars" if "scalars" in op.axes else "")  # the call is one on the CPU
        trace = Problem(op, contract, tensors, variant.params).evaluate(given)
        for stage, actual in given.items():
            if actual.is_floating_point() and (sentence := _objection(stage, trace.enclosure(stage), actual, variant)):
                broken.setdefault(stage, sentence)
            elements += actual.numel()
        calls += 1
    return Tried(calls, elements, len(written.stages), broken)


def load_op(text: str, name: str) -> Op:
    """Load the op of a file with this text."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.py"
        path.write_text(text, encoding="utf-8")
        made: Op = getattr(load_file(path), name)
        check_op(made)
    return made


def _objection(stage: str, legal: Enclosure, actual: Tensor, case: Case) -> str:
    """Describe the first element that the enclosure does not contain; an empty text if it contains all."""
    values = actual.double()
    if legal.shape != values.shape:
        shapes = f"{list(legal.shape)}, and the function {list(values.shape)}"
        raise LastbitError(f"the written reference gives {stage!r} the shape {shapes}, for {case}")
    within = ((legal.lo <= values) & (values <= legal.hi)) | (torch.isnan(values) & torch.isnan(legal.lo))
    if bool(within.all()):
        return ""
    at = tuple(int(i) for i in (~within).nonzero()[0])
    low, high = float(legal.lo[at]), float(legal.hi[at])
    allowed = f"{low!r}" if low == high else f"{low!r} to {high!r}"
    return f"{stage}{list(at)} is {float(values[at])!r}, and not {allowed}, for {case}"
