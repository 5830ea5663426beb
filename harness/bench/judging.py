"""Cost of judging: `compare` beside a copy and `assert_close`, `assert_contract` beside `assert_close`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

from lastbit.bench.samples import Effort, on_device, peak_memory, size_of, wall
from lastbit.bench.subjects import eager_for, subject_for
from lastbit.calling.performing import under_any_name
from lastbit.case import parse_case
from lastbit.devices import made_current
from lastbit.inputs import build
from lastbit.judging.compare import compare
from lastbit.numerics import Enclosure, format_of
from lastbit.outcomes.bench import ASSERTED, COMPARED, MEMORY, Measurement, Sample
from lastbit.verify.assertion import assert_contract
from lastbit.verify.check import Subject
from lastbit.verify.worker import Workplace

_WIDTH = 1 << 13
_ROWS, _ROWS_ON_CPU = 512, 64  # 2^22 elements are a block of `judge`; both are more than the L2 cache holds
_CLOSE = "assert_close"


def comparing(place: Workplace, of: str, effort: Effort) -> list[Measurement]:
    """Measure `compare` on a block of random values in bf16, by time and by bytes that it must read per second.

    A copy reads and writes: the bytes that it moves are twice those that it copies.
    """
    device = torch.device(*place.config.devices)
    with made_current(device):
        actual, expected = _block(_ROWS_ON_CPU if device.type == "cpu" else _ROWS, device)
        read = actual.nbytes + expected.parts.nbytes
        source = torch.empty(read, dtype=torch.uint8, device=device).random_()
        target = torch.empty_like(source)
        fmt, other = format_of(actual.dtype), actual.clone()
        own = on_device(lambda: compare(actual, expected, fmt), device, effort)
        copied = on_device(lambda: target.copy_(source), device, effort)
        close = on_device(lambda: assert_close(actual, other), device, effort)
    of = f"bf16[{len(actual)},{_WIDTH}]"
    speed, limit = own.rate(read / 1e9), copied.rate(2 * read / 1e9)
    return [
        Measurement(COMPARED, of, "compare", "GB/s", speed, "a copy of the same bytes", limit),
        Measurement(COMPARED, of, _CLOSE, "GB/s", close.rate(2 * actual.nbytes / 1e9), "the same copy", limit),
        Measurement(COMPARED, of, "compare", "s", own, _CLOSE, close),
    ]


def _block(rows: int, device: torch.device) -> tuple[Tensor, Enclosure]:
    """Make random values in bf16, and an enclosure in which some of them are decided."""
    exact = torch.randn(rows, _WIDTH, dtype=torch.float64, device=device)
    ends = [(exact * factor).bfloat16().double() for factor in (1.0, 1 - 2**-10, 1 + 2**-10)]
    value, inner, outer = ends
    return value.bfloat16(), Enclosure(torch.stack([exact, value, inner.minimum(outer), inner.maximum(outer)]))


def asserting(place: Workplace, line: str, effort: Effort) -> list[Measurement]:
    """Measure `assert_contract` on the result of another implementation than the first kernel, or on its own.

    Raises:
        UsageError: no kernel takes the case.
    """
    case = parse_case(line)
    first = subject_for(place, case)
    subject = eager_for(place, first, case) or first
    with made_current(subject.device):
        tensors = build(case, subject.device).tensors
        actual = subject.kernel.call(**tensors, **case.params)
        return list(_asserted(place, subject, actual, line, tensors | dict(case.params), effort))


def _asserted(
    place: Workplace, subject: Subject, actual: Any, line: str, arguments: Mapping[str, Any], effort: Effort
) -> Iterator[Measurement]:
    kernel, device = subject.kernel, subject.device
    project = next(iter(place.config.projects), None)

    def judge() -> object:
        claim, depth, order = kernel.contract, kernel.depth, kernel.order
        return assert_contract(
            kernel.op, actual, contract=claim, depth=depth, order=order, project=project, **arguments
        )

    whole, close = wall(lambda number: judge(), effort), _beside_its_clone(actual, effort)
    yield Measurement(ASSERTED, line, f"assert_contract, {kernel.name}", "s", whole, _CLOSE, close)
    if (most := peak_memory(judge, device)) is not None:
        inputs = size_of({name: value for name, value in arguments.items() if isinstance(value, Tensor)})
        base = Sample.of([inputs])
        yield Measurement(MEMORY, line, "assert_contract", "B", Sample.of([most]), "bytes of the inputs", base)


def _beside_its_clone(actual: Any, effort: Effort) -> Sample:
    """Time `assert_close` on a result, a tensor or a mapping, and its clone."""
    named = under_any_name(actual)
    other = {name: tensor.clone() for name, tensor in named.items()}
    return wall(lambda number: assert_close(named, other), effort)
