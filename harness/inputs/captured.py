"""Values captured from a real model: the regime `captured(PATH#KEY)` reads them from a safetensors file."""

from __future__ import annotations

import re
from pathlib import Path

import safetensors
from safetensors import safe_open
from torch import Tensor

from lastbit.case import TensorSpec
from lastbit.dtypes import DTYPES
from lastbit.errors import UsageError, unknown

_CALL = re.compile(r"captured\((?P<path>[^#]+)#(?P<key>.+)\)$")
_STORED_DTYPES = {
    "F64": "fp64",
    "F32": "fp32",
    "BF16": "bf16",
    "F16": "fp16",
    "F8_E4M3": "e4m3",
    "F8_E5M2": "e5m2",
    "I64": "int64",
    "I32": "int32",
    "I8": "int8",
    "BOOL": "bool",
}


def is_captured(regime: str) -> bool:
    """Return whether `regime` names a captured tensor (perhaps wrongly spelled)."""
    return regime == "captured" or regime.startswith("captured(")


def fill_captured(target: Tensor, spec: TensorSpec) -> None:
    """Copy the captured tensor that `spec.regime` names into `target`, bit for bit.

    The stored tensor has the dtype and shape of `spec`, or more rows in the first dimension, of which the first ones
    are taken. `target` may have size 1 where `spec` has stride 0; index 0 is taken there.

    Raises:
        UsageError: the regime is misspelled; the file or the key does not exist; dtype or shape does not fit.
    """
    path, key = _location(spec.regime)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            keys = list(file.keys())
            if key not in keys:
                raise unknown(f"tensor in {str(path)!r}:", key, keys)
            stored = file.get_slice(key)
            shape = tuple(stored.get_shape())
            _check(spec, f"{key!r} in {str(path)!r}", stored.get_dtype(), shape)
            if not shape:
                target.copy_(file.get_tensor(key))
                return
            inner = tuple(slice(0, size) for size in target.shape[1:])
            row_bytes = max(target[:1].numel() * target.element_size(), 1)
            step = max((64 << 20) // row_bytes, 1)
            for start in range(0, target.shape[0], step):
                stop = min(start + step, target.shape[0])
                target[start:stop].copy_(stored[start:stop][(slice(None), *inner)])
    except safetensors.SafetensorError as error:
        raise UsageError(f"{str(path)!r} is not a readable safetensors file: {error}") from error


def _location(regime: str) -> tuple[Path, str]:
    match = _CALL.match(regime)
    if match is None:
        raise UsageError(
            f"cannot read regime {regime!r}: expected captured(PATH#KEY), a safetensors file and a key in it"
        )
    path = Path(match["path"])
    if not path.is_file():
        raise UsageError(f"captured file {str(path)!r} does not exist or is not a file")
    return path, match["key"]


def _check(spec: TensorSpec, source: str, dtype: str, shape: tuple[int, ...]) -> None:
    name = _STORED_DTYPES.get(dtype, dtype)
    if name != spec.dtype:
        known = "" if name in DTYPES else ", a dtype that cases do not have"
        raise UsageError(f"captured tensor {source} is {name}{known}, but tensor {spec.name!r} is {spec.dtype}")
    fits = shape == spec.shape or (
        len(shape) == len(spec.shape) > 0 and shape[1:] == spec.shape[1:] and shape[0] >= spec.shape[0]
    )
    if not fits:
        raise UsageError(
            f"captured tensor {source} has shape {list(shape)}, but tensor {spec.name!r} has {list(spec.shape)}; "
            "it must have the same shape, or more rows in the first dimension"
        )
