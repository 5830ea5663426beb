"""Where the dtypes of a trace come from: traced with several dtypes of each input, an operation follows one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from harness.dtypes import DTYPE_NAMES
from harness.from_torch.tracing import Example, Traced, Untraceable, traced

HALVES = (torch.bfloat16, torch.float16)
FLOATS = (*HALVES, torch.float32)
Assigned = Mapping[str, torch.dtype]


@dataclass(frozen=True)
class Followed:
    """A trace, and which dtype the result of each operation has.

    Attributes:
        traced: the trace for the dtypes of the example.
        origins: operation with a result of floating-point numbers → the input whose dtype it has, or a format.
        alike: inputs that must have one dtype, because the function rounds elsewhere if they do not.
        only_fp32: inputs that must be of fp32 for the same reason.
    """

    traced: Traced
    origins: Mapping[fx.Node, str]
    alike: tuple[str, ...] = ()
    only_fp32: tuple[str, ...] = ()


def followed(function: Callable[..., Any], example: Example) -> Followed:
    """The trace of a function with the origin of every dtype.

    Raises:
        Untraceable: as `traced`; or the function does something else for another dtype of all inputs.
    """
    base = traced(function, example)
    floats = {name: t.dtype for name, t in example.tensors.items() if t.is_floating_point()}
    alike = [(assigned, traced(function, _with(example, assigned))) for assigned in _together(floats)]
    for assigned, other in alike:
        if _operations(other) != _operations(base):
            names = ", ".join(f"{name}={DTYPE_NAMES[dtype]}" for name, dtype in assigned.items())
            raise Untraceable(f"the function does other operations with {names}; write a function for each dtype")
    alone = [pair for pair in _tried(function, example, _one_by_one(floats)) if pair is not None]
    complete = len(alone) == len([*_one_by_one(floats)])
    same = [pair for pair in alone if _operations(pair[1]) == _operations(base)]
    origins = _origins(base, [*alike, *same]) if complete and len(same) == len(alone) else None
    if origins is not None:
        return Followed(base, origins)
    origins = _origins(base, alike)
    if origins is None:
        raise Untraceable("the dtypes of some operations are neither that of an input nor the same for all inputs")
    return Followed(
        base,
        origins,
        tuple(name for name, dtype in floats.items() if dtype in HALVES or len(set(floats.values())) == 1),
        tuple(name for name, dtype in floats.items() if dtype not in HALVES and len(set(floats.values())) > 1),
    )


def _with(example: Example, assigned: Assigned) -> Example:
    """The example with other dtypes."""
    tensors = {name: t.to(assigned.get(name, t.dtype)) for name, t in example.tensors.items()}
    return replace(example, tensors=tensors)


def _together(floats: Assigned) -> Iterator[Assigned]:
    """The inputs of 16 bits, or else all, with each dtype; the others as they are."""
    varied = [name for name, dtype in floats.items() if dtype in HALVES] or list(floats)
    for dtype in FLOATS:
        yield {**floats, **dict.fromkeys(varied, dtype)}


def _one_by_one(floats: Assigned) -> Iterator[Assigned]:
    """One input with another dtype than all others."""
    for name in floats if len(floats) > 1 else ():
        for own, others in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
            yield {**dict.fromkeys(floats, others), name: own}


def _tried(
    function: Callable[..., Any], example: Example, assignments: Iterator[Assigned]
) -> Iterator[tuple[Assigned, Traced] | None]:
    """The traces with these dtypes; None for those with which the function fails, as a product of two dtypes does."""
    for assigned in assignments:
        try:
            yield assigned, traced(function, _with(example, assigned))
        except Exception:  # whatever torch or the function itself raises for dtypes that it does not take
            yield None


def _operations(traced: Traced) -> list[object]:
    """The operations of a trace, dtypes and the limits of dtypes left out."""
    return [
        (node.op, node.target, node.name, str(map_aggregate((node.args, node.kwargs), _without_dtype)))
        for node in traced.graph.nodes
    ]


_LIMITS = {limit for dtype in FLOATS for limit in (torch.finfo(dtype).max, torch.finfo(dtype).min)}


def _without_dtype(argument: Any) -> Any:
    """An argument, for which words stand if it depends on dtypes."""
    if isinstance(argument, torch.dtype):
        return "dtype"
    return "limit" if isinstance(argument, float) and argument in _LIMITS else argument


def _origins(base: Traced, tried: Sequence[tuple[Assigned, Traced]]) -> dict[fx.Node, str] | None:
    """Operation → the input whose dtype it has in all traces, or the format; None if one has neither."""
    of_each = [list(other.graph.nodes) for _, other in tried]
    origins: dict[fx.Node, str] = {}
    for number, node in enumerate(base.graph.nodes):
        value = base.values[node]
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        dtypes = [other.values[nodes[number]].dtype for nodes, (_, other) in zip(of_each, tried, strict=True)]
        if node.op == "placeholder":
            origins[node] = node.target
            continue
        inputs = tried[0][0]
        following = [name for name in inputs if all(a[name] == d for d, (a, _) in zip(dtypes, tried, strict=True))]
        if len(set(dtypes)) == 1 and not (following and dtypes[0] != torch.float32):
            origins[node] = DTYPE_NAMES.get(dtypes[0], str(dtypes[0]))
        elif following:
            origins[node] = following[0]
        else:
            return None
    return origins
