"""The lines of a reference, from a trace whose dtypes are known: each operation's rule, and the rule's arguments."""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

import lastbit.numerics
from lastbit.from_torch import arithmetic_rules, reduction_rules, shape_rules  # noqa: F401 (their rules)
from lastbit.from_torch.expressions import RULES, Kind, Unmapped, Value
from lastbit.from_torch.reduction_rules import FORMULAS
from lastbit.from_torch.tracing import HALVES, TypedTrace, ancestors

CONVERSIONS = frozenset({"to", "float", "half", "bfloat16", "type_as", "type"})
_ADDITIONS = frozenset({"add", "sub", "subtract", "rsub"})
_CUTS = frozenset({"chunk", "split", "tensor_split", "unbind"})
_OTHER_NAMES = {"input": "x", "axis": "dim", "other": "y", "self": "x", "a_max": "max", "a_min": "min"}


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


# The lines of a reference


_WORDS = {
    "add": "sum", "sub": "difference", "rsub": "difference", "mul": "product", "div": "quotient", "truediv": "quotient",
    "pow": "power", "rsqrt": "inverse_root", "sqrt": "root", "matmul": "dot", "linear": "dot", "bmm": "dot",
}  # fmt: skip
# Arbitrary: with its name and an indentation such a line stays below 100 characters.
_LONG = 72
"""Characters of an expression that gets a line of its own."""


class Body:
    """The body of a reference: a line where a value has a name or is needed twice.

    Where not every operation rounds as torch rounds it (`steps`), the results alone round.

    Attributes:
        lines: its statements.
        rounds: stage → the input or format to which it is rounded.
        stages: operation → the stage of its result.
        unmapped: what no rule is for, a sentence each.
    """

    def __init__(self, followed: TypedTrace, *, steps: bool = True) -> None:
        self.lines: list[str] = []
        self.rounds: dict[str, str] = {}
        self.stages: dict[fx.Node, str] = {}
        self.unmapped: list[str] = []
        self.followed, self.steps = followed, steps
        self.traced = followed.traced
        self.values: dict[fx.Node, Value] = {}
        self.results = {node: name for name, node in self.traced.results.items()}
        self.taken = {"contract", "stage", "op", "pi", *lastbit.numerics.__all__, *FORMULAS, *self._inputs()}
        self.stage_names: set[str] = set(self.traced.results)
        self.used = ancestors([*self.traced.results.values(), *followed.assumed])
        self.decisive = self.used - ancestors(self.traced.results.values())
        self.kept: set[fx.Node] = set()
        for node in self.used:
            after = {operation(user) for user in node.users if user in self.used}
            unrounded = operation(node) in ("mul", "silu") and not self._target(node)
            if unrounded and after & {"mul", "add", "sub"}:  # a product that may be fused into what is after it
                self.kept |= set(node.all_input_nodes)
            if operation(node) == "sub":
                self.kept |= {operand for operand in node.all_input_nodes if operation(operand) == "mean"}
        for node in self.traced.graph.nodes:
            if node in self.used:
                self._write(node)
        self.lines = used_lines(self.lines)

    def _inputs(self) -> tuple[str, ...]:
        return (*self.traced.example.tensors, *self.traced.example.params)

    def _write(self, node: fx.Node) -> None:
        example = self.traced.values[node]
        if any(operand not in self.values for operand in node.all_input_nodes):
            return  # of a question that is not asked
        if node.op == "placeholder":
            self.values[node] = Value(str(node.target), kind_of(example), example=example)
            return
        unmapped = Value("unmapped", kind_of(example), example=example)
        if any(
            isinstance(self.traced.values[n], tuple) and self.values[n].text == "unmapped" for n in node.all_input_nodes
        ):
            self.values[node] = unmapped  # a part of what has no mapping
            return
        try:
            made = self._value_of(node, self.values)
        except Unmapped as error:
            if node in self.decisive:
                self.lines.append(f"# What {self._place(node, short=True)} asks is not asked here: {error}")
                return
            self.unmapped.append(f"{self._place(node)}: {error}")
            made = unmapped
        same = any(made is self.values.get(operand) for operand in node.all_input_nodes)
        for operand in node.all_input_nodes:
            given = self.values[operand]
            if given.kind == "number" and given.text not in made.text and not made.items:
                self._refuse(given, given.example)  # the rule took it for what it is on the example
        value = replace(made, example=example)
        if (same and node not in self.results) or value.kind == "sequence":
            self.values[node] = value
        elif value.kind == "number":
            if node in self.followed.assumed:  # what would have made the function go on in another way
                self._refuse(value, self.traced.assumed[node])
            name = self.traced.names.get(node, "")
            if name and not value.named and any(user in self.used for user in node.users):  # more than an index
                variable = self._variable(name)
                self.lines.append(f"{variable} = {value.text}")
                value = replace(value, text=variable, level=5)
            self.values[node] = value
        else:
            self.values[node] = self._placed(node, value)

    def _refuse(self, value: Value, seen: object) -> None:
        """Write that the expression must be what was seen."""
        wrong = (
            (f"not {value.within(4)}" if seen else value.text)
            if isinstance(seen, bool)
            else f"{value.text} != {seen!r}"
        )
        answer = "holds" if seen is True else "does not hold" if seen is False else f"is {seen!r}"
        message = f"the function was traced where {value.text} {answer}"
        quoted = f'"{message}"' if '"' not in message else repr(message)
        lines = [f"if {wrong}:", f"    raise ValueError({quoted})"]
        if not any(line == lines[0] for line in self.lines):
            self.lines += lines

    def _placed(self, node: fx.Node, value: Value) -> Value:
        """Return the value as later operations use it: a stage, a variable, or the expression itself."""
        name, result = self.traced.names.get(node, ""), self.results.get(node, "")
        rounds = self._target(node) if value.computed or result else ""
        if value.kind == "truth" and result:
            self.unmapped.append(f"{self._place(node)}: a comparison of computed numbers cannot be a result")
        seen = bool(name) or (bool(rounds) and value.kind == "numbers")
        if result or (seen and value.computed and value.kind != "truth"):
            return self._staged(node, value, result, rounds)
        repeated = len([user for user in node.users if user in self.used]) > 1 or len(value.text) > _LONG
        if name or ((node in self.kept or repeated) and not value.named):
            variable = self._variable(name or self._invented(node))
            self.lines.append(f"{variable} = {value.text}")
            return replace(value, text=variable, level=5, computed=False)
        return value

    def _staged(self, node: fx.Node, value: Value, result: str, rounds: str) -> Value:
        stage = result or self._unique(self.traced.names.get(node) or self._invented(node), self.stage_names)
        self.stage_names.add(stage)
        self.stages[node] = stage
        if rounds and value.kind == "numbers":
            self.rounds[stage] = rounds
        text = value.text
        more = ", result=True" if result else ""
        variable = self._variable(stage)
        needed = any(user in self.used for user in node.users)
        self.lines.append(f'{f"{variable} = " if needed else ""}stage("{stage}", {text}{more})')
        if rounds:
            return Value(variable, value.kind, example=value.example, mean_of=value.mean_of)
        return replace(value, text=variable, level=5, computed=False, staged=True)

    def _invented(self, node: fx.Node) -> str:
        """Invent a name for a value that has none in the source: the name of the value it goes into, and its kind."""
        if operation(node) in CONVERSIONS and (source := first_operand(node)) is not None:
            named = self.stages.get(source) or self.traced.names.get(source)
            if named:
                return f"{named}_rounded"
        after = node
        while after not in self.results and (after is node or after not in self.traced.names) and after.users:
            after = next(iter(u for u in after.users if u in self.used))
        owner = self.results.get(after) or self.traced.names.get(after, "value")
        word = "rounded" if operation(node) in CONVERSIONS else _WORDS.get(operation(node), operation(node))
        return f"{owner}_{word}"

    def _variable(self, name: str) -> str:
        """Return a name for a variable that is not taken yet, and take it."""
        wanted = f"{name}_" if name in lastbit.numerics.__all__ or keyword.iskeyword(name) else name
        found = self._unique(wanted, self.taken)
        self.taken.add(found)
        return found

    def _unique(self, name: str, taken: set[str]) -> str:
        own = {*taken, *self._inputs()}
        return next(n for n in (name, *(f"{name}_{k}" for k in range(2, 1000))) if n not in own)

    def _place(self, node: fx.Node, *, short: bool = False) -> str:
        file, line = self.traced.places[node]
        return f"{Path(file).name if short else file}:{line}"

    def _target(self, node: fx.Node) -> str:
        """Return the input or format to which the result is rounded; empty for fp32."""
        origin = self.followed.origins.get(node, "")
        return "" if origin == "fp32" or not (self.steps or node in self.traced.results.values()) else origin

    def _value_of(self, node: fx.Node, values: Mapping[fx.Node, Value]) -> Value:
        """Return the expression of an operation, which its rule makes of those of its operands.

        Raises:
            Unmapped: there is no rule for it.
        """
        name, args = operation(node), [self._argument(a, values) for a in node.args]
        kwargs = {_OTHER_NAMES.get(key, key): self._argument(a, values) for key, a in node.kwargs.items()}
        if name == "arange":  # as a tensor beside one of integers: a reference makes none by itself
            tensors = self.traced.example.tensors
            beside = next((n for n, t in tensors.items() if not t.is_floating_point()), None)
            if beside is None or len(args) != 1:
                raise Unmapped("arange is mapped from 0 on, and where an input has integers; make the range an input")
            return Value(f"{beside}.new_ones({args[0].text}).cumsum(-1) - 1", kind="integers", level=2, computed=True)
        if name in _ADDITIONS and self.steps and self._target(node):
            args = [self._taken(node, a) for a in args]
        first = args[0] if args else kwargs.get("x")
        if name in CONVERSIONS and first is not None and self.traced.values[node].is_floating_point():
            return self._converted(node, first)
        if name in _CUTS:
            return self._fitted(
                shape_rules.cut, node, args, {**kwargs, "name": name, "pieces": self.traced.values[node]}
            )
        if name == "where" and node.op == "call_method":
            args = [args[1], args[0], *args[2:]]
        if name == "pow" and args[1].example == 3 and args[0].kind == "numbers" and self._target(node) and self.steps:
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
        origin = self._target(node)
        own = origin in self.traced.example.tensors
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
            return Value(f"Enclosure.point({x.text})", computed=bool(self._target(node)))
        source = self.followed.origins.get(node.all_input_nodes[0])
        unchanged = self.followed.origins[node] == source or not self._target(node) or x.kind != "numbers"
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
        for name, tensor in self.traced.example.tensors.items():
            if tensor.dtype in HALVES and abs(number) == torch.finfo(tensor.dtype).max:
                sign = "-" if number < 0 else ""
                return Value(f'{sign}stage.format_of("{name}").max', "number", example=number)
        if abs(number) == float("inf"):
            return Value(f'float("{number}")', "number", example=number)
        return Value(repr(number), "number", level=5 if number >= 0 else 4, example=number)


def used_lines(lines: list[str]) -> list[str]:
    """Remove variables that nothing uses: a product that became part of a later expression needs none."""
    kept: list[str] = []
    words: set[str] = set()
    for text in reversed(lines):
        variable = re.match(r"(\w+) = (?!stage\()", text)
        if variable is None or variable[1] in words:
            kept.insert(0, text)
            words |= set(re.findall(r"\w+", text))
    return kept
