"""Results of `lastbit bench`, as Markdown and as lines of JSON: how fast kernels are."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import quantiles
from typing import Any

from lastbit.reports.markdown import bullets, code, plain, table


@dataclass(frozen=True)
class Sample:
    """Quartiles of what was measured `count` times."""

    low: float
    median: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Sample:
        """Compute the quartiles of at least one value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        low, median, high = quantiles(values, method="inclusive")
        return cls(low, median, high, len(values))

    def rate(self, amount: float) -> Sample:
        """Convert the seconds that an amount took into amounts per second."""
        return Sample(amount / self.high, amount / self.median, amount / self.low, self.count)


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


_ABOUT = ("device", "lastbit", "torch", "triton", "python")


@dataclass
class Bench:
    """The measurements of a run of the command so far.

    Attributes:
        failed: what could not be measured, with the reason.
        environment: versions and devices.
        roof: None if it could not be measured, or nothing is held against it.
        left_out: kernels that take no case, with the reason.
    """

    found: list[Any]
    failed: list[str]
    command: str
    environment: Mapping[str, str]
    roof: Roof | None = None
    left_out: list[str] = field(default_factory=list)

    def by_case(self) -> Iterator[tuple[str, list[Any]]]:
        """Yield each case with what was measured on it, in order."""
        for of in dict.fromkeys(one.of for one in self.found):
            yield of, [one for one in self.found if one.of == of]

    @property
    def about(self) -> dict[str, str]:
        """Date, device and versions of a run of the command."""
        device = self.environment.get("accelerators") or self.environment.get("devices", "")
        found = {**self.environment, "device": device, "date": time.strftime("%Y-%m-%d")}
        return {name: found[name] for name in ("date", *_ABOUT) if name in found}

    @property
    def page(self) -> str:
        """Markdown: a table per figure or case."""
        raise NotImplementedError

    @property
    def jsonl(self) -> str:
        """One JSON object per measurement, which says by itself where and how it was taken."""
        about = {**self.about, "command": self.command}
        rows = ({**asdict(one), **one.concluded(self.roof), **about} for one in self.found)
        return "".join(f"{json.dumps(row, allow_nan=False)}\n" for row in rows)

    def _page(self, heading: str, blocks: Iterable[str], wrong: Sequence[str] = ()) -> str:
        """Write a page: the command, the environment, and how to read figures; then the blocks, and what is lacking."""
        about = ", ".join(f"{name} {value}" for name, value in self.about.items())
        found = [f"# {heading}", f"{code(self.command)}: {plain(about)}. Medians, quartiles in brackets.", *blocks]
        for what, texts in {"Wrong": wrong, "Left out": self.left_out, "Not measured": self.failed}.items():
            if texts:
                found += [f"## {what}", bullets([plain(text) for text in texts])]
        return "\n\n".join(found) + "\n"


_SCALES = {
    "s": (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)),
    "B": (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)),
    "B/s": (("GB/s", 1e9), ("MB/s", 1e6)),
    "FLOP": (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)),
    "FLOP/s": (("TFLOP/s", 1e12), ("GFLOP/s", 1e9), ("MFLOP/s", 1e6)),
}


def short(of: str) -> str:
    """Shorten a case line after its first tensor; other texts keep two words."""
    return " ".join(of.split()[:2])


def amount(sample: Sample, unit: str) -> str:
    """Format `1.23 ms [1.20, 1.31]`, in the unit that suits the median."""
    scales = _SCALES.get(unit, ((unit, 1.0),))
    name, scale = next((s for s in scales if sample.median >= s[1]), scales[-1])
    scaled = (value / scale for value in (sample.low, sample.median, sample.high))
    low, median, high = (f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in scaled)
    spread = f" [{low}, {high}]" if sample.count > 1 else ""
    return f"{median} {name}{spread}"


def amount_of(value: float, unit: str) -> str:
    """Format one value, in the unit that suits it."""
    return amount(Sample.of([value]), unit)


# How fast kernels are

GRAPH = "graph"
EVENTS = "events"
CLOCK = "clock"


class _BelowRoof:
    """A time on a case that is held against the roof of the device."""

    time: Sample
    traffic: int
    flops: int

    def share(self, roof: Roof) -> float:
        """Divide the least time that the device can take by the time."""
        return max(roof.bounds(self.traffic, self.flops)) / self.time.median

    def concluded(self, roof: Roof | None) -> dict[str, Any]:
        """Return what a record has besides."""
        return {"share": roof and self.share(roof), "roof": roof and asdict(roof)}


@dataclass(frozen=True)
class Speed(_BelowRoof):
    """A kernel on a case.

    Attributes:
        verdict, why: that on the case, or on `judged` where that is not empty; what is wrong first, if anything is.
        judged: a smaller case of the op, in place of one that is too large to be judged.
        apart: where `judged` is not empty, the norm of the difference from the results of the first kernel of the case
            / the norm of these, of the result for which it is greatest; None for the first kernel itself.
        how: `GRAPH` for calls replayed without the host, `EVENTS` for single calls after a flush of the L2 cache,
            `CLOCK` for wall time on the CPU.
        time, host: seconds of a call, and those that the host takes to ask for it.
        launch: seconds that the host takes to launch a kernel with few arguments, measured right after.
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

    def concluded(self, roof: Roof | None) -> dict[str, Any]:
        """Return what a record has besides, and infinity and NaN as strings, since JSON has no numbers for them."""
        known = self.apart is None or math.isfinite(self.apart)
        return {"apart": self.apart if known else str(self.apart), **super().concluded(roof)}

    def sentence(self, roof: Roof | None) -> str:
        """Write the kernel on one line."""
        share = "" if roof is None else f", {self.share(roof):.0%} of the roof"
        time = f"{amount(self.time, 's')} by {self.how}{share}, host {amount(self.host, 's')}"
        return f"{short(self.of)}: {self.kernel} {self.verdict}, {time}"


_OF_SPEEDS = (
    *("kernel", "contract", "verdict", "time", "× its contract", "× all"),
    *("rate", "of the roof", "host", "× bare launch"),
)
_SPEEDS = (
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


class Speeds(Bench):
    """The speeds of kernels."""

    @property
    def page(self) -> str:
        """Markdown: a table per case, the fastest first."""
        blocks, roof = list[str](), self.roof
        if roof is not None:
            copy, matmul = amount(roof.copy, "B/s"), amount(roof.matmul, "FLOP/s")
            blocks.append(f"In the same run: a copy {copy}, read and written; a matrix product in bf16 {matmul}.")
        if used := [text for how, text in _HOW.items() if any(s.how == how for s in self.found)]:
            blocks.append(_SPEEDS.format(how="; ".join(used)))
        cases = dict(self.by_case())
        for of, found in cases.items():
            speeds = sorted(found, key=lambda s: s.time.median)
            rows = [_speed_row(s, speeds, roof) for s in speeds]
            about = _about_case(of, speeds, roof)
            blocks += [f"## {code(title(of, cases))}", about, table(_OF_SPEEDS, rows, left=3)]
        wrong = [f"{s.kernel}, {title(s.of, cases)}: {s.why}" for s in self.found if s.why]
        return self._page("How fast kernels are", blocks, wrong)


def _about_case(of: str, speeds: Sequence[Speed], roof: Roof | None) -> str:
    """Describe a case: its line, the traffic and FLOP of its roof, and the case that was judged in its place."""
    traffic, flops = speeds[0].traffic, max(s.flops for s in speeds)
    work = [amount_of(traffic, "B"), amount_of(flops, "FLOP")]
    if roof is not None:
        by_copy, by_matmul = (amount_of(seconds, "s") for seconds in roof.bounds(traffic, flops))
        work = [
            f"{work[0]}, {by_copy} at the rate of a copy",
            f"{work[1]}, {by_matmul} at the rate of a matrix product",
        ]
    sentences = [f"{code(of)}: {'; '.join(work if flops else work[:1])}"]
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


def _speed_row(s: Speed, speeds: Sequence[Speed], roof: Roof | None) -> list[str]:
    own = min(other.time.median for other in speeds if other.contract == s.contract)
    everyone = min(other.time.median for other in speeds)
    apart = "" if s.apart is None else f", {s.apart:.1e} apart"
    return [
        plain(s.kernel),
        plain(s.contract),
        f"{s.verdict} (smaller){apart}" if s.judged else s.verdict,
        amount(s.time, "s") + (f" ({EVENTS})" if s.how == EVENTS else ""),
        f"{s.time.median / own:.2f}",
        f"{s.time.median / everyone:.2f}",
        amount_of((s.flops or s.traffic) / s.time.median, "FLOP/s" if s.flops else "B/s"),
        "" if roof is None else f"{s.share(roof):.0%}",
        amount(s.host, "s"),
        f"{s.host.median / s.launch.median:.2f}",
    ]


# How fast a kernel is that nobody trusts


@dataclass(frozen=True)
class SpeedBound(_BelowRoof):
    """An upper bound of the time of a kernel that nobody trusts, on a case, by the clock of the judge.

    Attributes:
        of: the case line, whose seed stands for those that were drawn.
        kernel, contract: what was timed, and by which contract its results were judged.
        verdict, why: of the results of the timed calls; what is wrong first, if anything is.
        time: seconds from the message to go until the judge had results, of each call.
        empty: the same of a kernel that does nothing, in a process of its own.
        judged: calls whose results were judged; which, was drawn after they were timed.
        copied: share of the results that were copied to the judge's memory, within the time.
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

    def concluded(self, roof: Roof | None) -> dict[str, Any]:
        """Return what a record has besides."""
        return {"overhead": self.overhead, **super().concluded(roof)}


_OF_BOUNDS = (
    *("kernel", "contract", "verdict", "time, at most", "nothing", "of it"),
    *("rate", "of the roof", "copied", "calls", "judged"),
)
_BOUNDS = (
    "**Time, at most**: seconds of a call, by the clock of the judge: from the message to go until it has read "
    "results in its own memory; median and quartiles of the calls. Each call has values of its own, in other memory, "
    "which the process gets when the call before is over. **Nothing**: the same of a kernel that does nothing, in a "
    "process of its own; **of it**: its share of the time. **Copied**: results that had to be copied to the judge's "
    "memory, which is part of the time. **Verdict**: of these calls; **judged**: how many, drawn after they were "
    "timed. **Of the roof**: "
    "the least time, by bytes at the rate of a copy or by FLOP at the rate of a large matrix product, over the time."
)


class Bounds(Bench):
    """The speeds of kernels that nobody trusts, and of those beside them."""

    @property
    def page(self) -> str:
        """Markdown: a table per case, in the order in which they were timed."""
        blocks = [_BOUNDS]
        for of, found in self.by_case():
            rows = []
            for b in found:
                times = amount(b.time, "s"), amount(b.empty, "s"), f"{b.overhead:.0%}"
                rate = amount(b.time.rate(b.flops or b.traffic), "FLOP/s" if b.flops else "B/s")
                share = "" if self.roof is None else f"{b.share(self.roof):.0%}"
                counts = f"{b.copied:.0%}", str(b.time.count), str(b.judged)
                rows.append([plain(b.kernel), plain(b.contract), b.verdict, *times, rate, share, *counts])
            blocks += [f"## {code(of)}", table(_OF_BOUNDS, rows, left=3)]
        wrong = [f"{b.kernel}: {b.why}" for b in self.found if b.why]
        return self._page("How fast a kernel is at least", blocks, wrong)
