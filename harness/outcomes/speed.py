"""Speed of kernels, as data: the measurements of `lastbit bench kernels`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lastbit.outcomes.bench import Sample

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
