"""SwiGLU in Triton and PyTorch: arguments that are refused, how tensors are read, and packages under their adapters."""

from __future__ import annotations

import sys
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit.case import parse_case
from lastbit.config import Config
from lastbit.errors import UnsupportedCase
from lastbit.kernel import Kernel, load_kernels
from lastbit.placement import PlacementWarning
from lastbit.result import Verdict
from lastbit.verify.check import Subject, verify_case
from lastbit.verify.project import open_project
from tests.faults.plant import without_faults
from tests.rms_norm_contract import DEVICE, FOLDER, needs_device  # installs the bit-faithful interpreter

pytestmark = needs_device

KERNELS = {k.name: k for k in without_faults().kernels if k.op.startswith("swiglu")}
EXTERNAL = {k.name: k for k in load_kernels(FOLDER / "external") if k.op.startswith("swiglu")}
FORWARD = [name for name, k in KERNELS.items() if k.op == "swiglu"]
BACKWARD = [name for name, k in KERNELS.items() if k.op == "swiglu_backward"]
TILES = without_faults().modules["swiglu_tile"]
DESCRIBED = without_faults().modules["described"]
OPTIONS = without_faults().modules["swiglu_arguments"].SwigluParameters


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).to(DEVICE)


REFUSED: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
    ({"x": numbers(2, 5)}, ValueError, r"x has shape \(2, 5\); without up it must be \[\.\.\., 2I\]"),
    ({"x": numbers(4), "up": numbers(3)}, ValueError, r"up has shape \(3,\); as the gate it must be \(4,\)"),
    ({"x": numbers(4), "up": numbers(4), "interleaved": True}, ValueError, "up is a tensor of its own"),
    ({"x": numbers(4).double()}, TypeError, "x is torch.float64; it must be torch.bfloat16 or"),
    ({"x": numbers(4), "up": numbers(4).float()}, TypeError, "up is torch.float32; as x it must be torch.bfloat16"),
    ({"x": numbers(4), "swiglu_limit": 0.0}, ValueError, "swiglu_limit=0.0 must be positive"),
    ({"x": numbers(4), "alpha": inf}, ValueError, "alpha=inf is no number in fp32"),
)


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize(("given", "error", "said"), REFUSED)
def test_arguments_that_do_not_fit_are_refused(name: str, given: dict[str, Any], error: type, said: str) -> None:
    with pytest.raises(error, match=said):
        KERNELS[name].call(**given)


@pytest.mark.parametrize("name", BACKWARD)
def test_a_gradient_of_another_shape_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"dy has shape \(8,\); as the gate it must be \(4,\)"):
        KERNELS[name].call(numbers(8), numbers(8))


@pytest.mark.parametrize("name", [n for n in (*FORWARD, *BACKWARD) if n.startswith("triton")])
def test_stages_are_returned_in_fp32_and_change_nothing(name: str) -> None:
    tensors = {"x": numbers(3, 70), **({} if name in FORWARD else {"dy": numbers(3, 35)})}
    kernel = KERNELS[name]
    stored, plain = kernel.call(**tensors, stages=kernel.stages), kernel.call(**tensors)
    for result, tensor in (plain if isinstance(plain, dict) else {"output": plain}).items():
        assert torch.equal(stored[result], tensor)
    assert all(stored[stage].dtype == torch.float32 and stored[stage].shape == (3, 35) for stage in kernel.stages)
    with pytest.raises(ValueError, match="stages: 'gate' is not one of 'silu'"):
        kernel.call(**tensors, stages=("gate",))


def told(*views: Tensor, interleaved: bool = False) -> tuple[dict[str, Any], bool]:
    """Return what the kernel is told of gate and up, and whether they are copied."""
    given, copied = TILES.as_given(dict(zip(("gate", "up"), map(DESCRIBED.described, views), strict=True)))
    return TILES.launch_of(given, OPTIONS(interleaved=interleaved))[1], copied


def test_vectors_are_read_where_rows_allow_it() -> None:
    x = numbers(8, 2, 64)
    assert told(x[..., :32], x[..., 32:])[0]["ALIGNED"]
    assert not told(x[..., :31], x[..., 31:62])[0]["ALIGNED"]
    assert not told(x[..., :32].clone().mT.contiguous().mT, x[..., 32:])[0]["ALIGNED"]
    pairs, _ = told(x[..., ::2], x[..., 1::2], interleaved=True)
    assert pairs["PAIRS"] and pairs["ALIGNED"] and pairs["FLAT"]
    apart, _ = told(x[..., ::4], x[..., 2::4], interleaved=True)
    assert not apart["PAIRS"] and not apart["ALIGNED"]


def test_tensors_are_copied_only_beyond_three_leading_dimensions() -> None:
    x = numbers(2, 3, 2, 3, 8)
    assert not told(x[:, :, 0].mT, x[:, :, 1].mT)[1]
    turned = x.permute(3, 2, 1, 0, 4)
    assert told(turned, turned)[1]


@pytest.mark.parametrize("name", [n for n in FORWARD if n.startswith("triton")])
def test_up_is_moved_with_a_warning(name: str) -> None:
    x = torch.empty(0, 4, dtype=torch.bfloat16, device="meta")
    with pytest.warns(PlacementWarning, match="up is on .*, but the kernel runs on meta"):
        assert KERNELS[name].call(x, numbers(0, 4)).device.type == "meta"


CASES = {
    "swiglu": "swiglu x=bf16[5,64]:gates up=bf16[5,64] seed=1",
    "swiglu_backward": "swiglu_backward x=bf16[5,64]:gates dy=bf16[5,64] up=bf16[5,64] seed=1",
}
GPT_OSS = "interleaved=True swiglu_limit=7.0 alpha=1.702 up_offset=1.0 seed=1"
GPT_OSS_CASES = {
    "swiglu": f"swiglu x=bf16[5,64]:gates {GPT_OSS}",
    "swiglu_backward": f"swiglu_backward x=bf16[5,64]:gates dy=bf16[5,32] {GPT_OSS}",
}


@pytest.mark.parametrize("name", ["F.silu", "autograd[F.silu]", *(n for n in EXTERNAL if "GptOss" in n)])
def test_what_people_call_keeps_its_contract(name: str) -> None:
    kernel: Kernel = EXTERNAL[name]
    line = (GPT_OSS_CASES if "GptOss" in name else CASES)[kernel.op]
    line = line.replace("bf16", "fp16") if "," in name else line  # on a CPU torch has the other slope in bf16
    subject = Subject(kernel, open_project(Config(folder="")).op(kernel.op), torch.device("cpu"))
    assert verify_case(subject, parse_case(line)).verdict is Verdict.PASSED


@pytest.mark.parametrize(
    ("prefix", "package"), [("liger", "liger_kernel"), ("fla[", "fla"), ("flashinfer", "flashinfer")]
)
def test_refused_without_the_package(prefix: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [m for m in sys.modules if m.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    found = [k for name, k in EXTERNAL.items() if name.startswith(prefix)]
    assert found
    for kernel in found:
        given = {n: numbers(2, 32) for n in ("x", "up", "dy") if n in kernel.accepts}
        with pytest.raises(UnsupportedCase, match=rf"{package}\S* cannot be imported .*pip install"):
            kernel.call(**given)


def test_other_options_than_those_of_gpt_oss_are_refused() -> None:
    subject = Subject(
        EXTERNAL["transformers[GptOssExperts]"], open_project(Config(folder="")).op("swiglu"), torch.device("cpu")
    )
    found = verify_case(subject, parse_case(GPT_OSS_CASES["swiglu"].replace("alpha=1.702", "alpha=1.0")))
    assert found.verdict is Verdict.UNSUPPORTED
    assert found.reason.endswith("alpha must be 1.702")
