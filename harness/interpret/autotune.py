"""Autotuned kernels without a driver: nothing is timed, the first configuration that survives pruning is taken."""

from __future__ import annotations

from typing import Any

from triton.runtime.autotuner import Autotuner


def replace_benchmarks() -> None:
    """Give every configuration the same time, without running it; the choice is then the first, always.

    Pruning functions, pre-hooks and the resetting of arguments stay Triton's.
    """
    Autotuner._bench = _same_time


def _same_time(self: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
    return [0.0, 0.0, 0.0]
