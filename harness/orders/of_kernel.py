"""The order of a sum of a kernel: the kernel called with probes, and its declarations held against what was found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from lastbit.calling.performing import named_results
from lastbit.case import Case, Group, TensorSpec
from lastbit.config import Config
from lastbit.devices import made_current
from lastbit.dtypes import DTYPE_NAMES, DTYPES
from lastbit.errors import KernelError, LastbitError, UnsupportedCase, UsageError, no_kernel, unknown
from lastbit.judging.problem import Problem
from lastbit.kernel import Kernel
from lastbit.ops import ProbedSum
from lastbit.orders.form import form_of
from lastbit.orders.reveal import reveal
from lastbit.orders.search import prefixes
from lastbit.reports.order import Declared, Order, SumTree
from lastbit.verify.check import Subject, unsupported
from lastbit.verify.plan import Item, Plan
from lastbit.verify.project import open_project
from lastbit.verify.worker import Tick, Watch, Workplace, one_device, prepare

_WHY = "the probe"


@dataclass(frozen=True)
class Probe:
    """A question to a kernel: one of the sums of its op, with so many terms in so many rows of a dtype."""

    kernel: str
    sum: str
    terms: int
    rows: int
    dtype: str


def open_orders(config: Config, watch: Watch, tick: Tick) -> Workplace:
    """Make this process one that has loaded the kernels that the configuration names, and no cases.

    Without any name, those of its paths whose op has sums.

    Raises:
        UsageError: a name means nothing, or there are several devices.
    """
    device = torch.device(one_device(config))
    prepare(device)
    project = open_project(config)
    kernels = {kernel.name: kernel for kernel in project.kernels()}
    for name in config.kernels:
        if name not in kernels:
            raise no_kernel(name, kernels)
    names = config.kernels or [name for name, kernel in kernels.items() if project.op(kernel.op).sums]
    subjects = [Subject(kernels[name], project.op(kernels[name].op), device) for name in names]
    return Workplace(config, project, Plan(tuple(Item(s, Group(_WHY)) for s in subjects), (), 0), watch, tick)


def named(place: Workplace) -> tuple[str, ...]:
    """Return the names of the kernels that were loaded."""
    return tuple(place.subjects)


def sums_of(place: Workplace, kernel: str, asked: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the names of the sums of a kernel's op that are asked for; all of them if none is.

    Raises:
        UsageError: there is none of that name, or the op has no sums.
    """
    op = place.subjects[kernel].op
    if not op.sums:
        raise UsageError(f"{op.where} declares no sums; say with @op(sums=…) how one is probed: docs/order.md")
    for name in asked:
        if name not in op.sums:
            raise unknown(f"sum of {op.name}", name, op.sums)
    return asked or tuple(op.sums)


def order_of(place: Workplace, probe: Probe) -> Order:
    """Reveal the order in which a kernel adds, as far as it can be.

    Raises:
        KernelError: the kernel raised.
    """
    subject, size = place.subjects[probe.kernel], f"{probe.terms} terms in {probe.rows} rows of {probe.dtype}"
    return order_of_subject(subject, probe, place.watch(f"{probe.sum} of {subject.op.name} with {size}"))


def order_of_subject(subject: Subject, probe: Probe, watched: AbstractContextManager[object]) -> Order:
    """Reveal the order in which a kernel adds, in a context in which its calls are watched; errors as in `order_of`."""
    found = Order(
        kernel=probe.kernel,
        op=subject.op.name,
        contract=str(subject.contract),
        device=str(subject.device),
        sum=probe.sum,
        about=subject.op.sums[probe.sum].about,
        terms=probe.terms,
        rows=probe.rows,
        dtype=probe.dtype,
    )
    with watched, made_current(subject.device), torch.no_grad():
        try:
            return _read(subject, probe, found)
        except UnsupportedCase as error:
            return replace(found, reason=f"the kernel does not take it: {error}")


def _read(subject: Subject, probe: Probe, found: Order) -> Order:
    """Read the order from the first result that shows it."""
    summed = subject.op.sums[probe.sum]
    if objection := _objection(subject, summed, probe):
        return replace(found, reason=objection)
    blind: dict[str, list[str]] = {}
    for name in summed.results:
        call = _KernelOfTerms(subject, summed, name)
        if not call.gives(probe):
            continue
        revealed = reveal(
            call,
            probe.terms,
            rows=probe.rows,
            dtype=DTYPES[probe.dtype],
            device=subject.device,
            squares=summed.squares,
            tuned=True,
        )
        if revealed.visible:
            tree = revealed.tree
            return replace(
                found,
                read=f"{name} ({revealed.result})",
                tree=tree,
                form=form_of(tree) if tree else None,
                reason=revealed.reason,
                triples=revealed.triples,
                asked=revealed.asked,
                calls=revealed.calls,
                checked=revealed.checked,
                contradicted=revealed.contradicted,
                notes=(*revealed.notes, *_blind(blind)),
                declared=tuple(_declared(subject, summed, tree)) if tree else (),
            )
        blind.setdefault(revealed.reason, []).append(name)
    return replace(found, reason="; ".join(_blind(blind)) or f"the kernel gives none of {', '.join(summed.results)}")


def _blind(reasons: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """List each reason why results show nothing once, with the names of those results."""
    return tuple(f"{' and '.join(names)}: {reason}" for reason, names in reasons.items())


def _objection(subject: Subject, summed: ProbedSum, probe: Probe) -> str:
    """Say why the kernel cannot be called with a probe of the sum; empty if it can."""
    kernel, op = subject.kernel, subject.op
    if kernel.devices and subject.device.type not in kernel.devices:
        return f"the kernel is declared for {', '.join(kernel.devices)} only"
    given = summed.arguments(torch.zeros(1, probe.terms, dtype=DTYPES[probe.dtype]), 1.0)
    lacking = [n for n in given if n not in kernel.accepts and n not in op.optional]
    if lacking:
        return f"the kernel does not take {', '.join(lacking)}, which a probe of this sum needs"
    needed = sorted(kernel.requires - set(given))
    return f"the kernel needs {', '.join(needed)}, which a probe of this sum does not give" if needed else ""


@dataclass(frozen=True)
class _KernelOfTerms:
    """A kernel as a function from rows of terms to one of its results, or of the stages that it can store."""

    subject: Subject
    summed: ProbedSum
    result: str

    def gives(self, probe: Probe) -> bool:
        """Check whether the kernel returns the result."""
        if self.result in self.subject.kernel.stages:
            return True
        terms = torch.zeros(probe.rows, probe.terms, dtype=DTYPES[probe.dtype], device=self.subject.device)
        return self.result in self._results(terms, 1.0)

    def __call__(self, terms: Tensor, tuning: float) -> Tensor:
        return self._results(terms, tuning)[self.result].movedim(self.summed.results[self.result], 0)

    def _results(self, terms: Tensor, tuning: float) -> Mapping[str, Tensor]:
        kernel = self.subject.kernel
        given: dict[str, Any] = dict(self.summed.arguments(terms, tuning))
        if self.result in kernel.stages:
            given["stages"] = (self.result,)
        try:
            returned = kernel.call(
                **{name: value for name, value in given.items() if name in {*kernel.accepts, "stages"}}
            )
        except LastbitError:
            raise
        except Exception as error:
            what = f"{terms.shape[1]} terms in {terms.shape[0]} rows of {terms.dtype}"
            raise KernelError(f"{kernel.where} raised {type(error).__name__} with {what}: {error}") from error
        if isinstance(returned, tuple | list):
            op, tensors = self.subject.op, {name: v for name, v in given.items() if isinstance(v, Tensor)}
            params = {name: v for name, v in given.items() if name in op.params}
            problem = Problem(op, self.subject.contract, tensors, params)
            return named_results(returned, tuple(problem.required), tuple(problem.may_return))
        return returned if isinstance(returned, Mapping) else {next(iter(self.summed.results)): returned}


def _declared(subject: Subject, summed: ProbedSum, tree: SumTree) -> Iterator[Declared]:
    """Compare what the kernel declares of its sums with the tree."""
    kernel = subject.kernel
    if kernel.depth is not None:
        height = kernel.depth(tree.terms)
        said = f"depth= says that no term passes through more than {height:,} additions; {tree.height:,} were found"
        yield Declared("depth", tree.height <= height, said)
    if kernel.order is not None and summed.dot:
        block, held = kernel.order, prefixes(tree)
        lacking = next((end for end in range(block, tree.terms, block) if end not in held), None)
        said = f"order={block} says that one number holds the sum of all terms so far after every {block} of them"
        yield Declared(
            "order", lacking is None, said if lacking is None else f"{said}; none holds the first {lacking:,}"
        )


# The height that a kernel declares of its sums, held against the tree of one of them at a few terms


_TERMS = (48, 64, 96, 128)
"""Terms of a sum: more take longer, 0.1 s for each fifty in an interpreted kernel, and fewer hide what is declared."""

_ROWS = 512  # so many questions in a call; 2,048 took longer
_DTYPES = ("fp32", "bf16", "fp16")  # in bf16 an ulp of a sum of squares takes ten times as many questions

_known: dict[tuple[int, int, str], tuple[Kernel, str]] = {}
"""Function, declaration and device of a kernel → the kernel, so that these live on, and what was said of it."""


def too_deep(subject: Subject) -> str:
    """Say of the first sum of a kernel that shows its tree that it is higher than declared; empty if it is not.

    Also empty where none but dots shows its tree, or where no tree of so few terms is higher than declared. Known of a
    kernel in this process after the first time.
    """
    kernel = subject.kernel
    key = id(kernel.call), id(kernel.depth), str(subject.device)
    if key not in _known:
        try:
            said = _found(subject)
        except Exception:  # of the kernel, which may not be made for probes, or of its declaration
            said = ""
        _known[key] = kernel, said
    return _known[key][1]


def _found(subject: Subject) -> str:
    for name in (name for name, summed in subject.op.sums.items() if not summed.dot):  # to ask a dot takes seconds
        for probe in _probes(subject, name):
            with suppress(KernelError):  # of a dtype that the kernel does not take
                order = order_of_subject(subject, probe, nullcontext())
                if order.tree is None:
                    break
                broken = [one.said for one in order.declared if one.what == "depth" and not one.kept]
                if not broken or any("more bits" in note for note in order.notes):
                    return ""
                options = f"--sum {name} --columns {probe.terms} --rows {probe.rows} --dtype {probe.dtype}"
                command = f"lastbit order {probe.kernel} {options}"
                return f"{broken[0]} in {order.about} ({name}) of {probe.terms} terms: {command}"
    return ""


def _probes(subject: Subject, name: str) -> Iterator[Probe]:
    """Yield a probe of a sum for each dtype that the kernel takes, of terms among which too high a tree fits."""
    kernel, depth = subject.kernel, subject.kernel.depth
    assert depth is not None
    telling = sorted((n for n in _TERMS if depth(n) < n - 1), key=lambda n: (2 * depth(n) > n, n))
    for dtype in _DTYPES:
        taken = (n for n in telling if not unsupported(kernel, _case(subject, subject.op.sums[name], n, dtype)))
        yield from (Probe(kernel.name, name, terms, _ROWS, dtype) for terms in islice(taken, 1))


def _case(subject: Subject, summed: ProbedSum, terms: int, dtype: str) -> Case:
    """Return a case with tensors such as those of a probe."""
    given = summed.arguments(torch.zeros(_ROWS, terms, dtype=DTYPES[dtype]), 1.0)
    own = {name: value for name, value in given.items() if name in subject.kernel.accepts}
    tensors = {name: value for name, value in own.items() if isinstance(value, torch.Tensor)}
    specs = (TensorSpec(name, DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items())
    return Case(subject.op.name, tuple(specs), {name: v for name, v in own.items() if name not in tensors})
