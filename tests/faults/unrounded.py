"""Where a value comes from that a fault no longer rounds: the lines that a conversion was left out after."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

from tests.faults.lines import Line, Planted
from tests.faults.plant import Sources

_CONVERSIONS = ("to", "half", "bfloat16", "float", "double")
_WIDE = ("float32", "float64")
_ASSIGNMENTS = (ast.Assign, ast.AugAssign, ast.AnnAssign)


def unrounded(planted: Planted, before: Sources) -> frozenset[Line]:
    """List the lines that give a value of which the fault leaves out a rounding, and changes nothing else.

    These are the statements that assign its name before that, or what callers pass where it is a parameter.

    Args:
        planted: what the fault changes.
        before: file name → text without it.
    """
    changed = [file for file, text in planted.sources.items() if text != before[file]]
    lost = [(file, *pair) for file in changed for pair in _lost(before[file], planted.sources[file])]
    return frozenset(line for file, end, name in lost for line in _given(planted.sources, file, end, name, ()))


def _lost(old: str, new: str) -> Iterator[tuple[int, str]]:
    """Names of which a rounding is left out between two texts, with the line of the new one that is before that."""
    for _, i1, i2, j1, j2 in SequenceMatcher(None, old.splitlines(), new.splitlines(), autojunk=False).get_opcodes():
        was, now = _statements(old, i1, i2), _statements(new, j1, j2)
        names = _rounded(was) - _rounded(now)
        if names and _bare(was) == _bare(now):
            yield from ((j1, name) for name in names)


def _statements(text: str, start: int, end: int) -> list[ast.stmt]:
    """List the statements that stand in these lines alone, without those that are part of others."""
    inside = [s for s in ast.walk(ast.parse(text)) if isinstance(s, ast.stmt) and start < s.lineno <= _end(s) <= end]
    parts = {id(part) for s in inside for part in ast.walk(s) if part is not s}
    return sorted((s for s in inside if id(s) not in parts), key=lambda s: s.lineno)


def _end(node: ast.stmt | ast.expr) -> int:
    return node.end_lineno or node.lineno


def _is_conversion(node: ast.AST) -> bool:
    named = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CONVERSIONS
    return named and not any(keyword.arg == "bitcast" for keyword in node.keywords)  # type: ignore[attr-defined]


def _rounded(statements: Sequence[ast.stmt]) -> Counter[str]:
    """Return how often each name is converted to a narrow format."""
    calls = [n for s in statements for n in ast.walk(s) if isinstance(n, ast.Call) and _is_conversion(n)]
    values = (call.func.value for call in calls if isinstance(call.func, ast.Attribute) and not _is_wide(call))
    return Counter(value.id for value in values if isinstance(value, ast.Name))


def _is_wide(call: ast.Call) -> bool:
    formats = [getattr(argument, "attr", "") for argument in call.args]
    return not formats or any(name in _WIDE for name in formats)


def _bare(statements: Sequence[ast.stmt]) -> str:
    """Spell statements without conversions, and leave out those that then say nothing."""
    module = ast.parse("\n".join(map(ast.unparse, statements)))
    return ast.dump(_Bare().visit(module))


class _Bare(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        return node.func.value if _is_conversion(node) and isinstance(node.func, ast.Attribute) else node

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        self.generic_visit(node)
        same = isinstance(node.value, ast.Name) and [ast.unparse(t) for t in node.targets] == [node.value.id]
        return None if same else node

    def visit_If(self, node: ast.If) -> ast.AST | None:
        self.generic_visit(node)
        return node if node.body or node.orelse else None

    def visit_Pass(self, node: ast.Pass) -> None:
        return None


def _given(sources: Sources, file: str, end: int, name: str, known: tuple[object, ...]) -> Iterator[Line]:
    """Yield the lines that give a name its value up to a line."""
    nodes = list(ast.walk(ast.parse(sources[file])))
    around = [d for d in nodes if isinstance(d, ast.FunctionDef) and d.lineno <= end <= _end(d)]
    function = max(around, key=lambda d: d.lineno, default=None)
    if function is None or (file, function.name, name) in known:
        return
    branches = [n for n in ast.walk(function) if isinstance(n, ast.If) and n.orelse]
    own = [s for s in ast.walk(function) if isinstance(s, _ASSIGNMENTS) and _end(s) <= end]
    for statement in sorted(own, key=lambda s: s.lineno, reverse=True):
        if name in _assigned(statement) and not any(_is_other(b, statement, end) for b in branches):
            yield from ((file, line) for line in range(statement.lineno, _end(statement) + 1))
            if statement in function.body and not isinstance(statement, ast.AugAssign):
                return
    for where, passed in _passed(sources, function, name):
        if isinstance(passed, ast.Name):
            key = (file, function.name, name)
            yield from _given(sources, where, passed.lineno - 1, passed.id, (*known, key))
        else:
            yield from ((where, line) for line in range(passed.lineno, _end(passed) + 1))


def _is_other(branch: ast.If, statement: ast.stmt, end: int) -> bool:
    """Return whether a statement is in the first part of a condition whose second part the line is in."""
    second = branch.orelse[0].lineno
    return branch.lineno <= statement.lineno < second and second <= end <= _end(branch)


def _assigned(statement: ast.Assign | ast.AugAssign | ast.AnnAssign) -> set[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}


def _passed(sources: Sources, function: ast.FunctionDef, name: str) -> Iterator[tuple[str, ast.expr]]:
    """Yield what callers pass for a parameter."""
    names = [argument.arg for argument in function.args.args]
    for file, text in sources.items():
        for call in (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call)):
            if isinstance(call.func, ast.Name) and call.func.id == function.name:
                by_name = {keyword.arg: keyword.value for keyword in call.keywords}
                given = dict(zip(names, call.args, strict=False)) | by_name
                if name in given:
                    yield file, given[name]
