"""Kernels of kernels/external that need torch alone: what they compute, and what they refuse."""

from pathlib import Path

import pytest
import torch

from lastbit.case import parse_case
from lastbit.config import Config
from lastbit.kernel import Kernel, load_kernels
from lastbit.result import CaseResult, Verdict
from lastbit.verify.check import Subject, verify_case
from lastbit.verify.project import Project, open_project

FOLDER = Path(__file__).resolve().parents[2] / "kernels" / "external"
PAIRS = "expert_ids=int64[12,2]:below_6 routing_weights=fp32[12,2]:uniform"
WEIGHTS = (
    "gate_proj=bf16[4,32,64]:fan_in up_proj=bf16[4,32,64]:fan_in down_proj=bf16[4,64,32]:fan_in "
    "gate_lora_a=bf16[4,8,64]:fan_in gate_lora_b=bf16[4,32,8]:fan_in up_lora_a=bf16[4,8,64]:fan_in "
    "up_lora_b=bf16[4,32,8]:fan_in down_lora_a=bf16[4,8,32]:fan_in down_lora_b=bf16[4,64,8]:fan_in"
)
SAVED = "grad_output=bf16[12,64] saved_gate=bf16[12,2,32]:gates saved_up=bf16[12,2,32] intermediate=bf16[12,2,32]"
FORWARD = f"moe_lora x=bf16[12,64] {PAIRS} {WEIGHTS} scaling=2.0 first_expert=1 seed=1"
BACKWARD = f"moe_lora_backward x=bf16[12,64] {PAIRS} {SAVED} {WEIGHTS} scaling=0.5 seed=1"
NORM = "rms_norm x=bf16[9,64] weight=bf16[64]:near_one"
CODES = "quantize x=bf16[9,64]:rows dtype=int8 least_amax=1e-05 seed=1"
GATED = "layer_norm_gated x=bf16[9,64] weight=bf16[64] z=bf16[9,64]:gates eps=1e-05"


@pytest.fixture(scope="module")
def project() -> Project:
    return open_project(Config(folder=""))


@pytest.fixture(scope="module")
def kernels() -> dict[str, Kernel]:
    return {k.name: k for k in load_kernels(FOLDER)}


def verified(project: Project, kernel: Kernel, line: str) -> CaseResult:
    return verify_case(Subject(kernel, project.op(kernel.op), torch.device("cpu")), parse_case(line), repeat=False)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("torch._grouped_mm[moe_lora]", FORWARD),
        ("torch._grouped_mm[moe_lora_backward]", BACKWARD),
        ("F.rms_norm[unchecked]", f"{NORM} eps=1e-06 seed=1"),
        ("torch.compile[rms_norm]", f"{NORM} eps=1e-06 seed=1"),
        ("torch.compile[rms_norm,dynamic]", f"{NORM} residual=bf16[9,64] eps=1e-06 seed=1"),
        ("torch.compile[rms_norm_fp8]", f"{NORM} scale=fp32[1]:scale_random eps=1e-06 quant=static seed=1"),
        ("torch.compile[rms_norm_fp8]", f"{NORM} eps=1e-06 quant=dynamic seed=1"),
        ("torch.compile[layer_norm_gated]", f"{GATED} is_rms_norm=True seed=1"),
        ("torch.compile[layer_norm_gated]", f"{GATED} group_size=16 seed=1"),
        ("torch.ao[per_token]", CODES.replace("bf16", "fp32")),
        ("torch.ao[per_token]", f"{CODES.replace('bf16', 'fp16')} group_size=32"),
        ("torch.compile[softmax]", "softmax x=bf16[9,64]:gates seed=1"),
        ("torch.compile[softmax]", "softmax x=fp16[9,64] mask=fp16[9,64]:masked scale=0.125 seed=1"),
    ],
)
def test_it_keeps_what_it_claims(
    name: str, line: str, project: Project, kernels: dict[str, Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is compiled is tested as its source: compiling takes many seconds, and `lastbit bench kernels` judges it."""
    monkeypatch.setattr(torch, "compile", lambda source, **options: source)
    result = verified(project, kernels[name], line)
    assert result.verdict is Verdict.PASSED, result.findings or result.reason


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (FORWARD.replace("bf16", "fp16"), "x dtype must be bf16"),
        (FORWARD.replace(",8,", ",4,").replace(",8]", ",4]"), "must be from 8 to 65536 in steps of 8"),
        (BACKWARD.replace("scaling=0.5", "scaling=0.7"), "scaling must be 0.00390625 or"),
        (FORWARD.replace("[12,", "[0,"), "x must be non-empty"),
    ],
)
def test_what_grouped_products_cannot_do_is_refused(
    line: str, said: str, project: Project, kernels: dict[str, Kernel]
) -> None:
    case = parse_case(line)
    result = verified(project, kernels[f"torch._grouped_mm[{case.op}]"], line)
    assert result.verdict is Verdict.UNSUPPORTED and said in result.reason


def test_int8_codes_of_bf16_are_rounded_twice(project: Project, kernels: dict[str, Kernel]) -> None:
    """As docs/measurements/findings.md says; so the kernel refuses bf16."""
    kernel = kernels["torch.ao[per_token]"]
    refused = verified(project, kernel, CODES)
    assert refused.verdict is Verdict.UNSUPPORTED and "x dtype must be fp32 or fp16" in refused.reason
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    wide = kernel.call(x=x.float(), dtype="int8", least_amax=1e-5)["int8_codes"]
    scale, zero = torch.ops.quantized_decomposed.choose_qparams_per_token(x, torch.int8)
    codes = torch.ops.quantized_decomposed.quantize_per_token(x, scale, zero, -128, 127, torch.int8)
    assert scale.dtype == torch.bfloat16 and 0.05 < float((codes != wide).float().mean()) < 0.15
