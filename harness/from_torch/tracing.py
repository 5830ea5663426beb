"""Trace a PyTorch function with torch.fx on example inputs, with the names and places of its source.

torch.fx records calls as the source has them, so that shapes stay expressions (`x.shape[-1] // 2`) and `silu` stays
`silu`. torch.export and make_fx record what ATen makes of them: numbers in place of shapes, and decompositions that
hide where PyTorch rounds. What fx alone does not know, the values of the example answer: dtypes, which branch an `if`
takes, how many parts are unpacked.
"""

from __future__ import annotations

import inspect
import keyword
import operator
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate, map_arg

from lastbit.dtypes import DTYPE_NAMES
from lastbit.errors import LastbitError, UsageError

_OWN = str(Path(__file__).parent)
_OF_NO_FUNCTION = (str(Path(torch.__file__).parent), _OWN)

Place = tuple[str, int]
"""File and line."""


def frames() -> Iterator[FrameType]:
    """Yield the frames of the traced function and of what it calls, the innermost first; none of torch's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if of_source(file):
            yield frame
        elif file.startswith(_OWN) and frame.f_code.co_name == "called":
            return
        frame = frame.f_back


def of_source(file: str) -> bool:
    """Return whether a file is one of the function or of what it calls."""
    return not file.startswith(("<", *_OF_NO_FUNCTION))


def place_now() -> Place:
    """Return file and line of the operation that is being traced."""
    return next(((f.f_code.co_filename, f.f_lineno) for f in frames()), ("", 0))


def here() -> str:
    """Return file and line of the operation that is being traced, as text for a message."""
    return "{}:{}".format(*place_now())


_KNOWN = frozenset({"dtype", "device", "ndim", "is_cuda", "requires_grad", "layout", "is_floating_point", "dim"})
"""What is asked of a tensor and answered by that of the example: nothing of it becomes an operation."""

MOST_OPERATIONS = 1000
"""Of a function; a loop is traced step by step, and a reference of more than that nobody reads."""


class Untraceable(UsageError):
    """An error: no reference is written for what the function does; the message has file and line of it."""


@dataclass(frozen=True)
class Example:
    """The arguments that a function is traced with.

    Attributes:
        tensors: name → tensor, in the order of the parameters of the function.
        params: name → number that stays a parameter of the reference.
        fixed: name → truth value, word or None, for which the function is traced.
    """

    tensors: Mapping[str, torch.Tensor]
    params: Mapping[str, float]
    fixed: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Traced:
    """The operations of a function, in order.

    Attributes:
        example: what it was traced with.
        graph: the operations; what the function was called with are placeholders.
        values: operation → what it gave on the example.
        names: operation → the variable of the source that holds its result first.
        places: operation → where it is in the source.
        assumed: operation → what it was asked for and gave, which decided how the function went on.
        results: name → operation.
    """

    example: Example
    graph: fx.Graph
    values: dict[fx.Node, Any]
    names: dict[fx.Node, str]
    places: dict[fx.Node, Place]
    assumed: dict[fx.Node, object]
    results: dict[str, fx.Node] = field(default_factory=dict)

    @cached_property
    def used(self) -> list[fx.Node]:
        """The operations that the results depend on, in order, and all that the function was called with."""
        needed = ancestors(self.results.values())
        return [node for node in self.graph.nodes if node in needed or node.op == "placeholder"]

    def again(self, tensors: Mapping[str, torch.Tensor]) -> dict[fx.Node, Any]:
        """Evaluate the used operations on other tensors; return operation → its result."""
        values: dict[fx.Node, Any] = {}
        for node in self.used:
            if node.op == "placeholder":
                values[node] = tensors.get(str(node.target), self.values[node])
            else:
                values[node] = evaluated(node, values)
        return values


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the operations, and all that they depend on."""
    left, found = [*nodes], set()
    while left:
        if (node := left.pop()) not in found:
            found.add(node)
            left += node.all_input_nodes
    return found


def evaluated(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """Evaluate an operation on the `values` of those before it."""
    args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


class TracedOperand(fx.Proxy):
    """A stand-in for a tensor or a number while a function is traced; it knows the value of the example."""

    tracer: _Tracer

    @property
    def example(self) -> Any:
        return self.tracer.traced.values[self.node]

    def __getattr__(self, name: str) -> Any:
        if name in _KNOWN:
            return getattr(self.example, name)
        if name in ("shape", "T", "mT") or (name in ("values", "indices") and isinstance(self.example, tuple)):
            return self.tracer.create_proxy("call_function", getattr, (self, name), {})
        if not hasattr(self.example, name):  # as Python answers for what the example stands for
            raise AttributeError(f"{type(self.example).__name__!r} object has no attribute {name!r}")
        return lambda *args, **kwargs: self.tracer.create_proxy("call_method", name, (self, *args), kwargs)

    def __bool__(self) -> bool:
        return bool(self._assumed("if"))

    def __index__(self) -> int:
        return int(self._assumed("an index"))

    def __int__(self) -> int:
        return int(self._assumed("int()"))

    def __float__(self) -> float:
        return float(self._assumed("float()"))

    def __setitem__(self, index: object, value: object) -> None:
        raise Untraceable(f"{here()}: elements are assigned in place; write an operation with a result")

    def _in_place(self, other: object) -> TracedOperand:
        raise Untraceable(f"{here()}: a tensor is changed in place; write an operation with a result")

    __iadd__ = __isub__ = __imul__ = __itruediv__ = _in_place

    def __len__(self) -> int:
        return len(self.example)

    def __iter__(self) -> Iterator[Any]:
        parts = range(len(self.example))
        return iter([self.tracer.create_proxy("call_function", operator.getitem, (self, i), {}) for i in parts])

    def _assumed(self, what: str) -> Any:
        """Return the value on the example, which decides how the function goes on, and record it as assumed."""
        if isinstance(self.example, torch.Tensor):
            raise Untraceable(f"{here()}: {what} depends on the elements of a tensor, which no trace can follow")
        self.tracer.traced.assumed[self.node] = self.example
        return self.example


class _Tracer(fx.Tracer):
    """Records operations; each is evaluated on the example at once."""

    def __init__(self, example: Example) -> None:
        super().__init__()
        self.graph = fx.Graph(tracer_cls=type(self))
        self.traced = Traced(example, self.graph, {}, {}, {}, {})

    def proxy(self, node: fx.Node) -> TracedOperand:
        return TracedOperand(node, self)

    def given(self, name: str, value: object) -> TracedOperand:
        """Return the operand for an argument that the function is called with."""
        node = self.create_node("placeholder", name, (), {})
        self.traced.values[node] = value
        self.traced.names[node] = name
        return self.proxy(node)

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **more: Any) -> Any:
        if isinstance(target, str) and target.endswith("_") and not target.endswith("__"):
            raise Untraceable(f"{here()}: {target} changes a tensor in place; write an operation with a result")
        if len(self.traced.places) >= MOST_OPERATIONS:
            raise Untraceable(
                f"{here()}: the function does more than {MOST_OPERATIONS:,} operations, as a loop does that ends late "
                "or never; trace a function of one step, or an example that takes fewer"
            )
        if target is operator.truediv and not _is_tensor(args[0]) and _is_tensor(args[1]):
            inverse = args[1].reciprocal()  # as `Tensor.__rtruediv__` does, which rounds twice
            return inverse if args[0] == 1 else inverse * args[0]
        made = super().create_proxy(kind, target, args, kwargs, *rest, **more)
        traced, node = self.traced, made.node
        traced.places[node] = place_now()
        for frame in frames():
            name_operands(frame, traced.names)
        value = evaluated(node, traced.values)
        if not isinstance(value, torch.Tensor | int | float | tuple | list | bool):
            self.graph.erase_node(node)
            return value
        traced.values[node] = value
        return made

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, torch.Tensor):
            raise Untraceable(
                f"{here()}: a tensor of shape {tuple(a.shape)} is no input; make it a parameter of the function"
            )
        return super().create_arg(a)


def _is_tensor(operand: object) -> bool:
    return isinstance(operand, TracedOperand) and isinstance(operand.example, torch.Tensor)


def name_operands(frame: FrameType, names: dict[fx.Node, str]) -> None:
    """Take note of the variables that hold operands without a name."""
    for name, value in frame.f_locals.items():
        if isinstance(value, TracedOperand) and name.isidentifier() and not keyword.iskeyword(name):
            names.setdefault(value.node, name.strip("_") or "value")


def traced(function: Callable[..., Any], example: Example) -> Traced:
    """Trace a function on an example.

    Raises:
        Untraceable: it does what depends on the elements of tensors, or changes tensors in place.
    """
    tracer = _Tracer(example)
    made = tracer.traced
    given = {name: tracer.given(name, value) for name, value in {**example.tensors, **example.params}.items()}

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "return" and of_source(frame.f_code.co_filename):
            name_operands(frame, made.names)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        returned = called(function, {**given, **example.fixed})
    finally:
        sys.setprofile(before)
    made.results.update(_results(returned, made))
    return made


def called(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call the function, and return its result; parameters that can be given by place only are given so."""
    parameters = inspect.signature(function).parameters.values()
    by_place = [arguments[p.name] for p in parameters if p.kind is p.POSITIONAL_ONLY]
    others = {p.name: arguments[p.name] for p in parameters if p.kind is not p.POSITIONAL_ONLY and p.name in arguments}
    try:
        return function(*by_place, **others)
    except LastbitError:
        raise
    except Exception as error:  # whatever Python or torch raises for what stands for a tensor
        frames = [f for f in traceback.extract_tb(error.__traceback__) if of_source(f.filename)]
        at = f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""
        raise Untraceable(f"{at}cannot be traced, {type(error).__name__}: {error}") from error


def _results(returned: Any, traced: Traced) -> dict[str, fx.Node]:
    """Return the results of a function by name: keys of a mapping, variables of the source, or `output`."""
    if isinstance(returned, Mapping):
        found = {str(name): value for name, value in returned.items()}
    elif isinstance(returned, tuple | list):
        found = {_name_of(value, traced) or f"output_{n}": value for n, value in enumerate(returned, 1)}
    else:
        found = {_name_of(returned, traced) or "output": returned}
    for name, value in found.items():
        if not isinstance(value, TracedOperand) or not isinstance(value.example, torch.Tensor):
            raise Untraceable(f"the function returns {type(value).__name__} as {name!r}; a result must be a tensor")
        if value.node.op == "placeholder":
            raise Untraceable(f"the function returns its input {value.node.target!r} as it is")
    return {name: value.node for name, value in found.items()}


def _name_of(value: Any, traced: Traced) -> str:
    return (
        traced.names.get(value.node, "") if isinstance(value, TracedOperand) and value.node.op != "placeholder" else ""
    )


# The origins of dtypes: traced with several dtypes of each input, an operation follows one of them


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
