"""What stands for the recorder of a process in tests: it keeps what it is told of items."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from lastbit.result import CaseResult
from lastbit.verify.device_memory import directly
from lastbit.verify.power import Separable


@dataclass
class Recorded:
    """Keeps results and events; see `lastbit.verify.result_recorder.CaseRecorder`."""

    cases: int = 0
    seed: int = 0
    random: bool = False
    timeout: float = 60.0
    failures: set[tuple[str, str]] | None = None
    separable: Separable = field(default_factory=Separable)
    results: list[CaseResult] = field(default_factory=list)
    told: list[tuple[Any, ...]] = field(default_factory=list)
    looking: Any = nullcontext
    watched: Any = nullcontext

    def record(self, result: CaseResult) -> None:
        self.results.append(result)

    def tell(self, *event: Any) -> None:
        self.told.append(event)

    def told_of(self, name: str) -> list[Any]:
        return [content for event, content in self.told if event == name]

    def learn(self, failed: list[tuple[str, str]]) -> None:
        assert self.failures is not None
        self.failures.update(failed)

    def started(self, *of: Any, **how: Any) -> None:
        """Do nothing: no case takes too long."""

    def verify_on(self, device: Any) -> Any:
        return directly
