"""Stages of the norms of public packages, found in their own text, and the line that keeps each from another contract.

Run `python docs/measurements/stages_of_others.py` where liger-kernel, fla-core and conch-triton-kernels are installed;
it writes stages_of_others.md. The packages run as they are, interpreted on the CPU; they declare no stages.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CASE = "rms_norm x=bf16[4,256] weight=bf16[256] eps=1e-06 seed=1"
OTHERS = ("native_multiply", "fp32_multiply")
KERNELS = ("conch[rms_norm]", "fla[rms_norm]", "liger[llama]", "liger[gemma]")
PACKAGES = ("liger-kernel", "fla-core", "conch-triton-kernels")
HEAD = """# Stages of the norms of public packages

`python docs/measurements/stages_of_others.py`, {date}: {versions}, interpreted on the CPU.

The kernels declare no stages. The tables say which of their lines, and which operation there, agrees with which stage
of the reference, in which dtype, and how far it and the contract are from the exact values. Then each kernel is held
against a contract that it does not keep: the line where it leaves that. The case is
`{case}`.
"""


def page(name: str, kernel: Any) -> Iterator[str]:
    """Yield the section for a kernel."""
    import torch

    from lastbit.case import parse_case
    from lastbit.config import Config
    from lastbit.diagnosing.trace import stages_of_case, trace_case
    from lastbit.verify.check import Subject
    from lastbit.verify.project import open_project

    op, cpu = open_project(Config(folder="")).op("rms_norm"), torch.device("cpu")
    case = parse_case(CASE)
    found = stages_of_case(Subject(kernel, op, cpu), case)
    yield f"\n## {name}, which keeps `{found.contract}`\n"
    yield "| stage | line | held in | outside | rel. error | contract |"
    yield "|---|---|---|---|---|---|"
    for step in found.stages:
        m = step.match
        assert m is not None
        cells = f"{step.dtype} | {m.outside} of {m.of} | {m.error:.1e} | {m.contract_error:.1e}"
        yield f"| {m.stage} | {Path(step.file).name}:{step.line}, `{step.operation}` | {cells} |"
    for other in OTHERS:
        told = trace_case(Subject(replace(kernel, contract=other), op, cpu), case)
        first = told.leaves
        if told.verdict != "FAILED" or first is None:
            continue
        value = f"{first.first[0].decimal} in {first.dtype}"
        there = f"{Path(first.file).name}:{first.line}, `{first.operation}`, is {value}"
        yield f"\nUnder `{other}` it is FAILED at stage {told.wrong}: {there}."


def main() -> None:
    sys.path[:0] = [str(ROOT / "harness" / "checkout"), str(ROOT)]
    import torch
    import triton

    from lastbit.kernel import load_kernels
    from lastbit.verify.worker import prepare

    prepare(torch.device("cpu"))
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    versions = f"{packages}, torch {torch.__version__}, triton {triton.__version__}, Python {platform.python_version()}"
    lines = [HEAD.format(date=time.strftime("%Y-%m-%d"), versions=versions, case=CASE).rstrip()]
    for kernel in load_kernels(ROOT / "kernels" / "external"):
        if kernel.name in KERNELS:
            lines += page(kernel.name, kernel)
    Path(__file__).with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
