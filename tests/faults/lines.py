"""Where a fault is in the text of a kernel: its planted lines, and the lines that consume what these give."""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cached_property

from tests.faults.plant import Fault, Sources, mutated

Line = tuple[str, int]
"""Name of a file and number of a line, from 1."""
Name = tuple[str, str]
"""A name, and the key of an element of what it names; empty for all of it."""
_HEADERS = (ast.If, ast.For, ast.While, ast.With)


@dataclass(frozen=True)
class Planted:
    """What a fault changes in the files of a kernel.

    Attributes:
        sources: file name → text with the fault.
        lines: lines that the edits changed or added; where they only delete, the two lines around it.
        names: names that deleted lines assigned, each with the line before them.
        columns: from which column to which a line was changed, where that is not all of it.
    """

    sources: Sources
    lines: frozenset[Line]
    names: frozenset[tuple[Line, str]]
    columns: Mapping[Line, tuple[int, int]]


def planted_lines(fault: Fault, sources: Sources) -> Planted:
    """What `fault` changes in `sources`."""
    changed = mutated(fault, sources)
    lines: set[Line] = set()
    names: set[tuple[Line, str]] = set()
    columns: dict[Line, tuple[int, int]] = {}
    for file, text in changed.items():
        old, new = sources[file].splitlines(), text.splitlines()
        for kind, i1, i2, j1, j2 in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
            if kind in ("replace", "insert"):
                lines.update((file, number) for number in range(j1 + 1, j2 + 1))
                if i2 - i1 == j2 - j1:
                    pairs = zip(old[i1:i2], new[j1:j2], strict=True)
                    columns.update(((file, j1 + 1 + n), _changed(*pair)) for n, pair in enumerate(pairs))
            if kind == "delete":
                lines.update((file, number) for number in (j1, j1 + 1) if 1 <= number <= len(new))
                gone = (
                    s for s in ast.walk(ast.parse(sources[file])) if isinstance(s, ast.stmt) and i1 < s.lineno <= i2
                )
                names.update(((file, j1), name) for s in gone for name, _ in _assigned(s))
    return Planted({**sources, **changed}, frozenset(lines), frozenset(names), columns)


def _changed(old: str, new: str) -> tuple[int, int]:
    """From which column of `new` to which it is not as in `old`."""
    start = _same(old, new)
    return start, len(new) - _same(old[start:][::-1], new[start:][::-1])


def _same(a: str, b: str) -> int:
    """How many characters two texts have in common at their beginning."""
    pairs = zip(a, b, strict=False)
    return next((n for n, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def consumers(planted: Planted, visible: Collection[Line]) -> frozenset[Line]:
    """The lines that consume what the planted ones give: those of the statements of which some line is `visible`.

    What they give is followed through names, arguments, results of functions and conditions, as far as statements go
    that show nothing: these compute addresses, sizes or flags.
    """
    walk = _Walk(planted.sources, frozenset(visible))
    for line in planted.lines:
        walk.begin(line, planted.columns.get(line, (0, sys.maxsize)))
    for (file, number), name in planted.names:
        walk.follow(file, walk.function_at(file, number), (name, ""), number)
    return frozenset(walk.found)


@dataclass
class _Walk:
    """Follows names from statement to statement."""

    sources: Sources
    visible: frozenset[Line]
    found: set[Line] = field(default_factory=set)
    _seen: set[tuple[object, ...]] = field(default_factory=set)

    @cached_property
    def statements(self) -> list[tuple[str, ast.stmt]]:
        """All statements by file and line."""
        trees = {file: ast.parse(text) for file, text in self.sources.items()}
        found = [(file, node) for file, tree in trees.items() for node in ast.walk(tree) if isinstance(node, ast.stmt)]
        return sorted(found, key=lambda pair: (pair[0], pair[1].lineno))

    @cached_property
    def functions(self) -> list[tuple[str, ast.FunctionDef]]:
        return [(file, node) for file, node in self.statements if isinstance(node, ast.FunctionDef)]

    def function_at(self, file: str, line: int) -> ast.FunctionDef | None:
        """The innermost function around a line."""
        around = [d for f, d in self.functions if f == file and d.lineno <= line <= (d.end_lineno or 0)]
        return max(around, key=lambda d: d.lineno, default=None)

    def begin(self, line: Line, columns: tuple[int, int]) -> None:
        """Follow what the statements of a planted line give."""
        file, number = line
        for where, statement in self.statements:
            start, end = _own(statement)
            if where == file and start <= number <= end:
                parts = [n for n in _nodes(statement) if isinstance(n, ast.expr | ast.keyword)]
                around = [n for n in parts if _covers(n, number, columns)]
                inside = {id(n) for n in parts if _covers(n, number, columns, within=True)}
                if around and not inside:
                    inside = {id(n) for n in ast.walk(min(around, key=lambda n: len(list(ast.walk(n)))))}
                self._arguments(statement, "", inside)
                self._mark(file, statement)
                self._onward(file, statement, inside - self._handed_on(statement))

    def follow(self, file: str, function: ast.FunctionDef | None, name: Name, line: int) -> None:
        """Visit the statements that use a name from a line on; a name without a function is one of all files."""
        if self._known(file, function and function.lineno, name, line):
            return
        for where, statement in self.statements:
            inner = function is None or (where == file and _within(statement, function) and _own(statement)[1] > line)
            if not inner or isinstance(statement, ast.FunctionDef):
                continue
            used = _used(statement, name)
            if used or (isinstance(statement, ast.AugAssign) and name in _assigned(statement)):
                self._visit(where, statement, name, used)
            elif function and (name[0], "") in _assigned(statement) and statement in function.body:
                break  # it is another value from here on

    def _known(self, *key: object) -> bool:
        known = key in self._seen
        self._seen.add(key)
        return known

    def _visit(self, file: str, statement: ast.stmt, name: Name, used: set[int]) -> None:
        if self._known(file, statement.lineno, name):
            return
        self._arguments(statement, name[1], used)
        kept = used - self._handed_on(statement)
        if not self._mark(file, statement) and (kept or not used):
            self._onward(file, statement, kept)

    def _handed_on(self, statement: ast.stmt) -> set[int]:
        """The nodes of a statement that are arguments of functions of these files, which are followed there."""
        names = {function.name for _, function in self.functions}
        calls = [call for call in _calls(statement) if _called(call) in names]
        return {id(n) for call in calls for a in (*call.args, *call.keywords) for n in ast.walk(a)}

    def _mark(self, file: str, statement: ast.stmt) -> bool:
        """Note the lines of a statement that is visible."""
        start, end = _own(statement)
        lines = {(file, number) for number in range(start, end + 1)}
        if not lines & self.visible:
            return False
        self.found |= lines
        return True

    def _onward(self, file: str, statement: ast.stmt, used: set[int]) -> None:
        """To what a statement gives: the names it assigns, the callers of its function, the body that it governs."""
        function = self.function_at(file, statement.lineno)
        for name in _given(statement, used):
            self.follow(file, function, name, _own(statement)[1])
        if isinstance(statement, ast.Return) and function:
            for where, caller in self.statements:
                calls = {id(call) for call in _calls(caller) if _called(call) == function.name}
                if calls:
                    self._visit(where, caller, (f"{function.name}()", ""), calls)
        if isinstance(statement, _HEADERS):
            for where, each in self.statements:
                if where == file and each is not statement and _within(each, statement):
                    self._visit(where, each, ("", ""), set())
        if isinstance(statement, ast.FunctionDef):
            for argument in (*statement.args.args, *statement.args.kwonlyargs):
                self.follow(file, statement, (argument.arg, ""), statement.lineno)

    def _arguments(self, statement: ast.stmt, key: str, used: set[int]) -> None:
        """To the parameters that arguments of calls become."""
        for call in _calls(statement):
            for argument in (*call.args, *call.keywords):
                if not any(id(node) in used for node in ast.walk(argument)):
                    continue
                for file, function in self.functions:
                    if function.name == _called(call):
                        for name in _parameters(function, call, argument, key):
                            self.follow(file, function, name, function.body[0].lineno - 1)


def _parameters(function: ast.FunctionDef, call: ast.Call, argument: ast.expr | ast.keyword, key: str) -> list[Name]:
    """What a function calls an argument; a keyword that it has no name for is an element of its `**options`."""
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
    every = [*names, *(a.arg for a in function.args.kwonlyargs)]
    if not isinstance(argument, ast.keyword):
        position = call.args.index(argument)
        end = None if isinstance(argument, ast.Starred) else position + 1
        return [(name, "") for name in names[position:end]]
    options = [(function.args.kwarg.arg, argument.arg or key)] if function.args.kwarg else []
    if argument.arg or key:
        return [(argument.arg or key, "")] if (argument.arg or key) in every else options
    given = {keyword.arg for keyword in call.keywords} | set(names[: len(call.args)])
    return [(name, "") for name in every if name not in given] + options


def _covers(node: ast.expr | ast.keyword, line: int, columns: tuple[int, int], *, within: bool = False) -> bool:
    """Whether a node has these columns of a line, or is `within` them."""
    start, end = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
    first, last = (line, columns[0]), (line, columns[1])
    return first <= start and end <= last if within else start <= first and last <= end


def _within(inner: ast.stmt, outer: ast.stmt) -> bool:
    return outer.lineno <= inner.lineno <= (outer.end_lineno or 0)


def _own(statement: ast.stmt) -> tuple[int, int]:
    """First and last line of a statement, without its body."""
    body = getattr(statement, "body", None)
    end = body[0].lineno - 1 if isinstance(body, list) and body else statement.end_lineno
    return statement.lineno, max(statement.lineno, end or 0)


def _nodes(statement: ast.stmt) -> Iterator[ast.AST]:
    """The expressions of a statement and what they consist of, without those of its body."""
    for child in ast.iter_child_nodes(statement):
        if not isinstance(child, ast.stmt | ast.ExceptHandler):
            yield from ast.walk(child)


def _used(statement: ast.stmt, name: Name) -> set[int]:
    """Ids of the nodes of a statement that are a name's value, or an element of it with the key."""
    nodes = list(_nodes(statement))
    other = {id(n.value) for n in nodes if isinstance(n, ast.Subscript) and name[1] and _key(n) not in ("", name[1])}
    found = [n for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and n.id == name[0]]
    return _comprehended(nodes, {id(n) for n in found} - other)


def _comprehended(nodes: Sequence[ast.AST], used: set[int]) -> set[int]:
    """These nodes, and those that are names of a comprehension over one of them."""
    loops = [n for n in nodes if isinstance(n, ast.comprehension) and any(id(x) in used for x in ast.walk(n.iter))]
    names = {n.id for loop in loops for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
    return used | {id(n) for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and n.id in names}


def _assigned(statement: ast.stmt) -> set[Name]:
    """The names that a statement assigns, with the key where it assigns an element."""
    targets: list[ast.AST] = [*getattr(statement, "targets", [])]
    targets += [t for t in (getattr(statement, "target", None),) if t is not None]
    return {(n.id, _key(target)) for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}


def _given(statement: ast.stmt, used: set[int]) -> set[Name]:
    """What of the names that a statement assigns comes from these nodes: of a dictionary, its keys."""
    keys = {
        str(key.value)
        for n in _nodes(statement)
        if isinstance(n, ast.Dict)
        for key, value in zip(n.keys, n.values, strict=True)
        if isinstance(key, ast.Constant) and any(id(part) in used for part in ast.walk(value))
    }
    return {(name, key or of_dict) for name, key in _assigned(statement) for of_dict in (keys or {""})}


def _key(node: ast.AST) -> str:
    """The key of a subscript that is a string; empty where it is none."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return str(node.slice.value)
    return ""


def _calls(statement: ast.stmt) -> list[ast.Call]:
    return [n for n in _nodes(statement) if isinstance(n, ast.Call)]


def _called(call: ast.Call) -> str:
    """The name of what is called, also of a kernel that is launched: `name[grid](...)`."""
    function = call.func.value if isinstance(call.func, ast.Subscript) else call.func
    return getattr(function, "id", getattr(function, "attr", ""))
