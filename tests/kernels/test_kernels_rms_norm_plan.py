"""What the launcher of the Triton RMSNorm works out once: tiles, strides, variants."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from lastbit.case import Case, TensorSpec, contiguous_strides
from lastbit.cases.rms_norm import groups
from lastbit.dtypes import DTYPES
from lastbit.siblings import siblings
from tests.rms_norm_contract import BF16, DEVICE, EPS, FOLDER, KERNELS, integers, needs_device, triton_kernel

pytestmark = needs_device

with siblings(FOLDER):
    module: Any = importlib.import_module("rms_norm")


def describe(spec: TensorSpec) -> Any:
    dtype = DTYPES[spec.dtype]
    strides = contiguous_strides(spec.shape) if spec.strides is None else spec.strides
    aligned = spec.offset * dtype.itemsize % 16 == 0
    return module.Described(torch.Size(spec.shape), strides, dtype, torch.device("cpu"), aligned)


def switches(case: Case) -> tuple[bool, ...]:
    """Return whether rows are longer than a block, follow each other evenly, and are read in vectors."""
    x, weight, residual, scale = (
        describe(case[name]) if name in case.names else None for name in ("x", "weight", "residual", "scale")
    )
    quant, size = case.params.get("quant"), case.params.get("variance_size")
    plan = module._plan(x, weight, residual, scale, size, 0.0, quant, "native_multiply", "rounded_sum", ())
    return tuple(plan.launch.parameters[name] for name in ("LOOP", "FLAT", "ALIGNED"))


def cases() -> list[Case]:
    accepts = KERNELS["triton[native_multiply+rounded_sum]"].accepts
    return [case for group in groups(accepts, small=True) for case in group.examples if 0 not in case["x"].shape]


def tile(n: int, quant: str | None) -> tuple[int, int, int]:
    return module.tile(n, quantized=quant is not None)


def test_cases_for_a_cpu_reach_every_tile():
    reached = {tile(case["x"].shape[-1], case.params.get("quant")) for case in cases()}
    accepts = KERNELS["triton[native_multiply+rounded_sum]"].accepts
    for group in (group for group in groups(accepts, small=True) if group.combination):
        narrow, wide = (tile(int(n), group.combination["quant"]) for n in group.name.rpartition("-N")[2].split("to"))
        reached |= {wide} if narrow == wide else set()
    assert reached == {tile(n, quant) for n in range(1, 1 << 15) for quant in (None, "dynamic")}


def test_cases_for_a_cpu_reach_both_sides_of_every_switch():
    assert [set(values) for values in zip(*map(switches, cases()), strict=True)] == [{False, True}] * 3


def test_a_thread_holds_two_elements_of_a_row_or_more():
    """With one, its product would be fused into the first addition between threads, and their sums would differ."""
    for n in range(1, 1 << 15):
        _, block, warps = tile(n, None)
        assert block >= 2 * 32 * warps


def test_a_plan_is_made_once_and_errors_are_raised_every_time():
    x = integers(3, 40, dtype=BF16)
    module._plan.cache_clear()
    for _ in range(2):
        module.rms_norm(x, eps=EPS)
        module.rms_norm(x + 1, eps=EPS / 2)
    assert module._plan.cache_info().misses == 1
    for _ in range(2):
        with pytest.raises(ValueError, match="scale is missing"):
            triton_kernel()(x, eps=EPS, quant="static")
    module.rms_norm(torch.zeros(4, 40, dtype=BF16, device=DEVICE), eps=EPS)
    assert module._plan.cache_info().misses == 2


def test_a_plan_has_the_last_parameters_of_the_kernel_in_their_order():
    x = module.described(torch.zeros(3, 40, dtype=BF16))
    plan = module._plan(x, None, None, None, None, 0.0, None, "native_multiply", "rounded_sum", ())
    assert module._rms_norm_kernel.arg_names[-len(plan.launch.parameters) :] == list(plan.launch.parameters)
