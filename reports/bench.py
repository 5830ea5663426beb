"""Result of `lastbit bench`: what lastbit costs, as Markdown with the ratios first, and as lines of JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import quantiles

from lastbit.reports.markdown_text import bullets, code, plain, table

VERIFIED = "verified case"
MEMORY = "peak memory"
BUSY = "device busy"
OPERATIONS = "device operations"
PARTS = "parts"
COMPARED = "comparing"
ASSERTED = "assert_contract"
RATE = "cases per second"

FIGURES = (VERIFIED, MEMORY, BUSY, OPERATIONS, PARTS, COMPARED, ASSERTED, RATE)


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
class Measurement:
    """A figure of something, beside what it is measured against.

    Attributes:
        figure: one of `FIGURES`.
        of: a case line, the name of an op or the shape of a tensor.
        what: what was measured; kernels by their names.
        unit: of both samples.
        against, base: what it is measured against, and that; empty and None where a number stands for itself.
    """

    figure: str
    of: str
    what: str
    unit: str
    value: Sample
    against: str = ""
    base: Sample | None = None

    @property
    def ratio(self) -> float | None:
        """The ratio of the value to the base; None without a base."""
        return self.value.median / self.base.median if self.base is not None and self.base.median else None


@dataclass(frozen=True)
class Bench:
    """All measurements of a run of the command.

    Attributes:
        failed: what could not be measured, with the reason.
        command: the command line.
        environment: versions and devices.
    """

    measurements: tuple[Measurement, ...]
    failed: tuple[str, ...]
    command: str
    environment: Mapping[str, str]


MEANINGS: Mapping[str, str] = {
    VERIFIED: "Wall time of `verify_case`, with every contract tried, over that of one call of the kernel. Of four "
    "calls one is on other values, which are judged too, and one without guards; most cases of a run have two. On an "
    "accelerator the call is timed by its events with a cold L2 cache (`triton.testing.do_bench`), on the CPU by the "
    "clock, on inputs that take turns.",
    MEMORY: "The most bytes of tensors on the device, inputs included, over those of the inputs. Not taken on the CPU.",
    BUSY: "Time of all operations on the device (`torch.profiler`) over the wall time of such a case without profiler.",
    OPERATIONS: "Kernels, copies and fills on the device in one verified case.",
    PARTS: "Where the time of one verified case goes. Every part waits for the device, so the whole takes longer than "
    "it does otherwise.",
    COMPARED: "Bytes that must be read (the tensor and the four parts of its enclosure, or both tensors) per second, "
    "over those that a copy reads and writes. Then the time on a tensor over that of `torch.testing.assert_close`.",
    ASSERTED: "Wall time over that of `torch.testing.assert_close` on the result and its clone.",
    RATE: "Warm cases per second, verified as a run does it, over those of plain tests on these shapes: random "
    "tensors, the kernel, an eager implementation, `assert_close`. A ratio of 0.1 is ten times the time.",
}
_ABOUT = ("device", "lastbit", "torch", "triton", "python")
_SCALES = {
    "s": (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)),
    "B": (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)),
    "B/s": (("GB/s", 1e9), ("MB/s", 1e6)),
    "FLOP": (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)),
    "FLOP/s": (("TFLOP/s", 1e12), ("GFLOP/s", 1e9), ("MFLOP/s", 1e6)),
}


def as_jsonl(bench: Bench) -> str:
    """Write one JSON object per measurement, which says by itself where and how it was taken."""
    about = {**about_of(bench.environment), "command": bench.command}
    rows = ({**asdict(m), "ratio": m.ratio, **about} for m in bench.measurements)
    return "".join(f"{json.dumps(row, allow_nan=False)}\n" for row in rows)


def about_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Collect date, device and versions of a run of the command."""
    device = environment.get("accelerators") or environment.get("devices", "")
    found = {**environment, "device": device, "date": time.strftime("%Y-%m-%d")}
    return {name: found[name] for name in ("date", *_ABOUT) if name in found}


def page(bench: Bench) -> str:
    """Write the measurements as Markdown: a table per figure."""
    blocks = ["# What verifying costs", heading(bench.command, bench.environment)]
    for figure in FIGURES:
        if found := [m for m in bench.measurements if m.figure == figure]:
            shown = _parts(found) if figure == PARTS else _table(found)
            blocks += [f"## {figure.capitalize()}", MEANINGS[figure], shown]
    if bench.failed:
        blocks += ["## Not measured", bullets([plain(text) for text in bench.failed])]
    return "\n\n".join(blocks) + "\n"


def heading(command: str, environment: Mapping[str, str]) -> str:
    """Write the first sentences of a page: the command, the environment, and how to read figures."""
    about = ", ".join(f"{name} {value}" for name, value in about_of(environment).items())
    return f"{code(command)}: {plain(about)}. Medians, quartiles in brackets."


def _table(found: Sequence[Measurement]) -> str:
    compared = any(m.base is not None for m in found)
    headers = ("ratio", "of", "what", "median", "against", "its median")
    rows = [[_ratio(m.ratio), code(short(m.of)), plain(m.what), *_bases(m)] for m in found]
    if compared:
        return table(headers, rows, left=len(headers))
    return table(headers[1:4], [row[1:4] for row in rows], left=len(headers))


def _bases(m: Measurement) -> Iterator[str]:
    yield amount(m.value, m.unit)
    yield plain(m.against)
    yield amount(m.base, m.unit) if m.base is not None else ""


def _parts(found: Sequence[Measurement]) -> str:
    """Write a table with a row per case: its seconds, and the share of each part."""
    parts = list(dict.fromkeys(m.what for m in found))
    rows = []
    for of in dict.fromkeys(m.of for m in found):
        own = {m.what: m for m in found if m.of == of}
        whole = next(iter(own.values())).base
        shares = [f"{own[part].ratio or 0:.0%}" if part in own else "" for part in parts]
        rows.append([code(short(of)), amount(whole, "s") if whole is not None else "", *shares])
    return table(("of", "seconds", *parts), rows, left=1)


def sentence(m: Measurement) -> str:
    """Write a measurement on one line."""
    beside = f", {m.ratio:.3g} × {m.against}: {amount(m.base, m.unit)}" if m.base is not None and m.ratio else ""
    return f"{short(m.of)}, {m.figure}: {m.what} {amount(m.value, m.unit)}{beside}"


def short(of: str) -> str:
    """Shorten a case line after its first tensor; other texts keep two words."""
    return " ".join(of.split()[:2])


def _ratio(ratio: float | None) -> str:
    if ratio is None:
        return ""
    return f"**{ratio:,.0f}**" if ratio >= 100 else f"**{ratio:.3g}**"


def amount(sample: Sample, unit: str) -> str:
    """Format `1.23 ms [1.20, 1.31]`, in the unit that suits the median."""
    scales = _SCALES.get(unit, ((unit, 1.0),))
    name, scale = next((s for s in scales if sample.median >= s[1]), scales[-1])
    low, median, high = (_number(value / scale) for value in (sample.low, sample.median, sample.high))
    spread = f" [{low}, {high}]" if sample.count > 1 else ""
    return f"{median} {name}{spread}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
