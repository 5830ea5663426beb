"""Results of `lastbit explain --stages`: the stage at which a kernel's error begins."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from lastbit.result import Comparison, Verdict
from lastbit.row_check import RowCheck


class StageKind(StrEnum):
    """The kind of fault at a stage, or its absence."""

    CLEAN = "clean"
    """Nothing: every element is possible, and every row explained."""
    LOCAL = "local"
    """It does not follow from the stages before it, and the results show it."""
    UNSEEN = "unseen"
    """It does not follow from the stages before it, but no result shows it."""
    MISSING = "missing"
    """Every stage follows from those before it, but the results do not follow from the inputs."""
    ROWS = "rows"
    """Every element is possible, but not every row: the elements of a row disagree about it."""


@dataclass(frozen=True)
class Handover:
    """The reference goes on from the kernel's own stages, up to and including one of them.

    Attributes:
        stage: the last stage that is the kernel's; empty where the reference begins with the inputs.
        dtype: its format under the contract.
        result: the kernel must return it; otherwise the kernel let it be seen.
        isolated: the stage against what follows from the kernel's own earlier stages.
        forward: all results, those up to the stage the kernel's and the others the reference's, against what follows
            from the inputs: the error that is there by this stage.
        error: the largest relative L2 error of those results.
        backward: elements of the kernel's later results that do not follow from there: what goes wrong after it.
    """

    stage: str
    dtype: str
    result: bool
    isolated: Comparison
    forward: Comparison
    error: float
    backward: int


@dataclass(frozen=True)
class Suspect:
    """A stage that, computed otherwise, would explain a kernel.

    Attributes:
        change: what would be otherwise, as in `rounded to bf16`.
        left: elements that it leaves unexplained.
        exact: the change is one other computation; otherwise it is room for error, which explains more easily.
    """

    stage: str
    change: str
    left: int
    exact: bool = True


@dataclass(frozen=True)
class StageSearch:
    """The first stage of a kernel that matters, on one case.

    Attributes:
        handovers: the one of the inputs, then one per stage that the kernel gave, in the order of the reference.
        stage: the first of these stages that is wrong; empty if none is.
        shown: the first with which the results become impossible; empty if none is.
        wrong: how many of its elements are, of how many.
        suspects: what would explain them, where the kernel shows no stage in between: those that explain most.
        rows: rows that one latent value explains.
        beside: what else is wrong with the kernel on this case, which no stage shows.
        notices: what is unusual about it and no fault.
        verdict: of the case as `lastbit verify` judges it.
        reason: why the kernel gave nothing that can be judged; empty if it did.
        idle: options of the contract that change nothing in the case.
    """

    kernel: str
    op: str
    contract: str
    case: str
    device: str
    verdict: Verdict
    reason: str = ""
    handovers: tuple[Handover, ...] = ()
    kind: StageKind = StageKind.CLEAN
    stage: str = ""
    shown: str = ""
    wrong: tuple[int, int] = (0, 0)
    suspects: tuple[Suspect, ...] = ()
    rows: RowCheck | None = None
    beside: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()

    @property
    def named(self) -> str:
        """The stage to look at: that of the first suspect which explains everything, or else the wrong one."""
        explaining = (suspect.stage for suspect in self.suspects if suspect.exact and not suspect.left)
        return next(explaining, self.stage)

    @property
    def exit_code(self) -> int:
        """0 nothing goes wrong, 1 something does, 2 the kernel raised, 3 it does not take the case."""
        if not self.handovers:
            return 3 if self.verdict in (Verdict.UNSUPPORTED, Verdict.SKIPPED) else 2
        return int(self.kind is not StageKind.CLEAN or bool(self.beside))
