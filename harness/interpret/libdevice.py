"""CUDA's libdevice by numpy: the functions of `triton.language.extra.libdevice`, looked up by their symbol.

Correctly rounded functions (…_rn, …_rz, …_rd, …_ru, rint, fma, …) give the hardware's bits. The approximate ones give
the correctly rounded value or its neighbour, from which the hardware may differ by its documented error. Triton builds
libdevice with flush-to-zero, so fp32 subnormals are zeros going in and coming out (measured on an H200).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lastbit.interpret import arithmetic
from lastbit.interpret.arithmetic import directed, via_float64
from lastbit.interpret.numpy_formats import Array, flush_subnormals

Function = Callable[..., Array]


def _by_torch(function: Callable[..., torch.Tensor]) -> Function:
    """Turn a torch special function into a function of numpy arrays."""
    return lambda *xs: function(*(torch.from_numpy(np.ascontiguousarray(x)) for x in xs)).numpy()


_APPROXIMATE: dict[str, Function] = {
    "exp": np.exp, "exp2": np.exp2, "exp10": lambda x: np.power(10.0, x), "expm1": np.expm1,
    "log": np.log, "log2": np.log2, "log10": np.log10, "log1p": np.log1p,
    "sin": np.sin, "cos": np.cos, "tan": np.tan, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan,
    "atan2": np.arctan2, "sinh": np.sinh, "cosh": np.cosh, "tanh": np.tanh, "asinh": np.arcsinh,
    "acosh": np.arccosh, "atanh": np.arctanh, "cbrt": np.cbrt, "hypot": np.hypot, "pow": np.power,
    "erf": _by_torch(torch.erf), "erfc": _by_torch(torch.erfc), "erfinv": _by_torch(torch.erfinv),
    "lgamma": _by_torch(torch.lgamma), "rint": np.rint, "nearbyint": np.rint, "round": lambda x: np.copysign(
        np.floor(np.abs(x) + 0.5), x),
    "normcdf": _by_torch(torch.special.ndtr), "sqrt": np.sqrt, "fdim": lambda x, y: np.fmax(x - y, 0.0),
}  # fmt: skip
_FAST = ("exp", "exp10", "log", "log2", "log10", "sin", "cos", "tan", "pow")
_EXACT: dict[str, Function] = {
    "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "fabs": np.abs, "abs": np.abs,
    "copysign": np.copysign, "nextafter": np.nextafter, "fmod": np.fmod, "fmin": arithmetic.minimum,
    "fmax": arithmetic.maximum, "min": np.minimum, "max": np.maximum, "isnan": np.isnan, "isinf": np.isinf,
    "finite": np.isfinite, "isfinite": np.isfinite, "signbit": np.signbit, "saturate": lambda x: np.clip(
        np.nan_to_num(x, nan=0.0), 0.0, 1.0), "fma": arithmetic.fma, "rsqrt": arithmetic.rsqrt, "ldexp": np.ldexp,
}  # fmt: skip


def _table() -> dict[str, Function]:
    """Return symbol without its `__nv_` → function; fp32 symbols carry an f, the predicates on fp64 a d."""
    table: dict[str, Function] = {}
    for name, function in {**{k: via_float64(f) for k, f in _APPROXIMATE.items()}, **_EXACT}.items():
        table |= {name: function, f"{name}f": function, f"{name}d": function}
    for name in _FAST:
        table[f"fast_{name}f"] = table[name]
    table["fast_fdividef"] = directed("div", "rn")
    for direction in ("rn", "rz", "rd", "ru"):
        for operation in ("add", "sub", "mul", "div"):
            table[f"f{operation}_{direction}"] = directed(operation, direction)
        for operation, symbol in (("rcp", "frcp"), ("sqrt", "fsqrt"), ("fma", "fmaf")):
            table[f"{symbol}_{direction}"] = directed(operation, direction)
    table["frsqrt_rn"] = via_float64(lambda x: 1.0 / np.sqrt(x))
    table |= {"dadd_rn": np.add, "dsub_rn": np.subtract, "dmul_rn": np.multiply, "ddiv_rn": np.divide}
    table |= {"drcp_rn": lambda x: 1.0 / x, "dsqrt_rn": np.sqrt, "fma_rn": arithmetic.fma}
    return table


_TABLE = _table()
_UNFLUSHED = {"copysignf", "signbitf", "nextafterf", "isnanf", "isinff", "finitef", "powf"}


def evaluate(symbol: str, operands: list[Array]) -> Array:
    """Evaluate the libdevice function `symbol` (as `__nv_rsqrtf`) elementwise; NotImplementedError if it is missing."""
    name = symbol.removeprefix("__nv_")
    if name not in _TABLE:
        raise NotImplementedError(f"libdevice function {name!r} is not interpreted; known: {', '.join(sorted(_TABLE))}")
    if name in _UNFLUSHED:
        return _TABLE[name](*np.broadcast_arrays(*operands))
    return flush_subnormals(_TABLE[name](*map(flush_subnormals, np.broadcast_arrays(*operands))))


def replace_libdevice() -> None:
    """Make `triton.language.extra.libdevice`, whose functions are stubs outside the compiler, evaluate here.

    Type checks and promotions stay those of Triton's own CUDA declarations.
    """
    from triton.language.extra import libdevice as stubs
    from triton.language.extra.cuda import libdevice as declared

    from lastbit.interpret.rewrite import SUBSTITUTES

    for name, stub in inspect.getmembers(stubs, inspect.isfunction):
        declaration = getattr(declared, name, None)
        call = _unavailable(name) if declaration is None else _with_semantic(declaration)
        SUBSTITUTES[id(stub)] = stub, call
        setattr(stubs, name, call)
        if declaration is not None:
            SUBSTITUTES[id(declaration)] = declaration, call
            setattr(declared, name, call)


def _with_semantic(declaration: Callable[..., Any]) -> Callable[..., Any]:
    from triton.runtime.interpreter import interpreter_semantic

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("_semantic", None)
        return declaration(*args, **kwargs, _semantic=interpreter_semantic)

    return call


def _unavailable(name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"libdevice function {name!r} does not exist on NVIDIA GPUs")

    return call
