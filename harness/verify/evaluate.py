"""Evaluation of a reference under a contract: what every stage must be, in order."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from harness.case import DTYPE_NAMES
from harness.errors import OpError, UsageError, no_such, unknown
from harness.numerics import FORMATS, Enclosure, Format, Sum, current, format_of, using
from harness.numerics.formats import FP32, Integers
from harness.op import REQUIRED, Contract, Op
from harness.timing import REFERENCES, timed

Tensors = Mapping[str, Tensor]
Params = Mapping[str, Any]


Expected = Enclosure | Tensor
"""What a stage must be: an enclosure, or for integers the tensor itself."""


@dataclass
class Trace:
    """What the reference passed through, stage by stage, in order.

    Attributes:
        expected: stage → what it must be.
        sums: stage → its sum over the rows that were given, to be finished when all rows have been seen.
        formats: stage → format, of all stages.
        results: stages that a kernel must return.
        consulted: contract options that the reference asked for.
    """

    expected: dict[str, Expected] = field(default_factory=dict)
    sums: dict[str, Sum] = field(default_factory=dict)
    formats: dict[str, Format | Integers] = field(default_factory=dict)
    results: list[str] = field(default_factory=list)
    consulted: set[str] = field(default_factory=set)

    def enclosure(self, stage: str) -> Enclosure:
        """The enclosure of a stage of floating-point numbers, one value per row at least."""
        expected = self.expected[stage]
        assert isinstance(expected, Enclosure), f"stage {stage!r} is of integers"
        return expected


@dataclass(frozen=True)
class _AskedContract:
    """A contract that notes which options the reference asks for."""

    op: Op
    contract: Contract
    consulted: set[str]

    def has(self, option: str) -> bool:
        """Whether the contract has the option, which must be one of the op's.

        Raises:
            OpError: it is not.
        """
        if not any(option in choices for choices in self.op.axes.values()):
            known = [o for choices in self.op.axes.values() for o in choices]
            raise OpError(no_such(f"contract option that the reference of {self.op.where} asks for:", option, known))
        self.consulted.add(option)
        return self.contract.has(option)


@timed(REFERENCES)
def evaluate(
    op: Op, contract: Contract, tensors: Tensors, params: Params, given: Mapping[str, Expected] | None = None
) -> Trace:
    """Run the reference of `op` on enclosures of `tensors`; integers and plain inputs reach it as they are.

    Where `given` has a stage, the reference goes on from that instead of its own enclosure: the kernel's own values
    make the check of the next stage an isolated one, a candidate makes it a check of a latent value, and another
    enclosure shows what would follow if the stage were computed otherwise.

    Raises:
        UsageError: the op is not defined for these arguments under this contract.
        OpError: the reference asks for an option that the op does not have, records a stage twice or no result, or
            leaves out the latent stage of one that it records.
    """
    trace = Trace()
    stand_ins = given or {}

    def stage(name: str, value: Any, *, result: bool = False) -> Any:
        if name in trace.formats:
            raise OpError(f"{op.where}: the reference records the stage {name!r} twice")
        if result:
            trace.results.append(name)
        if isinstance(value, Tensor):
            trace.expected[name] = value
            trace.formats[name] = Integers(DTYPE_NAMES[value.dtype], value.dtype)
            return stand_ins.get(name, value)
        fmt = trace.formats[name] = _format(name, contract, op, tensors)
        if isinstance(value, Sum):
            trace.sums[name] = value
            return value
        enclosure = trace.expected[name] = value.rounded(fmt) if name in contract.rounds else value
        if current().wide and name not in contract.rounds:
            trace.expected[name] = value.rounded(fmt)  # what a tensor can hold of it
        stand_in = stand_ins.get(name, enclosure)
        return _beyond_fp32(stand_in, enclosure) if isinstance(stand_in, Tensor) else stand_in

    inputs = [_operand(op, name, tensors[name]) if name in tensors else None for name in op.inputs]
    asked = _AskedContract(op, contract, trace.consulted)
    try:
        op.reference(*inputs, **params, contract=asked, stage=stage)
    except ValueError as error:
        raise UsageError(f"{op.name} under {contract}: {error}") from error
    _check_recorded(op, contract, trace)
    return trace


def _beyond_fp32(own: Tensor, enclosure: Enclosure) -> Enclosure:
    """The kernel's own values, but what may follow from the enclosure where only their tensor could not hold them."""
    values = Enclosure.point(own)
    if not current().wide:
        return values
    lost = torch.isinf(values.value) & torch.isfinite(enclosure.lo) & torch.isfinite(enclosure.hi)
    lost &= torch.maximum(enclosure.lo.abs(), enclosure.hi.abs()) > FP32.max
    return Enclosure(torch.where(lost, enclosure.full, values.full)) if bool(lost.any()) else values


def _check_recorded(op: Op, contract: Contract, trace: Trace) -> None:
    if not trace.results:
        raise OpError(f"{op.where}: the reference records no stage with result=True here")
    if op.latent is None or (latent := op.latent.under(contract)) in trace.expected:
        return
    for stage in op.latent.through:
        if stage in trace.expected:
            raise OpError(f"{op.where}: {stage!r} is through the latent stage {latent!r}, which is not recorded")


@timed(REFERENCES)
def finished(stage: str, total: Sum, contract: Contract, fmt: Format) -> Enclosure:
    """The enclosure of a sum over rows, all of which have been seen."""
    premises = current()
    with using(replace(premises, flushes_subnormals=premises.flushes_subnormals or stage in premises.atomic)):
        enclosure = total.enclosure
    return enclosure.rounded(fmt) if stage in contract.rounds else enclosure


def _operand(op: Op, name: str, tensor: Tensor) -> Expected:
    """What a reference computes with: numbers as enclosures, integers and what the op declares plain as they are."""
    if name in op.plain:
        return tensor
    if name not in op.integers:
        format_of(tensor.dtype)  # raises for what is no floating-point number
        return Enclosure.point(tensor)
    if tensor.is_floating_point() or tensor.is_complex():
        raise UsageError(f"{name} of {op.name} is {tensor.dtype}, but must be of integers or bool")
    return tensor


def same_computation(trace: Trace, op: Op, own: Contract, other: Contract, tensors: Tensors) -> bool:
    """Whether `other` asks for the steps that made `trace`: no option that was asked for and no format differs."""
    if (set(own.options) ^ set(other.options)) & trace.consulted:
        return False
    floats = ((stage, fmt) for stage, fmt in trace.formats.items() if isinstance(fmt, Format))
    return all(_format(stage, other, op, tensors) == fmt for stage, fmt in floats)


def _format(stage: str, contract: Contract, op: Op, tensors: Tensors) -> Format:
    """Format of a stage: what the contract rounds it to, or fp32."""
    target = contract.rounds.get(stage)
    if target is None:
        return FP32
    if target in op.inputs:
        return format_of(tensors[target if target in tensors else op.inputs[0]].dtype)
    return FORMATS[target]


def check_arguments(op: Op, tensors: Collection[str], params: Collection[str]) -> None:
    """Raise `UsageError` unless the names are those of `op` and none that it needs is missing."""
    for name in tensors:
        if name not in op.inputs:
            raise unknown(f"tensor of {op.name}", name, op.inputs)
    for name in params:
        if name not in op.params:
            raise unknown(f"parameter of {op.name}", name, op.params)
    required = [n for n in op.inputs if n not in op.optional]
    required += [n for n, default in op.params.items() if default is REQUIRED]
    missing = [n for n in required if n not in tensors and n not in params]
    if missing:
        raise UsageError(f"{op.name} was not given {', '.join(missing)}")
