"""Explanations of why kernels fail that only confined processes load: found where their code runs, and not believed.

Such a process runs the kernel beside its reference, so that nobody may trust it. It says what it likes: that is no
verdict, and the file and line are for a reader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lastbit.calibrate import load_premises
from lastbit.case import parse_case
from lastbit.config import Config
from lastbit.devices import DevicePlan
from lastbit.diagnosing.explainer import FOLLOWED, KEEPS, explain_case
from lastbit.errors import LastbitError
from lastbit.files import BUILT_IN
from lastbit.isolation.answers import KernelProcessEnded
from lastbit.isolation.elsewhere import Kernels
from lastbit.isolation.process import ForkServer
from lastbit.of_file import held_to, kernel_of_file, role_of
from lastbit.reports.encoding import decoded, encoded
from lastbit.reports.explanation import computed, decision
from lastbit.reports.judged import Culprit, FileVerdict
from lastbit.reports.why import Explanation
from lastbit.result import CaseResult, Verdict
from lastbit.verify.check import Subject
from lastbit.verify.processes import environment_for
from lastbit.verify.project import open_project
from lastbit.verify.worker import on_case, open_workplace, unwatched

if TYPE_CHECKING:  # a confined process need not import it
    from lastbit.judges.opening import Desk
    from lastbit.judges.question import JudgeQuestion

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
        step = found.culprit
        if found.verdict is Verdict.PASSED:
            return None, KEEPS.format(device) if device != "cpu" else "it passed when it was run again"
        if found.verdict is not Verdict.FAILED or step is None:
            return None, found.reason or found.trace.reason or NOT_FOUND
        deciding = found.deciding if found.is_sure else None
        sentence = computed(step) if deciding is None else decision(deciding, sure=True)
        if step.mend and (deciding is None or not deciding.misrounded):  # which says what would be right
            sentence = f"{sentence.removesuffix('.')}; {step.right}"
        return Culprit(step.file, step.line, step.code or step.text, sentence), ""
    except Exception:  # whatever it said
        return None, "the process that looked for it gave an answer that is none"


def with_culprit(found: FileVerdict, desk: Desk, question: JudgeQuestion, failure: CaseResult | None) -> FileVerdict:
    """Add to the document the line that is wrong, or why none is found, if a failure is to be explained."""
    if failure is None or not question.explaining:
        return found
    path = Path(found.file).resolve()
    arguments = {
        "path": str(path),
        "role": asdict(question.role),
        "line": failure.case,
        "projects": list(desk.config.projects),
        "seconds": question.explaining,
    }
    try:
        given = desk.on_cpu.run(path, explanation_of, arguments, question.explaining)
    except KernelProcessEnded as ended:
        late = f"it was not found in {question.explaining:g} s (--explain)"
        return replace(found, culprit_reason=late if ended.limit is not None else str(ended))
    except LastbitError as error:  # the kernel raised, or the answer is none
        return replace(found, culprit_reason=str(error))
    culprit, reason = read(given, failure.device)
    return replace(found, culprit=culprit, culprit_reason=reason)


class Named(NamedTuple):
    """A kernel of a run, by name."""

    kernel: str


class ConfinedExplainer:
    """Explains failures as `Explainer` does, in confined processes, of which it believes nothing.

    `config` names one device, and the kernels and case lines that failed there. They are explained on the CPU. Smaller
    tensors are not looked for.
    """

    def __init__(self, config: Config) -> None:
        self._config, self._server = config, ForkServer(environment_for("cpu", config.site))
        places = (BUILT_IN, *map(Path, (*config.site, *config.projects, *config.kernel_folders)))
        folders = tuple(place.resolve() if place.is_dir() else place.resolve().parent for place in places)
        self._kernels = Kernels(self._server, readable=folders)

    def __enter__(self) -> ConfinedExplainer:
        self._server.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    @property
    def planned(self) -> tuple[Named, ...]:
        """The kernels that failed."""
        return tuple(map(Named, self._config.kernels))

    def explain(self, kernel: str, line: str, *, seconds: float, passed: Sequence[str] = ()) -> Explanation:
        """Explain a kernel's failure on a case line; if its process gives no answer, with that reason.

        It is not called again in cases that `passed`.
        """
        device = self._config.devices[0]
        names = kernel, line.partition(" ")[0], "", line, device
        own = Explanation.of_nothing(*names, verdict=Verdict.FAILED, reason="")
        try:
            found = self._found(kernel, line, seconds)
        except LastbitError as error:
            return replace(own, reason=str(error))
        if device == "cpu":
            return found
        if found.verdict is Verdict.PASSED:
            return replace(own, reason=KEEPS.format(device))
        return replace(found, device=device, reason="; ".join(filter(None, [found.reason, FOLLOWED])))

    def _found(self, kernel: str, line: str, seconds: float) -> Explanation:
        """Explain the failure on the CPU in another process, whose answer is not trusted."""
        arguments = {
            "kernel": kernel,
            "line": line,
            "projects": [str(Path(folder).resolve()) for folder in self._config.projects],
            "kernel_folders": [str(Path(folder).resolve()) for folder in self._config.kernel_folders],
            "seconds": seconds,
        }
        given = self._kernels.run(BUILT_IN, explanation_of_kernel, arguments, seconds)
        try:
            found: Explanation = decoded(Explanation, given)
        except Exception:  # whatever it said
            raise LastbitError("the process that explains it gave an answer that is none") from None
        return replace(found, kernel=kernel, case=line, device="cpu", smallest="", test="")


def explanation_of_kernel(
    kernel: str, line: str, projects: Sequence[str], kernel_folders: Sequence[str], seconds: float
) -> dict[str, Any]:
    """Run `lastbit explain` on a kernel of a folder on the CPU; return the explanation in types that JSON has."""
    config = Config(
        folder="",
        device_plan=DevicePlan(),
        kernels=(kernel,),
        projects=tuple(projects),
        kernel_folders=tuple(kernel_folders),
        lines=(line,),
    )
    place = open_workplace(config, unwatched, lambda result: None)
    found: dict[str, Any] = encoded(on_case(place, explain_case, kernel, line, seconds=seconds))
    return found
