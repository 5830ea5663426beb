"""Passers of an argument of a launch: from the launch back through functions of the host, to the line that chose it.

A function that hands a parameter of its own on does as it is told, and its caller is asked.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from types import CodeType
from typing import Any

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lastbit.diagnosing.told import function_of, place_of_node
from lastbit.interpret.places import Place

DEEPEST, MOST_PARTS = 3, 64
MUTATING = ("append", "extend", "insert", "update", "pop", "remove", "clear", "setdefault", "add", "sort", "reverse")

Way = tuple[str, ...]
"""The way to a value in the variables of a function: the name of one, then keys, positions and fields."""


@dataclass(frozen=True, eq=False)
class HostFrame:
    """A function of the host that led to a launch: where it stood, and what its variables were."""

    place: Place
    code: CodeType
    variables: Mapping[str, Any]

    @property
    def parameters(self) -> list[str]:
        count = self.code.co_argcount + self.code.co_kwonlyargcount
        return list(self.code.co_varnames[:count])

    @property
    def positional(self) -> list[str]:
        names = list(self.code.co_varnames[: self.code.co_argcount])
        return names[1:] if names[:1] == ["self"] else names

    @property
    def further(self) -> str:
        """The parameter that takes all others by name, or nothing."""
        names = self.code.co_varnames[self.code.co_argcount + self.code.co_kwonlyargcount :]
        keywords, several = (bool(self.code.co_flags & flag) for flag in (inspect.CO_VARKEYWORDS, inspect.CO_VARARGS))
        return names[several] if keywords else ""


def parts_of(value: Any, way: Way = (), depth: int = DEEPEST) -> Iterator[tuple[Way, Any]]:
    """Yield what a value is made of, with the way to each: tensors, numbers, None; in tuples, mappings, dataclasses."""
    if isinstance(value, Tensor | int | float | str | None):
        yield way, value
    elif depth:
        if isinstance(value, TensorDescriptor):
            found: Mapping[Any, Any] = {"base": value.base}
        elif isinstance(value, Mapping):
            found = value
        elif isinstance(value, tuple) and hasattr(value, "_asdict"):
            found = value._asdict()
        elif isinstance(value, list | tuple):
            found = dict(enumerate(value))
        else:
            found = vars(value) if is_dataclass(value) and hasattr(value, "__dict__") else {}
        for key, part in list(found.items())[:MOST_PARTS]:
            yield from parts_of(part, (*way, str(key)), depth - 1)


def holds(value: Any, wanted: Any) -> bool:
    """Return whether a value is made of another one, by identity of memory of tensors."""
    return any(is_same(part, wanted) for _, part in parts_of(value))


def is_same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.data_ptr() == b.data_ptr() and a.dtype == b.dtype
    return type(a) is type(b) and not isinstance(a, Tensor) and bool(a == b)


def passer(
    frames: Sequence[HostFrame], parameters: Sequence[str], name: str, now: Any, right: Any, *, level: int | None
) -> Place | None:
    """Return the expression that passed a launch the wrong argument; None where the text does not tell it.

    Args:
        frames: the innermost first.
        parameters, name: of the function that is launched, and the one in question; a field follows after a dot.
        now, right: what is passed and what should be.
        level: of the innermost frame that could pass the right one, where that is a tensor.
    """
    name, _, part = name.partition(".")
    called = ""
    for number, frame in enumerate(frames):
        scope, last = _Scope(frame), number == len(frames) - 1
        call = scope.call(called)
        expression = None if call is None else scope.resolved(scope.passed(call, parameters, name))
        if expression is not None and part:
            expression, name, part = scope.resolved(scope.field(expression, part)), part, ""
        if expression is None:
            return None
        if level is not None:
            if number == level:
                return scope.origin(expression, now)
            following = scope.only(expression, now)
        else:
            following = scope.parameter(expression)
            if not following or last:
                return scope.place(expression) if scope.chooses(expression, now, right) else None
        if not following or last:
            return None
        parameters, name, called = frame.positional, following, frame.code.co_name
    return None


@dataclass(frozen=True, eq=False)
class _Scope:
    """The text of a function of the host, with its variables."""

    frame: HostFrame

    @cached_property
    def function(self) -> ast.AST:
        found = function_of(self.frame.place)
        return found if found is not None and found.name == self.frame.code.co_name else ast.Pass()

    def call(self, called: str) -> ast.Call | None:
        """Return the call of a function at the place where this one stood, or the launch if it has no name."""
        place = self.frame.place
        for node in ast.walk(self.function):
            ends = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0), getattr(node, "end_col_offset", 0)
            if isinstance(node, ast.Call) and ends == (place.line, place.end_line, place.end_column):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if name == called and isinstance(node.func, ast.Subscript) == (not called):
                    return node
        return None

    def passed(self, call: ast.Call, parameters: Sequence[str], name: str) -> ast.expr | None:
        """Return what a call passes for a parameter; of several mappings that may, none."""
        if isinstance(call.func, ast.Subscript) and not name:
            return call.func.slice
        named = {k.arg: k.value for k in call.keywords if k.arg}
        if name in named:
            return named[name]
        starred = [i for i, a in enumerate(call.args) if isinstance(a, ast.Starred)]
        index = parameters.index(name) if name in parameters else len(call.args)
        if index < (starred[0] if starred else len(call.args)):
            return call.args[index]
        opaque = [k.value for k in call.keywords if not k.arg]
        for value in opaque:
            own = self.frame.variables.get(value.id) if isinstance(value, ast.Name) else None
            if isinstance(own, Mapping) and name in own and isinstance(value, ast.Name):
                if value.id == self.frame.further:
                    return ast.copy_location(ast.Name(name), value)
                made = self.resolved(value)
                keys = made.keys if isinstance(made, ast.Dict) else []
                at = [i for i, key in enumerate(keys) if isinstance(key, ast.Constant) and key.value == name]
                return made.values[at[0]] if isinstance(made, ast.Dict) and at else value
        unknown = [v for v in opaque if not isinstance(v, ast.Name)]
        if len(starred) == 1 and starred[0] == len(call.args) - 1 and not unknown:
            return call.args[-1]
        return ast.Tuple([*unknown], ast.Load()) if unknown and not starred else None

    def resolved(self, expression: ast.expr | None) -> ast.expr | None:
        """Follow a variable to the expression that was assigned to it; None where several were, or it was changed."""
        while isinstance(expression, ast.Name) and not self.parameter(expression):
            expression = self._assigned(expression.id)
        return expression

    def field(self, expression: ast.expr, part: str) -> ast.expr | None:
        """Return what was passed by the name of a field to the call that made what has it."""
        while isinstance(expression, ast.Attribute | ast.Subscript):
            expression = expression.value
        made = self.resolved(expression)
        return self.passed(made, (), part) if isinstance(made, ast.Call) else None

    def parameter(self, expression: ast.expr | None) -> str:
        """Return the name of the parameter that an expression is, unchanged; empty if it is none."""
        if not isinstance(expression, ast.Name):
            return ""
        name, own = expression.id, self.frame
        given = name in own.parameters or (own.further and name in own.variables.get(own.further, ()))
        return name if given and not self._stores(name) else ""

    def only(self, expression: ast.expr, wanted: Any) -> str:
        """Return the only parameter of which an expression has a value; empty where several or other variables do."""
        found = {self._source(name, wanted) for name in self._names(expression, wanted)}
        return found.pop() if len(found) == 1 else ""

    def _source(self, name: str, wanted: Any) -> str:
        assigned = None if self.parameter(node := ast.Name(name)) else self.resolved(node)
        if assigned is None or name in _variables(assigned):  # from what it was before, as a parameter may be
            return self.parameter(node)
        return self.only(assigned, wanted)

    def origin(self, expression: ast.expr, wanted: Any) -> Place | None:
        """Return where the value came into an expression of this function; None where that cannot be told."""
        names = self._names(expression, wanted)
        keys = (n.slice for n in ast.walk(expression) if isinstance(n, ast.Subscript))
        if any(set(_variables(key)) & set(self.frame.variables) for key in keys):
            return None  # what the key is was decided elsewhere
        if not names or all(self.parameter(ast.Name(name)) for name in names):
            return self.place(expression)
        assigned = self.resolved(ast.Name(names[0])) if len(names) == 1 else None
        return None if assigned is None or names[0] in _variables(assigned) else self.origin(assigned, wanted)

    def chooses(self, expression: ast.expr, now: Any, right: Any) -> bool:
        """Return whether an expression decides on a number, and the function knows the right one, or on a flag."""
        if isinstance(expression, ast.Attribute | ast.Subscript):
            return False  # of what somebody else has made
        if isinstance(now, tuple):  # a grid, of what the function was given itself
            own = (name for name in _variables(expression) if name in self.frame.variables)
            return all(self.parameter(ast.Name(name)) for name in own)
        parts = [part for _, part in parts_of(self.frame.variables)]
        numbers = {n for t in parts if isinstance(t, Tensor) for n in (*t.shape, *t.stride(), t.numel())}
        return (
            isinstance(now, bool)
            or isinstance(expression, ast.Constant)
            or right in numbers
            or right in (n for n in parts if isinstance(n, int | float))
        )

    def place(self, node: ast.expr) -> Place | None:
        nodes = node.elts if isinstance(node, ast.Tuple) and not hasattr(node, "lineno") else [node]
        if len(nodes) != 1:
            return None
        [node] = nodes
        return place_of_node(self.frame.place, node)

    def _names(self, expression: ast.expr, wanted: Any) -> list[str]:
        """List the variables in an expression that have a value."""
        names, own = _variables(expression), self.frame.variables
        further = own.get(self.frame.further, {})
        return [n for n in names if holds(own.get(n, further.get(n, ())), wanted)]

    def _stores(self, name: str) -> list[ast.AST]:
        """List what assigns a variable of the function or changes what it holds."""
        found = list[ast.AST]()
        for node in ast.walk(self.function):
            stored = isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)
            part = stored or (isinstance(node, ast.Attribute) and node.attr in MUTATING)
            own = node if stored and isinstance(node, ast.Name) else getattr(node, "value", None) if part else None
            if isinstance(own, ast.Name) and own.id == name:
                found.append(node)
        return found

    def _assigned(self, name: str) -> ast.expr | None:
        if len(self._stores(name)) != 1:
            return None
        for node in ast.walk(self.function):
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None or target is None:
                continue
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            for own, value in pairs:
                if isinstance(own, ast.Name) and own.id == name:
                    return value
        return None


def _variables(expression: ast.expr) -> list[str]:
    """List the variables in an expression, in order, without those that it binds itself."""
    nodes = [n for n in ast.walk(expression) if isinstance(n, ast.Name)]
    bound = {n.id for n in nodes if isinstance(n.ctx, ast.Store)}
    return list(dict.fromkeys(n.id for n in nodes if n.id not in bound))
