"""Kernels that are one function share the cases of a group: each has a part, and all together have every case."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lastbit.config import Config
from lastbit.kernel import Kernel
from lastbit.verify.plan import Plan, make_plan
from tests.harness.test_takes import norm

NATIVE, FP32 = "native_multiply", "fp32_multiply"
ONE = Kernel("a", "rms_norm", FP32, norm, source="mine.py:7", invariant=("run to run",))


def plan_of(*kernels: Kernel, **changes: object) -> Plan:
    config = replace(Config(folder="", kernel_folders=(str(Path(__file__).parent),)), **changes)  # type: ignore[arg-type]
    return make_plan(config, "cpu", load=lambda folder: kernels)


def shares(plan: Plan, group: str) -> dict[str, tuple[int, int]]:
    return {item.subject.kernel.name: item.share for item in plan.items if item.group.name == group}


@pytest.mark.parametrize("contracts", [(NATIVE, FP32), (NATIVE, FP32, "input_multiply")])
def test_contracts_of_one_function_divide_the_cases_of_a_group(contracts: tuple[str, ...]) -> None:
    """Those for properties too, of which there are two, but whoever promises one has at least one case for it."""
    plan = plan_of(*(replace(ONE, name=f"k{n}", contract=contract) for n, contract in enumerate(contracts)))
    assert sorted(shares(plan, "edges").values()) == [(n, len(contracts)) for n in range(len(contracts))]
    asked = shares(plan, "properties").values()
    assert len(asked) == len(contracts) and set(asked) == {(0, 2), (1, 2)}
    whole, one = (sum(item.cases for item in made.planned) for made in (plan, plan_of(ONE)))
    assert whole == one + len(contracts) - 2


def test_other_functions_do_not() -> None:
    other = replace(ONE, name="b", source="mine.py:70", contract=NATIVE)
    assert set(shares(plan_of(ONE, other), "edges").values()) == {(0, 1)}
    assert set(shares(plan_of(ONE, replace(other, source=ONE.source), profile="nightly"), "edges").values()) == {(0, 1)}
