"""The dtypes of tensors by name: `bf16` is what a case line says, and torch calls it bfloat16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    DTYPES: Mapping[str, torch.dtype]
    DTYPE_NAMES: Mapping[torch.dtype, str]


class Dtype(NamedTuple):
    """The facts about a dtype that are needed without torch."""

    torch_name: str
    itemsize: int
    floating: bool = False


BY_NAME: Mapping[str, Dtype] = {
    "fp64": Dtype("float64", 8, floating=True),
    "fp32": Dtype("float32", 4, floating=True),
    "bf16": Dtype("bfloat16", 2, floating=True),
    "fp16": Dtype("float16", 2, floating=True),
    "e4m3": Dtype("float8_e4m3fn", 1, floating=True),
    "e5m2": Dtype("float8_e5m2", 1, floating=True),
    "int64": Dtype("int64", 8),
    "int32": Dtype("int32", 4),
    "int8": Dtype("int8", 1),
    "uint8": Dtype("uint8", 1),
    "bool": Dtype("bool", 1),
}


def __getattr__(name: str) -> object:
    """Make `DTYPES` and `DTYPE_NAMES` when they are first asked for: a case line is read without torch."""
    if name not in ("DTYPES", "DTYPE_NAMES"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import torch

    dtypes = {name: getattr(torch, dtype.torch_name) for name, dtype in BY_NAME.items()}
    globals().update(DTYPES=dtypes, DTYPE_NAMES={dtype: name for name, dtype in dtypes.items()})
    return globals()[name]
