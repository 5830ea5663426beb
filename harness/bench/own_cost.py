"""The cost of lastbit itself, beside what it is compared with.

A verified case beside one call of its kernel, by time and its parts, memory, and use of the device; `compare` beside a
copy and `assert_close`; `assert_contract` beside `assert_close`; and cases per second beside plain tests: random
tensors, one call of the kernel, one of an eager implementation, `assert_close`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.testing import assert_close

from lastbit.bench.samples import Effort, in_turn, now, on_device, peak_memory, size_of, wall
from lastbit.bench.subjects import eager_for, subject_for
from lastbit.calling.performing import under_any_name
from lastbit.case import Case, Group, TensorSpec, parse_case
from lastbit.config import Config
from lastbit.devices import made_current
from lastbit.errors import LastbitError
from lastbit.inputs import build
from lastbit.judging.compare import compare
from lastbit.judging.problem import PROBLEMS
from lastbit.kernel import Kernel
from lastbit.numerics import Enclosure, format_of
from lastbit.reports.bench import (
    ASSERTED,
    BUSY,
    COMPARED,
    MEMORY,
    OPERATIONS,
    PARTS,
    RATE,
    VERIFIED,
    Measurement,
    Sample,
)
from lastbit.result import TURNED_DOWN, CaseResult, Verdict
from lastbit.timing import PARTS as PARTS_OF_TIME
from lastbit.timing import Clock, listening
from lastbit.verify.assertion import assert_contract
from lastbit.verify.check import Subject, unsupported, verify_case
from lastbit.verify.drawing import draw
from lastbit.verify.item_run import Explorer
from lastbit.verify.narrowing import groups_of
from lastbit.verify.plan import Item, Plan
from lastbit.verify.project import open_project
from lastbit.verify.worker import Tick, Watch, Worker, Workplace


def plain_test(kernel: Kernel, eager: Kernel, case: Case, device: torch.device) -> Callable[[], None]:
    """Make a function that does one plain test; integers are those of the case, and differing values raise nothing."""
    built = build(case, device).tensors
    integers = {t.name: built[t.name] for t in case.tensors if not t.torch_dtype.is_floating_point}

    def test() -> None:
        tensors = {t.name: _values(t, integers, device) for t in case.tensors}
        actual, expected = (_results(k.call(**tensors, **case.params)) for k in (kernel, eager))
        for name in actual.keys() & expected.keys():
            try:
                assert_close(actual[name], expected[name])
            except AssertionError:
                continue

    return test


def _values(spec: TensorSpec, integers: Mapping[str, Tensor], device: torch.device) -> Tensor:
    if spec.name in integers:
        return integers[spec.name].clone()
    return torch.randn(spec.shape, device=device).to(spec.torch_dtype)


def _results(returned: Any) -> dict[str, Tensor]:
    """Name the results, and convert those of 8 bits to fp32, which `assert_close` can compare."""
    named = under_any_name(returned)
    return {name: t.float() if t.is_floating_point() and t.itemsize == 1 else t for name, t in named.items()}


def seconds_of(tests: Sequence[Callable[[], object]], rounds: int, now: Callable[[], float]) -> tuple[float, ...]:
    """Time each round over the tests, in seconds."""
    taken = []
    for _ in range(rounds):
        start = now()
        for test in tests:
            test()
        taken.append(now() - start)
    return tuple(taken)


@dataclass(frozen=True)
class Plain:
    """Seconds of each round over the `count` plain tests that did not raise, and what the others raised."""

    seconds: tuple[float, ...]
    count: int
    raised: tuple[str, ...] = ()


def plain(kernel: Kernel, eager: Kernel, cases: Sequence[Case], device: torch.device, rounds: int) -> Plain:
    """Time plain tests of the cases, warm: each was done once before."""
    tests, raised = [], []
    for case in cases:
        test = plain_test(kernel, eager, case, device)
        try:
            test()
        except Exception as error:
            raised.append(f"{type(error).__name__}: {error}")
        else:
            tests.append(test)
    return Plain(seconds_of(tests, rounds, now(device)), len(tests), tuple(raised))


def plain_under_stock_interpreter(config: Config, kernel: str, eager: str, lines: Sequence[str], rounds: int) -> Plain:
    """Time plain tests on the CPU in a process in which lastbit's interpreter is not installed.

    Raises:
        LastbitError: the process ended early.
    """
    quiet = {"PYTHONWARNINGS": "ignore"}
    with Worker(config, environ=quiet, opening=open_without_interpreter) as worker:
        return worker.do(plain_by_name, kernel, eager, tuple(lines), rounds)


def open_without_interpreter(config: Config, watch: Watch, tick: Tick) -> Workplace:
    """Make this process one in which Triton interprets as it does by itself."""
    torch.set_num_threads(1)  # as where lastbit's interpreter is installed
    return Workplace(config, open_project(config), Plan((), (), 0), watch, tick)


def plain_by_name(place: Workplace, kernel: str, eager: str, lines: Sequence[str], rounds: int) -> Plain:
    """Time plain tests of kernels of the project, by their names."""
    kernels = {known.name: known for known in place.project.kernels()}
    return plain(kernels[kernel], kernels[eager], [parse_case(line) for line in lines], torch.device("cpu"), rounds)


_ONE = "one call of the kernel"
_WHOLE = "verify_case"


def cost(place: Workplace, line: str, effort: Effort) -> list[Measurement]:
    """Measure the cost of one case line.

    Raises:
        LastbitError: the kernel declines the case, or raises.
    """
    case = parse_case(line)
    subject = subject_for(place, case)
    with made_current(subject.device):
        memory = list(_memory(subject, case))
        whole = _wall(subject, case, effort, repeat=True)
        verified = _verified(subject, case, whole, effort)
        return [*verified, *memory, *_use(subject, case, whole), *_parts(subject, case)]


def _wall(subject: Subject, case: Case, effort: Effort, *, repeat: bool) -> Sample:
    return wall(lambda number: _verify(subject, reseeded(case, number), repeat=repeat), effort)


def _verify(subject: Subject, case: Case, *, repeat: bool = True) -> CaseResult:
    """Verify a case that no other kernel was given before."""
    PROBLEMS.forget()
    return verify_case(subject, case, repeat=repeat)


def reseeded(case: Case, number: int) -> Case:
    """Reseed a case, so that each number gives the same problem other values."""
    return replace(case, seed=(case.seed + number) % 2**63)


def _checked(result: CaseResult) -> None:
    """Raise unless the case ran to its end, whatever the verdict."""
    if result.verdict in TURNED_DOWN | {Verdict.ERRORED}:
        raise LastbitError(f"{result.kernel} on {result.device}: {result.reason}, in {result.case}")


def _verified(subject: Subject, case: Case, whole: Sample, effort: Effort) -> list[Measurement]:
    """Measure a verified case with four calls of the kernel, and with two as in most cases of a run."""
    name, one = subject.kernel.name, on_device(_one_call(subject, case), subject.device, effort)
    most = _wall(subject, case, effort, repeat=False)
    ways = ((f"{name}, four calls", whole), (f"{name}, two calls", most))
    return [Measurement(VERIFIED, str(case), what, "s", sample, _ONE, one) for what, sample in ways]


def _one_call(subject: Subject, case: Case) -> Callable[[], Any]:
    tensors = in_turn(lambda number: build(reseeded(case, number), subject.device).tensors, subject.device)
    return lambda: subject.kernel.call(**next(tensors), **case.params)


def _memory(subject: Subject, case: Case) -> Iterator[Measurement]:
    """Yield the peak memory of a verified case beside the bytes of its inputs, on an accelerator."""
    inputs = size_of(build(case, subject.device).tensors)
    most = peak_memory(lambda: _checked(_verify(subject, case)), subject.device)
    if most is not None:
        yield Measurement(MEMORY, str(case), _WHOLE, "B", Sample.of([most]), "bytes of the inputs", Sample.of([inputs]))


def _use(subject: Subject, case: Case, whole: Sample) -> Iterator[Measurement]:
    """Measure how long an accelerator works during a verified case, and how many operations it does."""
    if subject.device.type == "cpu":
        return
    activities = set(torch.profiler.supported_activities()) - {ProfilerActivity.CPU}
    with profile(activities=activities, acc_events=True) as profiled:
        _verify(subject, case)
        torch.accelerator.synchronize(subject.device)
    operations = [event for event in profiled.events() or () if event.device_type.name != "CPU"]
    busy = sum(event.time_range.elapsed_us() for event in operations) / 1e6
    yield Measurement(BUSY, str(case), "time of operations", "s", Sample.of([busy]), _WHOLE, whole)
    yield Measurement(OPERATIONS, str(case), _WHOLE, "operations", Sample.of([len(operations)]))


def _parts(subject: Subject, case: Case) -> Iterator[Measurement]:
    """Measure the time of each part of a verified case, where every part waits for the device."""
    with listening(Clock(now(subject.device))) as clock:
        _verify(subject, case)
        seconds = clock.seconds
    total = Sample.of([sum(seconds.values())])
    for part in filter(seconds.get, PARTS_OF_TIME):
        yield Measurement(PARTS, str(case), part, "s", Sample.of([seconds[part]]), _WHOLE, total)


# A width of the models in cases/shapes.toml.
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


_UNIT = "cases/s"


def rate(place: Workplace, op: str, effort: Effort) -> list[Measurement]:
    """Measure cases per second of the op's first kernel, warm, beside plain tests and the stock interpreter."""
    subject = next(subject for subject in place.subjects.values() if subject.op.name == op)
    drawn = _drawn(place, subject, effort)
    eager = next((eager_for(place, subject, case) for group in drawn for case in group.examples), None)
    with made_current(subject.device):
        groups = _accepted(subject, eager, drawn)
        cases = [case for group in groups for case in group.examples]
        seconds = seconds_of(
            [partial(_verify_group, subject, group) for group in groups], effort.rounds, now(subject.device)
        )
        own, name = Sample.of(seconds).rate(len(cases)), subject.kernel.name
        bases = [] if eager is None else list(_bases(place, subject, eager, cases, effort))
    alone = Measurement(RATE, op, name, _UNIT, own)
    return [replace(alone, against=against, base=base) for against, base in bases] or [alone]


def _drawn(place: Workplace, subject: Subject, effort: Effort) -> list[Group]:
    """Choose groups spread over those that the op generates, and draw the first cases of each."""
    kernel = subject.kernel
    made = groups_of(place.project, kernel, small=place.config.small)
    generated = [replace(group, examples=()) for group in made if group.strategy is not None]
    step = max(1, len(generated) // effort.groups)
    chosen = islice(generated, 0, step * effort.groups, step)
    return [Group(group.name, examples=tuple(draw(group, effort.cases))) for group in chosen]


def _accepted(subject: Subject, eager: Subject | None, groups: Iterable[Group]) -> list[Group]:
    """Drop cases that a kernel does not take; all others are verified once, as a warm-up."""
    kernels = [s.kernel for s in (subject, eager) if s is not None]
    kept = []
    for group in groups:
        fitting = tuple(case for case in group.examples if not any(unsupported(kernel, case) for kernel in kernels))
        declined = {
            r.case for r in _verify_group(subject, replace(group, examples=fitting)) if r.verdict in TURNED_DOWN
        }
        kept.append(replace(group, examples=tuple(case for case in fitting if str(case) not in declined)))
    return kept


def _verify_group(subject: Subject, group: Group) -> list[CaseResult]:
    """Verify the cases of a group as a run does."""
    explorer = Explorer(Item(subject, group), record=lambda result: None, started=lambda item, case, counted: None)
    return [explorer.run(case) for case in group.examples]


def _bases(
    place: Workplace, subject: Subject, eager: Subject, cases: Sequence[Case], effort: Effort
) -> Iterator[tuple[str, Sample]]:
    """Yield the rates of plain tests: in this process, and on the CPU under Triton's own interpreter."""
    own, other, device = subject.kernel, eager.kernel, subject.device
    found = {f"plain test with {other.name}": plain(own, other, cases, device, effort.rounds)}
    if device.type == "cpu":
        asked = own.name, other.name, list(map(str, cases)), effort.rounds
        found["plain test, stock interpreter"] = plain_under_stock_interpreter(place.config, *asked)
    for name, tests in found.items():
        raised = f" ({len(tests.raised)} of {len(cases)} raise)" if tests.raised else ""
        if tests.count:
            yield name + raised, Sample.of(tests.seconds).rate(tests.count)
