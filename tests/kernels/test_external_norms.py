"""Norms of other packages under their adapters: refused where the package is missing, and right where it is not."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from lastbit.case import parse_case
from lastbit.config import Config
from lastbit.errors import UnsupportedCase
from lastbit.kernel import Kernel, load_kernels
from lastbit.result import Verdict
from lastbit.verify.check import Subject, unsupported, verify_case
from lastbit.verify.project import open_project
from tests.rms_norm_contract import INTERPRETED  # installs the bit-faithful interpreter

FOLDER = Path(__file__).resolve().parents[2] / "kernels" / "external"
PACKAGES = {
    "transformers": "transformers",
    "liger": "liger_kernel",
    "fla[": "fla",  # not flashinfer, which test_external_compiled.py has
    "conch": "conch",
    "mamba": "mamba_ssm",
}
OPS = ("rms_norm", "layer_norm_gated", "layer_norm_gated_backward")
REQUIRED = {
    "eps": "eps=1e-06",
    "residual": "residual=bf16[9,64]",
    "weight_offset": "weight_offset=1.0",
    "z": "z=bf16[9,64]:gates",
    "dy": "dy=bf16[9,64]",
    "rstd": "rstd=fp32[9,1]:scale_random",
}


def norms() -> dict[str, Kernel]:
    """Those of packages; test_external_torch.py has those of torch."""
    return {k.name: k for k in load_kernels(FOLDER) if k.op in OPS and k.name.startswith(tuple(PACKAGES))}


def package_of(name: str) -> str:
    return next(package for prefix, package in PACKAGES.items() if name.startswith(prefix))


def arguments(kernel: Kernel, width: int = 16, weight: torch.dtype = torch.bfloat16) -> dict[str, object]:
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(0)).bfloat16()
    given = {
        "x": x,
        "weight": torch.ones(width, dtype=weight),
        "residual": x.clone(),
        "eps": 1e-6,
        "weight_offset": 1.0,
        "z": x.clone(),
        "dy": x.clone(),
        "rstd": torch.ones(3, 1),
    }
    return {name: value for name, value in given.items() if name in kernel.requires | {"x", "weight"}}


def test_every_package_has_kernels() -> None:
    assert {package_of(name) for name in norms()} == set(PACKAGES.values())


@pytest.mark.parametrize("name", norms())
def test_refused_without_the_package(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = package_of(name)
    for module in [m for m in sys.modules if m.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    kernel = norms()[name]
    with pytest.raises(UnsupportedCase, match=rf"{package}\S* cannot be imported .*pip install"):
        kernel.call(**arguments(kernel))


@pytest.mark.skipif(torch.cuda.is_available(), reason="lanes without a value are 0 on a GPU")
@pytest.mark.parametrize("name", [name for name in norms() if name.startswith("conch") or "backward" in name])
def test_lanes_without_a_value_are_not_taken_on_the_cpu(name: str) -> None:
    taken = norms()[name].takes["x columns"]
    assert 16 in taken and 17 not in taken


@pytest.mark.parametrize("name", [name for name in norms() if not name.startswith(("transformers", "liger[none]"))])
def test_a_tensor_on_another_device_is_named(name: str) -> None:
    kernel = norms()[name]
    given = arguments(kernel)
    with pytest.raises(ValueError, match="weight is on meta, but x is on cpu"):
        kernel.call(**given | {"weight": given["weight"].to("meta")})


def test_gemma_always_adds_one() -> None:
    case = parse_case("rms_norm x=bf16[9,64] weight=bf16[64] eps=1e-06 weight_offset=0.5 seed=1")
    assert unsupported(norms()["conch[gemma_rms_norm]"], case)


def test_conch_multiplies_two_narrow_dtypes_in_fp16() -> None:
    kernel = norms()["conch[rms_norm]"]
    with pytest.raises(UnsupportedCase, match="bf16 and fp16"):
        kernel.call(**arguments(kernel, weight=torch.float16))


def test_no_elements_are_refused() -> None:
    nothing = parse_case("rms_norm x=bf16[0,16] weight=bf16[16] eps=1e-06 seed=1")
    assert "non-empty" in unsupported(norms()["liger[llama]"], nothing)


def test_groups_that_upstream_cannot_hold_are_refused() -> None:
    """In the words of the package, which checks that before it starts anything."""
    pytest.importorskip("fla")
    kernel = norms()["fla[layernorm_gated]"]
    with pytest.raises(UnsupportedCase, match="doesn't support feature dim >= 64KB"):
        kernel.call(x=torch.zeros(1, 65536).bfloat16(), weight=torch.ones(65536).bfloat16(), eps=1e-6)


def test_gates_that_come_before_a_mean_are_refused_on_the_cpu_where_lanes_have_none() -> None:
    kernel = norms()["mamba[layernorm_gated]"]
    given = arguments(kernel, width=17)
    with pytest.raises(UnsupportedCase, match="lanes beyond a group"):
        kernel.call(**given, z=given["x"], norm_before_gate=False)


def test_what_fused_norm_gate_has_not_is_refused() -> None:
    kernel = norms()["fla[fused_norm_gate_backward]"]
    line = "layer_norm_gated_backward x=bf16[9,64] dy=bf16[9,64] weight=bf16[64] rstd=fp32[9,{}] z=bf16[9,64] seed=1"
    assert not unsupported(kernel, parse_case(line.format(1)))
    assert "rstd columns" in unsupported(kernel, parse_case(line.format(2)))
    gates_first = parse_case(line.format(1).replace("seed", "norm_before_gate=False seed"))
    assert "norm_before_gate" in unsupported(kernel, gates_first)


@pytest.mark.skipif(not INTERPRETED, reason="the cases are for the interpreter")
@pytest.mark.parametrize("name", [name for name in norms() if name != "liger[none]"])
def test_it_keeps_what_it_claims(name: str) -> None:
    """With a weight of x's dtype; `lastbit identify` tells what Liger and conch do with others."""
    if importlib.util.find_spec(package_of(name)) is None:
        pytest.skip(f"{package_of(name)} is not installed")
    kernel = norms()[name]
    project = open_project(Config(folder=""))
    given = " ".join(REQUIRED[name] for name in REQUIRED if name in kernel.requires)
    case = parse_case(f"{kernel.op} x=bf16[9,64] weight=bf16[64] {given} seed=1")
    result = verify_case(Subject(kernel, project.op(kernel.op), torch.device("cpu")), case)
    assert result.verdict is Verdict.PASSED, result.findings or result.reason
