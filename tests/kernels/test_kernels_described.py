"""Descriptions of tensors, and launches that a plan holds."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from lastbit.siblings import siblings
from tests.rms_norm_contract import FOLDER

with siblings(FOLDER):
    module: Any = importlib.import_module("described")


class Kernel:
    """Stands for a function of `triton.jit`; `compiles` is False for one that Triton interprets."""

    def __init__(self, *, compiles: bool) -> None:
        self.compiles = compiles
        self.asked: list[tuple[Any, ...]] = []
        self.run: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **named: Any) -> Any:
            self.asked.append((grid, arguments, named))
            return _Compiled(self.run) if self.compiles else None

        return launch


class _Compiled:
    def __init__(self, run: list[tuple[Any, ...]]) -> None:
        self.run = run

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.run.append((grid, arguments))


def test_what_was_compiled_runs_again_with_the_arguments_of_each_call():
    kernel = Kernel(compiles=True)
    launch = module.PlannedLaunch(kernel, 7, {"n": 3, "BLOCK": 128}, num_warps=2)
    for eps in (0.5, 0.25, 0.125):
        launch("x", eps)
    assert kernel.asked == [((7, 1, 1), ("x", 0.5), {"n": 3, "BLOCK": 128, "num_warps": 2})]
    assert kernel.run == [((7, 1, 1), ("x", eps, 3, 128)) for eps in (0.25, 0.125)]


def test_an_interpreted_kernel_is_launched_in_full_every_time():
    kernel = Kernel(compiles=False)
    launch = module.PlannedLaunch(kernel, 7, {"n": 3}, num_warps=2)
    launch("x")
    launch("y")
    assert [arguments for _, arguments, _ in kernel.asked] == [("x",), ("y",)]


@pytest.mark.parametrize(
    ("first", "second"),
    [(None, torch.zeros(1)), (torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16)), (0.5, 1)],
    ids=["missing", "dtype", "number"],
)
def test_a_plan_that_serves_other_kinds_of_arguments_is_refused(first, second):
    kernel = Kernel(compiles=False)
    kernel.__name__ = "copy"
    launch = module.PlannedLaunch(kernel, 7, {"n": 3})
    launch("x", first)
    with pytest.raises(TypeError, match=r"a plan of copy for .* was used for"):
        launch("x", second)


def test_descriptions_differ_where_a_plan_may():
    x = torch.zeros(4, 64, dtype=torch.bfloat16)
    assert module.described(None) is None
    assert module.described(x) == module.described(torch.ones_like(x))
    others = [x[:3], x.t(), x.half(), torch.zeros(4 * 64 + 1, dtype=torch.bfloat16)[1:].view(4, 64), x.to("meta")]
    assert len({module.described(x), *map(module.described, others)}) == 1 + len(others)


def test_the_device_changes_only_where_it_must(monkeypatch):
    entered = []
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "device_index", lambda index: entered.append(index) or module._UNCHANGED)
    for device in ("cpu", "cuda:1", "cuda:0"):
        with module.current(torch.device(device)):
            pass
    assert entered == [0]
