"""A process on the CPU beside one that runs kernels on another device: there Triton is interpreted."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from lastbit.config import Config
from lastbit.devices import DevicePlan
from lastbit.errors import LastbitError

if TYPE_CHECKING:
    from lastbit.verify.worker import Worker


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
        self._refused: LastbitError | None = None

    def open(self) -> None:
        """Start the process, unless it runs.

        Raises:
            LastbitError: the kernels cannot be loaded there, as was found now or before.
        """
        if self._refused is not None:
            raise self._refused
        try:
            self.worker.open()
        except LastbitError as error:
            self._refused = error
            raise

    @cached_property
    def worker(self) -> Worker:
        """The process on the CPU that follows kernels on residues while this one has the GPU."""
        from lastbit.verify.formula_check import open_to_follow  # both import the plan, which makes this
        from lastbit.verify.worker import Worker

        return Worker(self._config, opening=open_to_follow)
