"""What a reference computes for each of its stages, as it is written, in names of inputs, parameters and stages."""

from __future__ import annotations

import ast
import copy
import linecache
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from harness.interpret.places import place_of
from harness.judging.expected import Expected, Numbers
from harness.judging.problem import Given, Problem
from harness.judging.trace import Trace

LONGEST = 120
"""Characters of a formula, beyond which nobody computes it by hand."""


@dataclass
class FormulaTrace(Trace):
    """A trace that notes the formula of each stage, too.

    It is empty where it cannot be read, or where something in it is no input, parameter, number or stage. `given` are
    the enclosures that the reference goes on from, if it goes on from some.
    """

    problem: Problem | None = None
    given: Given = field(default_factory=dict)
    formulas: dict[str, str] = field(default_factory=dict)
    _named: list[tuple[object, str]] = field(default_factory=list)
    _executed: dict[int, list[int]] = field(default_factory=dict)

    def evaluate(self) -> FormulaTrace:
        """Run the reference; itself, with all stages recorded."""
        assert self.problem is not None
        folder = str(Path(self.problem.op.reference.__code__.co_filename).parent)
        with _line_by_line(folder, self._executed):
            self.problem.evaluate(self.given, self)
        return self

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
        assert self.problem is not None
        try:
            call = ast.parse(place_of(frame.f_code, frame.f_lasti).text, mode="eval").body
        except SyntaxError:
            return ""
        if not isinstance(call, ast.Call) or len(call.args) < 2:
            return ""
        known = {id(value): name for value, name in self._named if value is not None}
        ran = self._executed.get(id(frame), [])
        before = [line for n, line in enumerate(ran) if any(later != frame.f_lineno for later in ran[n:])]
        names = _Rewritten(frame, known, self.problem.params, before)
        formula = ast.unparse(names.visit(call.args[1]))
        return formula if not names.unknown and len(formula) <= LONGEST else ""


@dataclass
class _Rewritten(ast.NodeTransformer):
    """A formula in which variables are replaced by what they stand for, down to inputs, parameters and stages.

    Attributes:
        known: identity of a value → the input or stage that it is.
        executed: the lines of the frame that ran, in order: the last assignment that ran says what a variable is.
        unknown: a variable was left of which that is not known.
    """

    frame: FrameType
    known: Mapping[int, str]
    params: Mapping[str, Any]
    executed: list[int]
    unknown: bool = False

    def visit_Name(self, node: ast.Name) -> ast.expr:
        variables = self.frame.f_locals
        if node.id not in variables:
            return node  # a function of the module
        value = variables[node.id]
        if name := self.known.get(id(value), node.id if node.id in self.params else ""):
            return ast.Name(name)
        if callable(value):
            return ast.Name(getattr(value, "__name__", node.id))
        if value is None or isinstance(value, int | float | str):
            return ast.Constant(value)
        return self._assigned(node)

    def _assigned(self, node: ast.Name) -> ast.expr:
        """What was assigned to a variable last."""
        assignments = _assignments(self.frame.f_code.co_filename)
        for position in range(len(self.executed) - 1, -1, -1):
            if (value := assignments.get((self.executed[position], node.id))) is not None:
                earlier = _Rewritten(self.frame, self.known, self.params, self.executed[:position])
                found: ast.expr = earlier.visit(copy.deepcopy(value))
                self.unknown |= earlier.unknown
                return found
        self.unknown = True
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """A stage within a formula goes by its name."""
        if isinstance(node.func, ast.Name) and node.func.id == "stage" and isinstance(node.args[0], ast.Constant):
            return ast.Name(str(node.args[0].value))
        return self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        """The side that was taken."""
        test = compile(ast.Expression(node.test), self.frame.f_code.co_filename, "eval")
        taken = node.body if eval(test, self.frame.f_globals, dict(self.frame.f_locals)) else node.orelse
        return self.visit(taken)  # type: ignore[no-any-return]

    def visit_Slice(self, node: ast.Slice) -> ast.AST:
        """Without an end that is None."""
        found = self.generic_visit(node)
        if isinstance(node.upper, ast.Constant) and node.upper.value is None:
            node.upper = None
        return found


@contextmanager
def _line_by_line(folder: str, executed: dict[int, list[int]]) -> Iterator[None]:
    """Note the lines that frames of files in a folder run, in order, by the identity of the frame."""

    def ran(frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            executed[id(frame)].append(frame.f_lineno)
        return ran

    def called(frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(folder):
            return None
        executed[id(frame)] = [frame.f_lineno]
        return ran

    before = sys.gettrace()
    sys.settrace(called)
    try:
        yield
    finally:
        sys.settrace(before)


@cache
def _assignments(file: str) -> Mapping[tuple[int, str], ast.expr]:
    """Line and variable → what is assigned to it there, of assignments to variables alone."""
    found: dict[tuple[int, str], ast.expr] = {}
    for node in ast.walk(ast.parse("".join(linecache.getlines(file)))):
        if isinstance(node, ast.Assign):
            targets = (target for target in node.targets if isinstance(target, ast.Name))
            found |= {(node.lineno, target.id): node.value for target in targets}
    return found
