"""The default way to run a launch leaves every byte that running its programs one by one leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
import triton
from hypothesis import Phase, given, settings

from lastbit.case import parse_case
from lastbit.kernel import load_kernels

if not triton.knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET=1 was not set", allow_module_level=True)

from lastbit.interpret import descending
from tests import kernel_bytes, triton_programs
from tests.kernel_bytes import case_differences
from tests.triton_programs import Launch, Outcome, Program, Tensor, differences
from tests.triton_texts import programs

KERNELS = {kernel.name: kernel for kernel in load_kernels(Path(__file__).resolve().parents[2] / "kernels")}
EXPERTS = (
    "moe_lora x=bf16[5,16] expert_ids=int64[5,2]:below_3 routing_weights=fp32[5,2]:uniform "
    "gate_proj=bf16[3,16,16]:fan_in up_proj=bf16[3,16,16]:fan_in down_proj=bf16[3,16,16]:fan_in "
    "gate_lora_a=bf16[3,2,16]:fan_in "
    "gate_lora_b=bf16[3,16,2]:fan_in up_lora_a=bf16[3,2,16]:fan_in up_lora_b=bf16[3,16,2]:fan_in "
    "down_lora_a=bf16[3,2,16]:fan_in down_lora_b=bf16[3,16,2]:fan_in scaling=2.0 seed=0"
)
CASES = {
    "triton[native_multiply+rounded_sum]": "rms_norm x=bf16[9,40] weight=bf16[40] residual=bf16[9,40] eps=1e-06 seed=1",
    "triton[single_rounding]": "layer_norm_gated x=fp16[3,2,33] weight=fp16[33] z=fp16[3,2,33] eps=1e-05 seed=1",
    "triton[gated_backward+atomic]": (
        "layer_norm_gated_backward x=fp32[32,1024] dy=fp32[32,1024] weight=fp32[1024] "
        "rstd=fp32[32,1]:scale_random seed=1"
    ),
    "triton[completion_mask]": (
        "completion_mask ids=int64[6,65]:sequences_2 eos_ids=int64[2]:counting mask_truncated=True seed=3"
    ),
    "triton[moe_lora+fused]": EXPERTS,
}


@settings(max_examples=20, phases=[Phase.generate, Phase.shrink])
@given(programs(statements=9))
def test_generated_programs(program: Program) -> None:
    assert differences(program) == []


@pytest.mark.parametrize("name", CASES)
def test_kernels_of_the_project(name: str) -> None:
    assert case_differences(KERNELS[name], parse_case(CASES[name])) == ([], False)


# What compares can tell a difference.


def launch(text: str, *, down: bool = False) -> Program:
    lines = "\n".join(f"    {line}" for line in text.splitlines())
    head = "@triton.jit\ndef kernel(t0, n, m, s, K: tl.constexpr):"
    tensors = (Tensor("t0", "float32", 64, 0),)
    return Program(f"{head}\n{lines}\n", tensors, 2, (Launch((7,), 1, 2, 0.5, seed=0, down=down),) * 2)


ORDERED = {
    "the last store": "tl.store(t0, tl.program_id(0))",
    "a sum that rounds": "tl.store(t0, 0.1)\ntl.atomic_add(t0, s * tl.program_id(0) / 3)",
    "what others wrote": "tl.store(t0 + tl.program_id(0), tl.load(t0 + tl.program_id(0) + 1))",
    "the first error": "tl.gather(tl.arange(0, 4), tl.arange(0, 4) + tl.program_id(0), 0)",
    "what is printed": "print(tl.program_id(0))",
}


@pytest.mark.parametrize("text", ORDERED.values(), ids=ORDERED)
def test_another_order_is_seen(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert differences(launch(text)) == []
    monkeypatch.setattr(triton_programs, "one_by_one", descending)
    assert len(differences(launch(text))) == 2


def test_every_launch_starts_from_the_same_bytes() -> None:
    seen: list[Outcome] = []
    program = launch("x = tl.load(t0 + tl.program_id(0))\ntl.store(t0 + tl.program_id(0), x + 1)")
    for _ in range(2):
        assert differences(program, lambda _, outcome: seen.append(outcome)) == []
    assert seen[0] == seen[1]
    assert not seen[0].error


def test_another_byte_of_a_kernel_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "triton[gated_backward+atomic]"
    monkeypatch.setattr(kernel_bytes, "one_by_one", descending)
    found, _ = case_differences(KERNELS[name], parse_case(CASES[name]))
    assert found and "dw" in found[0]
