"""The cost of lastbit itself, beside what it is compared with.

A verified case beside one call of its kernel, by time and its parts, memory, and use of the device; `compare` beside a
copy and `assert_close`; `assert_contract` beside `assert_close`; and cases per second beside plain tests: random
tensors, one call of the kernel, one of an eager implementation, `assert_close`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
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
    integers = {name: tensor for name, tensor in built.items() if not tensor.is_floating_point()}
    del built

    def values(spec: TensorSpec) -> Tensor:
        if spec.torch_dtype.is_floating_point:
            return torch.randn(spec.shape, device=device).to(spec.torch_dtype)
        return integers[spec.name].clone()

    def results(kernel: Kernel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        named = under_any_name(kernel.call(**tensors, **case.params))  # assert_close compares nothing of 8 bits
        return {name: t.float() if t.is_floating_point() and t.itemsize == 1 else t for name, t in named.items()}

    def test() -> None:
        tensors = {t.name: values(t) for t in case.tensors}
        actual, expected = results(kernel, tensors), results(eager, tensors)
        for name in actual.keys() & expected.keys():
            try:
                assert_close(actual[name], expected[name])
            except AssertionError:
                continue

    return test


def seconds_of(tests: Sequence[Callable[[], object]], rounds: int, now: Callable[[], float]) -> tuple[float, ...]:
    """Time each round over the tests, in seconds."""
    taken = []
    for _ in range(rounds):
        start = now()
        for test in tests:
            test()
        taken.append(now() - start)
    return tuple(taken)


Plain = tuple[tuple[float, ...], int, tuple[str, ...]]
"""Seconds of each round over plain tests that did not raise, how many these are, and what the others raised."""


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
    return seconds_of(tests, rounds, now(device)), len(tests), tuple(raised)


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
    """Measure the cost of one case line, with four calls of the kernel, and with two as in most cases of a run.

    Raises:
        LastbitError: the kernel declines the case, or raises.
    """
    case = parse_case(line)
    line, subject = str(case), subject_for(place, case)
    kernel, device = subject.kernel, subject.device

    def reseeded(number: int) -> Case:
        return replace(case, seed=(case.seed + number) % 2**63)

    def verify(number: int, *, repeat: bool = True) -> CaseResult:
        PROBLEMS.forget()  # as of a case that no other kernel was given before
        return verify_case(subject, reseeded(number), repeat=repeat)

    def checked() -> None:
        result = verify(0)
        if result.verdict in TURNED_DOWN | {Verdict.ERRORED}:
            raise LastbitError(f"{result.kernel} on {result.device}: {result.reason}, in {result.case}")

    def alone() -> Sample:
        """Time the kernel; the inputs, whose memory is not of a case, go with this function."""
        tensors = in_turn(lambda number: build(reseeded(number), device).tensors, device)
        return on_device(lambda: kernel.call(**next(tensors), **case.params), device, effort)

    with made_current(device):
        inputs, most = size_of(build(case, device).tensors), peak_memory(checked, device)
        whole = wall(verify, effort)
        one = alone()
        ways = {"four calls": whole, "two calls": wall(partial(verify, repeat=False), effort)}
        found = [Measurement(VERIFIED, line, f"{kernel.name}, {way}", "s", s, _ONE, one) for way, s in ways.items()]
        if most is not None:
            sizes = Sample.of([most]), "bytes of the inputs", Sample.of([inputs])
            found.append(Measurement(MEMORY, line, _WHOLE, "B", *sizes))
        if device.type != "cpu":  # how long it works, and how many operations it does
            activities = set(torch.profiler.supported_activities()) - {ProfilerActivity.CPU}
            with profile(activities=activities, acc_events=True) as profiled:
                verify(0)
                torch.accelerator.synchronize(device)
            operations = [event for event in profiled.events() or () if event.device_type.name != "CPU"]
            busy = Sample.of([sum(event.time_range.elapsed_us() for event in operations) / 1e6])
            found.append(Measurement(BUSY, line, "time of operations", "s", busy, _WHOLE, whole))
            found.append(Measurement(OPERATIONS, line, _WHOLE, "operations", Sample.of([len(operations)])))
        with listening(Clock(now(device))) as clock:  # every part waits for the device
            verify(0)
            seconds = clock.seconds
    total = Sample.of([sum(seconds.values())])
    parts = {part: Sample.of([seconds[part]]) for part in PARTS_OF_TIME if seconds.get(part)}
    return [*found, *(Measurement(PARTS, line, part, "s", own, _WHOLE, total) for part, own in parts.items())]


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
        exact = torch.randn(_ROWS_ON_CPU if device.type == "cpu" else _ROWS, _WIDTH, dtype=torch.float64, device=device)
        value, a, b = ((exact * factor).bfloat16().double() for factor in (1.0, 1 - 2**-10, 1 + 2**-10))
        actual = value.bfloat16()
        expected = Enclosure(torch.stack([exact, value, a.minimum(b), a.maximum(b)]))  # some values are decided
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


def asserting(place: Workplace, line: str, effort: Effort) -> list[Measurement]:
    """Measure `assert_contract` on the result of another implementation than the first kernel, or on its own.

    Raises:
        UsageError: no kernel takes the case.
    """
    case = parse_case(line)
    first = subject_for(place, case)
    subject = eager_for(place, first, case) or first
    kernel, device, project = subject.kernel, subject.device, next(iter(place.config.projects), None)
    with made_current(device):
        tensors = build(case, device).tensors
        actual = kernel.call(**tensors, **case.params)

        def judge() -> object:
            claim, depth, order = kernel.contract, kernel.depth, kernel.order
            arguments: dict[str, Any] = {**tensors, **case.params}
            return assert_contract(
                kernel.op, actual, contract=claim, depth=depth, order=order, project=project, **arguments
            )

        named = under_any_name(actual)
        whole = wall(lambda number: judge(), effort)
        other = {name: tensor.clone() for name, tensor in named.items()}
        close = wall(lambda number: assert_close(named, other), effort)
        other.clear()  # whose memory is not of assert_contract
        found = [Measurement(ASSERTED, line, f"assert_contract, {kernel.name}", "s", whole, _CLOSE, close)]
        if (most := peak_memory(judge, device)) is not None:
            sizes = Sample.of([most]), "bytes of the inputs", Sample.of([size_of(tensors)])
            found.append(Measurement(MEMORY, line, "assert_contract", "B", *sizes))
        return found


def rate(place: Workplace, op: str, effort: Effort) -> list[Measurement]:
    """Measure cases per second of the op's first kernel, warm, beside plain tests and the stock interpreter."""
    subject = next(subject for subject in place.subjects.values() if subject.op.name == op)
    kernel, device = subject.kernel, subject.device
    made = groups_of(place.project, kernel, small=place.config.small)
    generated = [replace(group, examples=()) for group in made if group.strategy is not None]
    step = max(1, len(generated) // effort.groups)  # groups are spread over those that the op generates
    chosen = islice(generated, 0, step * effort.groups, step)
    drawn = [Group(group.name, examples=tuple(draw(group, effort.cases))) for group in chosen]
    eager = next((eager_for(place, subject, case) for group in drawn for case in group.examples), None)
    with made_current(device):
        groups = _accepted(subject, eager, drawn)
        cases = [case for group in groups for case in group.examples]
        whole = [partial(_verify_group, subject, group) for group in groups]
        own = Sample.of(seconds_of(whole, effort.rounds, now(device))).rate(len(cases))
        plain_tests: dict[str, Plain] = {}
        if eager is not None:
            name = f"plain test with {eager.kernel.name}"
            plain_tests[name] = plain(kernel, eager.kernel, cases, device, effort.rounds)
            if device.type == "cpu":
                asked = kernel.name, eager.kernel.name, list(map(str, cases)), effort.rounds
                plain_tests["plain test, stock interpreter"] = plain_under_stock_interpreter(place.config, *asked)
    alone, found = Measurement(RATE, op, kernel.name, "cases/s", own), []
    for against, (seconds, count, raised) in plain_tests.items():
        if count:
            told = f" ({len(raised)} of {len(cases)} raise)" if raised else ""
            found.append(replace(alone, against=against + told, base=Sample.of(seconds).rate(count)))
    return found or [alone]


def _accepted(subject: Subject, eager: Subject | None, groups: Iterable[Group]) -> list[Group]:
    """Drop cases that a kernel does not take; all others are verified once, as a warm-up."""
    kernels = [s.kernel for s in (subject, eager) if s is not None]
    kept = []
    for group in groups:
        fitting = [case for case in group.examples if not any(unsupported(kernel, case) for kernel in kernels)]
        results = _verify_group(subject, replace(group, examples=tuple(fitting)))
        declined = {result.case for result in results if result.verdict in TURNED_DOWN}
        kept.append(replace(group, examples=tuple(case for case in fitting if str(case) not in declined)))
    return kept


def _verify_group(subject: Subject, group: Group) -> list[CaseResult]:
    explorer = Explorer(Item(subject, group), record=lambda result: None, started=lambda item, case, counted: None)
    return [explorer.run(case) for case in group.examples]
