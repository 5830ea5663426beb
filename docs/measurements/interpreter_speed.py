"""Milliseconds per program of the project's Triton kernels: stock interpreter, lastbit at another commit, lastbit here.

Run `python docs/measurements/interpreter_speed.py [--base PATH] [--repeats 3] [--longest 20] [--kernel K]`; PATH is a
worktree of the other commit. It prints a table for interpreter.md. Each way has a process of its own; they take turns,
call by call. Counted is the processor time of a whole call of the kernel, the quickest of the repeats; *first* is the
first call with these shapes and constants, of which nothing was known. Where one call of the stock interpreter would
take more than `--longest` seconds, the figure is that of the smaller grid, and marked so.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WAYS = ("stock", "base", "here")
NORM = "x=bf16[{n},1024] weight=bf16[1024]"
EXPERTS = (
    "x=bf16[{t},{h}] expert_ids=int64[{t},2]:below_{e} routing_weights=fp32[{t},2]:uniform {more}"
    "gate_proj=bf16[{e},{i},{h}]:fan_in up_proj=bf16[{e},{i},{h}]:fan_in down_proj=bf16[{e},{h},{i}]:fan_in "
    "gate_lora_a=bf16[{e},8,{h}]:fan_in gate_lora_b=bf16[{e},{i},8]:fan_in up_lora_a=bf16[{e},8,{h}]:fan_in "
    "up_lora_b=bf16[{e},{i},8]:fan_in down_lora_a=bf16[{e},8,{i}]:fan_in down_lora_b=bf16[{e},{h},8]:fan_in "
    "scaling=2.0 seed=1"
)
SAVED = "grad_output=bf16[{t},{h}] saved_gate=bf16[{t},2,{i}] saved_up=bf16[{t},2,{i}] intermediate=bf16[{t},2,{i}] "


def experts(op: str, t: int, e: int, h: int, i: int) -> str:
    """Spell a case of `t` tokens, `e` experts, hidden size `h`, intermediate size `i`."""
    more = SAVED.format(t=t, h=h, i=i) if op == "moe_lora_backward" else ""
    return f"{op} {EXPERTS.format(t=t, e=e, h=h, i=i, more=more)}"


def _norms() -> dict[str, list[str]]:
    backward = [
        f"layer_norm_gated_backward x=bf16[{n},{w}] weight=bf16[{w}] dy=bf16[{n},{w}] "
        f"rstd=fp32[{n},{w // 1024}]:scale_random seed=1"
        for n, w in ((256, 1024), (1024, 4096))
    ]
    rms = f"rms_norm {NORM} residual=bf16[{{n}},1024] eps=1e-06 seed=1"
    gated = f"layer_norm_gated {NORM} bias=bf16[1024] z=bf16[{{n}},1024] eps=1e-06 seed=1"
    masks = "completion_mask ids=int64[{n},1024]:sequences_2 eos_ids=int64[2]:counting mask_truncated=True seed=1"
    lines = {
        "triton[native_multiply+rounded_sum]": rms,
        "triton[fp32_multiply+unrounded_sum]": rms,
        "triton[single_rounding]": gated,
        "triton[completion_mask]": masks,
    }
    drawn = {name: [line.format(n=n) for n in (64, 1024)] for name, line in lines.items()}
    return {**drawn, "triton[gated_backward]": backward, "triton[gated_backward+atomic]": backward}


def _experts() -> dict[str, list[str]]:
    """Spell cases of many experts that are narrow, as `verify` draws them, and of few that are wide."""
    return {
        "triton[moe_lora+fused]": [experts("moe_lora", 128, 64, 64, 64), experts("moe_lora", 2048, 1024, 64, 64)],
        "triton[moe_lora+fused] wide": [experts("moe_lora", 64, 8, 512, 512), experts("moe_lora", 256, 128, 128, 1024)],
        "triton[moe_lora_backward+fused]": [
            experts("moe_lora_backward", 32, 64, 64, 64),
            experts("moe_lora_backward", 512, 1024, 64, 64),
        ],
        "triton[moe_lora_backward+fused] wide": [
            experts("moe_lora_backward", 32, 8, 256, 256),
            experts("moe_lora_backward", 512, 8, 256, 256),
        ],
    }


CASES = {**_norms(), **_experts()}
"""Kernel, and a word where it has several → cases whose largest launch has about 64 and 1,024 programs."""


def work(way: str) -> None:
    """Answer lines of JSON: [kernel, case line] → seconds, programs, programs of the largest launch."""
    sys.path[:0] = [os.path.join(os.getcwd(), "harness", "checkout"), os.getcwd()]
    import torch
    from triton.runtime.interpreter import InterpreterBuilder

    from lastbit.case import parse_case
    from lastbit.inputs import build
    from lastbit.kernel import load_kernels

    if way != "stock":
        from lastbit.interpret import install

        install()
    torch.set_num_threads(1)
    launches: list[int] = []
    of_launch = InterpreterBuilder.set_grid_dim

    def set_grid_dim(self: Any, *sides: int) -> None:
        launches.append(torch.Size(sides).numel())
        of_launch(self, *sides)

    InterpreterBuilder.set_grid_dim = set_grid_dim
    kernels = {kernel.name: kernel for kernel in load_kernels(Path("kernels"))}
    answer(None)
    for line in sys.stdin:
        name, text = json.loads(line)
        case = parse_case(text)
        inputs = build(case, "cpu")
        launches.clear()
        start = time.process_time()
        try:
            kernels[name].call(**inputs.hand_out(), **case.params)
        except Exception as error:
            answer(f"raises {type(error.__cause__ or error).__name__}")
        else:
            answer([time.process_time() - start, sum(launches), max(launches)])


def answer(value: object) -> None:
    print(json.dumps(value), flush=True)


class WayProcess:
    """A process that runs kernels in one way, with the sources under `root`."""

    def __init__(self, way: str, root: Path) -> None:
        settings = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root / "harness" / "checkout")}
        command = [sys.executable, "-W", "ignore", __file__, "--work", way]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, cwd=root, env={**os.environ, **settings}, text=True, **pipes)
        self._answer()

    def ask(self, kernel: str, line: str) -> Any:
        """Return seconds, programs and the largest launch, or what was raised."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([kernel, line]) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


@dataclass
class Times:
    """Seconds of the calls of one kernel with one case, in one way."""

    seconds: list[float] = field(default_factory=list)
    programs: int = 0
    largest: int = 0
    note: str = ""

    def per_program(self, seconds: float) -> float:
        return 1e3 * seconds / max(1, self.programs)

    @property
    def again(self) -> float | None:
        """Milliseconds of the quickest call."""
        return self.per_program(min(self.seconds)) if self.seconds else None

    @property
    def first(self) -> float | None:
        return self.per_program(self.seconds[0]) if self.seconds else None


def measure(
    workers: dict[str, WayProcess], kernel: str, lines: Sequence[str], repeats: int, longest: float
) -> list[Any]:
    """Map every case to way → times."""
    rows: list[dict[str, Times]] = []
    for line in lines:
        times = {way: Times() for way in workers}
        for _ in range(repeats):
            for way in reversed(workers):  # the stock interpreter last: it needs the number of programs
                one = times[way]
                if one.note or (way == "stock" and one.seconds and min(one.seconds) > longest / 4):
                    continue
                if way == "stock" and rows and (before := rows[-1]["stock"].again) is not None:
                    programs = times["here"].programs
                    if before * programs / 1e3 > longest:
                        one.seconds, one.programs, one.note = [before * programs / 1e3], programs, "from 64"
                        continue
                found = workers[way].ask(kernel.partition(" ")[0], line)
                if isinstance(found, str):
                    one.note = found
                else:
                    one.seconds.append(found[0])
                    one.programs, one.largest = found[1:]
        rows.append(times)
    return rows


def show(kernel: str, times: dict[str, Times]) -> str:
    """Format a row of the table."""
    here, base, stock = times["here"], times.get("base", Times()), times["stock"]
    name, _, word = kernel.partition(" ")
    cells = [f"`{name}` {word}".strip(), f"{here.largest:,}", f"{here.programs:,}"]
    marked = f"{_ms(stock.again)}{' ¹' if stock.note == 'from 64' else ''}"
    cells += [stock.note if stock.note.startswith("raises") else marked]
    cells += [_ms(base.first), _ms(here.first), _ratio(base.first, here.first)]
    cells += [_ms(base.again), _ms(here.again), _ratio(base.again, here.again), _ratio(stock.again, here.again)]
    return f"| {' | '.join(cells)} |"


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _ratio(before: float | None, after: float | None) -> str:
    return "–" if before is None or not after else f"{before / after:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--longest", type=float, default=20.0)
    parser.add_argument("--kernel", action="append", default=[])
    parser.add_argument("--work", choices=WAYS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.work)
        return
    roots = {"stock": ROOT, "base": given.base, "here": ROOT}
    workers = {way: WayProcess(way, root) for way, root in roots.items() if root}
    print(
        "| kernel | largest launch | programs | stock "
        "| base, first | here, first | ratio | base | here | ratio | stock ÷ here |"
    )
    print(f"|{'---|' * 11}")
    for kernel, lines in CASES.items():
        if not given.kernel or kernel.partition(" ")[0] in given.kernel:
            for times in measure(workers, kernel, lines, given.repeats, given.longest):
                print(show(kernel, times), flush=True)
    print("\n¹ the figure of the smaller grid")


if __name__ == "__main__":
    main()
