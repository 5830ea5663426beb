"""The line that is wrong in a kernel that failed, looked for in a confined process of its own."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from lastbit.errors import LastbitError
from lastbit.isolation.process import KernelProcessEnded
from lastbit.judges import explaining
from lastbit.judges.opening import Desk
from lastbit.judges.question import JudgeQuestion
from lastbit.reports.judged import Culprit, FileVerdict
from lastbit.result import CaseResult


def with_culprit(found: FileVerdict, desk: Desk, question: JudgeQuestion, failure: CaseResult | None) -> FileVerdict:
    """Add to the document the line that is wrong, or why none is found, if a failure is to be explained."""
    if failure is None or not question.explaining:
        return found
    culprit, reason = _looked_for(desk, Path(found.file).resolve(), question, failure)
    return replace(found, culprit=culprit, culprit_reason=reason)


def _looked_for(desk: Desk, path: Path, question: JudgeQuestion, failure: CaseResult) -> tuple[Culprit | None, str]:
    arguments = {
        "path": str(path),
        "role": asdict(question.role),
        "line": failure.case,
        "projects": list(desk.config.projects),
        "seconds": question.explaining,
    }
    try:
        given = desk.on_cpu.run(path, explaining.explanation_of, arguments, question.explaining)
    except KernelProcessEnded as ended:
        late = f"it was not found in {question.explaining:g} s (--explain)"
        return None, late if ended.limit is not None else str(ended)
    except LastbitError as error:  # the kernel raised, or the answer is none
        return None, str(error)
    return explaining.read(given, failure.device)
