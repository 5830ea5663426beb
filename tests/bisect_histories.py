"""Random git histories in which one commit is the first bad one and some do not build; and results without a run."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bisect_demo import git

from lastbit.errors import LastbitError
from lastbit.history.bisection import Space
from lastbit.reports.bisection import BisectStep, Criterion, Mark, Point
from lastbit.result import CaseResult, Comparison, StageResult, Verdict

FAILS = Criterion("", "output")


def result(*, failed: bool, kernel: str = "norm", **figures: float) -> CaseResult:
    """Make a result with one stage of the given figures, as in `Comparison`."""
    seen = Comparison(**{"numel": 1000, "squared_exact": 1.0, **figures})  # type: ignore[arg-type]
    stage = StageResult("output", "bf16", True, seen, seen)
    verdict = Verdict.FAILED if failed else Verdict.PASSED
    return CaseResult(
        verdict, (stage,), case="case", op="op", kernel=kernel, contract="contract", device="cpu", dtypes="bf16"
    )


@dataclass(frozen=True)
class History:
    """Names of commits or versions from the oldest on, their parents, the first bad one, and which do not build."""

    names: list[str]
    parents: Mapping[str, list[str]]
    culprit: str
    unbuildable: frozenset[str]

    @property
    def bad(self) -> set[str]:
        """The culprit and everything that descends from it."""
        found = {self.culprit}
        for name in self.names:
            if found.intersection(self.parents[name]):
                found.add(name)
        return found

    def look(self, point: Point) -> CaseResult:
        if point.name in self.unbuildable:
            raise LastbitError("it does not build")
        return result(failed=point.name in self.bad)

    def ends(self, space: Space) -> tuple[BisectStep, BisectStep]:
        good, bad = space.point(space.good), space.point(space.bad)
        return BisectStep(good, Mark.GOOD, 1, self.look(good)), BisectStep(bad, Mark.BAD, 2, self.look(bad))


def line_of(count: int) -> list[list[int]]:
    """Draw the parents of each commit of a history without merges."""
    return [[i - 1] if i else [] for i in range(count)]


def with_merges(seed: int, count: int) -> list[list[int]]:
    """Draw the parents of each commit of a history that branches of up to three commits leave and come back to."""
    draw = random.Random(seed)
    parents: list[list[int]] = [[]]
    tip = 0
    while len(parents) < count:
        if count - len(parents) > 4 and draw.random() < 0.3:
            side = draw.randrange(max(0, tip - 4), tip + 1)
            for _ in range(draw.randrange(1, 4)):
                parents.append([side])
                side = len(parents) - 1
            parents.append([tip, side] if draw.random() < 0.8 else [side, tip])
        else:
            parents.append([tip])
        tip = len(parents) - 1
    return parents


def random_history(seed: int, names: list[str], shape: list[list[int]]) -> History:
    """Draw a culprit, and a tenth of the others that do not build, none of them next to it or an end."""
    draw = random.Random(seed)
    culprit = draw.randrange(1, len(names))
    near = {culprit, 0, len(names) - 1, *shape[culprit], *(i for i, own in enumerate(shape) if culprit in own)}
    far = [i for i in range(len(names)) if i not in near]
    unbuildable = draw.sample(far, min(len(far), len(names) // 10))
    parents = {name: [names[i] for i in own] for name, own in zip(names, shape, strict=True)}
    return History(names, parents, names[culprit], frozenset(names[i] for i in unbuildable))


def commit_all(folder: Path, shape: list[list[int]], *, kernels: str = "kernels") -> list[str]:
    """Make the commits of that shape in a new repository and return their hashes; each has another file of kernels."""
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=main")
    stream = []
    for i, parents in enumerate(shape):
        text = f"REVISION = {i}\n"
        stream += ["commit refs/heads/main", f"mark :{i + 1}", f"committer Test <test@localhost> {10**9 + i} +0000"]
        stream += ["data 6", f"c{i:05d}"]
        stream += [f"{'merge' if number else 'from'} :{p + 1}" for number, p in enumerate(parents)]
        stream += [f"M 100644 inline {kernels}/norms.py", f"data {len(text)}", text]
    marks = folder.with_name(f"{folder.name}.marks").resolve()
    git(folder, "fast-import", "--quiet", f"--export-marks={marks}", text="\n".join(stream))
    hashes = dict(line.split() for line in marks.read_text().splitlines())
    git(folder, "reset", "--quiet", "--hard", "main")
    return [hashes[f":{i + 1}"] for i in range(len(shape))]
