"""A folder of goldens beside the kernels of a plan: the contents of each file, missing ones, and those left over."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lastbit.case import Group
from lastbit.errors import LastbitError, UsageError
from lastbit.history.golden_check import asked_of, compare, lines_for, take, taken
from lastbit.history.golden_file import SUFFIX, Golden, path_of, read, write
from lastbit.history.golden_provenance import kind_of
from lastbit.reports.golden import REFUSED, KernelOutcome, Status
from lastbit.verify.check import Subject
from lastbit.verify.plan import Item
from lastbit.verify.worker import Tick, Watch, Workplace


@dataclass(frozen=True, eq=False)
class Target:
    """A kernel, its groups of cases, and the file of its golden."""

    subject: Subject
    groups: tuple[Group, ...]
    path: Path


@dataclass(frozen=True, eq=False)
class Proposal:
    """The outcome of a golden, and the one to take its place; without one, the file is to be removed."""

    outcome: KernelOutcome
    golden: Golden | None = None

    @property
    def open(self) -> bool:
        """Whether there is something to approve: a change, and nothing that is wrong."""
        return self.outcome.status not in REFUSED | {Status.SAME, Status.SKIPPED}


def targets(items: Iterable[Item], folder: Path) -> list[Target]:
    """Return the kernels of a plan with their files in `folder`."""
    groups: dict[str, list[Group]] = {}
    subjects: dict[str, Subject] = {}
    for item in items:
        name = item.subject.kernel.name
        subjects[name] = item.subject
        groups.setdefault(name, []).append(item.group)
    return [Target(subject, tuple(groups[name]), path_of(name, folder)) for name, subject in subjects.items()]


def load(path: Path, kernel: str, kind: str) -> Golden:
    """Load the golden of a kernel on a kind of device.

    Raises:
        LastbitError: the file cannot be read, or holds what belongs elsewhere.
    """
    golden = read(path)
    if (golden.kernel, golden.kind) != (kernel, kind):
        raise LastbitError(
            f"golden {path} is of {golden.kernel!r} on {golden.kind}, and its place is that of {kernel!r} on {kind}; "
            "move it to where it belongs"
        )
    return golden


def lines_elsewhere(target: Target) -> list[str]:
    """Return the cases of the kernel's goldens on other kinds of device, so that a new one is comparable with them."""
    others = sorted(set(target.path.parent.parent.glob(f"*/{target.path.name}")) - {target.path})
    return list(dict.fromkeys(case.line for path in others for case in read(path).cases))


def held(target: Target, golden: Golden, *, watch: Watch, tick: Tick, anew: bool = False) -> Proposal:
    """Run the cases of a golden again and say what became of them.

    The properties that it had are asked for, or those of a new golden if the proposed one may have them `anew`.
    """
    asked = asked_of(target.subject, target.groups) if anew else golden.properties or {}
    today = take(target.subject, [case.line for case in golden.cases], watch=watch, tick=tick, asked=asked)
    return Proposal(compare(golden, today.golden, today, str(target.path)), today.golden)


def fresh(target: Target, lines: Iterable[str], *, watch: Watch, tick: Tick) -> Proposal:
    """Run cases of a kernel that has no golden."""
    asked = asked_of(target.subject, target.groups)
    today = take(target.subject, lines, watch=watch, tick=tick, asked=asked)
    return Proposal(taken(today, str(target.path)), today.golden)


def propose_held(place: Workplace, kernel: str, folder: Path, *, anew: bool = False) -> Proposal:
    """Run `held` for a kernel whose golden is in `folder`."""
    target = _target(place, kernel, folder)
    golden = load(target.path, kernel, kind_of(target.subject.device))
    return held(target, golden, watch=place.watch, tick=place.tick, anew=anew)


def propose_fresh(place: Workplace, kernel: str, folder: Path, *, drawn: int, most: int) -> Proposal:
    """Run `fresh` on the lines of the configuration, those of a golden elsewhere, or on generated cases."""
    target, config = _target(place, kernel, folder), place.config
    if config.lines:
        lines = [str(case) for group in target.groups for case in group.examples]
    else:
        chosen = lines_elsewhere(target)
        lines = chosen or lines_for(target.subject, target.groups, drawn=drawn, seed=config.seed, most=most)
    return fresh(target, lines, watch=place.watch, tick=place.tick)


def _target(place: Workplace, kernel: str, folder: Path) -> Target:
    return next(t for t in targets(place.plan.items, folder) if t.subject.kernel.name == kernel)


def settle(proposal: Proposal) -> None:
    """Write the proposed golden, or remove the file of one that has no case any more."""
    path = Path(proposal.outcome.path)
    if proposal.golden and proposal.golden.cases:
        write(proposal.golden, path.parent)
    else:
        path.unlink(missing_ok=True)


def left_over(folder: Path, known: Collection[Path], device: str) -> Iterator[KernelOutcome]:
    """Yield an outcome for each file of a folder that belongs to no kernel any more."""
    for path in sorted(set(folder.glob(f"*{SUFFIX}")) - set(known)):
        try:
            golden = read(path)
        except LastbitError as error:
            yield broken(path.stem, path, error)
        else:
            reason = f"no kernel of that name runs on {device} now"
            yield KernelOutcome(golden.kernel, str(path), (golden.contract, ""), own=Status.GONE, reason=reason)


def broken(kernel: str, path: Path, error: LastbitError) -> KernelOutcome:
    """Return the outcome of a golden that could not be read or written."""
    return KernelOutcome(kernel, str(path), own=Status.ERRORED, reason=str(error))


def difference(first: Path, second: Path) -> list[KernelOutcome]:
    """Compare two goldens, or two folders of them, side by side; nothing is run.

    Raises:
        UsageError: one is a file and the other a folder, or a folder holds no golden.
        LastbitError: a file is broken, or the two files are of different kernels.
    """
    left, right = _goldens(first), _goldens(second)
    if first.is_file() and second.is_file() and list(left) != list(right):
        raise UsageError(f"{first} is a golden of {next(iter(left))!r}, but {second} one of {next(iter(right))!r}")
    outcomes = []
    for kernel in {**left, **right}:
        if kernel in left and kernel in right:
            outcomes.append(compare(left[kernel], right[kernel], None, str(second)))
        else:
            status, place = (Status.GONE, first) if kernel in left else (Status.NEW, second)
            outcomes.append(KernelOutcome(kernel, str(place), own=status))
    return outcomes


def _goldens(place: Path) -> dict[str, Golden]:
    """Return the goldens of a file or a folder, by kernel."""
    if not place.is_dir():
        golden = read(place)
        return {golden.kernel: golden}
    if not (paths := sorted(place.glob(f"*{SUFFIX}"))):
        below = ", ".join(sorted(path.name for path in place.iterdir() if path.is_dir())) or "none"
        raise UsageError(f"{place} holds no golden; folders in it: {below}")
    return {golden.kernel: golden for golden in map(read, paths)}
