"""Results of `lastbit bench kernels` and `bench FILE`: the speed of kernels, as Markdown and as lines of JSON."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from lastbit.reports.bench import Sample, about_of, amount, heading, short
from lastbit.reports.markdown_text import bullets, code, plain, table

GRAPH = "graph"
EVENTS = "events"
CLOCK = "clock"


@dataclass(frozen=True)
class Roof:
    """The device's best rates in this run: of a copy and of a matrix product.

    Attributes:
        copy: bytes that a copy of a large tensor reads and writes in a second, or its negation if that is faster.
        matmul: FLOP in a second of a large matrix product in bf16.
    """

    copy: Sample
    matmul: Sample

    def bounds(self, traffic: int, flops: int) -> tuple[float, float]:
        """Return the seconds of so many bytes at the rate of the copy, and of the FLOP at that of the product."""
        return traffic / self.copy.median, flops / self.matmul.median


@dataclass(frozen=True)
class Speed:
    """A kernel on a case.

    Attributes:
        of: the case line.
        verdict, why: that on the case, or on `judged` where that is not empty; what is wrong first, if anything is.
        judged: a smaller case of the op, in place of one that is too large to be judged.
        apart: where `judged` is not empty, the norm of the difference from the results of the first kernel of the case
            / the norm of these, of the result for which it is greatest; None for the first kernel itself.
        how: `GRAPH` for calls replayed without the host, `EVENTS` for single calls after a flush of the L2 cache,
            `CLOCK` for wall time on the CPU.
        time, host: seconds of a call, and those that the host takes to ask for it.
        launch: seconds that the host takes to launch a kernel with few arguments, measured right after.
        traffic: bytes of inputs and results.
        flops: that the op declares; 0 if it declares none.
    """

    of: str
    kernel: str
    contract: str
    verdict: str
    how: str
    time: Sample
    host: Sample
    launch: Sample
    traffic: int
    flops: int = 0
    why: str = ""
    judged: str = ""
    apart: float | None = None

    def share(self, roof: Roof) -> float:
        """Divide the least time that the device can take by the time."""
        return max(roof.bounds(self.traffic, self.flops)) / self.time.median


@dataclass(frozen=True)
class SpeedBound:
    """An upper bound of the time of a kernel that nobody trusts, on a case, by the clock of the judge.

    Attributes:
        of: the case line, whose seed stands for those that were drawn.
        kernel, contract: what was timed, and by which contract its results were judged.
        verdict, why: of the results of the timed calls; what is wrong first, if anything is.
        time: seconds from the message to go until the judge had results, of each call.
        empty: the same of a kernel that does nothing, in a process of its own.
        judged: calls whose results were judged; which, was drawn after they were timed.
        copied: share of the results that were copied to the judge's memory, within the time.
        traffic: bytes of inputs and results of a call.
        flops: that the op declares; 0 if it declares none.
    """

    of: str
    kernel: str
    contract: str
    verdict: str
    time: Sample
    empty: Sample
    judged: int
    copied: float
    traffic: int
    flops: int = 0
    why: str = ""

    @property
    def overhead(self) -> float:
        """The share of the time that a kernel which does nothing takes, too."""
        return self.empty.median / self.time.median

    def share(self, roof: Roof) -> float:
        """Divide the least time that the device can take by the time."""
        return max(roof.bounds(self.traffic, self.flops)) / self.time.median


@dataclass(frozen=True)
class Speeds:
    """All kernels of a run of the command.

    Attributes:
        roof: None if it could not be measured.
        left_out: kernels that take no case, with the reason.
        failed: what could not be measured, with the reason.
        command: the command line.
        environment: versions and devices.
    """

    roof: Roof | None
    speeds: tuple[Speed, ...]
    left_out: tuple[str, ...]
    failed: tuple[str, ...]
    command: str
    environment: Mapping[str, str]

    def by_case(self) -> Iterator[tuple[str, Sequence[Speed]]]:
        """Yield each case with its kernels, the fastest first."""
        for of in dict.fromkeys(speed.of for speed in self.speeds):
            yield of, sorted((s for s in self.speeds if s.of == of), key=lambda s: s.time.median)


_HEADERS = (
    *("kernel", "contract", "verdict", "time", "× its contract", "× all"),
    *("rate", "of the roof", "host", "× bare launch"),
)
_MEANING = (
    "**Time** of a call without the host: {how}. Calls take turns with tensors that together exceed the L2 cache, "
    "where 64 sets of them do. **× its contract** and **× all**: over that of the fastest kernel with the same "
    "contract, and of all. **Of the roof**: the least time, given by the bytes of inputs and results, each once, at "
    "the rate of a copy, or by FLOP at the rate of a large matrix product, whichever is more, over the time; both "
    "rates are of this run. **Host**: until a call returns, without waiting for the device; **× bare launch**: over "
    "that of a kernel with three arguments, launched right after. **Verdict**: of the "
    "contract on the same case, or where that is too large on a smaller one; then also how far the results are from "
    "those of the first kernel."
)
_HOW = {
    GRAPH: "calls captured in a CUDA graph",
    EVENTS: "where it says *events*, single calls after a flush of the L2 cache, because they wait for the device",
    CLOCK: "by the clock, on the CPU",
}


def as_jsonl(bench: Speeds) -> str:
    """Write one JSON object per kernel and case, which says by itself where and how it was taken."""
    about = {**about_of(bench.environment), "command": bench.command}
    roof = None if bench.roof is None else asdict(bench.roof)
    rows = (
        {**asdict(s), "apart": _numeral(s.apart), "share": bench.roof and s.share(bench.roof), "roof": roof, **about}
        for s in bench.speeds
    )
    return "".join(f"{json.dumps(row, allow_nan=False)}\n" for row in rows)


def _numeral(value: float | None) -> float | str | None:
    """Spell infinity and NaN as strings, since JSON has no numbers for them."""
    return value if value is None or math.isfinite(value) else str(value)


def page(bench: Speeds) -> str:
    """Write the kernels as Markdown: a table per case, the fastest first."""
    used = [text for how, text in _HOW.items() if any(s.how == how for s in bench.speeds)]
    blocks = ["# How fast kernels are", heading(bench.command, bench.environment)]
    if bench.roof is not None:
        blocks.append(_roof(bench.roof))
    if used:
        blocks.append(_MEANING.format(how="; ".join(used)))
    tables = dict(bench.by_case())
    for of, speeds in tables.items():
        blocks += [f"## {code(title(of, tables))}", _about_case(of, speeds, bench.roof), _table(speeds, bench.roof)]
    wrong = [f"{s.kernel}, {title(s.of, tables)}: {s.why}" for s in bench.speeds if s.why]
    for what, texts in {"Wrong": wrong, "Left out": bench.left_out, "Not measured": bench.failed}.items():
        if texts:
            blocks += [f"## {what}", bullets([plain(text) for text in texts])]
    return "\n\n".join(blocks) + "\n"


def _roof(roof: Roof) -> str:
    return (
        f"In the same run: a copy {amount(roof.copy, 'B/s')}, read and written; a matrix product in bf16 "
        f"{amount(roof.matmul, 'FLOP/s')}."
    )


def _about_case(of: str, speeds: Sequence[Speed], roof: Roof | None) -> str:
    """Describe a case: its line, the traffic and FLOP of its roof, and the case that was judged in its place."""
    traffic, flops = speeds[0].traffic, max(s.flops for s in speeds)
    by_copy, by_matmul = (None, None) if roof is None else roof.bounds(traffic, flops)
    work = [_work(traffic, "B", by_copy, "a copy")]
    if flops:
        work.append(_work(flops, "FLOP", by_matmul, "a matrix product"))
    sentences = [f"{code(of)}: {'; '.join(work)}"]
    sentences += [f"Judged on {code(judged)}" for judged in dict.fromkeys(s.judged for s in speeds) if judged]
    return ". ".join(sentences) + "."


def title(of: str, cases: Iterable[str]) -> str:
    """Shorten a case line to its first tensor, and add what tells it from the other `cases` with the same one.

    Of tensors that all of these have, the first that differs stands for all.
    """
    beside = [_words(other) for other in cases if short(other) == short(of)]
    everywhere = set.intersection(*(set(words) for words in beside))
    own = {name: word for name, word in _words(of).items() if any(words.get(name) != word for words in beside)}
    differing = [word for name, word in own.items() if name in everywhere][:1]
    return " ".join([short(of), *differing, *(word for name, word in own.items() if name not in everywhere)])


def _words(of: str) -> dict[str, str]:
    """Name → word of the tensors after the first and of the parameters, without layouts, regimes and the seed."""
    words = [re.split(r"(?<=\])[@+~:]", word)[0] for word in of.split()[2:]]
    return {word.partition("=")[0]: word for word in words if not word.startswith("seed=")}


def _work(value: float, unit: str, seconds: float | None, of: str) -> str:
    return _one(value, unit) + ("" if seconds is None else f", {_one(seconds, 's')} at the rate of {of}")


def _table(speeds: Sequence[Speed], roof: Roof | None) -> str:
    rows = [[plain(s.kernel), plain(s.contract), _verdict(s), *_figures(s, speeds, roof)] for s in speeds]
    return table(_HEADERS, rows, left=3)


def _verdict(s: Speed) -> str:
    if not s.judged:
        return s.verdict
    apart = "" if s.apart is None else f", {s.apart:.1e} apart"
    return f"{s.verdict} (smaller){apart}"


def _figures(s: Speed, speeds: Sequence[Speed], roof: Roof | None) -> Iterator[str]:
    own = min(other.time.median for other in speeds if other.contract == s.contract)
    everyone = min(other.time.median for other in speeds)
    yield amount(s.time, "s") + (f" ({EVENTS})" if s.how == EVENTS else "")
    yield f"{s.time.median / own:.2f}"
    yield f"{s.time.median / everyone:.2f}"
    yield _one((s.flops or s.traffic) / s.time.median, "FLOP/s" if s.flops else "B/s")
    yield "" if roof is None else f"{s.share(roof):.0%}"
    yield amount(s.host, "s")
    yield f"{s.host.median / s.launch.median:.2f}"


def _one(value: float, unit: str) -> str:
    return amount(Sample.of([value]), unit)


def sentence(s: Speed, roof: Roof | None) -> str:
    """Write a kernel on one line."""
    share = "" if roof is None else f", {s.share(roof):.0%} of the roof"
    return f"{short(s.of)}: {s.kernel} {s.verdict}, {amount(s.time, 's')} by {s.how}{share}, host {amount(s.host, 's')}"
