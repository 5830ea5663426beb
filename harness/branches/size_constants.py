"""The whole numbers in the source of a kernel that may be sizes on which it branches, without running it.

Looked at are functions of the kernel's own files that its entry reaches by name: those that it calls, programs that it
launches, methods of classes that it names.
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from lastbit.branches.own_files import is_own, root_of

_LARGEST = 1 << 24  # arbitrary: dimensions of this length are for nobody's test, and masks of bits begin here
_FEWEST_ENTRIES = 8  # arbitrary: a table of fewer is passed by the sizes that are drawn
_FOLDED: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
_TABLES = (tuple, list, dict)
_LIMITS = frozenset({"min", "max", "minimum", "maximum", "clamp"})


@dataclass(frozen=True)
class SizeConstants:
    """The numbers of a kernel from 2 on, each once, in the order of its text.

    Attributes:
        compared: in comparisons, beside `%`, as limits, ends of slices, and the lengths of tables.
        blocks: in divisions, ranges, defaults and arguments of calls, such as `BLOCK=128`.
    """

    compared: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()


@functools.cache
def size_constants(call: Callable[..., Any], source: str) -> SizeConstants:
    """Return the numbers in the functions that a kernel's entry reaches; `source` is the kernel's file and line.

    Of functions whose source is elsewhere, such as compiled ones, none are known.
    """
    compared, blocks = dict[int, None](), dict[int, None]()
    file = Path(source.rpartition(":")[0])
    for function in _reached(call, root_of(file)) if source else ():
        for number, decides in _numbers_of(function):
            if 2 <= number <= _LARGEST:
                (compared if decides else blocks)[number] = None
    return SizeConstants(tuple(compared), tuple(number for number in blocks if number not in compared))


def _reached(call: Callable[..., Any], root: Path) -> Iterator[Any]:
    """Yield each function below `root` that a function reaches by name, itself first."""
    left, seen = [call], set[int]()
    while left:
        one = left.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, type):
            left += [getattr(part, "__func__", getattr(part, "fget", part)) for part in vars(one).values()]
            continue
        inner = [getattr(one, name, None) for name in ("func", "fn", "__wrapped__", "_torchdynamo_orig_callable")]
        left += [part for part in inner if callable(part)]
        code = getattr(one, "__code__", None)
        if isinstance(code, CodeType) and is_own(code.co_filename, root):
            yield one
            left += _named(one, code)


def _named(function: Any, code: CodeType) -> Iterator[Any]:
    """Yield functions and classes that a function names, those of its own modules included."""
    names = {name: None for part in with_inner_code(code) for name in part.co_names}
    known = _known(function)
    for name in names:
        value = known.get(name)
        if isinstance(value, ModuleType):
            value = [vars(value).get(other) for other in names]
        for one in value if isinstance(value, list) else [value]:
            if callable(one):
                yield one
    yield from (cell for cell in _cells(function).values() if callable(cell))


def with_inner_code(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function and of those that are defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from with_inner_code(constant)


def _known(function: Any) -> dict[str, Any]:
    return {**getattr(function, "__globals__", {}), **_cells(function)}


def _cells(function: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    code, closure = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    for name, cell in zip(getattr(code, "co_freevars", ()), closure, strict=False):
        with suppress(ValueError):  # of a cell that nothing was put into yet
            found[name] = cell.cell_contents
    return found


@functools.cache  # many kernels reach the same ones
def _numbers_of(function: Any) -> tuple[tuple[int, bool], ...]:
    """Return the numbers of a function, and whether a comparison or the like is about them."""
    code = function.__code__
    node = _functions(code.co_filename).get(code.co_firstlineno)
    return () if node is None else tuple(_Reader(_known(function), node).numbers())


@functools.lru_cache(maxsize=256)
def _functions(file: str) -> dict[int, ast.FunctionDef | ast.AsyncFunctionDef]:
    """Map the first line of each function of a file, decorators included, to it; none of one that cannot be read."""
    with suppress(OSError, SyntaxError, ValueError):
        nodes = ast.walk(ast.parse(Path(file).read_text(encoding="utf-8"), file))
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        return {min([node.lineno, *(d.lineno for d in node.decorator_list)]): node for node in functions}
    return {}


class _Reader:
    """Reads the numbers of one function, in which names stand for numbers of its module or for local constants."""

    def __init__(self, known: Mapping[str, Any], node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._known, self._node = known, node
        self._local: dict[str, int] = {}
        self._parameters = {arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
        for part in ast.walk(node):
            match part:
                case ast.Assign(targets=[ast.Name(id=name)], value=assigned):
                    if (value := self._value(assigned)) is not None:
                        self._local[name] = value

    def numbers(self) -> Iterator[tuple[int, bool]]:
        for part in ast.walk(self._node):
            for node, decides in self._parts(part):
                yield from ((value, decides) for value in self._values(node))
            yield from ((length, True) for length in self._lengths(part))

    def _parts(self, node: ast.AST) -> Iterable[tuple[ast.expr, bool]]:
        """Return what of a node may be sizes, and whether it decides by them."""
        match node:
            case ast.Compare(left=left, comparators=others):
                return [(one, True) for one in (left, *others)]
            case ast.BinOp(op=ast.Mod(), right=right):
                return [(right, True)]
            case ast.BinOp(op=ast.FloorDiv(), right=right):
                return [(right, False)]
            case ast.BinOp(op=ast.RShift(), right=ast.Constant(value=int(places))) if 0 < places < 32:
                return [(ast.Constant(1 << places), False)]
            case ast.Slice(lower=lower, upper=upper, step=step):
                return [(one, one is not step) for one in (lower, upper, step) if one is not None]
            case ast.Call(func=function, args=positional, keywords=keywords):
                limits = getattr(function, "attr", getattr(function, "id", "")) in _LIMITS
                return [(one, limits) for one in (*positional, *(keyword.value for keyword in keywords))]
            case ast.Assign(value=value):
                return [(value, False)]
            case ast.arguments(defaults=defaults, kw_defaults=others):
                return [(one, False) for one in (*defaults, *others) if one is not None]
        return []

    def _values(self, node: ast.expr) -> Iterator[int]:
        """Yield the number that an expression is, or those of a tuple of them, or of the branches of an `if`."""
        if (value := self._value(node)) is not None:
            yield value
        elif isinstance(node, ast.Tuple | ast.List | ast.Set):
            for one in node.elts:
                yield from self._values(one)
        elif isinstance(node, ast.IfExp):
            yield from (*self._values(node.body), *self._values(node.orelse))
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):  # as in n > 4 * BLOCK
            yield from (*self._values(node.left), *self._values(node.right))

    def _value(self, node: ast.expr) -> int | None:
        match node:
            case ast.Constant(value=int(value)) if not isinstance(value, bool):
                return value
            case ast.Name(id=name) if name not in self._parameters:
                return self._local[name] if name in self._local else _number(self._known.get(name))
            case ast.Attribute(value=ast.Name(id=owner), attr=name):
                thing = self._known.get(owner)
                return _number(vars(thing).get(name)) if isinstance(thing, type | ModuleType) else None
            case ast.BinOp(left=left, op=operation, right=right):
                first, second = self._value(left), self._value(right)
                if first is None or second is None:
                    return None
                if isinstance(operation, ast.LShift):
                    return first << second if 0 <= second < 32 else None
                if isinstance(operation, ast.Pow):
                    return first**second if 0 <= second < 32 and 0 < first <= 16 else None
                with suppress(ZeroDivisionError):
                    return _FOLDED[type(operation)](first, second) if type(operation) in _FOLDED else None
        return None

    def _lengths(self, node: ast.AST) -> Iterator[int]:
        """Yield the length of a table that is written here, or that a name of the module stands for."""
        table: object = None
        match node:
            case ast.Tuple() | ast.List() | ast.Dict():
                with suppress(ValueError):
                    table = ast.literal_eval(node)
            case ast.Name(id=name) if name not in self._parameters:
                table = self._known.get(name)
        entries = list(table.values() if isinstance(table, dict) else table) if isinstance(table, _TABLES) else []
        if len(entries) >= _FEWEST_ENTRIES and all(isinstance(entry, int | float | tuple) for entry in entries):
            yield len(entries)


def _number(value: object) -> int | None:
    """Return a whole number, that in a `tl.constexpr` included; None for anything else."""
    if type(value).__name__ == "constexpr":
        value = getattr(value, "value", None)
    return value if type(value) is int else None
