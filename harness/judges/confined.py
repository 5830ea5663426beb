"""Explanations of kernels of a run whose files are loaded in processes of their own alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from lastbit.config import Config
from lastbit.devices import DevicePlan
from lastbit.diagnosing.explain import FOLLOWED, KEEPS, explain_kernel
from lastbit.errors import LastbitError
from lastbit.files import BUILT_IN
from lastbit.isolation.declared import Kernels
from lastbit.isolation.process import ForkServer
from lastbit.outcomes.explanation import Explanation
from lastbit.reports.encoding import decoded, encoded
from lastbit.result import Verdict
from lastbit.verify.processes import environment_for
from lastbit.verify.worker import open_workplace, unwatched


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()

    @property
    def planned(self) -> tuple[Named, ...]:
        """The kernels that failed."""
        return tuple(map(Named, self._config.kernels))

    def explain(self, kernel: str, line: str, *, seconds: float) -> Explanation:
        """Explain a kernel's failure on a case line; if its process gives no answer, with that reason."""
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
    found: dict[str, Any] = encoded(explain_kernel(place, kernel, line, seconds=seconds))
    return found
