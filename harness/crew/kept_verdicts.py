"""Verdicts that are kept from run to run: a file for each, a compressed JSON object below `.lastbit/cache/verdicts`.

It has what its kernel was judged on; the hash of everything that the verdict depends on (`lastbit.verify.dependencies`)
names the file. A verdict counts if all of that agrees, also what the kernel's code has read. A file that is
damaged, cut off or of another lastbit is none. Files are written as a whole, so that runs may share the folder; those
that were not used for longest go when all together are larger than `MOST`.
"""

from __future__ import annotations

import functools
import gzip
import json
import os
import re
import sys
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lastbit.config import Config
from lastbit.crew.ledger import ItemOutcome
from lastbit.files import hash_of, replace_file, state_of
from lastbit.reports.encoding import decoded, encoded
from lastbit.result import CaseResult, Verdict
from lastbit.run import Power, Run, Undecidable, VerdictOrigin
from lastbit.verify.notes import Planned

# Arbitrary: a run of profile ci takes 2 MB here, for 96 kernels; one of profile nightly thirty times as much.
MOST = 500_000_000
"""Bytes that kept verdicts may take together."""

_DAMAGED = (OSError, EOFError, zlib.error, ValueError, TypeError, KeyError, RecursionError, AttributeError)
"""Errors of a file that is no kept verdict, whatever it holds."""

FRESH, CHANGED = "--fresh asks for it", "no verdict is kept on it as it is now"
"""Why a kernel is judged, where nothing has changed."""

Subject = tuple[str, str]


@dataclass(frozen=True)
class KeptVerdict:
    """Everything that a run knows of a kernel on a device, which has PASSED.

    Attributes:
        run: name of the run that judged it.
        results: item → its results.
        stages: what was found of its stages, and `taken` the branches that its calls took, as workers tell them.
    """

    run: str
    results: Mapping[str, tuple[CaseResult, ...]]
    power: tuple[Power, ...] = ()
    undecidable: tuple[Undecidable, ...] = ()
    stages: tuple[str, ...] = ()
    taken: tuple[Any, ...] = ()


@dataclass
class _Judged:
    """A kernel on a device of this run.

    Attributes:
        depends: what its verdict depends on, as far as is known before it is called.
        items: those that run.
        why: why it is judged; empty if a kept verdict counts.
        reads, beyond, read_in: what its code has read, what of that is not known, and the items that told it.
    """

    depends: Mapping[str, str]
    items: Mapping[str, str]
    why: str = ""
    reads: dict[str, str] = field(default_factory=dict)
    beyond: dict[str, None] = field(default_factory=dict)
    read_in: set[str] = field(default_factory=set)


class KeptVerdicts:
    """The verdicts that are kept of a configuration's kernels, from before and for later.

    Attributes:
        verdicts: those that count in this run.
    """

    def __init__(self, config: Config) -> None:
        self._folder, self._fresh, name = Path(config.kept), config.fresh, Path(config.folder).name
        dated = re.match(r"\d{8}-\d{6}-", name)  # as the folders of runs are called unless they are told otherwise
        self._run = name if dated else f"{name} of {time.strftime('%Y-%m-%d %H:%M')}"
        self._keeps = config.keeps
        self._judged: dict[Subject, _Judged] = {}
        self._of_item: dict[str, Subject] = {}
        self.verdicts: dict[Subject, KeptVerdict] = {}
        self._state_of: Callable[[str], str] = functools.cache(state_of)

    def known(
        self, told: Sequence[Mapping[str, Any]], items: Sequence[Planned], selected: Collection[str] | None
    ) -> dict[int, ItemOutcome]:
        """Return the outcomes of items whose kernel has a verdict that counts, by the places of these.

        An actor has `told` what verdicts depend on, and these items alone run.
        """
        if not self._keeps:
            return {}
        places = {item.id: place for place, item in enumerate(items) if selected is None or item.id in selected}
        outcomes: dict[int, ItemOutcome] = {}
        for one in told:
            subject = one["kernel"], one["device"]
            if not (own := {item: cases for item, cases in one["items"].items() if item in places}):
                continue
            judged = self._judged[subject] = _Judged(one["depends"] | {"its cases": hash_of(sorted(own.items()))}, own)
            self._of_item |= dict.fromkeys(own, subject)
            if isinstance(found := self._found(subject, judged), str):
                judged.why = found
                continue
            self.verdicts[subject] = found
            outcomes |= {places[item]: ItemOutcome(found.results[item]) for item in own}
        return outcomes

    def _found(self, subject: Subject, judged: _Judged) -> KeptVerdict | str:
        """Return the kept verdict on a kernel, or why it has to be judged."""
        if self._fresh:
            return FRESH
        path = self._path(subject, judged)
        if not path.exists():
            return CHANGED
        try:
            read = _read(path)
            for file, state in read["reads"].items():
                if self._state_of(file) != state:
                    return f"{file}, which it reads, has changed"
            found = KeptVerdict(
                run=decoded(str, read["run"]),
                results={item: decoded(tuple[CaseResult, ...], read["results"][item]) for item in judged.items},
                power=decoded(tuple[Power, ...], read["power"]),
                undecidable=decoded(tuple[Undecidable, ...], read["undecidable"]),
                stages=decoded(tuple[str, ...], read["stages"]),
                taken=tuple(read["taken"]),
            )
        except _DAMAGED as error:
            return f"what is kept of it is damaged ({type(error).__name__}: {error})"
        with suppress(OSError):  # it was used, and is not among the first to go
            os.utime(path)
        return found

    def _path(self, subject: Subject, judged: _Judged) -> Path:
        return self._folder / f"{hash_of(subject)}-{hash_of(sorted(judged.depends.items()))}.json.gz"

    def hear(self, item: str, reads: Mapping[str, str], beyond: Sequence[str]) -> None:
        """Take note of what the code of an item's kernel has read, and of why that is not known."""
        judged = self._judged[self._of_item[item]]
        for path, state in reads.items():
            if judged.reads.setdefault(path, state) != state:
                judged.beyond[f"reads {path}, which changed during the run"] = None
        judged.beyond |= dict.fromkeys(beyond)
        judged.read_in.add(item)

    def over(
        self, run: Run, outcomes: Mapping[str, ItemOutcome], taken: Sequence[tuple[str, Any]], stages: Sequence[str]
    ) -> Run:
        """Keep the verdicts of kernels that have PASSED, and say in the run where each verdict is from."""
        origins, new = [], []
        for subject in run.subjects():
            if subject in self.verdicts:
                origins.append(VerdictOrigin(*subject, run=self.verdicts[subject].run))
            elif (judged := self._judged.get(subject)) is not None:
                why = judged.why
                if run.verdict(*subject) is Verdict.PASSED and not run.broken:
                    found = self._made(run, subject, judged, outcomes, taken, stages)
                    if isinstance(found, str):
                        why += f"; not kept, since it {found}"
                    else:
                        new.append((self._path(subject, judged), judged, found))
                origins.append(VerdictOrigin(*subject, why=why.replace(f"{Path.cwd()}{os.sep}", "")))
        if new and (hindered := self._keep(new)):
            print(f"lastbit: {hindered}", file=sys.stderr)
        return replace(run, origins=tuple(origins))

    def _made(
        self,
        run: Run,
        subject: Subject,
        judged: _Judged,
        outcomes: Mapping[str, ItemOutcome],
        taken: Sequence[tuple[str, Any]],
        stages: Sequence[str],
    ) -> KeptVerdict | str:
        """Return the verdict on a kernel of this run to be kept, or why it cannot be."""
        if judged.beyond:
            return "; ".join(judged.beyond)
        own = {item: outcomes[item] for item in judged.items if item in outcomes}
        if own.keys() != judged.items.keys() or judged.read_in != own.keys():
            return "lost a process, and what that had read is not known"
        branches = [found for kernel, found in taken if kernel == subject[0]]
        if None in branches:
            return "ran where somebody else watches its branches"
        return KeptVerdict(
            run=self._run,
            results={item: outcome.results for item, outcome in own.items()},
            power=tuple(one for one in run.power if (one.kernel, one.device) == subject),
            undecidable=tuple(one for one in run.undecidable if (one.kernel, one.device) == subject),
            stages=tuple(text for text in dict.fromkeys(stages) if _subject_of(text) == subject),
            taken=tuple(sorted({tuple(one) for found in branches for one in found})),
        )

    def _keep(self, new: Sequence[tuple[Path, _Judged, KeptVerdict]]) -> str:
        """Write verdicts; say what hinders, if something does."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / ".gitignore").write_text("*\n")
            for path, judged, verdict in new:
                told = {**encoded(verdict), "reads": judged.reads}
                data = gzip.compress(json.dumps(told, allow_nan=False).encode(), 1)
                replace_file(path, functools.partial(Path.write_bytes, data=data))
            self._make_room()
        except OSError as error:
            return f"verdicts cannot be kept in {self._folder}: {error.strerror or error}"
        return ""

    def _make_room(self) -> None:
        size = 0
        for about, path in sorted(_files(self._folder), key=lambda one: one[0].st_mtime, reverse=True):
            size += about.st_size
            if size > MOST:
                path.unlink(missing_ok=True)


def _files(folder: Path) -> Iterator[tuple[os.stat_result, Path]]:
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # another run makes room, too
            yield path.stat(), path


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(gzip.decompress(path.read_bytes())))


def _subject_of(stages: str) -> Subject | None:
    """Return whose stages a line tells; None of one that was cut off."""
    with suppress(ValueError, TypeError, KeyError):
        told = json.loads(stages)
        return told["kernel"], told["device"]
    return None
