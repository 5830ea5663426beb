"""What a reference computes for each of its stages, as it is written, in names of inputs, parameters and stages."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FrameType

from harness.interpret.places import place_of
from harness.judging.expected import Expected, Numbers
from harness.judging.problem import Given, Problem
from harness.judging.trace import Trace


@dataclass
class FormulaTrace(Trace):
    """A trace that notes the formula of each stage, too; empty where the source of the reference cannot be read.

    `given` are the enclosures that the reference goes on from, if it goes on from some.
    """

    problem: Problem | None = None
    given: Given = field(default_factory=dict)
    formulas: dict[str, str] = field(default_factory=dict)
    _named: list[tuple[object, str]] = field(default_factory=list)

    def record(self, name: str, expected: Expected) -> None:
        """Take note of the next stage, which a function called by the reference, or itself, records."""
        frame = sys._getframe(2)
        self._name_inputs(frame)
        self.formulas[name] = self._formula(frame)
        super().record(name, expected)
        made = expected.enclosure if isinstance(expected, Numbers) else None
        self._named.append((self.given.get(name, made), name))

    def _name_inputs(self, frame: FrameType | None) -> None:
        """Learn what the inputs are from the frame of the reference itself, before its first stage."""
        assert self.problem is not None
        op = self.problem.op
        while frame is not None and frame.f_code is not op.reference.__code__:
            frame = frame.f_back
        if frame is not None and not self.stages:
            self._named += ((frame.f_locals.get(name), name) for name in op.inputs)

    def _formula(self, frame: FrameType) -> str:
        try:
            call = ast.parse(place_of(frame.f_code, frame.f_lasti).text, mode="eval").body
        except SyntaxError:
            return ""
        if not isinstance(call, ast.Call) or len(call.args) < 2:
            return ""
        return ast.unparse(_Rewritten(frame.f_locals, self._name_of).visit(call.args[1]))

    def _name_of(self, value: object, own: str) -> str:
        """The stage or input that a variable stands for, the latest if there are several; or a function's own name."""
        own = getattr(value, "__name__", own) if callable(value) else own
        return next((name for known, name in reversed(self._named) if known is value and value is not None), own)


@dataclass
class _Rewritten(ast.NodeTransformer):
    """A formula with other names for its variables, without what its case leaves out."""

    variables: Mapping[str, object]
    name_of: Callable[[object, str], str]

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self.name_of(self.variables.get(node.id), node.id))

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        """The side that was taken, where a variable decides it."""
        if not isinstance(node.test, ast.Name) or node.test.id not in self.variables:
            return self.generic_visit(node)
        return self.visit(node.body if self.variables[node.test.id] else node.orelse)  # type: ignore[no-any-return]

    def visit_Slice(self, node: ast.Slice) -> ast.AST:
        """Without an end that is None."""
        if isinstance(node.upper, ast.Name) and self.variables.get(node.upper.id, node) is None:
            node.upper = None
        return self.generic_visit(node)
