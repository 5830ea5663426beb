"""A stand-in for `lastbit.verify.worker.Worker` that starts no process, for tests of what commands say of kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lastbit.config import Config
from lastbit.verify.worker import Tick, one_device, open_workplace, unwatched


class InThisProcess:
    def __init__(self, config: Config, tick: Tick = lambda result: None) -> None:
        one_device(config)
        self._config, self._tick = config, tick

    def __enter__(self) -> InThisProcess:
        self._place = open_workplace(self._config, unwatched, self._tick)
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def do(self, work: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        return work(self._place, *args, **kwargs)
