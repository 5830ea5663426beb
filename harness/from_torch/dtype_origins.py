"""The origins of dtypes in a trace: traced with several dtypes of each input, an operation follows one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from lastbit.dtypes import DTYPE_NAMES
from lastbit.from_torch.tracing import Example, Traced, Untraceable, traced

HALVES = (torch.bfloat16, torch.float16)
FLOATS = (*HALVES, torch.float32)
Assigned = Mapping[str, torch.dtype]


@dataclass(frozen=True)
class TypedTrace:
    """A trace, and which dtype the result of each operation has.

    Attributes:
        traced: the trace for the dtypes of the example.
        origins: operation with a result of floating-point numbers → the input whose dtype it has, or a format.
        assumed: operations that decided how the function went on, in the same way for every dtype.
        alike: inputs that must have one dtype, because the function rounds elsewhere if they do not.
        only_fp32: inputs that must be of fp32 for the same reason.
    """

    traced: Traced
    origins: Mapping[fx.Node, str]
    assumed: tuple[fx.Node, ...]
    alike: tuple[str, ...] = ()
    only_fp32: tuple[str, ...] = ()


def followed(function: Callable[..., Any], example: Example) -> TypedTrace:
    """Trace a function, and find the origin of every dtype.

    Raises:
        Untraceable: as `traced`; or the function does something else for another dtype of all inputs.
    """
    base = traced(function, example)
    floats = {name: t.dtype for name, t in example.tensors.items() if t.is_floating_point()}
    varied = [name for name, dtype in floats.items() if dtype in HALVES] or list(floats)  # the others keep their dtype
    together = [{**floats, **dict.fromkeys(varied, dtype)} for dtype in FLOATS]
    alike = [(assigned, traced(function, _with(example, assigned))) for assigned in together]
    for assigned, other in alike:
        if _operations(other) != _operations(base):
            names = ", ".join(f"{name}={DTYPE_NAMES[dtype]}" for name, dtype in assigned.items())
            raise Untraceable(f"the function does other operations with {names}; write a function for each dtype")
    single = {name: _alone(function, example, floats, name, base) for name in floats} if len(floats) > 1 else {}
    tried = [*alike, *(pair for pairs in single.values() for pair in pairs)]
    if (origins := _origins(base, tried)) is not None:
        bound = tuple(name for name, pairs in single.items() if not pairs)
        return TypedTrace(base, origins, _assumed(base, tried), bound)
    if (origins := _origins(base, alike)) is None:
        raise Untraceable("the dtypes of some operations are neither that of an input nor the same for all inputs")
    others = tuple(name for name in floats if name not in varied)
    return TypedTrace(base, origins, _assumed(base, alike), tuple(varied), others)


def _with(example: Example, assigned: Assigned) -> Example:
    """Return the example with other dtypes."""
    tensors = {name: t.to(assigned.get(name, t.dtype)) for name, t in example.tensors.items()}
    return replace(example, tensors=tensors)


def _alone(
    function: Callable[..., Any], example: Example, floats: Assigned, name: str, base: Traced
) -> list[tuple[Assigned, Traced]]:
    """Return the traces in which one input has another dtype than all others; none if the function does not take it."""
    found: list[tuple[Assigned, Traced]] = []
    for own, others in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        assigned = {**dict.fromkeys(floats, others), name: own}
        try:
            found.append((assigned, traced(function, _with(example, assigned))))
        except Exception:  # whatever torch or the function itself raises for dtypes that it does not take
            return []
    return found if all(_operations(other) == _operations(base) for _, other in found) else []


def _operations(traced: Traced) -> list[object]:
    """Return the operations that the results of a trace depend on, without dtypes and limits of dtypes."""
    described = _described(traced)
    return [described[node] for node in traced.used]


def _described(traced: Traced) -> dict[fx.Node, object]:
    """Return operation → a key that identifies it, in this trace and in others of the function."""
    found: dict[fx.Node, object] = {}

    def key(argument: Any) -> Any:
        """Return the key of an operation, or another argument, or a word in its place if it depends on dtypes."""
        if isinstance(argument, fx.Node):
            return found[argument]
        if isinstance(argument, torch.dtype):
            return "dtype"
        return "limit" if isinstance(argument, float) and argument in _LIMITS else argument

    for node in traced.graph.nodes:
        arguments: Any = map_aggregate((node.args, node.kwargs), key)
        found[node] = hash((node.op, str(node.target), str(arguments)))
    return found


def _assumed(base: Traced, tried: Sequence[tuple[Assigned, Traced]]) -> tuple[fx.Node, ...]:
    """Return the operations that decided how all traces went on, without those that only check the dtype of one."""
    of_others = [{described[node] for node in other.assumed} for _, other in tried for described in [_described(other)]]
    described = _described(base)
    return tuple(node for node in base.assumed if all(described[node] in other for other in of_others))


_LIMITS = {limit for dtype in FLOATS for limit in (torch.finfo(dtype).max, torch.finfo(dtype).min)}


def _origins(base: Traced, tried: Sequence[tuple[Assigned, Traced]]) -> dict[fx.Node, str] | None:
    """Return operation → the input whose dtype it has in all traces, or the format; None if one has neither."""
    of_each = [other.used for _, other in tried]
    origins: dict[fx.Node, str] = {}
    for number, node in enumerate(base.used):
        value = base.values[node]
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        dtypes = [other.values[nodes[number]].dtype for nodes, (_, other) in zip(of_each, tried, strict=True)]
        if node.op == "placeholder":
            origins[node] = str(node.target)
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
