"""Formulas of a reference's stages as its source has them, with the names of inputs, parameters and earlier stages."""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from types import FrameType

from lastbit.chains.chain_parts import PartRecorder, reference_codes
from lastbit.interpret.places import place_of
from lastbit.judging.expected import Expected, Numbers, Trace
from lastbit.judging.problem import Given, Problem

LONGEST = 120
"""Characters of a formula, beyond which nobody computes it by hand."""


@dataclass
class FormulaTrace(Trace):
    """A trace that also records the formula of each stage.

    What is no input, parameter, number or stage keeps the name that the reference has for it. A formula is empty if it
    cannot be read, is long, or is such a name alone.
    `given` are enclosures of stages from which the reference continues, if there are any.
    """

    problem: Problem | None = None
    given: Given = field(default_factory=dict)
    formulas: dict[str, str] = field(default_factory=dict)
    _named: list[tuple[object, str]] = field(default_factory=list)
    _begun: list[FrameType] = field(default_factory=list)

    def evaluate(self) -> FormulaTrace:
        """Run the reference and return this trace with all stages recorded."""
        assert self.problem is not None
        self.problem.evaluate(self.given, self)
        self._begun.clear()
        return self

    def record(self, name: str, expected: Expected) -> None:
        """Record the next stage and its formula, which is read off the frame that calls `stage`."""
        frame = sys._getframe(2)
        while frame.f_code is PartRecorder.__call__.__code__ and frame.f_back is not None:
            frame = frame.f_back
        self._name_inputs(frame)
        self.formulas[name] = self._formula(frame)
        super().record(name, expected)
        made = expected.enclosure if isinstance(expected, Numbers) else None
        self._named.append((self.given.get(name, made), name))

    def _name_inputs(self, frame: FrameType | None) -> None:
        """Learn the names of the inputs from the frame of the reference, or of a part of a chain, when it begins."""
        assert self.problem is not None
        codes = reference_codes(self.problem.op)
        while frame is not None and frame.f_code not in codes:
            frame = frame.f_back
        if frame is not None and not any(frame is begun for begun in self._begun):
            self._begun.append(frame)
            bundles = [value for value in frame.f_locals.values() if is_dataclass(value)]
            inputs = {f.name: getattr(b, f.name) for b in bundles for f in fields(b)} | dict(frame.f_locals)
            self._named += ((inputs.get(own), name) for own, name in codes[frame.f_code].items())

    def _formula(self, frame: FrameType) -> str:
        assert self.problem is not None
        try:
            call = ast.parse(place_of(frame.f_code, frame.f_lasti).text, mode="eval").body
        except SyntaxError:
            return ""
        if not isinstance(call, ast.Call) or len(call.args) < 2:
            return ""
        known = {id(value): name for value, name in self._named if value is not None}
        named: ast.expr = _Renamed(frame, known, self.problem.params).visit(call.args[1])
        formula = ast.unparse(named)
        alone = isinstance(named, ast.Name) and named.id not in known.values()  # computed elsewhere
        return "" if alone or len(formula) > LONGEST else formula


@dataclass
class _Renamed(ast.NodeTransformer):
    """Gives the variables of a formula the names of the inputs, parameters and stages that they hold.

    Attributes:
        known: identity of a value → the input or stage that it is.
    """

    frame: FrameType
    known: Mapping[int, str]
    params: Mapping[str, object]

    def visit_Name(self, node: ast.Name) -> ast.expr:
        variables = self.frame.f_locals
        if node.id not in variables:
            return node  # a function of the module
        value = variables[node.id]
        if name := self.known.get(id(value), node.id if node.id in self.params else ""):
            return ast.Name(name)
        if callable(value):
            return ast.Name(getattr(value, "__name__", node.id))
        is_constant = (
            value is None or isinstance(value, int | str) or (isinstance(value, float) and math.isfinite(value))
        )
        return ast.Constant(value) if is_constant else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Replace a call of `stage` within a formula by the name of the stage."""
        match node:
            case ast.Call(ast.Name("stage"), [ast.Constant(name), *_]):
                return ast.Name(str(name))
        return self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        """Keep only the branch that was taken."""
        test = compile(ast.Expression(node.test), self.frame.f_code.co_filename, "eval")
        with suppress(Exception):  # a variable of the function that it is in, say
            taken = node.body if eval(test, self.frame.f_globals, dict(self.frame.f_locals)) else node.orelse
            return self.visit(taken)  # type: ignore[no-any-return]
        return self.generic_visit(node)

    def visit_Slice(self, node: ast.Slice) -> ast.AST:
        """Leave out an upper bound that is None."""
        found = self.generic_visit(node)
        if isinstance(node.upper, ast.Constant) and node.upper.value is None:
            node.upper = None
        return found
