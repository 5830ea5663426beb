"""Reports of `lastbit bench FILE`, as Markdown with a table per case, and as lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from lastbit.reports.bench import about_of, amount, heading
from lastbit.reports.markdown_text import bullets, code, plain, table
from lastbit.reports.speed import Roof, SpeedBound

_HEADERS = (
    *("kernel", "contract", "verdict", "time, at most", "nothing", "of it"),
    *("rate", "of the roof", "copied", "calls", "judged"),
)
_MEANING = (
    "**Time, at most**: seconds of a call, by the clock of the judge: from the message to go until it has read "
    "results in its own memory; median and quartiles of the calls. Each call has values of its own, in other memory, "
    "which the process gets when the call before is over. **Nothing**: the same of a kernel that does nothing, in a "
    "process of its own; **of it**: its share of the time. **Copied**: results that had to be copied to the judge's "
    "memory, which is part of the time. **Verdict**: of these calls; **judged**: how many, drawn after they were "
    "timed. **Of the roof**: "
    "the least time, by bytes at the rate of a copy or by FLOP at the rate of a large matrix product, over the time."
)


@dataclass(frozen=True)
class Bounds:
    """Time bounds of kernels from files, and of the kernels of the project beside them."""

    roof: Roof | None
    bounds: tuple[SpeedBound, ...]
    failed: tuple[str, ...]
    command: str
    environment: Mapping[str, str]


def as_jsonl(bench: Bounds) -> str:
    """Write one JSON object per kernel and case, which says by itself where and how it was taken."""
    about = {**about_of(bench.environment), "command": bench.command}
    roof = None if bench.roof is None else asdict(bench.roof)
    rows = (
        {**asdict(b), "overhead": b.overhead, "share": bench.roof and b.share(bench.roof), "roof": roof, **about}
        for b in bench.bounds
    )
    return "".join(f"{json.dumps(row, allow_nan=False)}\n" for row in rows)


def page(bench: Bounds) -> str:
    """Write the kernels as Markdown: a table per case, in the order in which they were timed."""
    blocks = ["# How fast a kernel is at least", heading(bench.command, bench.environment), _MEANING]
    for of in dict.fromkeys(b.of for b in bench.bounds):
        found = [b for b in bench.bounds if b.of == of]
        blocks += [f"## {code(of)}", table(_HEADERS, [list(_row(b, bench.roof)) for b in found], left=3)]
    wrong = [f"{b.kernel}: {b.why}" for b in bench.bounds if b.why]
    for what, texts in {"Wrong": wrong, "Not measured": bench.failed}.items():
        if texts:
            blocks += [f"## {what}", bullets([plain(text) for text in texts])]
    return "\n\n".join(blocks) + "\n"


def _row(b: SpeedBound, roof: Roof | None) -> Iterator[str]:
    yield from (plain(b.kernel), plain(b.contract), b.verdict)
    yield from (amount(b.time, "s"), amount(b.empty, "s"), f"{b.overhead:.0%}")
    yield amount(b.time.rate(b.flops or b.traffic), "FLOP/s" if b.flops else "B/s")
    yield "" if roof is None else f"{b.share(roof):.0%}"
    yield from (f"{b.copied:.0%}", str(b.time.count), str(b.judged))


def sentence(b: SpeedBound, roof: Roof | None) -> str:
    """Write a kernel on one line."""
    share = "" if roof is None else f", at least {b.share(roof):.0%} of the roof"
    return f"{b.kernel} {b.verdict}, at most {amount(b.time, 's')}, of which nothing takes {b.overhead:.0%}{share}"
