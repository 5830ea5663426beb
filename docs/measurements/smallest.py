"""How small the tensors are on which planted faults still fail, in kernels that store no stages.

    PYTHONPATH=harness/checkout TRITON_INTERPRET=1 python docs/measurements/smallest.py FOUND.jsonl [--seconds S]
        [--part K/N]
    PYTHONPATH=harness/checkout TRITON_INTERPRET=1 python docs/measurements/smallest.py FOUND.jsonl --again

The first finds and adds a line per fault; the second runs each case once more, in a fresh process each, and prints the
table of smallest.md. Several processes at once take a part each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from lastbit.case import Case, parse_case
from lastbit.result import BAD
from lastbit.shrinking.smallest import smallest
from lastbit.verify.check import verify_case
from lastbit.verify.worker import prepare

CPU = torch.device("cpu")
CASES = 8
OF_ELEMENTS = ("normalized", "inv_rms", "rstd", "product", "quantized", "scale", "residual_sum", "gate", "affine")
OF_ELEMENTS += (
    "gated_input",
    "dgated_input",
    "daffine",
    "is_eos",
    "mask",
    "intermediate",
    "dz",
    "grad_gate",
    "grad_up",
)
"""Stages of which an element follows from few others; all others are sums of products, or count."""

Found = Mapping[str, Any]


def search(first: int, step: int, seconds: float, known: Iterable[str]) -> Iterator[Found]:
    """Search smallest tensors for the faults that can be seen: for one of so many, from the first on."""
    from tests.faults.catalogue import FAULTS

    for fault in [fault for fault in FAULTS if not fault.equivalent][first::step]:
        if str(fault) not in known:
            yield {"fault": str(fault), "op": fault.op, "stage": fault.exposed, **found(fault, seconds)}


def found(fault: Any, seconds: float) -> Found:
    from tests.faults.hunt import cases_for, hunt, subject_of, without_stages
    from tests.faults.plant import planted

    tries = 0

    @contextmanager
    def counted(case: object) -> Iterator[None]:
        nonlocal tries
        tries += 1
        yield

    with planted(fault) as kernel:
        hidden = without_stages(kernel)
        cases = cases_for(fault, fault.dtypes[0], CASES)
        sighting = hunt(hidden, cases, CPU)
        if sighting is None:
            return {"case": ""}
        case, began = parse_case(sighting.result.case), time.monotonic()
        small = smallest(subject_of(hidden, CPU), case, watch=counted, seconds=seconds)
    took = time.monotonic() - began
    return {"case": str(case), "way": sighting.result.way, "smallest": str(small or ""), "tries": tries, "s": took}


def again(one: Found) -> bool:
    """Return whether the case fails by itself, with all calls."""
    prepare(CPU)
    from tests.faults.catalogue import FAULTS
    from tests.faults.hunt import subject_of, without_stages
    from tests.faults.plant import planted

    fault = next(fault for fault in FAULTS if str(fault) == one["fault"])
    with planted(fault) as kernel:
        result = verify_case(subject_of(without_stages(kernel), CPU), parse_case(one["smallest"]), settled=None)
    return result.verdict in BAD


def elements(case: Case) -> int:
    return sum(tensor.numel for tensor in case.tensors)


def table(all_found: Iterable[Found]) -> Iterator[str]:
    seen = [one for one in all_found if one["case"]]
    yield "| op | faults | found | elements, median | per tensor | ≤ 8 | ≤ 64 | tries | seconds | fails by itself |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for op in dict.fromkeys(one["op"] for one in seen):
        yield row(op, [one for one in seen if one["op"] == op])
    of_elements = [one for one in seen if one["stage"].split(" or ")[0] in OF_ELEMENTS]
    yield row("of elements", of_elements)
    yield row("of sums", [one for one in seen if one not in of_elements])


def row(label: str, seen: list[Found]) -> str:
    small = [one for one in seen if one["smallest"]]
    cases = [parse_case(one["smallest"]) for one in small]
    sizes = [elements(case) for case in cases]
    per = [size / len(case.tensors) for size, case in zip(sizes, cases, strict=True)]
    shares = (f"{sum(size <= most for size in sizes) / len(seen):.0%}" for most in (8, 64))
    medians = (f"{statistics.median(one[what] for one in small):.0f}" for what in ("tries", "s"))
    middle = f"{statistics.median(sizes):g} | {statistics.median(per):.1f}"
    with ProcessPoolExecutor(None, get_context("spawn"), max_tasks_per_child=1) as pool:
        fails = f"{sum(pool.map(again, small))}"
    return (
        f"| {label} | {len(seen)} | {len(small)} | {middle} | {' | '.join(shares)} | {' | '.join(medians)} | {fails} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--part", default="0/1", metavar="K/N", help="every Nth fault, from number K on")
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args()
    prepare(CPU)
    before = [json.loads(line) for line in options.file.read_text().splitlines()] if options.file.exists() else []
    if options.again:
        print("\n".join(table(before)))
        return
    first, step = map(int, options.part.split("/"))
    for one in search(first, step, options.seconds, {one["fault"] for one in before}):
        with options.file.open("a") as file:
            file.write(json.dumps(one) + "\n")


if __name__ == "__main__":
    main()
