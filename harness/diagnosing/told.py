"""Responsibility for a rounding or a number: whether a line decides on it, or its caller by a flag or an argument.

A helper that rounds `if ROUND` is right wherever it stands; the call that passes a wrong ROUND is not. Where that hands
on a parameter of its own, its caller is asked, and where the launch of the kernel decides, no line of the kernel does.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache

from lastbit.interpret.places import Place
from lastbit.tracing import Event, Operand
from lastbit.tracing.events import Origin
from lastbit.tracing.kernel_frames import Places
from lastbit.tracing.of_triton import OF_PROGRAM
from lastbit.tracing.triton_lanes import MOVERS

CASTS = ("to", "cast")
MOVING = (*MOVERS, *OF_PROGRAM, "int_cast", "si_to_fp", "ui_to_fp", "fp_ext", "addptr")
"""Operations by which an address does not become another one."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


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
        call, function = _call(places[depth]), function_of(places[depth])
        caller = function_of(places[depth - 1])
        if call is None or caller is None:
            return None
        passed = _passed(call, caller)
        flags = set() if function is None else _of_parameters(function, [passed[f] for f in flags if f in passed])
    return depth


def is_given(event: Event) -> bool:
    """Return whether a number is an unchanged argument of the launch."""
    [operand, *others] = event.operands or (None,)
    return operand is not None and not others and event.name in MOVING and is_argument(operand)


def is_argument(operand: Operand) -> bool:
    """Return whether an operand is an unchanged argument of the launch."""
    return bool(operand.name) if operand.event is None else is_given(operand.event)


def is_index(event: Event) -> bool:
    """Return whether a number is the index of a program, unchanged."""
    before = event.operands[0].event if event.operands and event.name in MOVING else None
    return event.name in OF_PROGRAM or (before is not None and is_index(before))


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


@cache
def definition(place: Place) -> Place | None:
    """Return where the only variable of an expression is assigned, if once and if it is no parameter; else None."""
    expression, function = _parsed(place.text), function_of(place)
    found = _assignments(place, expression)
    names = {n.id for n in ast.walk(expression or ast.Pass()) if isinstance(n, ast.Name)}
    alone = len(found) == 1 and function is not None and not names & set(_parameters(function))
    return place_of_node(place, found[0].value) if alone else None


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
    names = {n.id for n in ast.walk(expression or ast.Pass()) if isinstance(n, ast.Name)}
    assigned = [n for n in ast.walk(function or ast.Pass()) if isinstance(n, ast.Assign) and n.lineno < place.line]
    return [n for n in assigned if isinstance(t := n.targets[0], ast.Name) and t.id in names]


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
    ends = node.end_lineno or node.lineno, node.end_col_offset or 0
    return Place(place.file, node.lineno, node.col_offset, *ends, place.function)


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
        names = {n.id for n in ast.walk(ahead.pop()) if isinstance(n, ast.Name)} - seen
        seen |= names
        for node in ast.walk(function):
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value and isinstance(target, ast.Name):
                ahead += [node.value] * (target.id in names - parameters)
    return seen & parameters


def _call(place: Place) -> ast.Call | None:
    """Return the call at a place; None if there is none."""
    calls = (n for n in ast.walk(tree_of_file(place.file)) if isinstance(n, ast.Call))
    found = [n for n in calls if (n.lineno, n.end_lineno) == (place.line, place.end_line)]
    return next((n for n in found if ast.unparse(n) == ast.unparse(ast.parse(place.text))), None) if found else None


@cache
def function_of(place: Place) -> Function | None:
    """Return the function that contains a place; None if there is none."""
    found = [n for n in ast.walk(tree_of_file(place.file)) if isinstance(n, Function)]
    around = [f for f in found if _begin(f) <= place.line <= (f.end_lineno or 0)]
    return max(around, key=lambda f: f.lineno, default=None)


def _begin(function: Function) -> int:
    return min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])


def _parameters(function: Function) -> list[str]:
    return [a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]


def _passed(call: ast.Call, function: Function) -> dict[str, ast.expr]:
    """Map each parameter of a function to the argument that a call passes."""
    by_name = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    return dict(zip(_parameters(function), call.args, strict=False)) | by_name


@cache
def tree_of_file(file: str) -> ast.Module:
    """Parse a file of source; it is empty where it cannot be read or parsed."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.Module([], [])
