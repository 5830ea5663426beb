"""The processes of a run: how many workers there are, and in which environment."""

from __future__ import annotations

import os

import pytest

from lastbit.config import Config
from lastbit.devices import DevicePlan
from lastbit.verify.processes import environment_for, workers_for


@pytest.mark.parametrize(
    ("device_type", "cores", "expected"),
    [("cpu", 1, 1), ("cpu", 2, 2), ("cpu", 64, 8), ("cuda", 64, 16), ("cuda", 4, 4)],
)
def test_each_type_of_device_has_its_own_number_of_workers(
    device_type: str, cores: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two accelerators have twice as many as one, if this process may use cores enough of the machine's."""
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)), raising=False)
    plan = DevicePlan(("cpu", "cuda:0", "cuda:1"), ("", "", ""))
    assert workers_for(device_type, Config(folder="", device_plan=plan)) == expected


def test_products_of_numpy_have_one_thread_in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers share the cores, and a thread of OpenBLAS spins for some milliseconds when its part is done."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "16")
    assert environment_for("cpu")["OPENBLAS_NUM_THREADS"] == "1"
