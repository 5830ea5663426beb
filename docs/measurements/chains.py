"""All-reduce, residual add and RMSNorm on two GPUs: the unfused path, a fused kernel, and one that rounds once less.

    PYTHONPATH=harness/checkout python docs/measurements/chains.py [--backend gloo] [--out FILE]

Two processes of torch.distributed, by NCCL with NVLink multicast switched off, or by gloo on the CPU. Each way is held
to the unfused chain in fp32_sum+native_multiply+rounded_sum, and its contract is looked for besides.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from lastbit.reports.identification import kept
from tests.chain_ranks import WAYS, Results, contracts_of, judged, results_of

WIDTHS = {"cuda": ((1, 7168), (8, 4096)), "cpu": ((1, 2048), (8, 1024))}
"""Rows and columns of the cases; contracts are looked for in the first one."""


def lines_of(device: torch.device) -> list[str]:
    """Spell a case of each size with a residual, and of the last one without."""
    found = []
    for seed, (rows, width) in enumerate(WIDTHS[device.type]):
        x = f"all_reduce_rms_norm x=bf16[{rows},{width}] peer_1=bf16[{rows},{width}] weight=bf16[{width}]"
        found.append(f"{x} residual=bf16[{rows},{width}] eps=1e-06 seed={seed}")
    return [*found, f"{x} eps=1e-06 seed={len(found)}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--out", type=Path, help="write there, too")
    options = parser.parse_args()
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    began = time.perf_counter()
    device = torch.device("cpu" if options.backend == "gloo" else "cuda:0")
    with TemporaryDirectory() as folder:
        ranks = results_of(2, options.backend, lines_of(device), Path(folder))
    with options.out.open("w", encoding="utf-8") if options.out else nullcontext() as out:
        for text in said(ranks, device, options.backend):
            for stream in filter(None, (sys.stdout, out)):
                print(text, file=stream, flush=True)
    print(f"{time.perf_counter() - began:.0f} s in all")


def said(ranks: list[dict[str, list[Results]]], device: torch.device, backend: str) -> Iterator[str]:
    """Yield a few lines for each way: the verdict on each case, elements outside by stage, and what it keeps."""
    lines = lines_of(device)
    name = torch.cuda.get_device_name(0) if device.type == "cuda" else "CPU"
    yield f"2 ranks, {backend}, {name}, torch {torch.__version__}"
    for way, function in WAYS.items():
        yield f"{way}: {(function.__doc__ or '').strip()}"
        for line, results in zip(lines, ranks[0][way], strict=True):
            yield f"  {_verdict(line, results, device)}"
        found = contracts_of(lines[:1], ranks[0][way][:1], device)
        yield f"  keeps {kept(found)}"
        apart = [_unequal(a, b) for a, b in zip(ranks[0]["unfused"], ranks[0][way], strict=True)]
        yield f"  elements that differ from the unfused path, by case: {', '.join(f'{n:,}' for n in apart)}"
        between = sum(_unequal(a, b) for a, b in zip(*(rank[way] for rank in ranks), strict=True))
        yield f"  elements that differ between the ranks: {between:,}"


def _verdict(line: str, results: Results, device: torch.device) -> str:
    judgement = judged(line, results, device)
    counts = ((s.name, s.cumulative) for s in judgement.stages if s.result)
    outside = ", ".join(f"{name} {c.outside:,} of {c.numel:,}" for name, c in counts)
    return f"{judgement.verdict}  outside: {outside}  {line}"


def _unequal(one: Results, other: Results) -> int:
    return sum(int((one[name] != other[name]).sum()) for name in one)


if __name__ == "__main__":
    main()
