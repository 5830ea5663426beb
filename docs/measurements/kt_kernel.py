"""kt-kernel 0.7.2 against the formula of MoE-LoRA, against every choice of rounding points, and at the edges.

`python docs/measurements/kt_kernel.py` prints Markdown, where kt-kernel is installed. It runs the AVX2 build and the
best build for the CPU, or the one that KT_KERNEL_CPU_VARIANT names. Every measurement is a process of its own.
"""

from __future__ import annotations

import ast
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent / "ktransformers"
WIDE = ("avx512_bf16", "amx")
CLASSES = ("MXFP4_SFT_MOE", "AMXBF16_SFT_MOE", "AMXInt8_SFT_MOE", "AMXInt4_SFT_MOE", "AMXInt4_KGroup_SFT_MOE")
KERNELS = ("MXFP4_SFT_MOE", "AMXBF16_SFT_MOE")
QUANTIZING = ("AMXInt8_SFT_MOE", "AMXInt4_SFT_MOE")
CASES = 8
SECONDS = 400

HEAD = """# kt-kernel 0.7.2: MoE-LoRA on the CPU

`python docs/measurements/kt_kernel.py`, {date}: kt-kernel {kt}, torch {torch}, Python {python}, {cpu}.

Unmodified, from PyPI. H = I = 64 (256 for Int4), 4 experts, 2 slots, rank 8, 16 tokens, scaling 2, unless said
otherwise.
"""
ERRORS = """
## Error against fp64

‖actual − exact‖ / ‖exact‖ on random numbers, exact being the formula on dequantized weights without any rounding. The
last three classes quantize x, and the first two of them the weights they are given.

"""
ROUNDING = """
## Rounding points

Elements of each result that no order of addition and no fusion can give under a contract, on numbers with exact sums /
on random numbers; then the smallest set of rounding points that leaves the fewest of the latter, and how many each
leaves. Results count from the state that kt-kernel's own forward left, `output` from its own `intermediate`.
"""
GRADIENTS = """
## Gradients, on the cases of the forward pass

`ktransformers/gradients.py`: elements of each result that no kernel could give that rounds at the points above, of all
elements, and the share that could have been no other. The first {cases} cases of each group whose x is bf16 and whose
values are finite, from the state that kt-kernel's own forward left, with one shard and with two or four.

"""
QUANTIZED = """
## Quantized activations

`ktransformers/quantized.py`: the output of `AMXInt8_SFT_MOE` and `AMXInt4_SFT_MOE` is that of `per_matrix` with base
products of codes. A row of x, and of `intermediate`, has codes of eight bits, rint(v / s) with s = max |v| / 127, and
so has a row of the weights: eight bits with s = max |w| · (1 / 127), or eight bits with s = max |w| / 112, of which the
upper four are kept, rounded. Codes are multiplied and added as integers, times s · s, rounded to bf16. H = I = 256,
{seeds} layers. What is left comes from the order of sums and the error of its sigmoid.

| | elements | differ from the formula | relative error |
| --- | --- | --- | --- |
"""
EDGES = """
## At the edges

| what | seen | builds and classes |
|---|---|---|
"""


@dataclass(frozen=True)
class KtClass:
    """A class in a build of kt-kernel."""

    build: str
    name: str

    def __str__(self) -> str:
        return f"{self.build} {self.name.removesuffix('_SFT_MOE')}"

    @property
    def kernel(self) -> str:
        """Its name in kernels/external."""
        return f"kt-kernel[{self.name},{WIDE[0] if self.build in WIDE else self.build}]"

    def run(self, program: str, *arguments: str) -> str:
        """Return what a program saw; how it ended, if it saw nothing."""
        command = [sys.executable, str(HERE / program), self.name, *arguments]
        environment = {**os.environ, "KT_KERNEL_CPU_VARIANT": self.build, "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return f"did not end within {SECONDS} s"
        seen = [line for line in done.stdout.splitlines() if line.startswith("seen: ")]
        if seen:
            return seen[-1].removeprefix("seen: ")
        said = [line.strip() for line in done.stderr.splitlines() if "rror" in line or "what()" in line]
        end = f"ends the process, {signal.Signals(-done.returncode).name}" if done.returncode < 0 else "raises"
        return f"{end}: {said[-1]}" if said else end


def subjects() -> list[KtClass]:
    """Return the AVX2 build's class, and the classes of the best build for this CPU."""
    program = "import kt_kernel; print(kt_kernel.__cpu_variant__)"
    printed = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()
    best = next(word for word in printed if word in (*WIDE, "avx2") or word.startswith("avx512"))
    narrow = [KtClass("avx2", "MXFP4_SFT_MOE")] if "KT_KERNEL_CPU_VARIANT" not in os.environ or best == "avx2" else []
    return narrow + [KtClass(best, name) for name in CLASSES if best in WIDE]


def table(header: list[str], rows: Iterator[list[str]]) -> Iterator[str]:
    for row in (header, ["---"] * len(header), *rows):
        yield f"| {' | '.join(row)} |"


def errors(found: dict[KtClass, dict[str, float]]) -> Iterator[str]:
    """Yield a row per result, a column per subject."""
    results = next(iter(found.values()))
    rows = ([result, *(f"{numbers[result]:.1e}" for numbers in found.values())] for result in results)
    yield from table(["", *map(str, found)], rows)


def rounding(subject: KtClass, report: dict[str, Any]) -> Iterator[str]:
    """Yield what explains each result of a subject."""
    yield f"\n### {subject}\n"
    presets = ("fused", "eager", "per_matrix")

    def row(result: str, kinds: dict[str, Any]) -> list[str]:
        counts = [" / ".join(str(kind[preset]) for kind in kinds.values()) for preset in presets]
        left = " / ".join(str(kind["found"][0]) for kind in kinds.values())
        points = kinds["random"]["found"][1]
        return [result, str(kinds["random"]["numel"]), *counts, ", ".join(points) or "none", left]

    header = ["", "elements", *presets, "rounding points", "left"]
    yield from table(header, (row(result, kinds) for result, kinds in report["table"].items()))
    unexplained, of = report["sequential"]
    if report["table"]["grad_input"]["random"]["found"][0]:
        yield f"\ngrad_input as 4k additions in bf16, one by one: {unexplained} of {of} certain elements differ."
    halves, whole, numel = report["grad_input of shards"]
    yield f"\nTwo shards: outside {forward_of(subject)} {report['forward in shards']}. grad_input: {whole} of {numel}"
    yield f"elements differ from those of one shard, {halves} from the sum of two halves that were rounded to bf16."


def gradients(subject: KtClass) -> Iterator[str]:
    """Yield what of each result is outside, and the share that was decided."""
    report = json.loads(subject.run("gradients.py", subject.kernel, str(CASES)))["results"]

    def cell(counts: dict[str, int] | None) -> str:
        if not counts:
            return ""
        return f"{counts['outside']} of {counts['elements']}, {counts['decided'] / counts['elements']:.0%}"

    names = [name for name in report if not name.endswith(" of shards")]
    for name in names:
        yield f"| {subject} | {name} | {cell(report[name])} | {cell(report.get(f'{name} of shards'))} |"


def quantized(subject: KtClass) -> str:
    found = json.loads(subject.run("quantized.py", subject.name))
    return f"| {subject} | {found['elements']} | {found['differ']} | {found['error']:.1e} |"


def forward_of(subject: KtClass) -> str:
    return "`per_matrix`" if subject.build in WIDE else "`fused+fp32_middle`"


def probes() -> dict[str, str]:
    """Map all probes to what they look at: read, not imported, so that this process stays without kt-kernel."""
    tree = ast.parse((HERE / "edges.py").read_text())
    declared = {ast.unparse(node.target): node.value for node in tree.body if isinstance(node, ast.AnnAssign)}
    titles = declared["TITLES"]
    assert isinstance(titles, ast.Dict)
    return {
        ast.unparse(key): ast.literal_eval(value) for key, value in zip(titles.keys, titles.values, strict=True) if key
    }


def edges(those: list[KtClass]) -> Iterator[str]:
    """Yield a row for each thing that a probe saw, with all subjects in which it did."""
    for probe, title in probes().items():
        seen: dict[str, list[str]] = {}
        for subject in those:
            seen.setdefault(subject.run("edges.py", probe), []).append(str(subject))
        for index, (text, where) in enumerate(seen.items()):
            yield f"| {title if not index else ''} | {text} | {', '.join(where) if len(seen) > 1 else 'all'} |"


def cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    versions = {"kt": version("kt-kernel"), "torch": version("torch"), "python": platform.python_version()}
    print(HEAD.format(date=datetime.date.today(), cpu=cpu(), **versions), ERRORS, sep="", end="")
    those = subjects()
    found = {subject: json.loads(subject.run("edges.py", "relative_errors")) for subject in those}
    print(*errors(found), sep="\n")
    print(ROUNDING)
    for subject in (s for s in those if s.name in KERNELS):
        print(*rounding(subject, json.loads(subject.run("rounding.py", subject.kernel))), sep="\n", flush=True)
    print(GRADIENTS.format(cases=CASES), end="")
    print(*table(["", "", "one shard", "several"], iter(())), sep="\n")
    for subject in (s for s in those if s.name in KERNELS):
        print(*gradients(subject), sep="\n", flush=True)
    print(QUANTIZED.format(seeds=8), end="")
    for subject in (s for s in those if s.name in QUANTIZING):
        print(quantized(subject), flush=True)
    print(EDGES, end="")
    for line in edges(those):
        print(line, flush=True)


if __name__ == "__main__":
    main()
