"""A process on the CPU beside one that runs kernels on another device: there Triton is interpreted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from lastbit.config import Config
from lastbit.devices import DevicePlan
from lastbit.errors import LastbitError

if TYPE_CHECKING:
    from lastbit.verify.worker import Worker, Workplace

P = ParamSpec("P")
T = TypeVar("T")


class Beside:
    """Process on the CPU that follows the kernels of a configuration; it is started when needed.

    Attributes:
        limit: seconds in which it follows a kernel in a case.
        given_up: where a function is written, and a case in which following it took too long and decided nothing.
    """

    def __init__(self, config: Config) -> None:
        # Less than the time of a case, so that the clock of the case that waits does not end its process.
        self.limit = 0.85 * config.timeout
        self.given_up = set[tuple[str, str]]()
        self._config = replace(config, device_plan=DevicePlan(), timeout=self.limit, lines=(), folder="")
        self._opened, self._refused = False, ""

    @cached_property
    def _worker(self) -> Worker:
        from lastbit.verify.formula_check import open_to_follow  # both import the plan, which makes this
        from lastbit.verify.worker import Worker

        return Worker(self._config, opening=open_to_follow)

    def open(self) -> None:
        """Start the process, unless it runs.

        Raises:
            LastbitError: the kernels cannot be loaded there.
        """
        if self._refused:
            raise LastbitError(self._refused)
        if not self._opened:
            try:
                self._worker.do(_nothing)
            except LastbitError as error:
                self._refused = str(error)
                raise
            self._opened = True

    def do(self, work: Callable[Concatenate[Workplace, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` in that process and return its result, as `Worker.do`.

        Raises:
            LastbitError: the work raised it, or the process ended.
        """
        try:
            return self._worker.do(work, *args, **kwargs)
        except LastbitError:
            self._opened = False  # it may have ended
            raise


def _nothing(place: Workplace) -> None:
    """Do nothing; its return shows that the process has started."""
