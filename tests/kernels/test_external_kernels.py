"""kt-kernel under its adapters: what it computes, and that cases which it cannot take are refused with the reason.

Everything that calls kt-kernel runs in a process of its own, because some mistakes end it. Without the package, only
the refusal is tested.
"""

import importlib.util
import os
import signal
import subprocess
import sys
from inspect import unwrap
from pathlib import Path

import pytest
import torch

from lastbit.errors import UnsupportedCase
from lastbit.kernel import Kernel, load_kernels
from tests.moe_lora_formula import lattice

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "kernels" / "external"
EDGES = ROOT / "docs" / "measurements" / "ktransformers" / "edges.py"
KERNEL = "kt-kernel[MXFP4_SFT_MOE,avx2]"
TENSORS = (
    "moe_lora x=bf16[33,64]:{x} expert_ids=int64[33,3]:experts_5 routing_weights=fp32[33,3]:uniform "
    "gate_proj=uint8[5,128,32]:bits up_proj=uint8[5,128,32]:bits down_proj=uint8[5,64,64]:bits "
    "gate_lora_a=bf16[5,8,64]:{lora} gate_lora_b=bf16[5,128,8]:{lora} up_lora_a=bf16[5,8,64]:{lora} "
    "up_lora_b=bf16[5,128,8]:{lora} down_lora_a=bf16[5,8,128]:{lora} down_lora_b=bf16[5,64,8]:{lora} "
    "gate_scale=uint8[5,128,2]:around_125 up_scale=uint8[5,128,2]:around_125 down_scale=uint8[5,64,4]:around_125 "
    "first_expert=0 scaling=0.75 shards={shards} seed=3"
)

installed = pytest.mark.skipif(
    importlib.util.find_spec("kt_kernel") is None, reason="kt-kernel is not installed: pip install kt-kernel==0.7.2"
)


def run(*command: str, build: str = "avx2") -> subprocess.CompletedProcess[str]:
    """Run a process with one build of kt-kernel, for 200 s at most."""
    environment = {**os.environ, "KT_KERNEL_CPU_VARIANT": build, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    command = (sys.executable, *command)
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)


def all_kernels() -> dict[str, Kernel]:
    return {k.name: k for k in load_kernels(FOLDER)}


def test_they_load_without_the_package_and_are_not_loaded_by_default() -> None:
    ops = {path.stem for path in (ROOT / "references").glob("[a-z]*.py")}
    without = {"all_reduce", "all_reduce_rms_norm", "completion_mask", "qk_norm_rope", "rms_norm_quantize"}
    assert {k.op for k in all_kernels().values()} == ops - without
    assert not {k.name for k in load_kernels(FOLDER.parent)} & set(all_kernels())


@pytest.mark.parametrize("name", [name for name, k in all_kernels().items() if k.op == "moe_lora" and "kt" in name])
def test_refused_without_the_package(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kt_kernel", None)  # as if it were not installed
    with pytest.raises(UnsupportedCase, match=r"kt_kernel cannot be imported .*pip install kt-kernel"):
        all_kernels()[name].call(**lattice(2))


@installed
def test_the_forward_keeps_its_contract(tmp_path: Path) -> None:
    values = (("few", "fractions"), ("normal", "fan_in"))
    lines = [TENSORS.format(x=x, lora=lora, shards=shards) for x, lora in values for shards in (1, 2, 4)]
    cases = tmp_path / "cases.txt"
    cases.write_text("\n".join(lines) + "\n")
    options = [str(FOLDER), "--cases", str(cases), "--run-folder", str(tmp_path / "run"), "-n", "1"]
    done = run("-m", "lastbit", "verify", KERNEL, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cases: 4 passed, 2 unsupported" in done.stdout, done.stdout


RIGHT = (
    *("ids_outside", "duplicates", "skipped_nan", "no_tokens", "experts_without_tokens", "accumulate_later"),
    *("two_layers", "fewer_and_more_tokens", "scaling_zero"),
)


@installed
def test_results_agree_with_the_formula() -> None:
    done = run(str(EDGES), "MXFP4_SFT_MOE", *RIGHT)
    seen = [line for line in done.stdout.splitlines() if line.startswith("seen: ")]
    assert dict(zip(RIGHT, seen, strict=True)) == dict.fromkeys(RIGHT, "seen: right"), done.stderr


@installed
def test_a_second_forward_ends_the_process() -> None:
    """Why kt-kernel is measured in processes of its own; where this fails, the adapter can say less."""
    done = run(str(EDGES), "MXFP4_SFT_MOE", "two_forwards")
    assert done.returncode == -signal.SIGABRT and "forward cache stack overflow" in done.stderr


REFUSED = """
import sys, torch
sys.path.insert(0, {folder!r})
from pathlib import Path
from lastbit.errors import UnsupportedCase
from lastbit.kernel import load_kernels
sys.path.insert(0, {problems!r})
from problem import problem
kernels = {{k.name: k for k in load_kernels(Path({folder!r}))}}
forward, backward = kernels[{kernel!r}], kernels[{kernel!r} + "_backward"]
p = problem("MXFP4_SFT_MOE")
state = forward.call(**p.tensors, scaling=2.0, stages=forward.stages)
state.pop("output")
gradients = backward.call(**p.tensors, **state, grad_output=p.grad_output, scaling=2.0)
assert gradients["grad_input"].any()
changed = {{
    "saved_up": ({{"saved_up": state["saved_up"] * 2}}, "saved_up is not what kt-kernel's own forward leaves"),
    "wide x": ({{"x": p.x.float()}}, "x is torch.float32"),
    "scales": ({{"gate_scale": p.base["gate_scale"] * 1.5}}, "powers of two"),
    "groups": ({{"gate_scale": p.base["gate_scale"][..., :1]}}, "one scale for 32 codes"),
    "bf16": ({{key: torch.zeros(4, 64, 64).bfloat16() for key in ("gate_proj", "up_proj", "down_proj")}}, "uint8"),
}}
for name, (tensors, reason) in changed.items():
    try:
        backward.call(**{{**p.tensors, **state, **tensors}}, grad_output=p.grad_output, scaling=2.0)
    except UnsupportedCase as error:
        assert reason in str(error), (name, str(error))
        print("refused:", name)
"""


@installed
def test_refused_cases_say_why() -> None:
    problems = str(EDGES.parent)
    done = run("-c", REFUSED.format(folder=str(FOLDER), problems=problems, kernel=KERNEL))
    refused = [line for line in done.stdout.splitlines() if line.startswith("refused:")]
    assert len(refused) == 5, done.stdout + done.stderr


@installed
def test_another_build_is_refused() -> None:
    code = (
        "import sys; from pathlib import Path; from lastbit.kernel import load_kernels; from tests.moe_lora_formula "
        f"import lattice; k = {{k.name: k for k in load_kernels(Path({str(FOLDER)!r}))}}; "
        "k['kt-kernel[AMXBF16_SFT_MOE,avx512_bf16]'].call(**lattice(2))"
    )
    assert "the avx2 build is loaded, not avx512_bf16" in run("-c", code).stderr


def test_room_between_the_shards_is_zero_and_goes_again() -> None:
    room = unwrap(all_kernels()[KERNEL].call).__globals__["Room"](hidden=5, width=6, shards=2, step=4)
    whole = lattice(3)
    tensors = {"x": whole["x"][:, :5], "down_proj": whole["down_proj"][:, :5, :6]}
    tensors["gate_lora_b"] = whole["gate_lora_b"][:, :6]
    filled = room.filled(tensors)
    assert [tuple(t.shape) for t in filled.values()] == [(3, 8), (5, 8, 8), (5, 8, 4)]
    assert torch.equal(filled["down_proj"][:, :5, 4:7], tensors["down_proj"][..., 3:])
    assert torch.equal(filled["gate_lora_b"][:, 4:7], tensors["gate_lora_b"][:, 3:])
    assert all(filled[name].sum() == tensor.sum() and filled[name].is_contiguous() for name, tensor in tensors.items())
    for name, tensor in room.cut(filled).items():
        assert torch.equal(tensor, tensors[name]), name
    gradient = {"grad_gate_lora_b": filled["gate_lora_b"]}
    assert torch.equal(room.cut(gradient)["grad_gate_lora_b"], tensors["gate_lora_b"])


def test_scales_of_e8m0_become_bf16() -> None:
    codes = torch.arange(256).to(torch.uint8)
    as_bf16 = unwrap(all_kernels()[KERNEL].call).__globals__["as_bf16"]
    expected = torch.exp2(codes.double() - 127).masked_fill(codes == 255, float("nan"))
    torch.testing.assert_close(as_bf16(codes).double(), expected, rtol=0, atol=0, equal_nan=True)
