"""Whether the interpreter's fast way leaves the bytes of the sequential run: on generated kernels and on real ones.

Run `python docs/measurements/interpreter_identity.py generated [--examples N] [--seed S]` for small Triton kernels
that Hypothesis draws (tests/triton_texts.py), or `… kernels [--cases N] [--folder kernels/external] [--op OP]
[--kernel K]` for the kernels of a folder on the cases that `verify` draws, N per group. Everything is compared with
`lastbit.interpret.one_by_one`: every byte of memory, what is raised, what is printed; in both directions.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
FEATURES = {
    "a grid of two or three axes": r"program_id\([12]\)",
    "fp32, bf16 or fp16": r"tl\.(float32|bfloat16|float16)",
    "masked load or store": r"mask=",
    "other values for masked loads": r"other=",
    "indirect addresses": r"\+ \(\(\(?tl\.load",
    "reduction": r"tl\.(sum|max|min|argmax|argmin|reduce|xor_sum)\(",
    "reduction or scan by a function of the kernel": r"(larger|second|chosen|both)\b",
    "scan": r"tl\.(cumsum|cumprod|associative_scan)",
    "reshape, trans, join, split, cat, gather, flip": r"tl\.(reshape|trans|join|split|cat|interleave|gather|flip)\(",
    "sort or histogram": r"tl\.(sort|histogram)",
    "dot": r"tl\.dot\(",
    "loop": r"\bfor ",
    "loop with a bound that programs may differ in": r"in (tl\.)?range\((?!2\)|K & 3\))",
    "while": r"\bwhile ",
    "if": r"^ +if ",
    "early return": r"^ {8,}return|^ +if .*\n +return",
    "atomic": r"tl\.atomic_",
    "atomic whose old value is used": r"= tl\.atomic_",
    "block pointer": r"make_block_ptr",
    "function called": r"def f\d",
    "print": r"print\(",
}


def generated(examples: int, seed: int) -> int:
    """Draw programs and compare; returns how many differ (Hypothesis stops at the first, and shrinks it)."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded

    from tests.triton_programs import Launch, Outcome, Program, differences
    from tests.triton_texts import programs

    count, tried, together = Counter[str](), 0, counting_together()
    failed: list[str] = []

    @seeded(seed)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs())
    def compare(program: Program) -> None:
        nonlocal tried
        outcomes: dict[Launch, Outcome] = {}
        found = differences(program, outcomes.__setitem__)
        if not failed:
            tried += 1
            count.update(_features(program, outcomes))
        if found:
            failed[:] = [f"{program!r}\n" + "\n".join(found)]
        assert not found

    try:
        compare()
    except AssertionError:
        print(failed[0])
    print(f"\n{tried:,} kernels, {count.pop('launches'):,} launches, {count.pop('instances'):,} programs")
    print(
        f"{together['done']:,} programs ran together with others, {together['undone']:,} were begun so and taken back"
    )
    for name in (*FEATURES, *(name for name in count if name not in FEATURES)):
        print(f"| {name} | {count[name]:,} |")
    if not together["done"]:
        print("no programs ran together, so nothing was compared")
    return len(failed) + (not together["done"])


def counting_together() -> Counter[str]:
    """Count the programs that run together from now on: done, or taken back."""
    from lastbit.interpret.launch import Launch

    counted = Counter[str]()
    run = Launch._together

    def together(self: Any, grid_indices: Any) -> bool:
        done = run(self, grid_indices)
        counted["done" if done else "undone"] += len(grid_indices)
        return done

    Launch._together = together  # type: ignore[method-assign]
    return counted


def _features(program: Any, outcomes: dict[Any, Any]) -> Iterator[str]:
    yield from (name for name, pattern in FEATURES.items() if re.search(pattern, program.text, re.MULTILINE))
    turns: dict[Any, set[bytes]] = {}
    for launch, outcome in outcomes.items():
        yield "launches"
        yield from ["instances"] * torch.Size(launch.grid).numel()
        turns.setdefault((launch.grid, launch.n, launch.m, launch.s, launch.seed), set()).add(outcome.memory)
    if any(len(memories) > 1 for memories in turns.values()):
        yield "another result in the other direction"
    if any(outcome.error for outcome in outcomes.values()):
        yield "an error in some launch"
    starts = sorted((t.start, t.start + t.size * t.itemsize) for t in program.tensors)
    if any(a[1] > b[0] for a, b in pairwise(starts)):
        yield "tensors that share bytes"


def kernels(count: int, seed: int, folder: str, ops: Sequence[str], names: Sequence[str]) -> int:
    """Run kernels that launch Triton on drawn cases; returns how many cases differ."""
    from lastbit.config import Config
    from lastbit.devices import DevicePlan
    from lastbit.errors import UnsupportedCase
    from lastbit.interpret import install
    from lastbit.verify.drawing import draw
    from lastbit.verify.plan import make_plan
    from tests.kernel_bytes import case_differences

    install()
    folders = (str(ROOT / folder),) if folder else ()
    plan = DevicePlan(devices=("cpu",))
    config = Config("", "smoke", plan, ops=tuple(ops), kernels=tuple(names), kernel_folders=folders)
    tallies: dict[str, Counter[str]] = {}
    launched = counting_programs()
    for item in make_plan(config, "cpu").items:
        kernel = item.subject.kernel
        tally = tallies.setdefault(kernel.name, Counter())
        for i, case in enumerate(draw(item.group, count, seed)):
            if tally["programs"] == 0 and tally["cases"] - tally["errors"] >= ENOUGH:
                break
            if not kernel.requires <= {*case.params, *(tensor.name for tensor in case.tensors)}:
                continue
            before = launched["programs"]
            try:
                found, raised = case_differences(kernel, case, turned=bool(i % 2))
            except UnsupportedCase:
                continue
            tally.update(cases=1, errors=raised, differences=bool(found), programs=(launched["programs"] - before) // 4)
            for line in found:
                print(f"DIFFERENT {kernel.name}: {line}\n  {case}", flush=True)
        print(item.id, dict(tally), file=sys.stderr, flush=True)
    columns = ("cases", "programs", "errors", "differences")
    print(f"\n| kernel | {' | '.join(columns)} |\n|{'---|' * 5}")
    shown = {name: tally for name, tally in tallies.items() if tally["programs"]}
    shown["all"] = sum(shown.values(), Counter[str]())
    for name, tally in shown.items():
        print(f"| `{name}` | {' | '.join(f'{tally[column]:,}' for column in columns)} |")
    print(f"without a launch, left out: {', '.join(name for name in tallies if name not in shown)}")
    return shown["all"]["differences"]


ENOUGH = 4
"""Cases after which a kernel that has not launched anything is taken for one that never does."""


def counting_programs() -> Counter[str]:
    """Count the programs of every launch from now on."""
    from lastbit.interpret.builder import Builder

    counted = Counter[str]()
    of_launch = Builder.set_grid_dim

    def set_grid_dim(self: Any, *sides: int) -> None:
        counted["programs"] += torch.Size(sides).numel()
        of_launch(self, *sides)

    Builder.set_grid_dim = set_grid_dim  # type: ignore[method-assign]
    return counted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="what", required=True)
    drawn = commands.add_parser("generated")
    drawn.add_argument("--examples", type=int, default=1000)
    drawn.add_argument("--seed", type=int, default=0)
    real = commands.add_parser("kernels")
    real.add_argument("--cases", type=int, default=2)
    real.add_argument("--seed", type=int, default=0)
    real.add_argument("--folder", default="")
    real.add_argument("--op", action="append", default=[])
    real.add_argument("--kernel", action="append", default=[])
    given = parser.parse_args()
    start = time.time()
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path[:0] = [str(ROOT / "harness" / "checkout"), str(ROOT)]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if given.what == "generated":
        different = generated(given.examples, given.seed)
    else:
        different = kernels(given.cases, given.seed, given.folder, given.op, given.kernel)
    print(f"differences: {different}; {time.time() - start:.0f} s")
    return bool(different)


if __name__ == "__main__":
    sys.exit(main())
