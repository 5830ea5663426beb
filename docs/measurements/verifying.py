"""What verifying costs: a case beside one call of its kernel, `assert_contract` and a run beside plain tests.

    python docs/measurements/verifying.py [--device cuda] [--op OP] [--quick]

The cases are those of `cases/bench/KIND/verified.txt` and `asserted.txt`, each with the first kernel that takes it. A
verified case tries every contract; *again* is without the calls that only some cases of a run have. Peak memory is
taken on an accelerator. Every part of a case waits for the device, so that its work counts where it was asked for. A
plain test is what one would write without lastbit: random tensors of the same shapes, the kernel, an eager
implementation, `torch.testing.assert_close`. The first call is never counted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from statistics import median
from typing import Any

import torch
from torch.testing import assert_close

from lastbit.bench.case_lines import case_lines
from lastbit.bench.samples import Effort, now, on_device, size_of, wall
from lastbit.calling.performing import under_any_name
from lastbit.case import Case, Group, parse_case
from lastbit.config import Config
from lastbit.devices import made_current, plan_devices
from lastbit.errors import LastbitError
from lastbit.inputs import build
from lastbit.judging.problem import PROBLEMS
from lastbit.kernel import Kernel
from lastbit.reports.bench import amount, short
from lastbit.result import TURNED_DOWN, CaseResult, Verdict
from lastbit.timing import PARTS, Clock, listening
from lastbit.verify.assertion import assert_contract
from lastbit.verify.check import Subject, unsupported, verify_case
from lastbit.verify.drawing import draw
from lastbit.verify.item_run import Explorer
from lastbit.verify.narrowing import groups_of
from lastbit.verify.plan import Item
from lastbit.verify.worker import Workplace, open_workplace, unwatched

EXCEEDING = 4 << 20  # bytes of inputs that take turns on the CPU: more than the L2 cache of a core


def subject_for(place: Workplace, case: Case) -> Subject:
    """Return the first kernel of the plan that takes the case."""
    subjects = (s for s in place.subjects.values() if s.op.name == case.op and not unsupported(s.kernel, case))
    return next(subjects)


def eager_for(place: Workplace, subject: Subject, case: Case) -> Kernel | None:
    """Find another implementation: the first in another file, of the same contract if possible."""
    file = subject.kernel.source.rpartition(":")[0]
    kernels = [k for k in place.project.kernels() if k.op == case.op and not unsupported(k, case)]
    others = [k for k in kernels if k.source.rpartition(":")[0] != file]
    fitting = [k for k in others if not k.devices or subject.device.type in k.devices]
    return min(fitting, key=lambda k: subject.op.contract(k.contract) != subject.contract, default=None)


def peak_memory(call: Callable[[], object], device: torch.device) -> int:
    """Return the most bytes of tensors on an accelerator during a call; 0 on the CPU."""
    if device.type == "cpu":
        call()
        return 0
    memory = torch.get_device_module(device)
    memory.empty_cache()
    memory.reset_peak_memory_stats(device)
    call()
    torch.accelerator.synchronize(device)
    return int(memory.max_memory_allocated(device))


def verified(place: Workplace, line: str, effort: Effort) -> list[str]:
    """Measure a case as verified, beside one call of its kernel."""
    case = parse_case(line)
    subject = subject_for(place, case)
    kernel, device = subject.kernel, subject.device

    def verify(number: int, *, repeat: bool = True) -> CaseResult:
        PROBLEMS.forget()  # as of a case that no other kernel was given before
        return verify_case(subject, replace(case, seed=(case.seed + number) % 2**63), repeat=repeat)

    def checked() -> None:
        result = verify(0)
        if result.verdict in TURNED_DOWN | {Verdict.ERRORED}:
            raise LastbitError(f"{kernel.name}: {result.reason}, in {case}")

    with made_current(device):
        tensors = build(case, device).tensors
        size = size_of(tensors)
        most = peak_memory(checked, device)
        whole, again = wall(verify, effort), wall(partial(verify, repeat=False), effort)
        copies = 1 if device.type != "cpu" else min(64, 2 + EXCEEDING // max(1, size))
        turns = cycle([{name: tensor.clone() for name, tensor in tensors.items()} for _ in range(copies)])
        one = on_device(lambda: kernel.call(**next(turns), **case.params), device, effort)
        with listening(Clock(now(device))) as clock:  # every part waits for the device
            verify(0)
            seconds = clock.seconds
    total = sum(seconds.values())
    times = f"{whole.median / one.median:,.0f}", f"{again.median / one.median:,.0f}"
    parts = ", ".join(f"{part} {seconds[part] / total:.0%}" for part in PARTS if seconds.get(part, 0) >= total / 200)
    memory = f"{most / size:,.1f}" if most else ""
    return [f"`{short(line)}`", kernel.name, *times, *(amount(s, "s") for s in (whole, again, one)), memory, parts]


def asserted(place: Workplace, line: str, effort: Effort) -> list[str]:
    """Measure `assert_contract` on a result, beside `assert_close` on it and its clone."""
    case = parse_case(line)
    subject = subject_for(place, case)
    kernel = eager_for(place, subject, case) or subject.kernel
    with made_current(subject.device):
        tensors = build(case, subject.device).tensors
        actual = kernel.call(**tensors, **case.params)
        about: dict[str, Any] = {"contract": kernel.contract, "depth": kernel.depth, "order": kernel.order}
        arguments: dict[str, Any] = {**tensors, **case.params}
        own = wall(lambda number: assert_contract(kernel.op, actual, **about, **arguments), effort)
        named = under_any_name(actual)
        other = {name: tensor.clone() for name, tensor in named.items()}
        close = wall(lambda number: assert_close(named, other), effort)
    ratio = f"{own.median / close.median:,.1f}"
    return [f"`{short(line)}`", kernel.name, ratio, amount(own, "s"), amount(close, "s")]


def plain_test(kernel: Kernel, eager: Kernel, case: Case, device: torch.device) -> None:
    """Do one plain test; integers are those of the case, and values that differ raise nothing."""
    tensors = {t.name: torch.randn(t.shape, device=device).to(t.torch_dtype) for t in case.tensors}
    if any(not tensor.is_floating_point() for tensor in tensors.values()):
        built = build(case, device).tensors
        tensors |= {name: tensor for name, tensor in built.items() if not tensor.is_floating_point()}
    results = [under_any_name(one.call(**tensors, **case.params)) for one in (kernel, eager)]
    actual, expected = ({n: t.float() if t.itemsize == 1 else t for n, t in own.items()} for own in results)
    for name in actual.keys() & expected.keys():
        try:
            assert_close(actual[name], expected[name])
        except AssertionError:
            continue


def rate(place: Workplace, op: str, effort: Effort, groups: int, cases: int) -> list[str]:
    """Measure warm cases per second of the op's first kernel, verified as a run does it, beside plain tests."""
    subject = next(subject for subject in place.subjects.values() if subject.op.name == op)
    kernel, device = subject.kernel, subject.device
    made = [g for g in groups_of(place.project, kernel, small=place.config.small) if g.strategy is not None]
    step = max(1, len(made) // groups)  # groups are spread over those that the op generates
    generated = islice((replace(group, examples=()) for group in made), 0, step * groups, step)
    drawn = [Group(group.name, examples=tuple(draw(group, cases))) for group in generated]
    eager = next((eager_for(place, subject, case) for group in drawn for case in group.examples), None)
    if eager is None:
        return [f"`{op}`", kernel.name, "", "", ""]

    def run(group: Group) -> list[CaseResult]:
        explorer = Explorer(Item(subject, group), record=lambda result: None, started=lambda item, case, counted: None)
        return [explorer.run(case) for case in group.examples]

    def seconds(once: Callable[[], object]) -> float:
        clock, taken = now(device), list[float]()
        for _ in range(effort.rounds):
            start = clock()
            once()
            taken.append(clock() - start)
        return median(taken)

    with made_current(device):
        fitting = []
        for group in drawn:  # which is the warm-up, too
            results = run(group)
            ended = TURNED_DOWN | {Verdict.ERRORED}
            kept = [c for c, r in zip(group.examples, results, strict=True) if r.verdict not in ended]
            for case in list(kept):
                try:
                    plain_test(kernel, eager, case, device)
                except Exception:  # an eager kernel takes less
                    kept.remove(case)
            fitting.append(replace(group, examples=tuple(kept)))
        number = sum(len(group.examples) for group in fitting)
        if not number:
            return [f"`{op}`", kernel.name, "", "", ""]
        own = number / seconds(lambda: [run(group) for group in fitting])
        tests = [partial(plain_test, kernel, eager, case, device) for group in fitting for case in group.examples]
        plain = number / seconds(lambda: [test() for test in tests])
    return [f"`{op}`", kernel.name, f"{own / plain:.3g}", f"{own:,.3g}", f"{plain:,.3g} with {eager.name}"]


def rows(place: Workplace, quick: bool) -> Iterator[tuple[str, list[str], Callable[[], list[str]]]]:
    """Yield each row of each table: its heading, columns, and what measures it."""
    effort = Effort(seconds=0.1, rounds=1) if quick else Effort()
    columns = ["of", "kernel", "× call", "× call, again", "verified", "again", "one call", "memory × inputs", "parts"]
    for line in case_lines(place, "verified.txt"):
        yield "A verified case", columns, partial(verified, place, line, effort)
    columns = ["of", "kernel", "×", "assert_contract", "assert_close"]
    for line in case_lines(place, "asserted.txt"):
        yield "`assert_contract`", columns, partial(asserted, place, line, effort)
    columns = ["op", "kernel", "ratio", "verified a second", "plain tests a second"]
    for op in dict.fromkeys(subject.op.name for subject in place.subjects.values()):
        yield "Cases per second", columns, partial(rate, place, op, effort, *((1, 2) if quick else (3, 8)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--op", action="append", default=[])
    parser.add_argument("--quick", action="store_true", help="few repetitions, to see that it works")
    options = parser.parse_args()
    config = Config(folder="", device_plan=plan_devices(options.device), ops=tuple(options.op))
    place, told = open_workplace(config, unwatched, lambda result: None), ""
    print(f"{place.config.devices[0]}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}")
    for heading, columns, measure in rows(place, options.quick):
        if heading != told:
            print(f"\n## {heading}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
            told = heading
        print(f"| {' | '.join(measure())} |", flush=True)


if __name__ == "__main__":
    main()
