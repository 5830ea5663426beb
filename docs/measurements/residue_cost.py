"""What residues cost in `verify`: the processor time of runs in which kernels are followed, and of runs without.

    export PYTHONPATH=harness/checkout
    python docs/measurements/residue_cost.py [--op OP] [--cores N] [--seconds S] [--out FILE]
    python docs/measurements/residue_cost.py --table FILE

Each run is `lastbit verify --profile ci --device cpu -n 1` of the kernels of an op, on one core; so many go on side by
side. FILE gets a line per run, with the verdict. The table of residue_cost.md is that of such a file.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COMPILED = "rms_norm"  # the op of kernels for which torch compiles, which takes longer than anything else
LONGEST = ("moe_lora_backward", COMPILED, "moe_lora", "layer_norm_gated_backward")  # these begin first
RUN = """
import json, resource, subprocess, sys
status = subprocess.run(sys.argv[1:]).returncode
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print("\\n" + json.dumps([status, used.ru_utime + used.ru_stime]))
"""

Job = tuple[str, str, bool]  # op, what -k takes, whether kernels are followed


def without_following(folder: str) -> Path:
    """Copy the checkout to a folder, and let `verify` follow no kernel there, in whichever process."""
    root = shutil.copytree(ROOT, Path(folder, "root"), ignore=shutil.ignore_patterns(".*", "docs", "tests"))
    with (root / "harness" / "verify" / "formula_check.py").open("a") as judged:
        judged.write("\n\ndef with_formula(subject, case, result, *_):\n    return result\n")
    return root


def ran(job: Job, cores: Queue[int], seconds: float, root: Path) -> dict[str, Any]:
    """Start one run on a core of its own, and return what it says and uses."""
    op, chosen, followed = job
    core = cores.get()
    try:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "lastbit", "verify", "--profile", "ci", "--device", "cpu", "-n", "1"]
            command += ["--op", op, "--run-folder", f"{folder}/run", *(("-k", chosen) if chosen else ())]
            path = os.pathsep.join(filter(None, [str(root / "harness" / "checkout"), os.environ.get("PYTHONPATH")]))
            own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            own |= {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
            said = subprocess.run(
                ["timeout", str(seconds), "taskset", "-c", str(core), sys.executable, "-c", RUN, *command],
                capture_output=True,
                text=True,
                env=os.environ | own,
                cwd=root,
            ).stdout
    finally:
        cores.put(core)
    *report, last = said.rstrip().splitlines() or ["it was stopped"]
    status, used = json.loads(last) if last.startswith("[") else (None, None)
    verdict = next((line for line in reversed(report) if "kernels:" in line), last)
    return {"op": op, "chosen": chosen, "followed": followed, "exit": status, "seconds": used, "said": verdict}


def jobs(ops: Sequence[str]) -> Iterable[Job]:
    """Yield the runs, those that take longest first."""
    from lastbit.config import Config
    from lastbit.verify.project import open_project

    known = ops or sorted(open_project(Config(folder="")).ops)
    for op in sorted(known, key=lambda op: LONGEST.index(op) if op in LONGEST else len(LONGEST)):
        for chosen in ("compile", "not compile") if op == COMPILED else ("",):
            yield from ((op, chosen, followed) for followed in (True, False))


def table(found: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    """Yield the lines of a table: seconds with and without, and the share of residues in the first."""
    seconds: dict[str, dict[bool, float]] = {}
    for one in found:
        if one["exit"] not in ((0, 3) if one["chosen"] else (0,)):  # 3: -k has left kernels out
            yield f"failed: {one}"
        name = f"`{one['op']}`" + (f", {one['chosen']}" if one["chosen"] else "")
        seconds.setdefault(name, {})[one["followed"]] = one["seconds"]
    whole = {name: both for name, both in sorted(seconds.items()) if all(both.get(key) for key in (True, False))}
    whole["**all**"] = {key: sum(both[key] for both in whole.values()) for key in (True, False)}
    yield from ("| op | followed | not followed | share of residues |", "|---|---|---|---|")
    for name, both in whole.items():
        yield f"| {name} | {both[True]:.1f} s | {both[False]:.1f} s | {1 - both[False] / both[True]:.1%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", action="append", default=[])
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--out", type=Path, default=Path("residue_cost.jsonl"))
    parser.add_argument("--table", type=Path)
    arguments = parser.parse_args()
    if arguments.table:
        print("\n".join(table(map(json.loads, arguments.table.read_text().splitlines()))))
        return
    cores: Queue[int] = Queue()
    for core in sorted(os.sched_getaffinity(0))[: arguments.cores]:
        cores.put(core)
    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(cores.qsize()) as pool,
        arguments.out.open("a") as out,
    ):
        roots = {True: ROOT, False: without_following(folder)}
        given = [(job, cores, arguments.seconds, roots[job[2]]) for job in jobs(arguments.op)]
        for done in [pool.submit(ran, *each) for each in given]:
            out.write(json.dumps(done.result()) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
