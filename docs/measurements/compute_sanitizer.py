"""What `lastbit verify --sanitize` costs on a GPU, and what it finds of faults that leave every result right.

Run `python docs/measurements/compute_sanitizer.py [--device cuda] [--op OP ...] [--cases-per-group N]`. It prints the
reports of two runs, on planted faults and on the kernels of this repository, and milliseconds per case with and without
each tool.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "harness" / "checkout"), str(ROOT)]
TOOLS = {"over_reads": "memcheck", "reads_scratch": "initcheck", "races_in_a_block": "racecheck", "does_neither": ""}
"""Planted kernel → the tool that finds its fault."""
PLANTED = ROOT / "tests" / "faults" / "sanitizer"
LINES_OF_NOTHING = 2  # of a log: a head, and a summary


def verified(folder: Path, limit: float, *words: str) -> None:
    """Print what `lastbit verify --sanitize` prints below its table, and its time; it is interrupted at the limit."""
    command = [sys.executable, "-m", "lastbit", "verify", "--sanitize", "--run-folder", str(folder), *words]
    began = time.monotonic()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            said, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            said, errors = process.communicate()
    below = said.partition("Findings\n")[2] or said[-3000:]
    print(f"lastbit verify --sanitize {' '.join(words)}\n{below}{errors[-2000:]}")
    print(f"exit code {process.returncode} after {time.monotonic() - began:.0f} s\n", flush=True)


def logs(folder: Path) -> None:
    """Print how what the tools wrote begins, where they found something."""
    for log in sorted(folder.glob("*check-*.txt")):
        if len(lines := log.read_text().splitlines()) > LINES_OF_NOTHING:
            print("\n".join([log.name, *lines[:14], ""]))


def plain(folder: Path, limit: float) -> None:
    """Print seconds to the first case, and milliseconds for each further one, without a tool; it stops at the limit."""
    from lastbit.config import Config
    from lastbit.reports import records
    from lastbit.sanitize.looking import call_bare, chosen_of
    from lastbit.sanitize.tool import UNCACHED
    from lastbit.verify.worker import Worker

    results = chosen_of(records.read(folder))
    config = replace(Config.load(folder / "config.json"), lines=tuple(dict.fromkeys(r.case for r in results)))
    print(f"{len(results)} cases: {dict(Counter(r.kernel for r in results))}")
    if not results:
        return
    moments = [time.monotonic()]
    with Worker(config, environ=UNCACHED) as worker:
        for result in results:
            if moments[-1] < moments[0] + limit:
                worker.do(call_bare, result.kernel, result.case)
                moments.append(time.monotonic())
    each = 1000 * (moments[-1] - moments[1]) / max(len(moments) - 2, 1)
    print(
        f"without a tool: {moments[1] - moments[0]:.1f} s to the first of {len(moments) - 1} cases, {each:.1f} ms each"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--op", action="append", default=[])
    parser.add_argument("--cases-per-group", default="2")
    parser.add_argument("--kernel", action="append", default=[], help="only these planted and own kernels")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds that a run may take (default: 3600)")
    options = parser.parse_args()
    here = ["--device", options.device, "--cases-per-group", options.cases_per_group]
    ops = [word for op in options.op for word in ("--op", op)]
    chosen = {kernel: [kernel] for kernel in options.kernel}
    faulty = [word for kernel, words in chosen.items() if kernel in TOOLS for word in words]
    right = [word for kernel, words in chosen.items() if kernel not in TOOLS for word in words]
    with tempfile.TemporaryDirectory() as folder:
        own, planted = Path(folder, "own"), Path(folder, "planted")
        verified(own, options.limit, *here, *ops, *right)
        logs(own)
        plain(own, options.limit / 8)
        place = str(PLANTED.relative_to(ROOT))
        verified(planted, options.limit / 2, *here, "--op", "rms_norm", place, *faulty)
        logs(planted)


if __name__ == "__main__":
    main()
