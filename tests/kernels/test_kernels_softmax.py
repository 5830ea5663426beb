"""The kernels of softmax: what their cases reach, and what they refuse."""

from __future__ import annotations

import math

import pytest
import torch

from lastbit.config import Config
from lastbit.errors import UnsupportedCase
from lastbit.verify.project import open_project
from tests.faults.plant import without_faults
from tests.rms_norm_contract import DEVICE, LOADED, needs_device  # installs the bit-faithful interpreter

KERNELS = {k.name: k for k in LOADED if k.op == "softmax"}
MODULE = without_faults().modules["softmax"]


def widths() -> set[int]:
    """Numbers of columns of the fixed cases, and both ends of what is drawn."""
    groups = open_project(Config(folder="")).groups("softmax", frozenset({"x", "mask", "keep", "scale"}), small=True)
    fixed = {case.tensors[0].shape[-1] for group in groups for case in group.examples}
    ends = {int(end) for group in groups if "-N" in group.name for end in group.name.rpartition("-N")[2].split("to")}
    return fixed | ends


def test_cases_for_a_cpu_reach_every_block_and_the_loop() -> None:
    reached = {next((b for b in MODULE.BLOCKS if b >= n), None) for n in widths()}
    assert reached == {*MODULE.BLOCKS, None}
    assert any(n > 2 * MODULE.ONLINE[0] for n in widths())


def test_depth_is_that_of_blocks_and_a_tree() -> None:
    assert MODULE.summation_depth(3) == 3
    assert MODULE.summation_depth(4096) == 48
    assert all(b >= MODULE.ONLINE[0] or b == MODULE.BLOCKS[0] or b == 256 for b in MODULE.BLOCKS)


def test_a_plan_has_the_last_parameters_of_the_kernel_in_their_order() -> None:
    x = MODULE.described(torch.zeros(3, 40))
    plan = MODULE._plan(x, None, None, False, False, False, False, False, MODULE.BLOCKS, ())
    assert MODULE._softmax_kernel.arg_names[-len(plan.launch.parameters) :] == list(plan.launch.parameters)


def test_calls_that_compile_another_variant_have_another_plan() -> None:
    x = torch.zeros(3, 40)
    MODULE._plan.cache_clear()
    for options in (
        {},
        {"scale": 2.0},
        {"fp32_output": True},
        {"stages": ("total",)},
        {"rounded": True},
        {"base2": True},
    ):
        MODULE.softmax(x, **options)
        MODULE.softmax(x, **options)
    assert MODULE._plan.cache_info().misses == 6


@needs_device
@pytest.mark.parametrize("name", [name for name in KERNELS if name.startswith("triton")])
def test_a_first_block_that_keeps_nothing_loses_nothing(name: str) -> None:
    x = torch.randn(3, 1200, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    keep = torch.ones_like(x, dtype=torch.bool)
    keep[1, :1100] = False
    keep[2] = False
    y = KERNELS[name].call(x, None, keep)
    expected = torch.softmax(x.masked_fill(~keep, -math.inf), -1)
    assert torch.allclose(y[:2], expected[:2], rtol=1e-5, atol=0)
    assert (y[2] == 0).all() if "zero_rows" in name else y[2].isnan().all()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": torch.zeros(())}, ValueError, "x has no dimension"),
        ({"x": torch.zeros(2, 0)}, UnsupportedCase, "the last dimension of x is 0"),
        ({"x": torch.zeros(2, 4).double()}, TypeError, "x is torch.float64"),
        ({"x": torch.zeros(2, 4), "mask": torch.zeros(4)}, ValueError, r"mask has shape \(4,\)"),
        ({"x": torch.zeros(2, 4), "keep": torch.zeros(2, 4)}, TypeError, "keep is torch.float32"),
        ({"x": torch.zeros(2, 4), "stages": ("sum",)}, ValueError, "'sum' is not one of 'scaled', 'masked', 'total'"),
    ],
)
def test_arguments_that_have_no_softmax(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MODULE.softmax(**arguments)
