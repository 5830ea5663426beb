"""How long `lastbit judge` takes to a verdict: 50 kernel files, right, wrong and hostile, in one pool.

    PYTHONPATH=harness/checkout python docs/measurements/judge.py [--device cuda] [--judges N] [--profile smoke]
        [--each]

Every file is written into a folder of its own and judged with --fail-fast. The time of a file is that from the judge's
beginning it to its verdict; the first files of a judge, which warm it, count as the others do.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lastbit
from lastbit.reports.judged import FileVerdict
from tests.faults.catalogue import FAULTS
from tests.faults.plant import FOLDER, mutated, read_sources
from tests.hostile import FILES as HOSTILE_FILES
from tests.hostile import HOSTILE

USUAL = {"op": "rms_norm", "contract": "native_multiply"}
PASSED, FAILED = "PASSED", "FAILED"

PLAIN = """import torch


def rms_norm(x, weight=None, *, eps):
    value = x.float()
    mean = {mean}
    normalized = value * torch.rsqrt(mean + eps)
    {output}
"""
MEANS = {
    "mean": "value.square().mean(-1, keepdim=True)",
    "sum": "value.square().sum(-1, keepdim=True) / value.shape[-1]",
    "reversed": "value.flip(-1).square().mean(-1, keepdim=True)",
    "in fp64": "value.double().square().mean(-1, keepdim=True).float()",
    "one by one": "value.square().cumsum(-1)[..., -1:] / value.shape[-1]",
    "dot": "(value.unsqueeze(-2) @ value.unsqueeze(-1)).squeeze(-1) / value.shape[-1]",
}
NATIVE = """normalized = normalized.to(x.dtype if weight is None else weight.dtype)
    return normalized.to(x.dtype) if weight is None else (normalized * weight).to(x.dtype)"""
FP32 = "return (normalized if weight is None else normalized * weight.float()).to(x.dtype)"
OUTPUTS = {"native_multiply": NATIVE, "fp32_multiply": FP32}

TRITON = """import torch
import triton
import triton.language as tl


@triton.jit
def _rows(x_pointer, weight_pointer, y_pointer, columns, eps, BLOCK: tl.constexpr, HAS_WEIGHT: tl.constexpr):
    row, offsets = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = offsets < columns
    x = tl.load(x_pointer + row * columns + offsets, mask=mask, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / columns + eps)
    if HAS_WEIGHT:
        y = y * tl.load(weight_pointer + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_pointer + row * columns + offsets, y, mask=mask)


def rms_norm(x, weight=None, *, eps):
    y, rows = torch.empty_like(x, memory_format=torch.contiguous_format), x.contiguous()
    columns = x.shape[-1]
    if x.numel():
        weight = weight if weight is None else weight.contiguous()
        grid = (x.numel() // columns,)
        _rows[grid](rows, weight, y, columns, eps, BLOCK=triton.next_power_of_2(columns), HAS_WEIGHT=weight is not None)
    return y
"""

OWN = {
    ("rms_norm.py", "rms_norm", "triton[native_multiply+rounded_sum]", "native_multiply"),
    ("rms_norm_torch.py", "rms_norm", "eager[fp32_multiply+rounded_sum]", "fp32_multiply"),
    ("completion_mask_torch.py", "completion_mask", "eager[completion_mask]", ""),
    ("layer_norm_gated_torch.py", "layer_norm_gated", "eager[single_rounding]", "single_rounding"),
    ("completion_mask.py", "completion_mask", "", ""),
}
"""Files of kernels/, and what is asked of them."""

SLIPS = {
    "eps after the root": ("torch.rsqrt(mean + eps)", "(1 / (mean.sqrt() + eps))"),
    "no eps": ("mean + eps", "mean"),
    "eps twice": ("mean + eps", "mean + 2 * eps"),
    "the last column forgotten": ("value.square().mean", "value[..., :-1].square().mean"),
    "a mean of n - 1": (
        "value.square().mean(-1, keepdim=True)",
        "value.square().sum(-1, keepdim=True) / (value.shape[-1] - 1)",
    ),
    "variance": ("value.square().mean(-1, keepdim=True)", "value.var(-1, keepdim=True, unbiased=False)"),
    "in the format of x": ("x.float()", "x"),
    "another rounding": (NATIVE, FP32),
    "no weight": ("(normalized * weight)", "normalized"),
    "zeros": ("normalized = value *", "normalized = 0 * value *"),
}
"""Name → what stands in the right file, and in the wrong one."""

PLANTED = (
    "inverse rms rounded",
    "variance accumulated in low precision",
    "squares rounded",
    "store truncates",
    "ties away from zero",
    "mean over the padded block",
    "masked load without other",
    "last element dropped",
)
"""Faults of tests/faults, in copies of kernels/."""

HOSTILES = (
    *("cached_by_shape", "cached_by_address", "replays_first_call", "knows_the_seeds", "reads_frames", "reads_gc"),
    *("patches_torch", "patches_the_judge", "patches_the_comparison", "patches_the_verdict", "exits_hard", "hangs"),
    *("zeros_within_tolerance", "zeroes_inputs", "returns_its_input", "prints_a_verdict", "takes_memory"),
)


@dataclass(frozen=True)
class KnownFile:
    """A file, what is asked of it, and the verdicts that are right."""

    kind: str
    name: str
    path: Path
    expected: tuple[str, ...]
    question: dict[str, Any] = field(default_factory=dict)


def right(folder: Path) -> Iterator[KnownFile]:
    for contract, output in OUTPUTS.items():
        for name, mean in MEANS.items():
            path = written(folder / f"{name} {contract}", PLAIN.format(mean=mean, output=output))
            yield KnownFile("right", f"{name}, {contract}", path, (PASSED,), {"op": "rms_norm", "contract": contract})
    path = written(folder / "triton", TRITON)
    yield KnownFile("right", "triton", path, (PASSED,), {"op": "rms_norm", "contract": "fp32_multiply"})
    for file, op, function, contract in sorted(OWN):
        question = {"op": op, "contract": contract, "function": function}
        yield KnownFile("right", f"kernels/{file} {function}", FOLDER / file, (PASSED,), question)


def wrong(folder: Path) -> Iterator[KnownFile]:
    plain = PLAIN.format(mean=MEANS["mean"], output=NATIVE)
    for name, (old, new) in SLIPS.items():
        assert old in plain, name
        path = written(folder / name, plain.replace(old, new))
        question = {"op": "rms_norm", "contract": "native_multiply"}
        yield KnownFile("wrong", name, path, (FAILED, "ERRORED"), question)
    sources = read_sources()
    for fault in (fault for fault in FAULTS if fault.op == "rms_norm" and fault.name in PLANTED):
        copy = folder / fault.name.replace(" ", "_")
        copy.mkdir()
        for file, text in {**sources, **mutated(fault, sources)}.items():
            (copy / file).write_text(text)
        question = {"op": "rms_norm", "contract": fault.variant, "function": f"triton[{fault.variant}]"}
        yield KnownFile("wrong", fault.name, copy / "rms_norm.py", (FAILED,), question)


def hostile(folder: Path) -> Iterator[KnownFile]:
    """Yield kernels that multiply in the format of x; what they do beside that is in the way of the verdict."""
    for one in (one for one in HOSTILE if one.name in HOSTILES):
        text = one.file.read_text().replace("return y * weight", "return (y * weight).to(x.dtype)")
        path = written(folder / one.name, text)
        shutil.copy(HOSTILE_FILES / "known_inputs.txt", path.parent)
        question = {"op": "rms_norm", "contract": "input_multiply", "timeout": 5.0, "memory": 3 << 29}
        yield KnownFile("hostile", one.name, path, (FAILED, "ERRORED"), question)


def written(folder: Path, text: str) -> Path:
    path = Path(str(folder).replace(" ", "_"), "kernel.py")
    path.parent.mkdir()
    path.write_text(text)
    return path


def judged(files: Sequence[KnownFile], arguments: argparse.Namespace) -> Iterator[tuple[KnownFile, FileVerdict]]:
    """Judge the files in their order, as far as the time allows, and yield them with their verdicts."""
    latest = time.monotonic() + arguments.seconds
    asked = {"device": arguments.device, "profile": arguments.profile, "fail_fast": True, **USUAL}
    with suppress(TimeoutError), lastbit.Judges(arguments.judges, **asked) as judges:
        for one, future in [(one, judges.judge(one.path, **one.question)) for one in files]:
            yield one, future.result(max(latest - time.monotonic(), 0))


def line(one: KnownFile, seen: FileVerdict) -> str:
    ran = sum(seen.cases.values())
    told = f"{seen.seconds:7.2f} s {seen.verdict:12} {ran:4}/{seen.planned:<4} {one.kind}: {one.name}"
    return f"{told}  {seen.reason[:150]}".rstrip()


def show(found: Sequence[tuple[KnownFile, FileVerdict]]) -> None:
    print("| files | verdicts | not as expected | median (s) | p95 (s) | longest (s) |\n|---|---|---|---|---|---|")
    for kind in dict.fromkeys([*(one.kind for one, _ in found), ""]):
        pairs = [(one, seen) for one, seen in found if kind in (one.kind, "")]
        seconds = sorted(seen.seconds for _, seen in pairs)
        counted = ", ".join(f"{count} {verdict}" for verdict, count in Counter(s.verdict for _, s in pairs).items())
        odd = ", ".join(one.name for one, seen in pairs if seen.verdict not in one.expected) or "none"
        p95 = seconds[min(len(seconds) - 1, round(0.95 * (len(seconds) - 1)))]
        times = f"{statistics.median(seconds):.2f} | {p95:.2f} | {seconds[-1]:.2f}"
        print(f"| {len(pairs)} {kind or 'in all'} | {counted} | {odd} | {times} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--judges", type=int, default=2)
    parser.add_argument("--profile", default="smoke")
    parser.add_argument("--each", action="store_true", help="show every file")
    parser.add_argument("--kinds", default="right,wrong,hostile")
    parser.add_argument("--seconds", type=float, default=1e6, help="that the files may take together")
    arguments = parser.parse_args()
    found, start = [], time.perf_counter()
    with TemporaryDirectory(prefix="judged-") as folder:
        for one, seen in judged(list(written_files(Path(folder), arguments.kinds.split(","))), arguments):
            found.append((one, seen))
            if arguments.each:
                print(line(one, seen), flush=True)
    print(f"{len(found)} files, {arguments.judges} judges, {time.perf_counter() - start:.1f} s with their start")
    show(found)


def written_files(folder: Path, kinds: Sequence[str]) -> Iterator[KnownFile]:
    for make in (right, wrong, hostile):
        if make.__name__ in kinds:
            (folder / make.__name__).mkdir()
            yield from make(folder / make.__name__)


if __name__ == "__main__":
    main()
