"""RMSNorm and quantization: in one Triton kernel, that of rms_norm.py, and in PyTorch as two kernels compute it."""

from __future__ import annotations

from collections.abc import Sequence

from quantize_torch import quantized
from rms_norm import rms_norm
from rms_norm_torch import SMALLEST_SCALE, add_residual, multiply_fp32, multiply_native, normalize
from torch import Tensor

from lastbit import UnsupportedCase, kernel


def _renamed(found: Tensor | dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the results of the norm as the chain does."""
    names = {"quantized": "e4m3_codes", "scale": "quantize_scale"}
    results = found if isinstance(found, dict) else {"quantized": found}
    return {names.get(name, name): tensor for name, tensor in results.items()}


def _only_e4m3(dtype: str) -> None:
    if dtype != "e4m3":
        raise UnsupportedCase(f"dtype={dtype!r}: the fused kernel has e4m3 codes alone")


@kernel(
    "rms_norm_quantize",
    contract="per_token",
    name="triton[rms_norm_quantize+per_token]",
    takes={"dtype": "e4m3"},
    invariant=("rows", "permutation", "padding", "run to run"),
)
def per_token(
    x: Tensor,
    weight: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    eps: float,
    dtype: str,
    least_scale: float,
) -> dict[str, Tensor]:
    _only_e4m3(dtype)
    if least_scale != SMALLEST_SCALE:
        raise UnsupportedCase(f"least_scale={least_scale}: the fused kernel has {SMALLEST_SCALE} alone")
    return _renamed(rms_norm(x, weight, residual, eps=eps, quant="dynamic", residual_rule="unrounded_sum"))


@kernel(
    "rms_norm_quantize",
    contract="per_tensor",
    name="triton[rms_norm_quantize+per_tensor]",
    takes={"dtype": "e4m3"},
    invariant=("rows", "permutation", "padding", "run to run"),
)
def per_tensor(
    x: Tensor,
    scale: Tensor,
    weight: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    eps: float,
    dtype: str,
    weight_offset: float = 0.0,
) -> dict[str, Tensor]:
    _only_e4m3(dtype)
    rules = {"weight_rule": "fp32_multiply", "residual_rule": "rounded_sum"}
    return _renamed(rms_norm(x, weight, residual, scale, eps=eps, quant="static", weight_offset=weight_offset, **rules))


def _declare(contract: str, codes: str, residual_rule: str, *, native: bool) -> None:
    @kernel(
        "rms_norm_quantize",
        contract=contract,
        name=f"eager[rms_norm_quantize+{contract}]",
        stages=("output",),
        invariant=("run to run",),
    )
    def unfused(
        x: Tensor,
        weight: Tensor | None = None,
        residual: Tensor | None = None,
        scale: Tensor | None = None,
        *,
        eps: float,
        dtype: str,
        group_size: int | None = None,
        ue8m0: bool = False,
        least_amax: float = 0.0,
        least_scale: float = 0.0,
        stages: Sequence[str] = (),
    ) -> dict[str, Tensor]:
        squared, value, results = add_residual(x, residual, residual_rule)
        normalized = normalize(squared, value, eps, None)
        rounded = multiply_native(normalized, weight, x.dtype)
        output = rounded if native else multiply_fp32(normalized, weight, x.dtype, 0.0)
        found = quantized(
            output,
            scale,
            dtype=dtype,
            group_size=group_size,
            ue8m0=ue8m0,
            least_amax=least_amax,
            least_scale=least_scale,
            codes=codes,
        )
        results |= {"quantize_scale": found["scale"]} if "scale" in found else {}
        results |= {"output": output} if "output" in stages else {}
        return {f"{dtype}_codes": found[f"{dtype}_codes"], **results}


_declare("per_group", "reciprocal", "unrounded_sum", native=True)
_declare("per_tensor", "reciprocal", "rounded_sum", native=False)
