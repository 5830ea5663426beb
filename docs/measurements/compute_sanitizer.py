"""What `lastbit verify --sanitize` costs on a GPU, and what it finds of faults that leave every result right.

Run `python docs/measurements/compute_sanitizer.py [--device cuda] [--op OP ...] [--cases-per-group N]`. It prints the
reports of two runs, on planted faults and on the kernels of this repository, and milliseconds per case with and without
each tool.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
PLANTED = ROOT / "tests" / "faults" / "sanitizer"


def verified(folder: Path, *words: str) -> int:
    """Print what `lastbit verify --sanitize` prints but its table, and how long it took; its exit code."""
    command = [sys.executable, "-m", "harness", "verify", "--sanitize", "--run-folder", str(folder), *words]
    began = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    said = done.stdout.partition("Findings\n")[2] or done.stdout[-2500:]
    print(f"lastbit verify --sanitize {' '.join(words)}\n{said}{done.stderr[-1500:]}")
    print(f"exit code {done.returncode} after {time.monotonic() - began:.0f} s\n", flush=True)
    return done.returncode


def plain(folder: Path) -> None:
    """Print seconds to the first case, and milliseconds for each further one, without a tool."""
    from harness.config import Config
    from harness.sanitize.call import call_bare
    from harness.sanitize.run import chosen_of
    from harness.sanitize.tool import UNCACHED
    from harness.verify.worker import Worker
    from reports import records

    results = chosen_of(records.read(folder))
    config = replace(Config.load(folder / "config.json"), lines=tuple(r.case for r in results))
    print(f"{len(results)} cases: {dict(Counter(r.kernel for r in results))}")
    began = time.monotonic()
    with Worker(config, environ=UNCACHED) as worker:
        worker.do(call_bare, results[0].kernel, results[0].case)
        first = time.monotonic()
        for result in results[1:]:
            worker.do(call_bare, result.kernel, result.case)
    each = 1000 * (time.monotonic() - first) / max(len(results) - 1, 1)
    print(f"without a tool: {first - began:.1f} s to the first case, then {each:.1f} ms a case", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--op", action="append", default=[])
    parser.add_argument("--cases-per-group", default="1")
    options = parser.parse_args()
    here = ["--device", options.device, "--cases-per-group", options.cases_per_group]
    with tempfile.TemporaryDirectory() as folder:
        verified(Path(folder, "planted"), *here, "--op", "rms_norm", "--kernels", str(PLANTED))
        verified(Path(folder, "own"), *here, *(word for op in options.op for word in ("--op", op)))
        plain(Path(folder, "own"))


if __name__ == "__main__":
    main()
