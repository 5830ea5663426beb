"""Responsibility for what is wrong: whether a line decides on it, its caller, or who passed an argument of the launch.

A helper that rounds `if ROUND` is right wherever it stands; the call that passes a wrong ROUND is not. Where that hands
on a parameter of its own, its caller is asked, and where the launch of the kernel decides, no line of the kernel does.
Then functions of the host are asked, from the launch on: one that hands on a parameter of its own does as it is told.
"""

from __future__ import annotations

import ast
import inspect
import linecache
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cache, cached_property
from types import CodeType
from typing import Any

import numpy as np
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lastbit.interpret.places import Place, character
from lastbit.tracing import Event, Operand
from lastbit.tracing.events import Origin, Places
from lastbit.tracing.of_triton import MOVERS, OF_PROGRAM, ROUND

CASTS = ("to", "cast")
MOVING = (*MOVERS, *OF_PROGRAM, "int_cast", "si_to_fp", "ui_to_fp", "fp_ext", "addptr")
"""Operations by which an address does not become another one."""
DEEPEST, MOST_PARTS = 3, 64
MUTATING = ("append", "extend", "insert", "update", "pop", "remove", "clear", "setdefault", "add", "sort", "reverse")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Way = tuple[str, ...]
"""The way to a value in the variables of a function: the name of one, then keys, positions and fields."""


# Numbers: what they follow from.


def is_given(event: Event) -> bool:
    """Return whether a number is an unchanged argument of the launch."""
    [operand, *others] = event.operands or (None,)
    return operand is not None and not others and event.name in MOVING and is_argument(operand)


def is_argument(operand: Operand) -> bool:
    """Return whether an operand is an unchanged argument of the launch."""
    return bool(operand.name) if operand.event is None else is_given(operand.event)


def is_index(event: Event) -> bool:
    """Return whether a number is the index of a program or of a loop's round, unchanged."""
    operand = event.operands[0] if event.operands and event.name in MOVING else None
    return event.name in OF_PROGRAM or (operand is not None and is_index_of(operand))


def is_index_of(operand: Operand) -> bool:
    """Return whether an operand is such an index."""
    return operand.name == ROUND if operand.event is None else is_index(operand.event)


def chain_of_address(event: Event, *, pointer: bool = False) -> dict[int, Event]:
    """Collect the events, by number, that compute the address an event reads, and its mask unless `pointer` is true."""
    found = dict[int, Event]()
    ahead = [operand.event for operand in event.operands if operand.address][: 1 if pointer else None]
    while ahead:
        before = ahead.pop()
        if before is not None and before.number not in found and before.origin is not Origin.CONSTANTS:
            found[before.number] = before
            ahead += [operand.event for operand in before.operands]
    return found


def lines_of(chain: Mapping[int, Event]) -> frozenset[tuple[str, int]]:
    """Return the lines that compute addresses, without those that only move or convert them."""
    return frozenset((e.place.file, e.place.line) for e in chain.values() if e.name not in MOVING)


def constant_of(operand: Operand) -> float | None:
    """Return the number that an operand has in every element, if it follows from constants and arguments alone.

    The index of a program or round is no such number: another one has another.
    """
    event = operand.event
    if operand.address or operand.memory is not None or is_index_of(operand):
        return None
    if event is not None and event.origin is Origin.MEMORY:
        return None
    flat = np.asarray(operand.values if event is None else event.values).reshape(-1)
    return float(flat[0]) if len(flat) and (flat == flat[0]).all() else None


# Lines of the kernel.


def deciding(places: Places, *, left_out: bool = False) -> int | None:
    """Return the index of the place, from the innermost on, that decides on a rounding; None if the launch does.

    With `left_out`, the rounding is one that was not done: a statement that rounds the variable assigned at the
    innermost place, under a condition.
    """
    flags, depth = _flags(places[0], left_out), 0
    while flags:
        depth += 1
        if depth == len(places):
            return None
        call, function = _call(tree_of_file(places[depth].file), places[depth]), function_of(places[depth])
        called = function_of(places[depth - 1])
        if call is None or called is None or not isinstance(_parsed(places[depth].text), ast.Call):
            return None
        passed = dict(zip(_parameters(called), call.args, strict=False))
        passed |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        flags = set() if function is None else _of_parameters(function, [passed[f] for f in flags if f in passed])
    return depth


@cache
def definition(place: Place) -> Place | None:
    """Return where the only variable of an expression is assigned, if once and if it is no parameter; else None."""
    expression, function = _parsed(place.text), function_of(place)
    found = _assignments(place, expression)
    alone = len(found) == 1 and function is not None and not _names_in(expression) & set(_parameters(function))
    return place_of_node(place, found[0].value) if alone else None


def constant(place: Place) -> Place | None:
    """Return where the only variable of the module in an expression is assigned in that file; else None."""
    function = function_of(place)
    own = set() if function is None else _targets([function]) | set(_parameters(function))
    found = _assigning(tree_of_file(place.file).body, _names_in(_parsed(place.text)) - own)
    return place_of_node(place, found[0].value) if len(found) == 1 else None


def alias(place: Place, side: str, lines: Collection[int]) -> Place | None:
    """Return where an operand, the `left` or `right`, got its name from another variable that is computed elsewhere."""
    operand = getattr(_parsed(place.text), side, None)
    found = _assignments(place, operand) if isinstance(operand, ast.Name) else []
    names = [n for n in found if isinstance(n.value, ast.Name)]
    computes = any(n.lineno <= line <= (n.end_lineno or 0) for n in found for line in lines)
    return place_of_node(place, names[0].value) if len(names) == 1 and not computes else None


def _assignments(place: Place, expression: ast.AST | None) -> list[ast.Assign]:
    """List the assignments to variables of an expression that stand before its place in the function."""
    function = function_of(place)
    found = [] if function is None else _assigning(ast.walk(function), _names_in(expression))
    return [n for n in found if n.lineno < place.line]


def _assigning(nodes: Iterable[ast.AST], names: Collection[str]) -> list[ast.Assign]:
    """List the assignments to variables of these names."""
    assigned = (n for n in nodes if isinstance(n, ast.Assign))
    return [n for n in assigned if isinstance(t := n.targets[0], ast.Name) and t.id in names]


def _names_in(expression: ast.AST | None) -> set[str]:
    """Return the variables of an expression."""
    return {n.id for n in ast.walk(expression or ast.Pass()) if isinstance(n, ast.Name)}


def _parsed(text: str) -> ast.AST | None:
    """Parse a text; of an assignment return the value, of an augmented one the operation."""
    try:
        found: ast.AST = ast.parse(text.strip()).body[0]
    except (SyntaxError, IndexError):
        return None
    if isinstance(found, ast.AugAssign):
        return ast.BinOp(found.target, found.op, found.value)
    return getattr(found, "value", found)


def place_of_node(place: Place, node: ast.expr) -> Place:
    """Return the place of a node of the same function."""
    file, last = place.file, node.end_lineno or node.lineno
    start, end = character(file, node.lineno, node.col_offset), character(file, last, node.end_col_offset or 0)
    return Place(file, node.lineno, start, last, end, place.function)


def _flags(place: Place, left_out: bool) -> set[str]:
    """Return the parameters that are conditions of branches which only round, in a block around a place."""
    function, found = function_of(place), set[str]()
    if function is None:
        return found
    begins = place.line <= function.body[0].lineno  # it is handed the value, and hands it on
    own = set(_parameters(function)) if begins else _targets(n for n in ast.walk(function) if _is_around(n, place))
    blocks = [b for n in ast.walk(function) for b in (getattr(n, "body", ()), getattr(n, "orelse", ())) if b]
    around = [b for b in blocks if isinstance(b, list) and b[0].lineno <= place.line <= (b[-1].end_lineno or 0)]
    for branches in (n for block in around or [function.body] for n in block if isinstance(n, ast.If)):
        rounding = [n for side in (branches.body, branches.orelse) if all(map(_only_rounds, side)) for n in side]
        later = [n for n in rounding if n.lineno > place.line and _targets([n]) & own]
        if later if left_out else any(_is_around(n, place) for n in rounding):
            found |= _of_parameters(function, [branches.test])
    return found


def _is_around(node: ast.AST, place: Place) -> bool:
    """Return whether a node is a simple statement, in whose lines a place is."""
    if not isinstance(node, ast.Assign | ast.AugAssign | ast.Return):
        return False
    return node.lineno <= place.line <= (node.end_lineno or 0)


def _targets(statements: Iterable[ast.AST]) -> set[str]:
    """Return the variables that statements assign."""
    nodes = (n for statement in statements for n in ast.walk(statement))
    return {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _only_rounds(statement: ast.stmt) -> bool:
    """Return whether a statement does nothing but cast a variable."""
    value, casts = getattr(statement, "value", None), 0
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in CASTS:
        value, casts = value.func.value, casts + 1
    return bool(casts) and isinstance(value, ast.Name)


def _of_parameters(function: Function, expressions: Sequence[ast.expr]) -> set[str]:
    """Return the parameters of a function on which expressions depend, directly or through assigned variables."""
    parameters, seen = set(_parameters(function)), set[str]()
    ahead = list(expressions)
    while ahead:
        names = _names_in(ahead.pop()) - seen
        seen |= names
        for node in ast.walk(function):
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value and isinstance(target, ast.Name):
                ahead += [node.value] * (target.id in names - parameters)
    return seen & parameters


def _call(text: ast.AST, place: Place) -> ast.Call | None:
    """Return the call that ends with a place: no two end at the same."""
    line = linecache.getline(place.file, place.end_line)
    ends = place.line, place.end_line, len(line[: place.end_column].encode())  # ast counts bytes
    calls = (node for node in ast.walk(text) if isinstance(node, ast.Call))
    return next((n for n in calls if (n.lineno, n.end_lineno, n.end_col_offset) == ends), None)


@cache
def function_of(place: Place) -> Function | None:
    """Return the function that contains a place; None if there is none."""
    around = list[Function]()
    for node in ast.walk(tree_of_file(place.file)):
        if isinstance(node, Function):
            begin = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if begin <= place.line <= (node.end_lineno or 0):
                around.append(node)
    return max(around, key=lambda f: f.lineno, default=None)


def _parameters(function: Function) -> list[str]:
    return [a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]


@cache
def tree_of_file(file: str) -> ast.Module:
    """Parse a file of source; it is empty where it cannot be read or parsed."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.Module([], [])


# Functions of the host.


@dataclass(frozen=True, eq=False)
class HostFrame:
    """A function of the host that led to a launch: where it stood, and what its variables were."""

    place: Place
    code: CodeType
    variables: Mapping[str, Any]

    @property
    def parameters(self) -> list[str]:
        return inspect.getargs(self.code).args

    @property
    def positional(self) -> tuple[str, ...]:
        names = self.code.co_varnames[: self.code.co_argcount]
        return names[1:] if names[:1] == ("self",) else names

    @property
    def further(self) -> str:
        """The parameter that takes all others by name, or nothing."""
        return inspect.getargs(self.code).varkw or ""

    @cached_property
    def function(self) -> ast.AST:
        found = function_of(self.place)
        return found if found is not None and found.name == self.code.co_name else ast.Pass()

    def call(self, called: str) -> ast.Call | None:
        """Return the call of a function at the place where this one stood, or the launch if it has no name."""
        found = _call(self.function, self.place)
        if found is None or isinstance(found.func, ast.Subscript) != (not called):
            return None
        return found if getattr(found.func, "attr", getattr(found.func, "id", "")) == called else None

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
            own = self.variables.get(value.id) if isinstance(value, ast.Name) else None
            if isinstance(own, Mapping) and name in own and isinstance(value, ast.Name):
                if value.id == self.further:
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
        name = expression.id
        given = name in self.parameters or (self.further and name in self.variables.get(self.further, ()))
        return name if given and not self._stores(name) else ""

    def only(self, expression: ast.expr, wanted: Any) -> str:
        """Return the only parameter of which an expression has a value; empty where several or other variables do."""
        found = set[str]()
        for name in self._names(expression, wanted):
            own = self.parameter(ast.Name(name))
            assigned = None if own else self.resolved(ast.Name(name))
            if assigned is not None and name not in _variables(assigned):  # else of what it was before
                own = self.only(assigned, wanted)
            found.add(own)
        return found.pop() if len(found) == 1 else ""

    def origin(self, expression: ast.expr, wanted: Any) -> Place | None:
        """Return where the value came into an expression of this function; None where that cannot be told."""
        names = self._names(expression, wanted)
        keys = (n.slice for n in ast.walk(expression) if isinstance(n, ast.Subscript))
        if any(set(_variables(key)) & set(self.variables) for key in keys):
            return None  # what the key is was decided elsewhere
        if not names or all(self.parameter(ast.Name(name)) for name in names):
            return self.standing(expression)
        assigned = self.resolved(ast.Name(names[0])) if len(names) == 1 else None
        return None if assigned is None or names[0] in _variables(assigned) else self.origin(assigned, wanted)

    def chooses(self, expression: ast.expr, now: Any, right: Any) -> bool:
        """Return whether an expression decides on a number, and the function knows the right one, or on a flag."""
        if isinstance(expression, ast.Attribute | ast.Subscript):
            return False  # of what somebody else has made
        if isinstance(now, tuple):  # a grid, of what the function was given itself
            own = (name for name in _variables(expression) if name in self.variables)
            return all(self.parameter(ast.Name(name)) for name in own)
        parts = [part for _, part in parts_of(self.variables)]
        known = [n for n in parts if isinstance(n, int | float)]
        known += [n for t in parts if isinstance(t, Tensor) for n in (*t.shape, *t.stride(), t.numel())]
        return isinstance(now, bool) or isinstance(expression, ast.Constant) or right in known

    def standing(self, node: ast.expr) -> Place | None:
        nodes = node.elts if isinstance(node, ast.Tuple) and not hasattr(node, "lineno") else [node]
        return place_of_node(self.place, nodes[0]) if len(nodes) == 1 else None

    def _names(self, expression: ast.expr, wanted: Any) -> list[str]:
        """List the variables in an expression that have a value."""
        names, own = _variables(expression), self.variables
        further = own.get(self.further, {})
        made_of = {n: parts_of(own.get(n, further.get(n, ()))) for n in names}
        return [n for n, parts in made_of.items() if any(is_same(part, wanted) for _, part in parts)]

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
        for node in ast.walk(self.function) if len(self._stores(name)) == 1 else ():
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=False))
                found = [value for own, value in pairs if isinstance(own, ast.Name) and own.id == name]
                if found:
                    return found[0]
        return None


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
        call, last = frame.call(called), number == len(frames) - 1
        expression = None if call is None else frame.resolved(frame.passed(call, parameters, name))
        if expression is not None and part:
            expression, name, part = frame.resolved(frame.field(expression, part)), part, ""
        if expression is None:
            return None
        if level is not None:
            if number == level:
                return frame.origin(expression, now)
            following = frame.only(expression, now)
        else:
            following = frame.parameter(expression)
            if not following or last:
                return frame.standing(expression) if frame.chooses(expression, now, right) else None
        if not following or last:
            return None
        parameters, name, called = frame.positional, following, frame.code.co_name
    return None


def _variables(expression: ast.expr) -> list[str]:
    """List the variables in an expression, in order, without those that it binds itself."""
    nodes = [n for n in ast.walk(expression) if isinstance(n, ast.Name)]
    bound = {n.id for n in nodes if isinstance(n.ctx, ast.Store)}
    return list(dict.fromkeys(n.id for n in nodes if n.id not in bound))
