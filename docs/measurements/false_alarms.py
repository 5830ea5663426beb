"""How often correct kernels are called wrong: many generated cases on the CPU, counted from the records.

Run `python docs/measurements/false_alarms.py [--narrow N] [--wide N] [--out FILE]`; it writes false_alarms.md. The
kernels are those of kernels/ and of tests/correct_kernels/, without the one that torch.compile makes.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("kernels", "tests/correct_kernels")
LEFT_OUT = "torch.compile[native_multiply]"
WIDE = 1024
WIDE_GROUPS = ("N1025to2048", "N2049to4096", "N4097to8192", "N8193to16384")
FAMILIES = {
    "triton": "Triton, interpreted",
    "eager": "PyTorch, eager",
    "F.rms_norm": "torch.nn.functional.rms_norm",
    "order": "PyTorch, other orders of summation",
}
HEAD = """# False alarms: correct kernels under test

`{command}`, {date}, {minutes:.1f} min:
{versions}, {cores} cores.

The kernels of `kernels/` and `tests/correct_kernels/`, which all keep their contract. `{left_out}` is left
out because compiling it takes most of the time. Two runs of `lastbit verify`: {narrow} generated cases per kernel and
group with seed {seed}, and {wide} more with seed {next_seed} in the groups of rows longer than {limit}. A case is one
kernel on one input, judged on its results and, where the kernel stores them, on its stages. What Hypothesis tries
while it shrinks a failure does not count, nor does the same case of the same kernel in the second run.

"""


@dataclass(frozen=True)
class FamilyTally:
    """The outcomes of the cases of one family of kernels."""

    cases: int
    wide: int
    verdicts: Counter[str]


def verify(folder: Path, ops: list[str], count: int, seed: int, only: str, workers: int) -> Any:
    """Run `lastbit verify` once, and return the run."""
    from lastbit.reports import records

    folders = [str(ROOT / name) for name in FOLDERS]
    command = [sys.executable, "-m", "lastbit", "verify", *folders, *kernel_names(ops), "--run-folder", str(folder)]
    command += ["--cases-per-group", str(count), "--seed", str(seed), "-n", str(workers), "--keep-going"]
    command += [word for op in ops for word in ("--op", op)]
    command += ["-k", only] if only else []
    subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False)
    return records.read(folder)


def kernel_names(ops: list[str]) -> list[str]:
    """Name every kernel of the ops in the folders but the compiled one."""
    from lastbit.kernel import load_kernels

    kernels = [k for folder in FOLDERS for k in load_kernels(ROOT / folder) if k.name != LEFT_OUT]
    return [k.name for k in kernels if not ops or k.op in ops]


def width(result: Any) -> int:
    from lastbit.case import parse_case

    return int(parse_case(result.case).tensors[0].shape[-1])


def tally(results: Iterable[Any]) -> FamilyTally:
    found = list(results)
    return FamilyTally(
        len(found),
        sum(width(r) >= WIDE for r in found),
        Counter(r.verdict.value for r in found),
    )


def table(results: list[Any]) -> str:
    """Yield one line per family of kernels, and one for all."""
    verdicts = list(dict.fromkeys(r.verdict.value for r in sorted(results, key=lambda r: r.verdict != "PASSED")))
    groups = {title: [r for r in results if r.kernel.split("[")[0] == key] for key, title in FAMILIES.items()}
    lines = [("kernels", "cases", f"with N ≥ {WIDE}", *verdicts, "passed")]
    for title, own in (*groups.items(), ("all", results)):
        if own:
            t = tally(own)
            counts = [f"{t.verdicts[v]:,}" for v in verdicts]
            passed = f"{100 * t.verdicts['PASSED'] / t.cases:.4g} %"
            lines.append((title, f"{t.cases:,}", f"{t.wide:,}", *counts, passed))
    rows = [f"| {' | '.join(line)} |\n" for line in lines]
    return "".join([rows[0], "|" + "---|" * len(lines[0]) + "\n", *rows[1:]])


def left_inconclusive(results: list[Any]) -> list[str]:
    """List the kernels of which some other contract was never ruled out by all of these results together."""
    from lastbit.config import Config
    from lastbit.run import Run
    from lastbit.verify.power import power_of
    from lastbit.verify.project import open_project

    run = Run(tuple(results), power_of(results, open_project(Config(folder=""))))
    return [kernel for kernel, device in run.subjects() if run.verdict(kernel, device).value == "INCONCLUSIVE"]


def remarks(results: list[Any]) -> str:
    """List the kernels that were left inconclusive, and every case that was not passed."""
    text = f"\nKernels left INCONCLUSIVE: {', '.join(left_inconclusive(results)) or 'none'}.\n"
    kernels = len({r.kernel for r in results})
    text += f"{kernels} kernels; {len({r.case for r in results}):,} different case lines.\n"
    bad = [r for r in results if r.verdict.value in ("FAILED", "ERRORED")]
    for r in bad:
        text += (
            f"\n* {r.verdict.value} {r.kernel}: `{r.case}` {r.reason or '; '.join(f.sentence for f in r.findings)}\n"
        )
    others = Counter(r.reason for r in results if r.verdict.value not in ("PASSED", "FAILED", "ERRORED"))
    for reason, count in others.most_common():
        text += f"\n* {count:,} cases not judged: {reason}.\n"
    return text


def distinct(runs: Iterable[Any]) -> list[Any]:
    """Keep one result per kernel and case line; what was tried while a failure was shrunk does not count."""
    return list({(r.kernel, r.case): r for run in runs for r in run.results if r.counted}.values())


def versions() -> str:
    import torch
    import triton

    return f"triton {triton.__version__}, torch {torch.__version__}, Python {platform.python_version()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--narrow", type=int, default=34, help="cases per kernel and group, in every group")
    parser.add_argument("--wide", type=int, default=68, help="further cases per kernel and group of long rows")
    parser.add_argument("--op", action="append", default=[], help="only kernels of this op (repeatable)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    options = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path[:0] = [str(ROOT / "harness" / "checkout"), str(ROOT)]
    start = time.perf_counter()
    wide_groups = " or ".join(WIDE_GROUPS)
    with tempfile.TemporaryDirectory() as parent:
        runs = [
            verify(Path(parent, "all"), options.op, options.narrow, options.seed, "", options.workers),
            verify(Path(parent, "wide"), options.op, options.wide, options.seed + 1, wide_groups, options.workers),
        ]
    results = distinct(runs)
    head = HEAD.format(
        command=shlex.join(["python", "docs/measurements/false_alarms.py", *sys.argv[1:]]),
        date=time.strftime("%Y-%m-%d"),
        versions=versions(),
        cores=os.cpu_count(),
        minutes=(time.perf_counter() - start) / 60,
        left_out=LEFT_OUT,
        narrow=options.narrow,
        wide=options.wide,
        seed=options.seed,
        next_seed=options.seed + 1,
        limit=WIDE,
    )
    text = table(results) + remarks(results)
    options.out.write_text(head + text)
    print(text)


if __name__ == "__main__":
    main()
