"""The lines of a reference, from a trace whose dtypes are known."""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import fx

import lastbit.numerics
from lastbit.from_torch.dtype_origins import TypedTrace
from lastbit.from_torch.expressions import Unmapped, Value
from lastbit.from_torch.rule_dispatch import CONVERSIONS, Operations, first_operand, kind_of, operation
from lastbit.from_torch.selection_rules import FORMULAS
from lastbit.from_torch.tracing import ancestors

_WORDS = {
    "add": "sum", "sub": "difference", "rsub": "difference", "mul": "product", "div": "quotient", "truediv": "quotient",
    "pow": "power", "rsqrt": "inverse_root", "sqrt": "root", "matmul": "dot", "linear": "dot", "bmm": "dot",
}  # fmt: skip
# Arbitrary: with its name and an indentation such a line stays below 100 characters.
_LONG = 72
"""Characters of an expression that gets a line of its own."""


@dataclass
class Body:
    """The body of a reference.

    Attributes:
        lines: its statements.
        rounds: stage → the input or format to which it is rounded.
        stages: operation → the stage of its result.
        unmapped: what no rule is for, a sentence each.
    """

    lines: list[str] = field(default_factory=list)
    rounds: dict[str, str] = field(default_factory=dict)
    stages: dict[fx.Node, str] = field(default_factory=dict)
    unmapped: list[str] = field(default_factory=list)


def written_body(followed: TypedTrace, *, steps: bool = True) -> Body:
    """Write the statements of a reference.

    steps: whether every operation rounds as torch rounds it; otherwise the results alone round.
    """
    return _Writer(followed, steps).written()


class _Writer:
    """Goes through the operations once, and writes a line where a value has a name or is needed twice."""

    def __init__(self, followed: TypedTrace, steps: bool) -> None:
        self.followed, self.operations = followed, Operations(followed, steps)
        self.traced = followed.traced
        self.values: dict[fx.Node, Value] = {}
        self.body = Body()
        self.results = {node: name for name, node in self.traced.results.items()}
        self.taken = {"contract", "stage", "op", "pi", *lastbit.numerics.__all__, *FORMULAS, *self._inputs()}
        self.stage_names: set[str] = set(self.traced.results)
        self.used = ancestors([*self.traced.results.values(), *followed.assumed])
        self.decisive = self.used - ancestors(self.traced.results.values())
        self.kept: set[fx.Node] = set()
        for node in self.used:
            after = {operation(user) for user in node.users if user in self.used}
            unrounded = operation(node) in ("mul", "silu") and not self.operations.target(node)
            if unrounded and after & {"mul", "add", "sub"}:  # a product that may be fused into what is after it
                self.kept |= set(node.all_input_nodes)
            if operation(node) == "sub":
                self.kept |= {operand for operand in node.all_input_nodes if operation(operand) == "mean"}

    def _inputs(self) -> tuple[str, ...]:
        return (*self.traced.example.tensors, *self.traced.example.params)

    def written(self) -> Body:
        for node in self.traced.graph.nodes:
            if node in self.used:
                self._write(node)
        self.body.lines = used_lines(self.body.lines)
        return self.body

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
            made = self.operations.value(node, self.values)
        except Unmapped as error:
            if node in self.decisive:
                self.body.lines.append(f"# What {self._place(node, short=True)} asks is not asked here: {error}")
                return
            self.body.unmapped.append(f"{self._place(node)}: {error}")
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
                self.body.lines.append(f"{variable} = {value.text}")
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
        if not any(line == lines[0] for line in self.body.lines):
            self.body.lines += lines

    def _placed(self, node: fx.Node, value: Value) -> Value:
        """Return the value as later operations use it: a stage, a variable, or the expression itself."""
        name, result = self.traced.names.get(node, ""), self.results.get(node, "")
        rounds = self.operations.target(node) if value.computed or result else ""
        if value.kind == "truth" and result:
            self.body.unmapped.append(f"{self._place(node)}: a comparison of computed numbers cannot be a result")
        seen = bool(name) or (bool(rounds) and value.kind == "numbers")
        if result or (seen and value.computed and value.kind != "truth"):
            return self._staged(node, value, result, rounds)
        repeated = len([user for user in node.users if user in self.used]) > 1 or len(value.text) > _LONG
        if name or ((node in self.kept or repeated) and not value.named):
            variable = self._variable(name or self._invented(node))
            self.body.lines.append(f"{variable} = {value.text}")
            return replace(value, text=variable, level=5, computed=False)
        return value

    def _staged(self, node: fx.Node, value: Value, result: str, rounds: str) -> Value:
        stage = result or self._unique(self.traced.names.get(node) or self._invented(node), self.stage_names)
        self.stage_names.add(stage)
        self.body.stages[node] = stage
        if rounds and value.kind == "numbers":
            self.body.rounds[stage] = rounds
        text = value.text
        more = ", result=True" if result else ""
        variable = self._variable(stage)
        needed = any(user in self.used for user in node.users)
        self.body.lines.append(f'{f"{variable} = " if needed else ""}stage("{stage}", {text}{more})')
        if rounds:
            return Value(variable, value.kind, example=value.example, mean_of=value.mean_of)
        return replace(value, text=variable, level=5, computed=False, staged=True)

    def _invented(self, node: fx.Node) -> str:
        """Invent a name for a value that has none in the source: the name of the value it goes into, and its kind."""
        if operation(node) in CONVERSIONS and (source := first_operand(node)) is not None:
            named = self.body.stages.get(source) or self.traced.names.get(source)
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
