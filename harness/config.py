"""Settings of a run, as data that every worker process reads from the run's folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lastbit.devices import DevicePlan
from lastbit.errors import UsageError, unknown
from lastbit.kernel import check_path

# Arbitrary: smoke shows that everything runs, ci is for each change, nightly for the night of an accelerator.
PROFILES: Mapping[str, int] = {"smoke": 2, "ci": 6, "nightly": 200}
"""Profile → cases that are designed or drawn per kernel and group, on average. A design may need more, and groups of
combinations have fewer: see `multiple` in `lastbit.verify.drawing`. A run that is `brief` has still fewer."""

# Arbitrary below where clocks overflow; whoever wants none is served by it.
LONGEST_TIMEOUT = 10_000_000
"""Seconds, almost four months; a clock of the system overflows beyond 292 years."""

# Arbitrary: longer than judging a case takes on a busy machine.
_SLACK = 60.0  # seconds after which the judge of a kernel in another process is taken to hang itself


@dataclass(frozen=True)
class Config:
    """The settings of one run.

    Attributes:
        folder: where configuration, logs and records of the run go.
        profile: one of `PROFILES`.
        device_plan: the devices, and why these; what the command line prints.
        ops, kernels: names to restrict the run to; empty for all.
        projects: folders with references/, cases/ or kernels/, besides the ones that lastbit brings.
        kernel_folders: files and folders of kernels; empty for those of lastbit and of the projects.
        revision: label of the revision that the kernels are of, which are then called `KERNEL@LABEL`.
        tree: the worktree of another revision, whose code its processes import; empty for the user's own.
        revisions: label → folder of another revision's kernels, which run beside these, in the same processes, as
            `KERNEL@LABEL`; they may import nothing of the repository but each other.
        site: folders of installed packages that come before those of this environment.
        lines: case lines to run instead of generated cases.
        seed: of the generated cases.
        random: the values of each case are of another seed, which nobody knows before it runs; a line tells which.
        cases: generated cases per kernel and group; None for the profile's number.
        timeout: seconds that one case may take, and each property of it.
        strict: notices fail a case.
        keep_going: a kernel that has failed runs its other cases all the same.
        sanitize: memory accesses are looked at, too: by compute-sanitizer on CUDA, for races where kernels are
            interpreted.
        isolate: kernels run in processes of their own.
        properties: names of the properties that alone are asked; lines are asked about these, and else about none.
        watched: installed packages in which the branches that kernels take are watched, too.
        plain: a file that declares no kernel has one of the only op, which claims no contract.
        kept: folder in which verdicts are kept from run to run; empty for none.
        fresh: all kernels are judged, whatever is kept.
    """

    folder: str
    profile: str = "ci"
    device_plan: DevicePlan = field(default_factory=DevicePlan)
    ops: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    projects: tuple[str, ...] = ()
    kernel_folders: tuple[str, ...] = ()
    revision: str = ""
    tree: str = ""
    revisions: Mapping[str, str] = field(default_factory=dict)
    site: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    seed: int = 0
    cases: int | None = None
    timeout: float = 120.0
    strict: bool = False
    keep_going: bool = False
    sanitize: bool = False
    random: bool = False
    isolate: bool = False
    properties: tuple[str, ...] = ()
    watched: tuple[str, ...] = ()
    plain: bool = False
    kept: str = ""
    fresh: bool = False

    def __post_init__(self) -> None:
        if self.profile not in PROFILES:
            raise unknown("profile", self.profile, PROFILES)
        if not 0 < self.timeout <= LONGEST_TIMEOUT:
            raise UsageError(
                f"timeout {self.timeout} must be a number of seconds above 0 and at most {LONGEST_TIMEOUT:,}"
            )
        if self.isolate and self.sanitize and any(kind != "cpu" for kind in self.device_plan.types):
            raise UsageError("--sanitize on an accelerator runs kernels where --isolate does not; give one of them")
        if self.cases is not None and self.cases < 0:
            raise UsageError(f"{self.cases} generated cases per group cannot be run; give 0 or more")

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the torch devices: `cpu`, `cuda:0`."""
        return self.device_plan.devices

    @property
    def cases_per_group(self) -> int:
        return PROFILES[self.profile] if self.cases is None else self.cases

    @property
    def limit(self) -> float:
        """Seconds that a case may take in the judge's process: more than in an isolated kernel's process."""
        return self.timeout + _SLACK * self.isolate

    @property
    def races(self) -> bool:
        """Return whether interpreted kernels are watched for races between programs."""
        return self.sanitize or self.profile == "nightly"

    @property
    def shares(self) -> bool:
        """Return whether kernels that are one function under several contracts share the cases of a group, and a kernel
        is looked at more closely in its novel items alone.

        Not where a reader says how many cases there are, where revisions are compared case by case, nor where kernels
        are not trusted, which would choose what is shared.
        """
        asked = self.profile == "nightly" or self.cases is not None
        return not (asked or self.isolate or self.random or self.revisions or self.revision or self.lines)

    @property
    def keeps(self) -> bool:
        """Return whether verdicts are kept, and those of earlier runs count.

        Not where a reader asks for cases, where values or memory differ each time, nor where kernels are not trusted,
        are of another revision, or have packages of their own.
        """
        anew = self.lines or self.random or self.sanitize or self.isolate
        return bool(self.kept) and not (anew or self.revision or self.tree or self.revisions or self.site)

    @property
    def brief(self) -> bool:
        """Return whether a run has as few cases as show each dtype and option, and kernels of an op share others."""
        return self.profile == "smoke" and self.shares

    @property
    def small(self) -> bool:
        """Cases are cut to what the interpreter runs in a moment: a CPU takes part, or a tool visits every access."""
        return "cpu" in self.devices or self.sanitize

    def check_places(self) -> None:
        """Raise `UsageError` if kernels or a project cannot be where they are said to be."""
        for path in self.kernel_folders:
            check_path(Path(path))
        for folder in self.projects:
            if not Path(folder).is_dir():
                raise UsageError(f"project folder {folder!r} does not exist or is not a folder")

    @property
    def anywhere(self) -> Config:
        """These settings for a process that has another working directory."""
        return replace(
            self,
            folder=os.path.abspath(self.folder),
            kernel_folders=tuple(map(os.path.abspath, self.kernel_folders)),
            projects=tuple(map(os.path.abspath, self.projects)),
            kept=self.kept and os.path.abspath(self.kept),
        )

    def save(self) -> Path:
        """Write the settings into the run's folder and return the file."""
        path = Path(self.folder) / "config.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1))
        return path

    @classmethod
    def load(cls, path: Path) -> Config:
        """Load the settings that `save` wrote."""
        fields = _with_tuples(json.loads(path.read_text()))
        return cls(**{**fields, "device_plan": DevicePlan(**_with_tuples(fields["device_plan"]))})


def _with_tuples(loaded: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(v) if isinstance(v, list) else v for name, v in loaded.items()}
