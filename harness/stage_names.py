"""Names of stages that a reference can record, read off its source.

A stage may be absent from a case, so that no evaluation tells whether a name is ever recorded. But a name that a
reference records is spelled somewhere: by a string, or by an f-string whose parts are, in the function itself or in a
function, class or constant that it names, directly or through others.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from lastbit.ops import Op

_RECORDER = "stage"
_BLANK = re.compile(r"%[a-z]|\{[^{}]*\}")  # where % and str.format put something
_OF_NO_REFERENCE = re.compile(rf"(lastbit(?!\.references)|torch|numpy|{'|'.join(sys.stdlib_module_names)})(\.|$)")


@dataclass(frozen=True)
class Blank:
    """Part of a name that is put together: one of the words, or anything where the source does not tell."""

    free: bool = False


Spelling = tuple[str | Blank, ...]
"""The parts of a name."""


@dataclass(frozen=True)
class StageNames:
    """The names that a source spells.

    Attributes:
        words: names, and parts of names.
        spellings: how names are put together from parts.
    """

    words: frozenset[str]
    spellings: tuple[Spelling, ...] = ()

    def __contains__(self, name: str) -> bool:
        return name in self.words or name.isdigit() or any(self._spells(s, name) for s in self.spellings)

    def _spells(self, spelling: Spelling, name: str) -> bool:
        if not spelling:
            return not name
        first, rest = spelling[0], spelling[1:]
        if isinstance(first, str):
            return name.startswith(first) and self._spells(rest, name[len(first) :])
        cuts = (n for n in range(1, len(name) + 1) if self._spells(rest, name[n:]))
        return any(first.free or name[:n] in self for n in cuts)

    @functools.cached_property
    def known(self) -> tuple[str, ...]:
        """Names to suggest: the words, and what the spellings make of one of them, and of that."""
        found = words = sorted(word for word in self.words if word.isidentifier())
        single = [s for s in self.spellings if sum(isinstance(part, Blank) for part in s) == 1]
        for _ in range(2):
            words = ["".join(word if isinstance(p, Blank) else p for p in s) for s in single for word in words]
            found = [*found, *words]
        return tuple(dict.fromkeys(found))


@functools.lru_cache(maxsize=64)
def stage_names(reference: Callable[..., Any]) -> StageNames | None:
    """Return the names of stages that a reference can record, or None where its source cannot be read.

    A reference that has `stage_names` itself, as that of a chain does, says so.
    """
    if (own := getattr(reference, "stage_names", None)) is not None:
        found: StageNames | None = own()
        return found
    try:
        code = _Code(reference)
    except (_Unreadable, OSError, SyntaxError):
        return None
    if (recorded := _recorded(code)) is not None:
        return recorded
    # All names that the strings of the source can spell, except strings only compared or raised.
    spellings = {s for tree in code.trees for s in _strings(tree, code.parameters)}
    spellings |= {(word,) for constant in code.constants for word in _words(constant)}
    words = frozenset(s[0] for s in spellings if len(s) == 1 and isinstance(s[0], str))
    return StageNames(words, tuple(s for s in spellings if len(s) > 1 or s == (Blank(free=True),)))


class _Unreadable(Exception):
    """A function whose source cannot be read."""


class _Code:
    """The syntax trees of a function and of all functions and classes that it names, and the constants among them."""

    def __init__(self, reference: Callable[..., Any]) -> None:
        self.parameters = {p.name for p in inspect.signature(reference).parameters.values() if p.kind is p.KEYWORD_ONLY}
        self.trees: list[ast.AST] = []
        self.nodes: list[ast.AST] = []
        self.functions: set[str] = set()
        self.constants: list[Any] = []
        self._seen: set[int] = set()
        self._follow(reference)
        if not self.trees:
            raise _Unreadable

    def _follow(self, thing: Any) -> None:
        if isinstance(thing, Op):
            thing = thing.reference
        thing = inspect.unwrap(thing) if callable(thing) else thing
        if id(thing) in self._seen:
            return
        self._seen.add(id(thing))
        if isinstance(thing, str | tuple | list | set | frozenset | Mapping):
            self.constants.append(thing)
        elif inspect.isfunction(thing) or isinstance(thing, type):
            if not _OF_NO_REFERENCE.match(str(thing.__module__)) or not self.trees:
                self._read(thing)
        elif not isinstance(thing, ModuleType) and type(thing).__module__ != "builtins":
            self._follow(type(thing))

    def _read(self, thing: Any) -> None:
        tree, names = _tree_of(thing)
        nodes = _walked(tree)
        self.trees.append(tree)
        self.nodes += nodes
        self.functions.add(thing.__name__)
        for node in nodes:
            if isinstance(node, ast.Name) and node.id in names:
                self._follow(names[node.id])
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                module = names.get(node.value.id)
                if isinstance(module, ModuleType):
                    self._follow(getattr(module, node.attr, None))


def _tree_of(thing: Any) -> tuple[ast.AST, dict[str, Any]]:
    """Parse the definition of a function or class, and collect what the names in it may stand for."""
    if isinstance(thing, type):
        module = sys.modules.get(thing.__module__)
        file = getattr(module, "__file__", None)
        line, names = 0, dict(vars(module))
    else:
        file, line = thing.__code__.co_filename, thing.__code__.co_firstlineno
        closure = zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True)
        names = {**thing.__globals__, **{name: cell.cell_contents for name, cell in closure}}
    path = Path(file or "")
    if not path.is_file():
        raise _Unreadable
    for node in _definitions(path, path.stat().st_mtime_ns):
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        alike = node.name == thing.__name__ and isinstance(node, ast.ClassDef) == isinstance(thing, type)
        if alike and line in (0, first):
            return node, names
    raise _Unreadable


_walked = functools.lru_cache(maxsize=256)(lambda tree: [*ast.walk(tree)])


@functools.lru_cache(maxsize=64)
def _definitions(path: Path, changed: int) -> list[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """List every function and class of a file, as it was when it `changed`."""
    return [*_defined(ast.parse(path.read_text()))]


def _defined(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child
        if isinstance(child, ast.stmt):
            yield from _defined(child)


def _recorded(code: _Code) -> StageNames | None:
    """Collect the recorded names, if the recorder is only called with strings or handed on under its name."""
    calls: list[ast.Call] = []
    known: set[int] = set()
    for node in code.nodes:
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id == _RECORDER:
                calls.append(node)
                known.add(id(node.func))
            if isinstance(node.func, ast.Name) and node.func.id in code.functions:
                known |= {id(k.value) for k in node.keywords if k.arg == _RECORDER}
    for node in code.nodes:
        if isinstance(node, ast.Attribute) and node.attr == _RECORDER:
            return None
        if isinstance(node, ast.Name) and node.id == _RECORDER and id(node) not in known:
            return None
    names: set[str] = set()
    for call in calls:
        given = [*call.args[:1], *(k.value for k in call.keywords if k.arg == "name")]
        choices = [c for g in given for c in ((g.body, g.orelse) if isinstance(g, ast.IfExp) else (g,))]
        own = [c.value for c in choices if isinstance(c, ast.Constant) and isinstance(c.value, str)]
        if not own or len(own) != len(choices):
            return None  # the source does not tell
        names.update(own)
    return StageNames(frozenset(names))


def _words(constant: Any) -> Iterator[str]:
    if isinstance(constant, str):
        yield constant
    elif isinstance(constant, Mapping):
        yield from _words([*constant.keys(), *constant.values()])
    elif isinstance(constant, tuple | list | set | frozenset):
        for part in constant:
            yield from _words(part)


def _strings(node: ast.AST, parameters: Iterable[str]) -> Iterator[Spelling]:
    """Yield the spellings of the strings below a node; `parameters` are names whose values are not known."""
    match node:
        case ast.Raise() | ast.Compare() | ast.Expr(value=ast.Constant()):
            return
        case ast.Call(func=ast.Attribute(attr="has")):
            return
        case ast.Constant(value=str(text)):
            yield _with_blanks(text)
        case ast.JoinedStr():
            yield _joined(node, parameters)
        case ast.BinOp(op=ast.Add()) if any(isinstance(part, str) for part in _joined(node, parameters)):
            yield _joined(node, parameters)
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(text)), attr="join")):
            yield (Blank(), text, Blank())
        case ast.keyword(arg=str(name)):
            yield (name,)
    for child in _below(node):
        yield from _strings(child, parameters)


def _below(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the children of a node, without decorators, annotations and the pieces of an f-string."""
    left_out: list[ast.AST | None] = []
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        left_out = [*node.decorator_list, getattr(node, "returns", None)]
    elif isinstance(node, ast.arg | ast.AnnAssign):
        left_out = [node.annotation]
    elif isinstance(node, ast.JoinedStr):
        left_out = [part for part in node.values if isinstance(part, ast.Constant)]
    return (child for child in ast.iter_child_nodes(node) if child not in left_out)


def _joined(node: ast.AST, parameters: Iterable[str]) -> Spelling:
    """Split an f-string, or strings that are added, into words and blanks."""
    match node:
        case ast.JoinedStr(values=values):
            return tuple(part for value in values for part in _joined(value, parameters))
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return (*_joined(left, parameters), *_joined(right, parameters))
        case ast.Constant(value=str(text)):
            return _with_blanks(text)
        case ast.FormattedValue(value=value):
            return _joined(value, parameters)
        case ast.Name(id=name) if name not in parameters:
            return (Blank(),)
    return (Blank(free=True),)


def _with_blanks(text: str) -> Spelling:
    """Split a string at the places where something is put into it."""
    parts: list[str | Blank] = []
    at = 0
    for blank in _BLANK.finditer(text):
        parts += [text[at : blank.start()], Blank()]
        at = blank.end()
    return tuple(part for part in (*parts, text[at:]) if part) or (text,)
