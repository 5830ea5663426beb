"""The contracts of RMSNorm computed in fp64, one rounding at a time, and what the tests of its kernels share.

Every fp32 operation of the Triton kernel is correctly rounded, and the tests leave its sums no freedom: they use small
integers (whose sums are exact in any order) or a mean over one column. So one legal result remains. The tests also run
on a GPU, with TRITON_INTERPRET=0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from lastbit.kernel import load_kernels
from lastbit.numerics.formats import E4M3, FP32, cast, format_of, round_to

FOLDER = Path(__file__).resolve().parent.parent / "kernels"
BF16, FP16, FLOAT = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP16, FLOAT)
WEIGHT_RULES = ("native_multiply", "fp32_multiply")
RESIDUAL_RULES = ("rounded_sum", "unrounded_sum", "rounded_value")
CONTRACTS = tuple(f"{w}+{r}" for w in WEIGHT_RULES for r in RESIDUAL_RULES)
INTERPRETED = triton.knobs.runtime.interpret
DEVICE = "cpu" if INTERPRETED else "cuda"
EPS = 2.0**-20

needs_device = pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="no CUDA device")

if INTERPRETED:
    from lastbit.interpret import install

    install()

LOADED = load_kernels(FOLDER)
"""Loaded once for all files of tests: what the interpreter knows of a kernel is of one load."""
KERNELS = {k.name: k for k in LOADED if k.op == "rms_norm"}


def triton_kernel(contract: str = "native_multiply+rounded_sum") -> Any:
    return KERNELS[f"triton[{contract}]"].call


def result_name(quant: str | None) -> str:
    return "output" if quant is None else "quantized"


def integers(*shape: int, dtype: torch.dtype = FLOAT, most: int = 8, seed: int = 0) -> Tensor:
    """Eighths of whole numbers: sums of their squares are exact below 2**24 units."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-most, most + 1, shape, generator=generator) / 8).to(dtype).to(DEVICE)


def normals(*shape: int, dtype: torch.dtype = FLOAT, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def strided(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, *, offset: int = 0) -> Tensor:
    length = offset + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return integers(length, dtype=dtype, seed=5).as_strided(shape, strides, offset)


LAYOUTS = {
    "packed heads": ((20, 4, 128), (768, 128, 1)),
    "transposed heads": ((8, 5, 128), (128, 4096, 1)),
    "three outer dims": ((2, 3, 5, 48), (2000, 100, 350, 1)),
    "four outer dims": ((2, 3, 2, 2, 24), (2003, 401, 100, 49, 1)),
    "expanded": ((4, 6, 40), (0, 44, 1)),
    "padded rows": ((9, 40), (41, 1)),
    "last dim strided": ((6, 40), (80, 2)),
    "last dim expanded": ((6, 40), (3, 0)),
    "one column": ((6, 3, 1), (5, 40, 7)),
    "vector": ((40,), (1,)),
    "ones": ((1, 7, 1, 40), (9999, 64, 3, 1)),
}


def fp32(x: Tensor) -> Tensor:
    return round_to(x, FP32)


def expected(
    contract: str,
    x: Tensor,
    weight: Tensor | None = None,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    *,
    eps: float = EPS,
    variance_size: int | None = None,
    weight_offset: float = 0.0,
    quant: str | None = None,
    inv_rms_error: float = 0.0,
) -> dict[str, Tensor]:
    """Compute the contract's results and stages, in fp64 with a rounding after every operation, cast to their dtypes.

    `inv_rms_error` is relative, and moves the inverse rms off its correctly rounded value.
    """
    weight_rule, residual_rule = contract.split("+")
    x_format = format_of(x.dtype)
    squared = value = x.double()
    stored: dict[str, Tensor] = {}
    if residual is not None:
        total = fp32(x.double() + residual.double())
        rounded = round_to(total, x_format)
        stored["residual_sum"] = cast(rounded, x.dtype)
        squared = rounded if residual_rule == "rounded_sum" else total
        value = total if residual_rule == "unrounded_sum" else rounded
    squares = fp32(squared[..., :variance_size].square())
    variance = fp32(squares.sum(-1, keepdim=True) / squares.shape[-1])
    inv_rms = fp32(1 / fp32(torch.sqrt(fp32(variance + torch.tensor(eps).double().to(x.device)))))
    stored |= {"variance": variance.float(), "inv_rms": inv_rms.float()}
    inv_rms = inv_rms * (1 + inv_rms_error)

    native = weight_rule == "native_multiply"
    multiplied = (x if weight is None else weight).dtype if native else FLOAT
    y = round_to(fp32(value * inv_rms), format_of(multiplied))
    stored["normalized"] = cast(y, multiplied)
    if weight is not None:
        factor = weight.double() if not weight_offset else fp32(weight.double() + weight_offset)
        y = round_to(fp32(y * factor), format_of(multiplied))
        stored["product"] = cast(y, multiplied)
    y = round_to(y, x_format)
    stored["output"] = cast(y, x.dtype)
    return stored | encoded(y, quant, scale)


def encoded(y: Tensor, quant: str | None, scale: Tensor | None) -> dict[str, Tensor]:
    if quant is None:
        return {}
    if quant == "static":
        assert scale is not None
        scaled, stored = fp32(y * fp32(1 / scale.double())), {}
    else:
        amax = torch.where(y.isnan(), 0.0, y.abs()).amax(-1, keepdim=True)
        floor = fp32(torch.tensor(1 / (448.0 * 512.0), dtype=torch.float64, device=y.device))
        row_scale = torch.maximum(fp32(amax / 448.0), floor)
        scaled, stored = fp32(y / row_scale), {"scale": row_scale.float()}
    return stored | {"quantized": cast(scaled.clamp(-E4M3.max, E4M3.max), torch.float8_e4m3fn)}


def assert_bits(actual: Tensor, wanted: Tensor, name: str) -> None:
    """Check for the same shape, dtype and bits; NaN by class."""
    assert (actual.shape, actual.dtype) == (wanted.shape, wanted.dtype), name
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[actual.element_size()]
    nan = wanted.float().isnan()
    assert torch.equal(actual.float().isnan(), nan), f"{name}: NaN in other places"
    different = (actual.contiguous().view(integer) != wanted.contiguous().view(integer)) & ~nan
    where = different.nonzero()[:1].tolist()
    assert not different.any(), f"{name}: {int(different.sum())} of {different.numel()} differ, first at {where}"


def keeps(contract: str, output: Tensor, *tensors: Tensor | None) -> bool:
    """Return whether every element is legal with sums that are exact and a mean and rsqrt wrong by 2**-21 together."""
    low, high = (
        expected(contract, *tensors, inv_rms_error=e)["output"].double()  # type: ignore[arg-type]
        for e in (-(2.0**-21), 2.0**-21)
    )
    y = output.double()
    return bool(((torch.minimum(low, high) <= y) & (y <= torch.maximum(low, high))).all())
