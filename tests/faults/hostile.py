"""Kernels that are wrong in what they keep, share or watch and not in what they compute, and right ones of each kind.

Two calls on the same values, in the same order and under guards alone, let most of the wrong ones pass.
"""

from __future__ import annotations

import os
import tempfile
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Hostile:
    """A kernel of rms_norm with x, weight and eps.

    Attributes:
        make: makes the kernel, which has been called by nobody.
        kinds: kinds of findings that it gives, all of them; empty for a right kernel.
    """

    name: str
    make: Callable[[], Function]
    kinds: frozenset[str] = frozenset()
    mutates: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


def norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Return a right kernel of the default contract."""
    y = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return y * weight


# Memory that is the kernel's own


def output_by_address() -> Function:
    """Keep a result for the address of its input, as prepared weights are kept, and give a copy of it."""
    kept: dict[int, Tensor] = {}

    def kernel(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        if x.data_ptr() not in kept:
            kept[x.data_ptr()] = norm(x, weight, eps=eps)
        return kept[x.data_ptr()].clone()

    return kernel


def static_output() -> Function:
    """Return the same buffer every time, before it is written for the first time and after it is written later."""
    buffers: dict[torch.Size, Tensor] = {}

    def kernel(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        if x.shape not in buffers:
            buffers[x.shape] = torch.zeros(x.shape, dtype=x.dtype)
            return buffers[x.shape]
        return buffers[x.shape].copy_(norm(x, weight, eps=eps))

    return kernel


def cached_output() -> Function:
    """Write the right result into a buffer that is kept for the next call."""
    buffers: dict[torch.Size, Tensor] = {}

    def kernel(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        return buffers.setdefault(x.shape, torch.empty(x.shape, dtype=x.dtype)).copy_(norm(x, weight, eps=eps))

    return kernel


def cached_workspace() -> Function:
    """Right: keeps scratch memory, which it writes before it reads, and returns memory of its own every time."""
    scratch: dict[torch.Size, Tensor] = {}

    def kernel(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        return scratch.setdefault(x.shape, torch.empty(x.shape, dtype=x.dtype)).copy_(norm(x, weight, eps=eps)).clone()

    return kernel


def uncleared_maximum() -> Function:
    """Keep the largest magnitudes of rows ever seen, where those of x are wanted."""
    largest: dict[torch.Size, Tensor] = {}

    def kernel(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        own = x.float().abs().amax(-1, keepdim=True)
        amax = largest.setdefault(x.shape, torch.zeros_like(own))
        torch.maximum(amax, own, out=amax)
        return norm(x, weight, eps=eps) * (own / amax).to(x.dtype)

    return kernel


# Values of an earlier call


def output_by_shape() -> Function:
    """Compute once for a shape, and return copies of that."""
    known: dict[torch.Size, Tensor] = {}

    def kernel(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        if x.shape not in known:
            known[x.shape] = norm(x, weight, eps=eps)
        return known[x.shape].clone()

    return kernel


def output_by_weight() -> Function:
    """Compute once for a weight, which a model does not change, and return copies of that."""
    known: dict[object, Tensor] = {}

    def kernel(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        return known.setdefault((x.shape, *weight.tolist()), norm(x, weight, eps=eps)).clone()

    return kernel


def eps_by_shape() -> Function:
    """Compute every result, with the eps of the first call for a shape."""
    known: dict[torch.Size, float] = {}

    def kernel(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        return norm(x, weight, eps=known.setdefault(x.shape, eps))

    return kernel


def captured_graph() -> Function:
    """Replays what it captured, tensors included."""
    graphs: dict[torch.Size, Callable[[], Tensor]] = {}

    def kernel(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        return graphs.setdefault(x.shape, lambda: norm(x, weight, eps=eps))()

    return kernel


def captured_graph_with_copies() -> Function:
    """Right: replays on its own inputs, into which it copies the caller's, and copies the output."""
    graphs: dict[torch.Size, tuple[Tensor, Tensor]] = {}

    def kernel(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        own = graphs.setdefault(x.shape, (torch.empty_like(x), torch.empty_like(weight)))
        for mine, given in zip(own, (x, weight), strict=True):
            mine.copy_(given)
        return norm(*own, eps=eps).clone()

    return kernel


def constants_by_shape() -> Function:
    """Right: keeps what depends on the shape alone."""
    known: dict[torch.Size, Tensor] = {}

    def kernel(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        width = known.setdefault(x.shape, torch.tensor(float(x.shape[-1])))
        y = (x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) / width + eps)).to(x.dtype)
        return y * weight

    return kernel


# Tensors of the caller


def after(change: Callable[[Tensor], object]) -> Callable[[], Function]:
    """Make a kernel that does something to x, and then what is right for the x that it was given."""

    def make() -> Function:
        def kernel(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
            y = norm(x, weight, eps=eps)
            change(x)
            return y

        return kernel

    return make


def magnitudes() -> Function:
    """Take the magnitudes of x for x, in the tensor of the caller."""

    def kernel(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        x.data = x.data.abs()
        return norm(x, weight, eps=eps)

    return kernel


def frees_storage(x: Tensor) -> None:
    x.untyped_storage().resize_(0)


def grows(x: Tensor) -> None:
    x.resize_(1 << 20)


def in_place() -> Function:
    """Right where it is declared: the result is x."""
    return lambda x, weight, *, eps: x.copy_(norm(x, weight, eps=eps))


# Guards that can be seen


def careful_if(watched: Callable[[], bool]) -> Callable[[], Function]:
    """Make a kernel that forgets the last column, unless it is watched."""

    def make() -> Function:
        def kernel(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
            y = norm(x, weight, eps=eps)
            if not watched():
                y[..., -1] = 0
            return y

        return kernel

    return make


def is_wrapped() -> bool:
    return hasattr(torch.empty, "__wrapped__")


def is_no_builtin() -> bool:
    return isinstance(torch.empty, types.FunctionType)


# The process


def leaving(change: Callable[[], object]) -> Callable[[], Function]:
    """Make a right kernel that changes the process and leaves it so."""
    return after(lambda _: change())


def moves_away() -> None:
    os.chdir(tempfile.gettempdir() if os.getcwd() != tempfile.gettempdir() else "/")


def sets_and_restores() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_default_dtype(torch.float32)


def uses_more_threads() -> None:
    torch.set_num_threads(2)
    os.environ["LASTBIT_HOSTILE"] = "1"


# The order of programs


@triton.jit
def _copies_rows(source, target, rows, width, SPILL: tl.constexpr, WIDTH: tl.constexpr):
    """Copy a row; with SPILL, write it over the next one as well, which the next program mends."""
    row = tl.program_id(0)
    columns = tl.arange(0, WIDTH)
    values = tl.load(source + row * width + columns, mask=columns < width)
    tl.store(target + row * width + columns, values, mask=columns < width)
    tl.store(target + (row + 1) * width + columns, values, mask=(columns < width) & (row + 1 < rows) & SPILL)


def copied(*, spill: bool) -> Callable[[], Function]:
    """Make a kernel whose last step is a launch of one program per row."""

    def make() -> Function:
        def kernel(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
            y = norm(x, weight, eps=eps)
            copy = torch.empty(y.shape, dtype=y.dtype, device=y.device)
            rows, width = y.shape
            _copies_rows[(rows,)](y.contiguous(), copy, rows, width, SPILL=spill, WIDTH=triton.next_power_of_2(width))
            return copy

        return kernel

    return make


def _all(kernels: Mapping[str, tuple[Any, ...]]) -> tuple[Hostile, ...]:
    return tuple(Hostile(name, make, frozenset(kinds)) for name, (make, *kinds) in kernels.items())


HOSTILE = _all(
    {
        "static output, garbage first": (static_output, "reused_memory", "nondeterministic", "outside"),
        "cached output": (cached_output, "reused_memory"),
        "uncleared maximum": (uncleared_maximum, "other_values", "nondeterministic"),
        "output by shape": (output_by_shape, "other_values"),
        "output by address": (output_by_address, "guards", "other_values"),
        "output by weight": (output_by_weight, "other_values"),
        "eps by shape": (eps_by_shape, "other_parameters"),
        "captured graph": (captured_graph, "other_values"),
        "x.data": (magnitudes, "rebound_input", "outside"),
        "x.set_": (after(lambda x: x.set_()), "rebound_input"),
        "x.resize_": (after(grows), "rebound_input"),
        "x.t_": (after(lambda x: x.t_()), "rebound_input"),
        "storage freed": (after(frees_storage), "rebound_input"),
        "sees __wrapped__": (careful_if(is_wrapped), "guards"),
        "sees a Python function": (careful_if(is_no_builtin), "guards"),
        "last writer wins": (copied(spill=True), "nondeterministic"),
        "chdir": (leaving(moves_away), "process_state"),
        "default dtype": (leaving(lambda: torch.set_default_dtype(torch.float64)), "process_state"),
        "default device": (leaving(lambda: torch.set_default_device("meta")), "process_state"),
        "grad mode": (leaving(lambda: torch.set_grad_enabled(not torch.is_grad_enabled())), "process_state"),
    }
)
RIGHT = (
    *_all(
        {
            "cached workspace": (cached_workspace,),
            "captured graph with copies": (captured_graph_with_copies,),
            "constants by shape": (constants_by_shape,),
            "one program per row": (copied(spill=False),),
            "default dtype restored": (leaving(sets_and_restores),),
            "threads and environment": (leaving(uses_more_threads),),
        }
    ),
    Hostile("in place", in_place, mutates=("x",)),
)
