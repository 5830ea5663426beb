"""Problems: an op under a contract for given inputs; evaluation gives the values every stage must have, in order.

Several kernels share them, so that an evaluation for one is not repeated for the next: kernels of an op get the same
case lines, and the contract of one is an alternative of another. A problem is the same for two kernels if case, device,
contract and premises are.
"""

from __future__ import annotations

import traceback
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from lastbit.dtypes import DTYPE_NAMES
from lastbit.errors import OpError, UsageError, no_such
from lastbit.files import BUILT_IN, PACKAGE
from lastbit.inputs import Inputs, row_blocks, unequal
from lastbit.judging.expected import ChosenIndices, Exact, Numbers, RowSum, Steps, Trace
from lastbit.numerics import (
    TARGETS,
    AfterSums,
    Enclosure,
    Format,
    Indices,
    Premises,
    Sum,
    current,
    format_of,
    hull,
    using,
)
from lastbit.numerics.algebraic import following_residues
from lastbit.numerics.formats import FP32, PRECISE, WIDE_FP32, Integers, split_target
from lastbit.numerics.premises import EXACT, REAL, put_in_force
from lastbit.numerics.residues import Residues, products_of
from lastbit.ops import Contract, Op
from lastbit.timing import REFERENCES, timed

_MISTAKES = (TypeError, AttributeError, NameError, LookupError, ArithmeticError)  # of code, not of memory or a device
_OWN, _REFERENCES = str(PACKAGE), str(BUILT_IN / "references")
_FEW = 1 << 16  # elements of the first input that are evaluated as fast as a row

Tensors = Mapping[str, Tensor]
Params = Mapping[str, Any]
Given = Mapping[str, Tensor | Enclosure]
"""Stages from which a reference goes on: a kernel's own values, or other enclosures than the reference's own."""


@dataclass(frozen=True, eq=False)
class Problem:
    """An op under a contract for given inputs.

    Attributes:
        op, contract: the computation, and where it is rounded.
        tensors: name → input.
        params: name → parameter; those that are missing have the op's default.
        premises: what the error bounds rest on; those in force unless others are given.
        siblings: this problem under other contracts, once they are asked for, if they are to be kept; None if not.
        any_numbers: the inputs stand for whatever numbers there may be in their place; see `with_any_numbers`.
    """

    op: Op
    contract: Contract
    tensors: Tensors
    params: Params
    premises: Premises = field(default_factory=current)
    siblings: dict[Hashable, Problem] | None = field(default=None, repr=False)
    any_numbers: bool = False

    @property
    def main(self) -> Tensor:
        """The op's first input."""
        return self.tensors[self.op.inputs[0]]

    @property
    def leading(self) -> tuple[int, ...]:
        """Sizes of all dimensions of the first input but the last, which index its rows."""
        return tuple(self.main.shape[:-1])

    @property
    def main_format(self) -> Format:
        """The format of the first input; fp32 for integers, which are never rounded."""
        return format_of(self.main.dtype) if self.main.is_floating_point() else FP32

    def under(self, contract: Contract) -> Problem:
        """Return this problem under another contract."""
        if self.siblings is None:
            return replace(self, contract=contract)
        key = contract.options, frozenset(contract.rounds.items())
        return self.siblings.setdefault(key, replace(self, contract=contract))

    def on(self, tensors: Tensors) -> Problem:
        """Return this problem for other inputs."""
        return replace(self, tensors=tensors, siblings=None)

    def blocks(self, most: int) -> Iterator[tuple[tuple[slice, ...], Problem]]:
        """Yield problems of at most `most` elements of the first input, with the index of their rows.

        Yield itself, without an index, where rows are not independent or all of them are few.
        """
        if self.in_one(most):
            yield (), self
            return
        rows = self.op.rows
        for index in row_blocks(self.leading, self.main.shape[-1], most):
            yield index, self.on({n: t[index] if n in rows else t for n, t in self.tensors.items()})

    def in_one(self, most: int) -> bool:
        """Check whether `blocks` yields the problem itself."""
        if not self.op.rows or not self.leading:
            return True
        return len(list(islice(row_blocks(self.leading, self.main.shape[-1], most), 2))) < 2

    def with_more_range(self, until: str = "") -> Problem:
        """Return this problem for a kernel whose intermediate values have more range than fp32, up to stage `until`."""
        premises = replace(self.premises, arithmetic=WIDE_FP32, until=until)
        return replace(self, premises=premises, siblings=None)

    @property
    def in_real_arithmetic(self) -> Problem:
        """This problem for a kernel that rounds where the contract does and nowhere else, as closely as fp64 tells.

        Its stages are recorded before they are rounded.
        """
        return replace(self, premises=REAL, siblings=None)

    @property
    def unrounded(self) -> Problem:
        """This problem without any rounding, so that the ends of each stage enclose its exact value."""
        contract = Contract(self.contract.options, {})
        return replace(self, contract=contract, premises=EXACT, siblings=None)

    @cached_property
    def with_any_numbers(self) -> Problem:
        """The problem of all inputs of these shapes and with these integers: a result that is one number here follows
        from no floating-point number.

        Each number of an input may be any from its tensor's least to its greatest, and from -1 to 1, and nothing is
        known of what is infinite or NaN. Plain inputs, which the reference takes apart itself, have other values.
        """
        return replace(self, any_numbers=True, siblings=None)

    @property
    def _is_small(self) -> bool:
        return not self.op.rows or self.main.numel() <= _FEW

    @cached_property
    def _first(self) -> Trace:
        """The trace of the first row, or of all rows where these are evaluated as fast."""
        if self._is_small:
            return self.trace
        rows = self.op.rows
        one = tuple(slice(0, 1) for _ in self.leading)
        return self.on({n: t[one] if n in rows else t for n, t in self.tensors.items()}).trace

    @property
    def results(self) -> list[str]:
        """Names of the results, in the order of the op."""
        return self.op.in_order(self._first.results)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Stage → its shape, as the reference says."""
        stages, leading = self._first.stages, () if self._is_small else self.leading
        return {n: tuple(s.shape if s.of_all_rows else (*leading, *s.shape[len(leading) :])) for n, s in stages.items()}

    @property
    def required(self) -> list[str]:
        """Names of the results that a kernel must return, in order."""
        return [name for name in self.results if name not in self.op.optional_results]

    @property
    def may_return(self) -> list[str]:
        """Names of the results that a kernel may leave out, in order."""
        return [name for name in self.results if name in self.op.optional_results]

    @cached_property
    def trace(self) -> Trace:
        """The values every stage must have, seen from the inputs; errors as in `evaluate`."""
        return self.evaluate()

    @timed(REFERENCES)
    def evaluate(self, given: Given | None = None, trace: Trace | None = None) -> Trace:
        """Run the reference on enclosures of the inputs; integers and plain inputs reach it as they are.

        Where `given` has a stage, the reference goes on from that instead of its own enclosure: the kernel's own values
        make the check of the next stage an isolated one, a candidate makes it a check of a latent value, and another
        enclosure shows what would follow if the stage were computed otherwise. `trace` records the stages, if given.

        Raises:
            UsageError: the op is not defined for these arguments under this contract.
            OpError: the reference asks for an option that the op does not have, records a stage twice or no result,
                leaves out the latent stage of one that it records, or cannot be run.
        """
        op, recorder = self.op, _Recorder(self, given or {}, trace or Trace())
        with using(self.premises):
            inputs = [self._operand(name) for name in op.inputs]
            asked = _AskedContract(op, self.contract, recorder.trace.consulted)
            try:
                op.reference(*inputs, **self.params, contract=asked, stage=recorder)
            except ValueError as error:
                raise UsageError(f"{op.name} under {self.contract}: {error}") from error
            except _MISTAKES as error:
                frames = traceback.extract_tb(error.__traceback__)
                own = [f for f in frames if f.filename.startswith(_REFERENCES) or not f.filename.startswith(_OWN)]
                place = f" in {own[-1].filename}:{own[-1].lineno}, `{own[-1].line}`" if own else ""
                raise OpError(f"{op.where}: the reference raised {type(error).__name__}{place}: {error}") from error
        formats = recorder.trace.formats
        if not recorder.trace.results:
            raise OpError(f"{op.where}: the reference records no stage with result=True here")
        if op.latent is not None and (latent := op.latent.under(self.contract)) not in formats:
            for stage in op.latent.through:
                if stage in formats:
                    raise OpError(
                        f"{op.where}: {stage!r} is through the latent stage {latent!r}, which is not recorded"
                    )
        return recorder.trace

    @property
    def constants(self) -> list[float]:
        """The numbers that constants of a kernel may be made of: parameters, and sizes of tensors."""
        sizes = {float(size) for tensor in self.tensors.values() for size in tensor.shape}
        return [value for value in self.params.values() if isinstance(value, float)] + sorted(sizes)

    @cached_property
    def residues(self) -> dict[str, Residues]:
        """The residues of every stage of numbers under the contract; errors as in `evaluate`."""
        with following_residues(), products_of(self.constants):
            stages = self.evaluate().stages
            allowed = {name: stage.finished.allowed for name, stage in stages.items()}
        return {name: each.residues for name, each in allowed.items() if isinstance(each, Enclosure)}

    def format(self, stage: str) -> Format:
        """Return the format of a stage of numbers: the one that the contract rounds it to, in its direction, or fp32.

        Arithmetic in fp32 is rounded to nearest, so that nothing is left to be rounded to fp32 in another direction.
        """
        if stage not in self.contract.rounds:
            return FP32
        target, direction = split_target(self.contract.rounds[stage])
        if target in self.op.inputs and target not in self.tensors:
            target = self.op.stand_ins.get(target, self.op.inputs[0])
        found = format_of(self.tensors[target].dtype) if target in self.op.inputs else TARGETS[target]
        return found.toward(direction) if found.precision < FP32.precision else found

    @property
    def nbytes(self) -> int:
        """Bytes of the evaluated trace and residues that are kept."""
        trace: Trace | None = vars(self).get("trace")
        residues: Mapping[str, Residues] = vars(self).get("residues", {})
        other: Problem | None = vars(self).get("with_any_numbers")
        kept = [each.numbers.nbytes for each in residues.values()]
        return sum(kept) + (0 if trace is None else trace.nbytes) + (0 if other is None else other.nbytes)

    @cached_property
    def steps(self) -> Steps:
        """The computation that the reference makes of the problem; errors as in `evaluate`."""
        trace, consulted = self.trace, frozenset(self.trace.consulted)
        chosen = consulted.intersection(self.contract.options)
        idle = self.op.idle(self.contract, consulted, trace.formats)
        return Steps(consulted, chosen, trace.formats, frozenset(trace.sums), idle)

    def takes(self, steps: Steps) -> bool:
        """Check whether its computation is this one, which the same inputs had under another contract."""
        if steps.consulted.intersection(self.contract.options) != steps.chosen:
            return False
        return all(self.format(name) == fmt for name, fmt in steps.numbers.items())

    def _operand(self, name: str) -> Enclosure | Tensor | None:
        """Return an input as the reference takes it: numbers as enclosures, integers and plain inputs as they are."""
        op = self.op
        if (tensor := self.tensors.get(name)) is None:
            return None
        if name in op.plain:
            other = self.any_numbers and tensor.is_floating_point()
            return (tensor.float() * 1.5 + 1.0).to(tensor.dtype) if other else tensor
        if name in op.integers:
            if tensor.is_floating_point() or tensor.is_complex():
                raise UsageError(f"{name} of {op.name} is {tensor.dtype}, but must be of integers or bool")
            return tensor
        format_of(tensor.dtype)  # raises for what is no floating-point number
        if not self.any_numbers:
            return Enclosure.point(tensor)
        x = tensor.to(torch.float64)
        finite = torch.isfinite(x)
        inside = torch.where(finite, x, 0.0).reshape(-1)
        ends = torch.cat([inside, inside.new_tensor([-1.0, 1.0])]).aminmax()
        lo, hi = torch.where(finite, ends.min, -torch.inf), torch.where(finite, ends.max, torch.inf)
        return Enclosure(torch.stack([x, x, lo, hi]))


@dataclass(frozen=True)
class _Recorder:
    """The function that a reference calls at each stage: it rounds, records, and returns the value to go on from."""

    problem: Problem
    given: Given
    trace: Trace

    def __call__(self, name: str, value: Any, *, result: bool = False) -> Any:
        if name in self.trace.formats:
            raise OpError(f"{self.problem.op.where}: the reference records the stage {name!r} twice")
        if result:
            self.trace.results.append(name)
        if isinstance(value, Tensor):
            self.trace.record(name, Exact(value, Integers(DTYPE_NAMES[value.dtype], value.dtype)))
            given = self.given.get(name, value)
            return given if given is value or not isinstance(given, Tensor) else given.clone()  # as in `_values`
        if isinstance(value, Indices):
            self.trace.record(name, ChosenIndices(value, Integers(DTYPE_NAMES[value.dtype], value.dtype)))
            chosen = self.given.get(name)
            return value.only(chosen) if isinstance(chosen, Tensor) else value
        fmt, rounds = self.problem.format(name), name in self.problem.contract.rounds
        if isinstance(value, Sum | AfterSums):
            rounds = rounds and current().arithmetic is not PRECISE
            own = self.problem.premises  # in the end fp32, whatever the range of the terms; atomic additions flush
            flushes, precise = own.flushes_subnormals or name in own.atomic, own.arithmetic is PRECISE
            own = replace(own, flushes_subnormals=flushes, arithmetic=PRECISE if precise else FP32)
            self.trace.record(name, RowSum(value, fmt, rounds, own))
            return value
        enclosure = value.rounded(fmt) if rounds else value
        arithmetic = current().arithmetic
        unrounded = arithmetic is WIDE_FP32 and not rounds
        held = value.rounded(fmt) if unrounded else enclosure  # what a tensor can hold of it
        self.trace.record(name, Numbers(value if arithmetic is PRECISE else held, fmt))
        if name == current().until:
            put_in_force(replace(current(), arithmetic=FP32, until=""))
            enclosure = hull(enclosure, held)
        stand_in = self.given.get(name, enclosure)
        wide = arithmetic is not FP32
        return _values(stand_in, enclosure, wide) if isinstance(stand_in, Tensor) else stand_in

    def format_of(self, name: str) -> Format:
        return format_of(self.problem.tensors[name].dtype)


def _values(own: Tensor, enclosure: Enclosure, wide: bool) -> Enclosure:
    """Return the kernel's own values, or the enclosure where only the range of their tensor made them infinite.

    They are read anew each time: a kernel that writes there leaves no trace by which `remembered` would notice.
    """
    values = Enclosure(own.to(torch.float64, copy=True).unsqueeze(0))
    if not wide:
        return values
    lost = torch.isinf(values.value) & torch.isfinite(enclosure.lo) & torch.isfinite(enclosure.hi)
    lost &= torch.maximum(enclosure.lo.abs(), enclosure.hi.abs()) > FP32.max
    return Enclosure(torch.where(lost, enclosure.full, values.full)) if bool(lost.any()) else values


@dataclass(frozen=True)
class _AskedContract:
    """A contract that notes which options the reference asks for."""

    op: Op
    contract: Contract
    consulted: set[str]

    def has(self, option: str) -> bool:
        """Check whether the contract has the option, which must be one of the op's.

        Raises:
            OpError: it is not.
        """
        if not any(option in choices for choices in self.op.axes.values()):
            known = [o for choices in self.op.axes.values() for o in choices]
            raise OpError(no_such(f"contract option that the reference of {self.op.where} asks for:", option, known))
        self.consulted.add(option)
        return self.contract.has(option)


# Half a GB for each worker, of which there may be 8 on a device.
_MOST_BYTES = 1 << 29
# Arbitrary: kernels of one op come one after the other, and share the cases of a group.
_MOST_CASES = 256
_TOGETHER = 2  # problems that a case asks for before it is judged: its own, and that of other values
# Arbitrary: one that is kept would push out many small ones, which are asked for more often.
_LARGE = 1 << 20  # elements of a case beyond which it is not kept
# As _FEW: rows that take longer to evaluate than the start of an operation are those of large cases.
_LARGE_ROWS = 1 << 16  # elements of rows beyond which a case is not kept


@dataclass(eq=False)
class Problems:
    """The problems of the cases seen last, as many as fit into some memory; their inputs are compared bit by bit.

    Whoever sees a kernel write outside or raise lets all be forgotten: nobody knows what it did before.
    """

    _families: OrderedDict[Hashable, dict[Hashable, Problem]] = field(default_factory=OrderedDict)  # by contract
    _weights: dict[Hashable, int] = field(default_factory=dict)  # bytes of their evaluations when last counted
    _recent: deque[Hashable] = field(default_factory=lambda: deque(maxlen=_TOGETHER))

    def of(self, op: Op, contract: Contract, inputs: Inputs, premises: Premises) -> Problem:
        """Return the problem of a case, which was given to another kernel before, or is new."""
        params, tensors = dict(inputs.case.params), inputs.tensors
        main = tensors[op.inputs[0]]
        rows = main.numel() if op.rows else 0
        if sum(t.numel() for t in tensors.values()) > _LARGE or rows > _LARGE_ROWS or _nbytes(tensors) > _MOST_BYTES:
            return Problem(op, contract, tensors, params, premises)
        key = id(op), str(inputs.case), main.device, premises  # an op that is kept keeps its id
        for recent in self._recent:  # only these have grown since they were weighed
            if problems := self._families.get(recent, {}).values():
                self._weights[recent] = sum(p.nbytes for p in problems) + _nbytes(*(p.tensors for p in problems))
        while self._families and (sum(self._weights.values()) > _MOST_BYTES or len(self._families) > _MOST_CASES):
            self._weights.pop(self._families.popitem(last=False)[0], None)
        self._recent.append(key)
        own = self._families.setdefault(key, {})
        self._families.move_to_end(key)
        known = next(iter(own.values()), None)
        # Not the same if an input was overwritten, or the file of captured values.
        if known is not None and any(unequal([(known.tensors[name], tensor) for name, tensor in tensors.items()])):
            own.clear()
            known = None
        return (known or Problem(op, contract, tensors, params, premises, own)).under(contract)

    def forget(self) -> None:
        """Forget all of them: their inputs may not be what they were."""
        self._families.clear()
        self._recent.clear()
        self._weights.clear()


def _nbytes(*problems: Tensors) -> int:
    """Count the bytes of the storages of tensors, which may be far more than their elements."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for tensors in problems for t in tensors.values()}
    return sum(storage.nbytes() for storage in storages.values())


PROBLEMS = Problems()
"""The problems of this process."""
