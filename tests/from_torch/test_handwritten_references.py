"""What is traced from the kernels written in PyTorch has the enclosures of the references written by hand."""

import inspect
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch

from lastbit.case import Case, parse_case
from lastbit.commands.new import loaded, reference_of
from lastbit.config import Config
from lastbit.from_torch.reference_check import load_op
from lastbit.inputs import build
from lastbit.judging.expected import Exact, Trace
from lastbit.judging.problem import Problem
from lastbit.kernel import load_file
from lastbit.ops import Op
from lastbit.siblings import siblings
from lastbit.verify.project import Project, open_project
from tests.from_torch import functions

ROOT = Path(__file__).resolve().parents[2]


@cache
def project() -> Project:
    return open_project(Config(folder=""))


@cache
def kernel_file(name: str) -> ModuleType:
    with siblings(ROOT / "kernels"):
        return load_file(ROOT / "kernels" / name)


@cache
def kernels() -> Mapping[str, object]:
    return {kernel.name: inspect.unwrap(kernel.call) for kernel in project().kernels()}


def traced_op(function: object, example: str) -> Op:
    text, tried = reference_of(function, parse_case(f"traced {example} seed=0"), "here")
    assert tried is not None and not tried.broken
    return load_op(text, "traced")


def trace_of(op: Op, contract: str, case: Case) -> Trace:
    tensors = dict(build(case, "cpu").tensors)
    return Problem(op, op.contract(contract), tensors, case.params).trace


def check_equal(own: Trace, traced: Trace, stages: Mapping[str, str]) -> None:
    """Assert that stages of a reference that was written are those of one that was traced, bit for bit."""
    for by_hand, from_torch in stages.items():
        if isinstance(own.stages[by_hand], Exact):
            assert torch.equal(own.stages[by_hand].allowed, traced.stages[from_torch].allowed), by_hand
            continue
        first, second = own.enclosure(by_hand).full.flatten(1), traced.enclosure(from_torch).full.flatten(1)
        assert torch.equal(first.nan_to_num(nan=1e300), second.nan_to_num(nan=1e300)), by_hand
        assert own.formats[by_hand] == traced.formats[from_torch], by_hand


NORM = "x={0}[5,{1}]:{2} weight={0}[{1}]:near_one eps=1e-06 seed=7"


@pytest.mark.parametrize("regime", ["normal", "rows", "huge", "special"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("contract", "stages"),
    [
        (
            "native_multiply+rounded_sum",
            {"variance": "variance", "normalized": "normalized_rounded", "product": "output_product"},
        ),
        ("fp32_multiply+rounded_sum", {"variance": "variance", "normalized": "normalized"}),
    ],
)
def test_the_norm(contract: str, stages: Mapping[str, str], dtype: str, regime: str) -> None:
    traced = op_of_kernel(f"eager[{contract}]", "x=bf16[3,64] weight=bf16[64] eps=1e-06")
    line = NORM.format(dtype, 96, regime)
    own = trace_of(project().op("rms_norm"), contract, parse_case(f"rms_norm {line}"))
    check_equal(own, trace_of(traced, "", parse_case(f"traced {line}")), {**stages, "output": "output"})


@cache
def op_of_kernel(name: str, example: str) -> Op:
    return traced_op(kernels()[name], example)


@pytest.mark.parametrize("rule", ["rounded_sum", "unrounded_sum", "rounded_value"])
def test_the_norm_of_a_sum(rule: str) -> None:
    example = "x=bf16[3,64] weight=bf16[64] residual=bf16[3,64] eps=1e-06"
    traced = op_of_kernel(f"eager[native_multiply+{rule}]", example)
    line = "x=fp16[4,48] weight=fp16[48]:near_one residual=fp16[4,48]:rows eps=1e-05 seed=3"
    own = trace_of(project().op("rms_norm"), f"native_multiply+{rule}", parse_case(f"rms_norm {line}"))
    found = trace_of(traced, "", parse_case(f"traced {line}"))
    check_equal(own, found, {n: n for n in ("residual_sum", "variance", "output")})


def test_weight_of_another_dtype_keeps_its_own_rounding() -> None:
    traced = op_of_kernel("eager[native_multiply+rounded_sum]", "x=bf16[3,64] weight=bf16[64] eps=1e-06")
    line = "x=bf16[4,48] weight=fp32[48]:near_one eps=1e-05 seed=3"
    own = trace_of(project().op("rms_norm"), "native_multiply", parse_case(f"rms_norm {line}"))
    found = trace_of(traced, "", parse_case(f"traced {line}"))
    check_equal(own, found, {"normalized": "normalized_rounded", "output": "output"})


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_layer_norm_in_one_rounding(dtype: str) -> None:
    traced = traced_op(functions.layer_norm, functions.EXAMPLES[functions.layer_norm])
    line = f"x={dtype}[4,48]:rows weight={dtype}[48] bias={dtype}[48] eps=1e-05 seed=3"
    own = trace_of(project().op("layer_norm_gated"), "single_rounding", parse_case(f"layer_norm_gated {line}"))
    found = trace_of(traced, "", parse_case(f"traced {line}"))
    check_equal(own, found, {n: n for n in ("mean", "variance", "normalized", "output")})


@pytest.mark.parametrize(("before", "stages"), [(True, ("gate", "variance", "output")), (False, ("gate", "output"))])
def test_the_gated_norm_step_by_step(before: bool, stages: tuple[str, ...]) -> None:
    options = f"eps=1e-05 group_size=16 is_rms_norm=True norm_before_gate={before}"
    traced = op_of_kernel("eager[stepwise]", f"x=bf16[3,64] weight=bf16[64] z=bf16[3,64] {options}")
    line = "x=fp16[4,48] weight=fp16[48] z=fp16[4,48]:gates eps=1e-05 group_size=16 seed=3"
    case = parse_case(f"layer_norm_gated {line} is_rms_norm=True norm_before_gate={before}")
    own = trace_of(project().op("layer_norm_gated"), "stepwise", case)
    check_equal(own, trace_of(traced, "", parse_case(f"traced {line}")), {n: n for n in stages})


@pytest.mark.parametrize("truncated", [True, False])
def test_the_mask_of_completions(truncated: bool) -> None:
    tensors = "ids=int64[6,16]:sequences_3 eos_ids=int64[2]:lookalikes_3"
    traced = op_of_kernel("eager[completion_mask]", f"{tensors} mask_truncated={truncated}")
    case = parse_case(f"completion_mask {tensors} mask_truncated={truncated} seed=5")
    own = trace_of(project().op("completion_mask"), "", case)
    found = trace_of(traced, "", parse_case(f"traced {tensors} seed=5"))
    check_equal(own, found, {"is_eos": "is_eos", "mask": "output"})


def test_an_expert_of_a_mixture() -> None:
    expert = kernel_file("moe_lora_torch.py").expert_fused

    def one_expert(x, weight, gate_proj, up_proj, down_proj):
        maps = {"gate_proj": gate_proj, "up_proj": up_proj, "down_proj": down_proj}
        _, gate, up, intermediate = expert(x, weight, maps, scaling=1.0, limit=float("inf"))
        return {"saved_gate": gate, "saved_up": up, "intermediate": intermediate}

    shapes = "gate_proj={0}24,16] up_proj={0}24,16] down_proj={0}16,24]"
    traced = traced_op(one_expert, f"x=bf16[3,16] weight=bf16[3,1] {shapes.format('bf16[')}")
    case = parse_case(
        f"moe_lora x=fp16[5,16] expert_ids=int64[5,1]:zeros routing_weights=fp16[5,1] {shapes.format('fp16[1,')} seed=4"
    )
    tensors = dict(build(case, "cpu").tensors)
    op = project().op("moe_lora")
    own = Problem(op, op.contract("fused"), tensors, case.params).trace
    given = {n: tensors[n].squeeze(0) for n in ("gate_proj", "up_proj", "down_proj")}
    given = {"x": tensors["x"], "weight": tensors["routing_weights"], **given}
    check_equal(
        own,
        Problem(traced, traced.contract(), given, {}).trace,
        {n: n for n in ("saved_gate", "saved_up", "intermediate")},
    )


def test_a_function_is_found_by_its_name() -> None:
    with siblings(ROOT / "kernels"):
        assert loaded(ROOT / "kernels" / "rms_norm_torch.py", "normalize").__name__ == "normalize"
