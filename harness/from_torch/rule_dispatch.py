"""The mapping of an operation of a trace: its rule, and the arguments that the rule takes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lastbit.from_torch import arithmetic_rules, reduction_rules, selection_rules, shape_rules  # noqa: F401 (their rules)
from lastbit.from_torch.dtype_origins import HALVES, TypedTrace
from lastbit.from_torch.expressions import RULES, Kind, Unmapped, Value

CONVERSIONS = frozenset({"to", "float", "half", "bfloat16", "type_as", "type"})
_ADDITIONS = frozenset({"add", "sub", "subtract", "rsub"})
_CUTS = frozenset({"chunk", "split", "tensor_split", "unbind"})
_OTHER_NAMES = {"input": "x", "axis": "dim", "other": "y", "self": "x", "a_max": "max", "a_min": "min"}


@dataclass(frozen=True)
class Operations:
    """The operations of a trace.

    Attributes:
        followed: the trace.
        steps: whether every operation rounds as torch rounds it; otherwise the results alone round.
    """

    followed: TypedTrace
    steps: bool

    def target(self, node: fx.Node) -> str:
        """Return the input or format to which the result is rounded; empty for fp32."""
        origin = self.followed.origins.get(node, "")
        return "" if origin == "fp32" or not (self.steps or node in self.followed.traced.results.values()) else origin

    def value(self, node: fx.Node, values: Mapping[fx.Node, Value]) -> Value:
        """Return the expression of an operation, which its rule makes of those of its operands.

        Raises:
            Unmapped: there is no rule for it.
        """
        name, args = operation(node), [self._argument(a, values) for a in node.args]
        kwargs = {_OTHER_NAMES.get(key, key): self._argument(a, values) for key, a in node.kwargs.items()}
        if name == "arange":  # as a tensor beside one of integers: a reference makes none by itself
            tensors = self.followed.traced.example.tensors
            beside = next((n for n, t in tensors.items() if not t.is_floating_point()), None)
            if beside is None or len(args) != 1:
                raise Unmapped("arange is mapped from 0 on, and where an input has integers; make the range an input")
            return Value(f"{beside}.new_ones({args[0].text}).cumsum(-1) - 1", kind="integers", level=2, computed=True)
        if name in _ADDITIONS and self.steps and self.target(node):
            args = [self._taken(node, a) for a in args]
        first = args[0] if args else kwargs.get("x")
        if name in CONVERSIONS and first is not None and self.followed.traced.values[node].is_floating_point():
            return self._converted(node, first)
        if name in _CUTS:
            return self._fitted(
                shape_rules.cut, node, args, {**kwargs, "name": name, "pieces": self.followed.traced.values[node]}
            )
        if name == "where" and node.op == "call_method":
            args = [args[1], args[0], *args[2:]]
        if name == "pow" and args[1].example == 3 and args[0].kind == "numbers" and self.target(node) and self.steps:
            return Value(f"_cube({args[0].text}, {self._format(node)})", computed=True)
        if name in RULES.functions:
            if (
                first is not None
                and first.kind == "integers"
                and name in ("squeeze", "unsqueeze", "flatten", "reshape")
            ):
                return shape_rules.as_method(name, *args, **kwargs)
            return self._fitted(RULES.functions[name], node, args, kwargs)
        if first is not None and first.kind == "integers" and hasattr(torch.Tensor, name):
            others = [*args[1:], *kwargs.values()]
            if all(v.kind in ("integers", "number", "other") for v in others):
                return shape_rules.as_method(name, *args, **kwargs)
        raise Unmapped(f"{name} has no mapping")

    def _taken(self, node: fx.Node, value: Value) -> Value:
        """Return an addend of 16-bit numbers; one that 16 bits cannot hold is not the same on a CPU and on a GPU."""
        if value.kind != "number":
            return value
        if not value.named and all(float(torch.tensor(value.example).to(d)) == value.example for d in HALVES):
            return value
        return Value(f"_taken({value.text}, {self._format(node)}, contract)", "number", example=value.example)

    def _format(self, node: fx.Node) -> str:
        """Return the expression of the format to which the result is rounded."""
        origin = self.target(node)
        own = origin in self.followed.traced.example.tensors
        return f'stage.format_of("{origin}")' if own else f'FORMATS["{origin}"]'

    def _fitted(self, rule: Any, node: fx.Node, args: list[Value], kwargs: Mapping[str, Any]) -> Value:
        try:
            inspect.signature(rule).bind(*args, **kwargs)
        except TypeError as error:
            raise Unmapped(f"{operation(node)} is not mapped with these arguments: {error}") from error
        made: Value = rule(*args, **kwargs)
        return made

    def _converted(self, node: fx.Node, x: Value) -> Value:
        """Return the converted numbers, which are rounded if their dtype is neither that of the argument nor fp32."""
        if x.kind == "integers":
            return Value(f"Enclosure.point({x.text})", computed=bool(self.target(node)))
        source = self.followed.origins.get(node.all_input_nodes[0])
        unchanged = self.followed.origins[node] == source or not self.target(node) or x.kind != "numbers"
        return x if unchanged else Value(x.text, x.kind, x.level, computed=True)

    def _argument(self, argument: Any, values: Mapping[fx.Node, Value]) -> Value:
        """Return the expression of an argument."""
        if isinstance(argument, fx.Node):
            return values[argument]
        if isinstance(argument, tuple | list):
            items = tuple(self._argument(a, values) for a in argument)
            text = ", ".join(item.text for item in items)
            return Value(f"({text},)" if len(items) == 1 else f"({text})", "sequence", items=items, example=argument)
        if isinstance(argument, slice):
            bounds = [argument.start, argument.stop, argument.step]
            texts = ["" if b is None else self._argument(b, values).text for b in bounds]
            text = ":".join(texts if texts[2] else texts[:2])
            return Value(text, "other", example=argument)
        if isinstance(argument, bool) or not isinstance(argument, int | float):
            return Value("..." if argument is ... else str(argument), "other", example=argument)
        return self._number(argument)

    def _number(self, number: float) -> Value:
        """Return the expression of a number; the limit of the dtype of an input is written as such."""
        for name, tensor in self.followed.traced.example.tensors.items():
            if tensor.dtype in HALVES and abs(number) == torch.finfo(tensor.dtype).max:
                sign = "-" if number < 0 else ""
                return Value(f'{sign}stage.format_of("{name}").max', "number", example=number)
        if abs(number) == float("inf"):
            return Value(f'float("{number}")', "number", example=number)
        return Value(repr(number), "number", level=5 if number >= 0 else 4, example=number)


def operation(node: fx.Node) -> str:
    """Return the name of an operation, however it was called."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return {"multiply": "mul", "subtract": "sub"}.get(str(name), str(name))


def first_operand(node: fx.Node) -> fx.Node | None:
    """Return the operand that an operation is called on; None if that is no operation."""
    return node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None


def kind_of(example: object) -> Kind:
    """Return the kind of operand that this value of the example is."""
    if not isinstance(example, torch.Tensor):
        return "number"
    return "numbers" if example.is_floating_point() else "integers"
