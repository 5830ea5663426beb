"""Formulas of a reference's stages as its source has them, in names of inputs, parameters and earlier stages."""

from __future__ import annotations

import ast
import copy
import linecache
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from lastbit.chains.chain_parts import PartRecorder, reference_codes
from lastbit.interpret.places import place_of
from lastbit.judging.expected import Expected, Numbers, Trace
from lastbit.judging.problem import Given, Problem

LONGEST = 120
"""Characters of a formula, beyond which nobody computes it by hand."""


@dataclass
class FormulaTrace(Trace):
    """A trace that also records the formula of each stage.

    A formula is empty where it cannot be read, or where something in it is no input, parameter, number or stage.
    `given` are enclosures of stages from which the reference continues, if there are any.
    """

    problem: Problem | None = None
    given: Given = field(default_factory=dict)
    formulas: dict[str, str] = field(default_factory=dict)
    _named: list[tuple[object, str]] = field(default_factory=list)
    _executed: dict[int, list[int]] = field(default_factory=dict)
    _begun: list[FrameType] = field(default_factory=list)

    def evaluate(self) -> FormulaTrace:
        """Run the reference and return this trace with all stages recorded."""
        assert self.problem is not None
        folders = {str(Path(code.co_filename).parent) for code in reference_codes(self.problem.op)}
        with _line_by_line(tuple(folders), self._executed):
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
        place = place_of(frame.f_code, frame.f_lasti)
        try:
            call = ast.parse(place.text, mode="eval").body
        except SyntaxError:
            return ""
        if not isinstance(call, ast.Call) or len(call.args) < 2:
            return ""
        known = {id(value): name for value, name in self._named if value is not None}
        before = _before(self._executed.get(id(frame), []), place.line, place.end_line)
        names = _Rewritten(frame, known, self.problem.params, before)
        formula = ast.unparse(names.visit(call.args[1]))
        return formula if not names.unknown and len(formula) <= LONGEST else ""


@dataclass
class _Rewritten(ast.NodeTransformer):
    """Rewrites a formula: variables are replaced by their definitions, down to inputs, parameters and stages.

    Attributes:
        known: identity of a value → the input or stage that it is.
        executed: the lines of the frame that ran, in order: the last one that bound a variable says what it is.
        later: the variables that were bound after these lines, and hold something else by now.
        unknown: a variable was left of which that is not known.
    """

    frame: FrameType
    known: Mapping[int, str]
    params: Mapping[str, Any]
    executed: list[int]
    later: frozenset[str] = frozenset()
    unknown: bool = False

    def visit_Name(self, node: ast.Name) -> ast.expr:
        variables = self.frame.f_locals
        if node.id not in variables:
            return node  # a function of the module
        if node.id in self.later:
            return self._assigned(node)
        value = variables[node.id]
        if name := self.known.get(id(value), node.id if node.id in self.params else ""):
            return ast.Name(name)
        if callable(value):
            return ast.Name(getattr(value, "__name__", node.id))
        if value is None or isinstance(value, int | float | str):
            return ast.Constant(value)
        return self._assigned(node)

    def _assigned(self, node: ast.Name) -> ast.expr:
        """Replace a variable by its last assignment, if that assigns to nothing else."""
        bindings, later = _bindings(self.frame.f_code.co_filename), set(self.later)
        for position in range(len(self.executed) - 1, -1, -1):
            bound = bindings.get(self.executed[position], {})
            later |= bound.keys()
            if (assigned := bound.get(node.id)) is not None:
                before = _before(self.executed[: position + 1], assigned.lineno, assigned.end_lineno)
                earlier = _Rewritten(self.frame, self.known, self.params, before, frozenset(later))
                found: ast.expr = earlier.visit(copy.deepcopy(assigned.value))
                self.unknown |= earlier.unknown
                return found
            if node.id in bound:
                break
        self.unknown = True
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Replace a call of `stage` within a formula by the name of the stage."""
        match node:
            case ast.Call(ast.Name("stage"), [ast.Constant(name), *_]):
                return ast.Name(str(name))
        return self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        """Keep only the branch that was taken, if the variables of its condition have not been rebound since."""
        if self.later.isdisjoint(part.id for part in ast.walk(node.test) if isinstance(part, ast.Name)):
            test = compile(ast.Expression(node.test), self.frame.f_code.co_filename, "eval")
            with suppress(Exception):  # a variable of the function that it is in, say
                taken = node.body if eval(test, self.frame.f_globals, dict(self.frame.f_locals)) else node.orelse
                return self.visit(taken)  # type: ignore[no-any-return]
        self.unknown = True
        return node

    def visit_Slice(self, node: ast.Slice) -> ast.AST:
        """Leave out an upper bound that is None."""
        found = self.generic_visit(node)
        if isinstance(node.upper, ast.Constant) and node.upper.value is None:
            node.upper = None
        return found


def _before(executed: list[int], first: int, last: int | None) -> list[int]:
    """Return the executed lines up to the last execution of a statement in lines `first` to `last`."""
    end = len(executed)
    while end and first <= executed[end - 1] <= (last or first):
        end -= 1
    return executed[:end]


@contextmanager
def _line_by_line(folders: tuple[str, ...], executed: dict[int, list[int]]) -> Iterator[None]:
    """Record the lines that frames of files in some folders execute, in order, by the identity of the frame.

    Recording is limited to this thread and to the context; a debugger or a measurement of coverage does not see the
    lines run within, and sees those run afterwards.
    """

    def ran(frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            executed[id(frame)].append(frame.f_lineno)
        return ran

    def called(frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(folders):
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
def _bindings(file: str) -> Mapping[int, Mapping[str, ast.Assign | None]]:
    """Map each line to the variables that it binds, and those to the assignment; None if that has other targets."""
    found = dict[int, dict[str, ast.Assign | None]]()
    for node in ast.walk(ast.parse("".join(linecache.getlines(file)))):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.setdefault(node.lineno, {}).setdefault(node.id)
        if isinstance(node, ast.Assign):
            names = (target for target in node.targets if isinstance(target, ast.Name))
            for name in names:
                found.setdefault(name.lineno, {})[name.id] = node
    return found
