"""What residues cost in `verify`: the share of its processor time in which kernels are followed and compared by them.

    python docs/measurements/residue_cost.py [--profile NAME] [-n N] [-- ARGUMENT …]

Runs `lastbit verify --device cpu` once, of a copy of this checkout that writes down how long each kernel was followed.
Prints the table of residue_cost.md. Further arguments go to `verify`, such as `--op softmax`.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMED = """

_followed = with_formula


def with_formula(subject, case, result, begins):
    import time

    begun = time.process_time()
    try:
        return _followed(subject, case, result, begins)
    finally:
        with open({log!r}, "a") as log:
            log.write(f"{{subject.kernel.op}} {{time.process_time() - begun}}\\n")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="ci")
    parser.add_argument("-n", default="2", help="worker processes")
    parser.add_argument("arguments", nargs="*")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log, root = Path(folder, "log"), Path(folder, "root")
        log.touch()
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(".*", "docs", "tests"))
        with (root / "harness" / "verify" / "formula_check.py").open("a") as judged:
            judged.write(TIMED.format(log=str(log)))
        command = [sys.executable, "-m", "lastbit", "verify", "--device", "cpu", "--profile", options.profile]
        command += ["-n", options.n, "--run-folder", f"{folder}/run", *options.arguments]
        places = [str(root / "harness" / "checkout"), os.environ.get("PYTHONPATH", "")]
        status = subprocess.run(command, cwd=root, env=os.environ | {"PYTHONPATH": os.pathsep.join(places)}).returncode
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        cases, seconds = Counter[str](), Counter[str]()
        for line in log.read_text().splitlines():
            op, spent = line.split()
            cases[op], seconds[op] = cases[op] + 1, seconds[op] + float(spent)
    print("| op | cases followed | seconds of the processor |\n|---|---|---|")
    for op, spent in sorted(seconds.items()):
        print(f"| `{op}` | {cases[op]:,} | {spent:.1f} |")
    total, whole = seconds.total(), used.ru_utime + used.ru_stime
    print(f"| **all** | {cases.total():,} | {total:.1f} of {whole:.1f}: **{total / whole:.1%}** |")
    sys.exit(status)


if __name__ == "__main__":
    main()
