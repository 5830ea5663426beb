"""Explanations of why a kernel of a file fails, found where its code runs, and told as data not to be trusted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lastbit.calibrate import load_premises
from lastbit.case import parse_case
from lastbit.config import Config
from lastbit.diagnosing.explain import KEEPS, explain_case
from lastbit.of_file import held_to, kernel_of_file, role_of
from lastbit.reports.encoding import decoded, encoded
from lastbit.reports.explanation import computed, decision
from lastbit.reports.judged import Culprit
from lastbit.reports.why import Explanation
from lastbit.result import Verdict
from lastbit.verify.check import Subject
from lastbit.verify.project import open_project

NOT_FOUND = "the kernel fails, but no line of it was found to be the one that is wrong"


def explanation_of(
    path: str, role: Mapping[str, Any], line: str, projects: Sequence[str], seconds: float
) -> dict[str, Any]:
    """Run `lastbit explain` on the kernel of a file on the CPU; return the explanation in types that JSON has.

    This process runs the kernel beside its reference, so that nobody may trust it.
    """
    given, device = role_of(role), torch.device("cpu")
    op = open_project(Config(folder="", projects=tuple(projects))).op(given.op)
    kernel, _ = held_to(kernel_of_file(Path(path), given), given, op)
    subject = Subject(kernel, op, device, load_premises(device))
    found: dict[str, Any] = encoded(explain_case(subject, parse_case(line), seconds=seconds))
    return found


def read(given: Mapping[str, Any], device: str) -> tuple[Culprit | None, str]:
    """Read the wrong line, or why there is none, from the answer of a process that nobody has to trust.

    It says what it likes: this is no verdict, and the file and line are for a reader.
    """
    try:
        found: Explanation = decoded(Explanation, given)
        return _culprit(found), _reason(found, device)
    except Exception:  # whatever it said
        return None, "the process that looked for it gave an answer that is none"


def _culprit(found: Explanation) -> Culprit | None:
    step = found.culprit
    if found.verdict is not Verdict.FAILED or step is None:
        return None
    deciding = found.deciding
    same = deciding is not None and (deciding.file, deciding.line) == (step.file, step.line)
    sentence = decision(deciding, sure=True) if deciding is not None and same else computed(step)
    if step.mend and not (same and deciding is not None and deciding.misrounded):  # which says what would be right
        sentence = f"{sentence.removesuffix('.')}; {step.right}"
    return Culprit(step.file, step.line, step.code or step.text, sentence)


def _reason(found: Explanation, device: str) -> str:
    if found.verdict is Verdict.PASSED:
        return KEEPS.format(device) if device != "cpu" else "it passed when it was run again"
    if found.verdict is Verdict.FAILED and found.culprit is not None:
        return ""
    return found.reason or found.trace.reason or NOT_FOUND
