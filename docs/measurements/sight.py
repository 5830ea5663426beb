"""What lastbit sees of a kernel's faults, and what torch.testing.assert_close sees of them.

Run `python docs/measurements/sight.py [--device cuda] [--out FILE]`; it writes sight.md. Triton's interpreter runs the
kernels on the CPU; on an accelerator they are compiled, each faulty copy for itself, so that --workers helps there.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SEEDS = (0, 1, 2)
HEAD = """# Sight: which faults are seen, and where

`{command}`, {date}: {versions}, {device}; {seconds:.0f} s.

Each row is a copy of a kernel with one fault (`tests/faults/` has the replacements), run on the cases that
`lastbit verify` generates for one group of cases in which the fault can show: the same generator, at the size for a
CPU. *Planted* is the stage that the fault spoils first, or what the guards must find. A number under *with stages* and
*results only* says how many distinct generated cases it took until one failed, the failing one included, with the seeds
{seeds}; cases in which the fault cannot show count too. (*view flattened* is hunted with the real shapes that every run
begins with, which do not depend on the seed.) The name is what the report leads with: the first stage that goes wrong,
or what the guards found. *Results only* is the same kernel
declared without stages. *Wrong there* is the share of elements of the failing result that differ from the contract's
value in the first failing case of seed {seed}, results only, with the largest distance in ulp of its format. *Changed*
is the share of elements, over the first {at_most} cases of seed {seed}, whose bits are not those of the kernel without
the fault. A run gives up after {count} cases, a few of which are equal.

The last columns ask `torch.testing.assert_close` the same question, kernel against the eager kernel of the same
contract, with its default tolerances for the dtype and NaN equal to NaN, over the same cases: alarms on the faulty
copy, false alarms on the kernel without the fault, and cases in which only the faulty copy alarms.
{upstream}
| {columns} |
|{rule}|
"""
COLUMNS = (
    "fault: a copy of the kernel that …", "x", "planted", "with stages", "results only", "wrong there", "changed",
    "assert_close", "false alarms", "only faulty",
)  # fmt: skip
UPSTREAM = """
*Upstream's test* is that of ktransformers' SFT operator (`tests/faults/upstream.py`): the largest mean |difference| /
mean |expected| over the output, or the gradients of input and adapters, against its bounds, 5 % forward and 10 %
backward, 35 % and 40 % with codes of four bits, with its own way to draw tensors. *Balanced* is the same test with
tensors that make the adapters' part as large as that of the base weights.
"""
UPSTREAM_COLUMNS = ("upstream's test", "balanced")


@dataclass(frozen=True)
class SightRow:
    """One line of the table, and what the summary counts.

    Attributes:
        seen: seeds with which the fault was seen, stages stored and not.
        named: sightings that named what the fault's definition gives, with stages and with results only.
        caught: cases in which assert_close alarms on the faulty copy only.
        passed: whether the fault passes the upstream test, and the balanced one; empty where there is none.
        unexpected: names that the fault's definition does not give.
    """

    fault: str
    cells: tuple[str, ...]
    seen: int
    named: tuple[int, int]
    caught: int
    passed: tuple[bool, ...]
    equivalent: bool
    unexpected: tuple[str, ...]


def measure(name: str, dtype: str, device_name: str, count: int, compared: int) -> SightRow:
    """Hunt one fault with one dtype."""
    import torch

    from tests.faults import hunt as hunting
    from tests.faults import upstream
    from tests.faults.catalogue import FAULTS
    from tests.faults.plant import alternatives, planted

    torch.set_num_threads(1)
    device = torch.device(device_name)
    if device.type == "cpu":
        from lastbit.interpret import install

        install()
    fault = next(f for f in FAULTS if str(f) == name)
    drawn = {seed: hunting.cases_for(fault, dtype, count, seed) for seed in SEEDS}
    with planted(fault) as kernel:
        variants = (kernel, hunting.without_stages(kernel))
        exposed, hidden = ([hunting.hunt(k, cases, device) for cases in drawn.values()] for k in variants)
        clean, eager = hunting.clean(fault), hunting.clean(fault, "eager")
        effects = hunting.effects(kernel, clean, eager, drawn[SEEDS[0]][:compared], device)
        tests = [False, True] if fault.op in upstream.BOUNDS and dtype == "bf16" else []
        outcomes = [upstream.outcome(kernel, fault, device, balanced=balanced) for balanced in tests]
    found = ((exposed, alternatives(fault.exposed)), (hidden, alternatives(fault.hidden)))
    names = {s.named for sightings, expected in found for s in sightings if s and s.named not in expected}
    named = tuple(sum(s is not None and s.named in expected for s in sightings) for sightings, expected in found)
    changed = _percent(effects.changed, effects.elements)
    cells = (
        dtype,
        fault.exposed,
        _sightings(exposed),
        _sightings(hidden),
        _wrong(hidden[0]),
        changed,
        *_assert_close(effects),
    )
    cells += tuple(map(str, outcomes)) or ("–", "–")
    seen = sum(a is not None and b is not None for a, b in zip(exposed, hidden, strict=True))
    equivalent = bool(fault.equivalent and not effects.changed)
    passed = tuple(outcome.passes for outcome in outcomes)
    return SightRow(name, cells, seen, named, effects.caught, passed, equivalent, tuple(sorted(names)))


def _sightings(found: list[Any]) -> str:
    names = dict.fromkeys(s.named for s in found if s)
    return f"{' '.join(str(s.cases) if s else 'not' for s in found)} {', '.join(names)}".strip()


def _wrong(sighting: Any) -> str:
    if sighting is None or not sighting.comparison.numel:
        return "–"
    seen = sighting.comparison
    return f"{_percent(seen.mismatched, seen.numel)}, {seen.max_ulp:.3g} ulp"


def _assert_close(effects: Any) -> list[str]:
    return [f"{n} of {effects.cases}" for n in (effects.alarms, effects.false_alarms, effects.caught)]


def _percent(part: int, whole: int) -> str:
    share = 100 * part / whole
    return f"{share:.2g} %" if 0 < share < 10 else f"{share:.0f} %"


def rows(options: argparse.Namespace) -> list[SightRow]:
    """Return the lines of the table, in the order of the faults."""
    from tests.faults.catalogue import FAULTS

    chosen = [f for f in FAULTS if not options.op or f.op in options.op]
    tasks = [(str(f), dtype) for f in chosen for dtype in f.dtypes if not options.fault or f.name in options.fault]
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        counts = (options.device, options.cases, options.compared)
        futures = [pool.submit(measure, *task, *counts) for task in tasks]
        return [future.result() for future in futures]


def table(found: list[SightRow]) -> str:
    """Return the lines of the table; a fault is described where it first appears."""
    from tests.faults.catalogue import FAULTS

    words = {str(f): f"{f.op}: **{f.name}**: {f.description}" for f in FAULTS}
    cells = len(COLUMNS) - 1 + len(UPSTREAM_COLUMNS) * has_upstream(found)
    return "".join(f"| {' | '.join((words.pop(r.fault, r.fault), *r.cells[:cells]))} |\n" for r in found)


def has_upstream(found: list[SightRow]) -> bool:
    """Return whether any of the faults has a test upstream."""
    return any(r.passed for r in found)


def summary(found: list[SightRow]) -> str:
    """Phrase the table in numbers."""
    from tests.faults.catalogue import FAULTS

    real = [r for r in found if not r.equivalent]
    always = sum(r.seen == len(SEEDS) for r in real)
    caught = sum(r.caught > 0 for r in real)
    text = (
        f"\nOf {len(real)} rows whose fault changes what the kernel does, lastbit saw {always} with every seed, with "
    )
    text += f"stages and without; `assert_close` set {caught} apart from the correct kernel in at least one case.\n"
    text += _naming(real) + _upstream(real)
    text += _listed("Seen with some seeds only", [r for r in real if 0 < r.seen < len(SEEDS)])
    text += _listed("Never seen", [r for r in real if not r.seen])
    text += _listed("Named otherwise than `tests/faults/` expects", [r for r in real if r.unexpected])
    same = {r.fault for r in found if r.equivalent}
    return text + "".join(f"\n*{f}* changes nothing: {f.equivalent}.\n" for f in FAULTS if str(f) in same)


def _naming(real: list[SightRow]) -> str:
    with_stages, results_only = (sum(r.named[i] for r in real) for i in (0, 1))
    of = len(real) * len(SEEDS)
    return (
        f"\nThe report led with a stage that the fault's definition gives in {with_stages} of {of} hunts with stages, "
        f"and in {results_only} of {of} with results only.\n"
    )


def _upstream(real: list[SightRow]) -> str:
    tested = [r.passed for r in real if r.passed]
    if not tested:
        return ""
    own, balanced = (sum(passed[i] for passed in tested) for i in (0, 1))
    return f"\nThe test from upstream passes {own} of {len(tested)} faults, and with balanced tensors {balanced}.\n"


def _listed(title: str, found: list[SightRow]) -> str:
    return f"\n{title}: {'; '.join(' '.join([r.fault, r.cells[0], *r.unexpected]) for r in found)}.\n" if found else ""


def versions() -> str:
    import torch
    import triton

    return f"triton {triton.__version__}, torch {torch.__version__}, Python {platform.python_version()}"


def device_words(device: str) -> str:
    import torch

    return "Triton interpreted on the CPU" if device == "cpu" else torch.cuda.get_device_name(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    parser.add_argument("--cases", type=int, default=60, help="generated cases per seed")
    parser.add_argument("--compared", type=int, default=24, help="cases that are compared by assert_close")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--op", action="append", default=[], help="only the faults of this op (repeatable)")
    parser.add_argument("--fault", action="append", default=[], help="only this fault (repeatable)")
    options = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "1" if options.device == "cpu" else "0"
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT / "harness" / "checkout"), os.environ.get("PYTHONPATH")])
    )
    sys.path[:0] = [str(ROOT / "harness" / "checkout"), str(ROOT)]
    start = time.perf_counter()
    found = rows(options)
    columns = COLUMNS + UPSTREAM_COLUMNS * has_upstream(found)
    head = HEAD.format(
        command=" ".join(["python docs/measurements/sight.py", *sys.argv[1:]]),
        date=time.strftime("%Y-%m-%d"),
        versions=versions(),
        device=device_words(options.device),
        seconds=time.perf_counter() - start,
        seeds=", ".join(map(str, SEEDS)),
        seed=SEEDS[0],
        count=options.cases,
        at_most=options.compared,
        upstream=UPSTREAM * has_upstream(found),
        columns=" | ".join(columns),
        rule="---|" * (len(columns) - 1) + "---",
    )
    options.out.write_text(head + table(found) + summary(found))
    print(summary(found).strip())


if __name__ == "__main__":
    main()
