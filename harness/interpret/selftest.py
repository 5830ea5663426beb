"""Quick tests of the installed interpreter; most of them run only on unknown releases of Triton."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import interpreter_semantic

Check = tuple[str, Callable[[], torch.Tensor], Sequence[float]]
"""A name, a launch, and the values that it must return."""


@triton.jit  # type: ignore[untyped-decorator]
def _convert(x_ptr, out_ptr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(x_ptr + i).to(out_ptr.dtype.element_ty))


@triton.jit  # type: ignore[untyped-decorator]
def _multiply(x_ptr, y_ptr, out_ptr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(x_ptr + i) * tl.load(y_ptr + i))


@triton.jit  # type: ignore[untyped-decorator]
def _scale(x_ptr, out_ptr, scale, count, N: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(x_ptr + i) * scale * (1 + (count * count < 0)))


@triton.jit  # type: ignore[untyped-decorator]
def _reduce(x_ptr, out_ptr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    x = tl.load(x_ptr + tl.arange(0, N))
    tl.store(out_ptr, tl.sum(x))
    tl.store(out_ptr + 1, tl.max(x))
    tl.store(out_ptr + 2, tl.cumsum(x).to(tl.float32).sum())
    tl.store(out_ptr + 3, tl.maximum(tl.min(x), float("nan")))


@triton.jit  # type: ignore[untyped-decorator]
def _repeat(x_ptr, out_ptr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    total = tl.zeros([1], tl.float32)
    for _ in range(0, program % 2 + 1):
        total += tl.load(x_ptr + program + tl.arange(0, 1)).to(tl.float32)
    tl.store(out_ptr + program + tl.arange(0, 1), total)


def _ran(
    kernel: Any, inputs: list[torch.Tensor], dtype: torch.dtype, *scalars: float, programs: int = 1
) -> torch.Tensor:
    out = torch.zeros(inputs[0].shape, dtype=dtype)
    kernel[(programs,)](*inputs, out, *scalars, N=out.numel())
    return out


def _bf16(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bfloat16)


def checks() -> tuple[Check, ...]:
    """Return the checks of rounding, conversions, scalar arguments, several programs and reductions, a launch each."""
    ties = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 2.0**-134, 3.4e38])
    fp8 = torch.tensor([1.0625, 1.1875, -1000.0, math.inf])
    factors = [_bf16(1.0078125, 3.0), _bf16(1.0078125, 0.5)]
    small = torch.tensor([2.0, -1.0, 3.0, 0.5], dtype=torch.float16)
    return (
        ("fp32 to bf16", lambda: _ran(_convert, [ties], torch.bfloat16), [1.0, 1.015625, 0.0, math.inf]),
        ("fp32 to e4m3", lambda: _ran(_convert, [fp8], torch.float8_e4m3fn), [1.0, 1.25, -448.0, 448.0]),
        ("bf16 to fp32", lambda: _ran(_convert, [_bf16(1.5, -2.0)], torch.float32), [1.5, -2.0]),
        ("bf16 product", lambda: _ran(_multiply, factors, torch.bfloat16), [1.015625, 1.5]),
        ("scalars", lambda: _ran(_scale, [_bf16(3.0, 3.0)], torch.float32, 0.1, 50000), [0.6000000238418579] * 2),
        ("programs", lambda: _ran(_repeat, [small], torch.float32, programs=4), [2.0, -2.0, 3.0, 1.0]),
        ("reductions", lambda: _ran(_reduce, [small], torch.float32), [4.5, 3.0, 11.5, -1.0]),
    )


def differences(chosen: Sequence[Check] | None = None) -> list[str]:
    """Return a sentence for every check that fails or raises."""
    wrong = []
    for name, launch, expected in checks() if chosen is None else chosen:
        try:
            actual = launch().double().tolist()
        except Exception as error:
            wrong.append(f"{name} raised {type(error).__name__}: {error}")
            continue
        if actual != list(expected):
            wrong.append(f"{name} gave {actual} instead of {list(expected)}")
    return wrong


class _Asked:
    """A builder that notes the names of the operations which it is asked for."""

    def __init__(self, builder: Any) -> None:
        self.names: list[str] = []
        self._builder = builder

    def __getattr__(self, name: str) -> Any:
        self.names.append(name)
        return getattr(self._builder, name)


def check_that_one_builder_is_asked() -> None:
    """Raise an AttributeError if the language asks another builder than the one that a `Recorder` stands in for."""
    builder = interpreter_semantic.builder
    interpreter_semantic.builder = asked = _Asked(builder)
    try:
        tl.arange(0, 2)
    finally:
        interpreter_semantic.builder = builder
    if "create_make_range" not in asked.names:
        raise AttributeError("its language asks a builder that cannot be exchanged")
