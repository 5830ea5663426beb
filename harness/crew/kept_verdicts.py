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
from collections.abc import Collection, Mapping, Sequence, Set
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

FRESH, CHANGED = "--fresh asks for it", "no verdict is kept on it as it is now"
"""Why a kernel is judged, where nothing has changed."""

Subject = tuple[str, str]


@dataclass(frozen=True)
class KeptVerdict:
    """Everything that a run knows of a kernel on a device, which has PASSED.

    Attributes:
        run: name of the run that judged it.
        reads: path → state of all that the kernel's code has read.
        results: item → its results.
        stages: what was found of its stages, and `taken` the branches that its calls took, as workers tell them.
    """

    run: str
    reads: Mapping[str, str]
    results: Mapping[str, tuple[CaseResult, ...]]
    power: tuple[Power, ...]
    undecidable: tuple[Undecidable, ...]
    stages: tuple[str, ...]
    taken: tuple[Any, ...]


@dataclass
class _Judged:
    """A kernel on a device of this run.

    Attributes:
        path: of its kept verdict, by all that this depends on as far as is known before the kernel is called.
        items: those that run, and `told` those that have told what its code has read.
        why: why it is judged.
        reads, beyond: what its code has read, and what of that is not known.
    """

    path: Path
    items: Set[str]
    why: str = ""
    reads: dict[str, str] = field(default_factory=dict)
    beyond: dict[str, None] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)


class KeptVerdicts:
    """The verdicts that are kept of a configuration's kernels, from before and for later.

    Attributes:
        verdicts: those that count in this run.
    """

    def __init__(self, config: Config) -> None:
        self._folder, self._keeps, self._fresh = Path(config.kept), config.keeps, config.fresh
        self._run = Path(config.folder).name
        if not re.match(r"\d{8}-\d{6}-", self._run):  # as the folders of runs are called unless they are told otherwise
            self._run += f" of {time.strftime('%Y-%m-%d %H:%M')}"
        self._judged: dict[Subject, _Judged] = {}
        self._of_item: dict[str, _Judged] = {}
        self.verdicts: dict[Subject, KeptVerdict] = {}
        self._state_of = functools.cache(state_of)

    def known(
        self, told: Sequence[Mapping[str, Any]], items: Sequence[Planned], selected: Collection[str] | None
    ) -> dict[int, ItemOutcome]:
        """Return the outcomes of items whose kernel has a verdict that counts, by the places of these.

        An actor has `told` what verdicts depend on, and these items alone run.
        """
        places = {item.id: place for place, item in enumerate(items) if selected is None or item.id in selected}
        outcomes: dict[int, ItemOutcome] = {}
        for one in told if self._keeps else ():
            subject = one["kernel"], one["device"]
            if own := {item: cases for item, cases in one["items"].items() if item in places}:
                depends = hash_of((sorted(one["depends"].items()), sorted(own.items())))
                judged = _Judged(self._folder / f"{hash_of(subject)}-{depends}.json.gz", own.keys())
                judged.why = FRESH if self._fresh else self._find(subject, judged)
                if judged.why:
                    self._judged[subject] = judged
                    self._of_item |= dict.fromkeys(own, judged)
                else:
                    results = self.verdicts[subject].results
                    outcomes |= {places[item]: ItemOutcome(results[item]) for item in own}
        return outcomes

    def _find(self, subject: Subject, judged: _Judged) -> str:
        """Take the kept verdict on a kernel, or return why it has to be judged."""
        if not judged.path.exists():
            return CHANGED
        try:
            read = json.loads(gzip.decompress(judged.path.read_bytes()))
            found = replace(decoded(KeptVerdict, {**read, "taken": []}), taken=tuple(read["taken"]))
            if found.results.keys() != judged.items:
                raise ValueError("it lacks results")
        except Exception as error:  # whatever it holds
            return f"what is kept of it is damaged ({type(error).__name__}: {error})"
        for file, state in found.reads.items():
            if self._state_of(file) != state:
                return f"{file}, which it reads, has changed"
        with suppress(OSError):  # it was used, and is not among the first to go
            os.utime(judged.path)
        self.verdicts[subject] = found
        return ""

    def hear(self, item: str, reads: Mapping[str, str], beyond: Sequence[str]) -> None:
        """Take note of what the code of an item's kernel has read, and of why that is not known."""
        judged = self._of_item[item]
        changed = (path for path, state in reads.items() if judged.reads.setdefault(path, state) != state)
        judged.beyond |= dict.fromkeys(f"reads {path}, which changed during the run" for path in changed)
        judged.beyond |= dict.fromkeys(beyond)
        judged.told.add(item)

    def over(
        self, run: Run, outcomes: Mapping[str, ItemOutcome], taken: Sequence[tuple[str, Any]], stages: Sequence[str]
    ) -> Run:
        """Keep the verdicts of kernels that have PASSED, and say in the run where each verdict is from."""
        origins, new = [], dict[Path, KeptVerdict]()
        for subject in run.subjects():
            if subject in self.verdicts:
                origins.append(VerdictOrigin(*subject, run=self.verdicts[subject].run))
            elif (judged := self._judged.get(subject)) is not None:
                why, branches = judged.why, [found for kernel, found in taken if kernel == subject[0]]
                results = {item: outcomes[item].results for item in judged.items if item in outcomes}
                if not judged.told == results.keys() == judged.items:
                    judged.beyond["lost a process, and what that had read is not known"] = None
                if None in branches:
                    judged.beyond["ran where somebody else watches its branches"] = None
                if run.verdict(*subject) is Verdict.PASSED and not run.broken:
                    if judged.beyond:
                        why += f"; not kept, since it {'; '.join(judged.beyond)}"
                    else:
                        new[judged.path] = KeptVerdict(
                            run=self._run,
                            reads=judged.reads,
                            results=results,
                            power=tuple(one for one in run.power if (one.kernel, one.device) == subject),
                            undecidable=tuple(one for one in run.undecidable if (one.kernel, one.device) == subject),
                            stages=tuple(text for text in dict.fromkeys(stages) if _subject_of(text) == subject),
                            taken=tuple(sorted({tuple(one) for found in branches for one in found})),
                        )
                origins.append(VerdictOrigin(*subject, why=why.replace(f"{Path.cwd()}{os.sep}", "")))
        if new:
            self._keep(new)
        return replace(run, origins=tuple(origins))

    def _keep(self, new: Mapping[Path, KeptVerdict]) -> None:
        """Write verdicts, and remove those that were not used for longest; say what hinders, if something does."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / ".gitignore").write_text("*\n")
            for path, verdict in new.items():
                data = gzip.compress(json.dumps(encoded(verdict), allow_nan=False).encode(), 1)
                replace_file(path, functools.partial(Path.write_bytes, data=data))
            size = 0
            with suppress(FileNotFoundError):  # another run makes room, too
                for path in sorted(self._folder.iterdir(), key=os.path.getmtime, reverse=True):
                    size += path.stat().st_size
                    if size > MOST:
                        path.unlink()
        except OSError as error:
            print(f"lastbit: verdicts cannot be kept in {self._folder}: {error.strerror or error}", file=sys.stderr)


def _subject_of(stages: str) -> Subject:
    """Return whose stages a line tells."""
    told = json.loads(stages)
    return told["kernel"], told["device"]
