"""Places in functions of a file where a kernel can go more than one way, and the ways that no case of a run went."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lastbit.interpret.decisions import ALL, NONE, SOME, Decision
from lastbit.run import DEVICE, ERROR, EXTENT, REFUSAL, Unreached

_MOST_TEXT = 60
_DEVICES = frozenset({"available", "capability", "device", "devices", "interpret", "interpreted", "platform"}) | {
    *("cpu", "cuda", "gpu", "hip", "mps", "npu", "rocm", "xpu")
}
"""Words of a name that tells one device from another."""

_OPPOSITE = {
    ast.Lt: ">=", ast.GtE: "<", ast.Gt: "<=", ast.LtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip

NEVER = {"if": ("true", "false"), "while": ("true",), "for": ("ran",), "case": ("matched",), "except": ("caught",)}
"""Kind of a site → what is said of it where nothing went the first way, or the other one; masks have ways of their own.
"""


@dataclass(frozen=True)
class Site:
    """A place where a function goes one of several ways: 1 into what follows it, 0 past it.

    Attributes:
        line, column: of its condition, or of what a loop runs over.
        kind: one of `NEVER`, or `mask`.
        text: as it is written, from `if` on.
        header: first and last line of the statement without its body.
        body: the first line of the body; 0 where a tracer of lines cannot see it.
        before: the line that is run where the site is asked; itself for most.
        program: its function is one of Triton.
        why: way → why it is known that nobody goes there.
        wanted: way → what holds where somebody goes there.
    """

    line: int
    column: int
    kind: str
    text: str
    function: str
    header: tuple[int, int]
    body: int
    before: int
    program: bool
    why: Mapping[int, str] = field(default_factory=dict)
    wanted: Mapping[int, str] = field(default_factory=dict)

    @property
    def shown(self) -> int:
        """The line that a reader is told."""
        return self.line if self.kind in ("case", "except") else self.header[0]


def sites_of(file: str) -> tuple[Site, ...]:
    """Return the sites in functions of a file; none of one that cannot be read any more."""
    return _read(file)[0]


def decisions_of_arcs(file: str, arcs: Collection[tuple[int, int]]) -> Iterator[Decision]:
    """Yield the ways that Python went; `arcs` are pairs of lines that it ran one after the other, as of coverage.py."""
    sites, firsts = _read(file)
    whole = {(firsts.get(a, a), firsts.get(b, b)) for a, b in arcs}
    ran = {line for pair in whole for line in pair}
    after: dict[int, set[int]] = {}
    for a, b in whole:
        after.setdefault(a, set()).add(b)
    for site in sites:
        if site.program or not site.body or site.before not in ran:
            continue
        if site.kind in ("case", "except"):
            yield file, site.line, site.column, int(site.body in ran)
            continue
        ends = after.get(site.header[0], set()) - {site.header[0]}
        if site.body in ends:
            yield file, site.line, site.column, 1
        if ends - {site.body}:
            yield file, site.line, site.column, 0


@functools.lru_cache(maxsize=256)
def _read(file: str) -> tuple[tuple[Site, ...], Mapping[int, int]]:
    """Return the sites of a file, and of each line the first one of the statement, or head of one, that it is part of.

    Nothing of a file that cannot be read.
    """
    with suppress(OSError, SyntaxError, ValueError):
        source = Path(file).read_text(encoding="utf-8")
        tree = ast.parse(source, file)
        firsts: dict[int, int] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.stmt):
                start, end = _header(node)
                firsts |= dict.fromkeys(range(start, end + 1), start)
        return tuple(_Finder(source.split("\n"), firsts).of(tree.body)), firsts
    return (), {}


def _header(node: ast.stmt) -> tuple[int, int]:
    """Return the first and the last line of a statement, without the statements that it consists of."""
    match node:
        case ast.If(test=part) | ast.While(test=part) | ast.Match(subject=part):
            return node.lineno, part.end_lineno or node.lineno
        case ast.For(iter=part) | ast.AsyncFor(iter=part):
            return node.lineno, part.end_lineno or node.lineno
        case ast.With(items=items) | ast.AsyncWith(items=items):
            return node.lineno, max(item.context_expr.end_lineno or node.lineno for item in items)
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return min([node.lineno, *(d.lineno for d in node.decorator_list)]), node.lineno
        case ast.Try() | ast.TryStar():
            return node.lineno, node.lineno
    return node.lineno, node.end_lineno or node.lineno


@dataclass(frozen=True)
class _Finder:
    """Finds the sites of statements; `function` is the one that they are in, a `program` if Triton runs it.

    `sizes` maps those of its names that are assigned once, from something that names a shape, to that.
    """

    lines: Sequence[str]
    firsts: Mapping[int, int]
    function: str = ""
    program: bool = False
    sizes: Mapping[str, str] = field(default_factory=dict)

    def of(self, body: Sequence[ast.stmt]) -> Iterator[Site]:
        """Yield the sites of a block."""
        for number, node in enumerate(body):
            yield from self._of(node, body[number + 1 : number + 2])

    def _of(self, node: ast.stmt, following: Sequence[ast.stmt]) -> Iterator[Site]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from self._inside(node)
            return
        if self.function:
            yield from self._at(node, following)
        for block in ("body", "orelse", "finalbody"):
            yield from self.of(getattr(node, block, ()))
        for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
            yield from self.of(part.body)

    def _inside(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> Iterator[Site]:
        name = ".".join(filter(None, (self.function, node.name)))
        if isinstance(node, ast.ClassDef):  # a class in no function has no site but those of its methods
            for method in node.body:
                if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield from replace(self, function=name)._inside(method)
            return
        program = any(_is_jit(decorator) for decorator in node.decorator_list)
        yield from _Finder(self.lines, self.firsts, name, program, dict(self._sizes(node))).of(node.body)

    def _sizes(self, function: ast.AST) -> Iterator[tuple[str, str]]:
        nodes = list(ast.walk(function))
        stored = Counter(node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
        for node in nodes:
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and "shape" in (text := self._text(node.value)):
                target = node.targets[0]
                parts = target.elts if isinstance(target, ast.Tuple) else [target]
                for number, part in enumerate(parts):
                    if isinstance(part, ast.Starred):
                        break
                    if isinstance(part, ast.Name) and stored[part.id] == 1:
                        yield part.id, text if part is target else f"{text}[{number}]"

    def _at(self, node: ast.stmt, following: Sequence[ast.stmt]) -> Iterator[Site]:
        header = _header(node)
        match node:
            case ast.If(test=test, body=body, orelse=past) | ast.While(test=test, body=body, orelse=past):
                if not isinstance(test, ast.Constant):
                    kind = "if" if isinstance(node, ast.If) else "while"
                    word = re.match(r"\w+", self.lines[node.lineno - 1][node.col_offset :])
                    text = f"{word[0] if word else kind} {self._text(test)}"
                    beyond = past or (following if _ends(body) else ())
                    why = {way: said for way, to in ((1, body), (0, beyond)) if (said := _why(test, to))}
                    yield self._site(test, kind, text, header, body, header[0], why, self._wanted(test))
            case ast.For(iter=over, body=body):
                text = f"for {self._text(node.target)} in {self._text(over)}"
                yield self._site(over, "for", text, header, body, header[0], {})
            case ast.Match(cases=cases):
                for one in cases:
                    if one.guard is not None or not isinstance(one.pattern, ast.MatchAs) or one.pattern.pattern:
                        why = {1: said} if (said := _why(one.pattern, one.body)) else {}
                        text = f"case {self._text(one.pattern)}"
                        yield self._site(one.pattern, "case", text, header, one.body, header[0], why)
            case ast.Try(body=body, handlers=handlers):
                for handler in handlers:
                    text = f"except {self._text(handler.type)}" if handler.type else "except"
                    place = handler.type or handler
                    yield self._site(place, "except", text, header, handler.body, self._first(body), {1: ERROR})
        if self.program:
            yield from self._choices(node)

    def _choices(self, node: ast.stmt) -> Iterator[Site]:
        """Yield the conditional expressions and masks of a statement of a program, which the interpreter sees."""
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.expr):
                for one in ast.walk(part):
                    if isinstance(one, ast.Call) and (mask := _mask(one)) is not None:
                        text, lines = f"mask={self._text(mask)}", (one.lineno, one.lineno)
                        yield self._site(one, "mask", text, lines, [], one.lineno, {}, self._wanted(mask))
                    if isinstance(one, ast.IfExp) and not isinstance(one.test, ast.Constant):
                        text = f"if {self._text(one.test)}"
                        wanted = self._wanted(one.test)
                        yield self._site(one.test, "if", text, (one.lineno, one.lineno), [], one.lineno, {}, wanted)

    def _wanted(self, test: ast.expr) -> dict[int, str]:
        """Say for each way what holds of a condition there, and what its names stand for."""
        names = dict.fromkeys(node.id for node in ast.walk(test) if isinstance(node, ast.Name))
        where = ", ".join(f"{name} = {self.sizes[name]}" for name in names if name in self.sizes)
        said = {1: self._text(test), 0: self._negated(test)}
        return {way: f"{text}, where {where}" if where else text for way, text in said.items()}

    def _negated(self, test: ast.expr) -> str:
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return self._text(operand)
            case ast.Compare(left=left, ops=[operation], comparators=[right]):
                return f"{self._text(left)} {_OPPOSITE[type(operation)]} {self._text(right)}"
        plain = isinstance(test, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
        return f"not {self._text(test)}" if plain else f"not ({self._text(test)})"

    def _site(
        self,
        place: ast.expr | ast.pattern | ast.excepthandler,
        kind: str,
        text: str,
        header: tuple[int, int],
        body: Sequence[ast.stmt],
        before: int,
        why: Mapping[int, str],
        wanted: Mapping[int, str] = MappingProxyType({}),
    ) -> Site:
        first = self._first(body)
        seen = 0 if header[0] <= first <= header[1] else first
        where = place.lineno, place.col_offset
        return Site(*where, kind, text, self.function, header, seen, before, self.program, dict(why), dict(wanted))

    def _first(self, body: Sequence[ast.stmt]) -> int:
        """Return the first line of a block that Python runs; 0 if it is told of none."""
        for node in body:
            silent = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            silent |= isinstance(node, ast.Global | ast.Nonlocal)
            silent |= isinstance(node, ast.AnnAssign) and node.value is None
            if not silent:
                return _header(node)[0]
        return 0

    def _text(self, node: ast.expr | ast.pattern) -> str:
        """Return the source of a part in one line, shortened; `ast.get_source_segment` splits the file each time."""
        assert node.end_lineno is not None
        lines = [line.encode() for line in self.lines[node.lineno - 1 : node.end_lineno]]
        lines[-1] = lines[-1][: node.end_col_offset]
        lines[0] = lines[0][node.col_offset :]
        text = " ".join(b" ".join(lines).decode().split())
        return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}…"


def _is_jit(decorator: ast.expr) -> bool:
    """Return whether a decorator is `triton.jit` or has its name, with arguments or without."""
    plain = decorator.func if isinstance(decorator, ast.Call) else decorator
    return getattr(plain, "attr", getattr(plain, "id", "")) == "jit"


def _mask(call: ast.Call) -> ast.expr | None:
    """Return the mask of a load or store; None where it has none, or a call is another one."""
    place = {"load": 1, "store": 2}.get(getattr(call.func, "attr", ""))
    if place is None:
        return None
    named = (keyword.value for keyword in call.keywords if keyword.arg == "mask")
    return next(named, call.args[place] if len(call.args) > place else None)


def _why(test: ast.AST, block: Sequence[ast.stmt]) -> str:
    """Say why nobody may go into a block: it refuses what it is given, or another device decides."""
    simple = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr)
    if bool(block) and isinstance(block[-1], ast.Raise) and all(isinstance(node, simple) for node in block[:-1]):
        return REFUSAL
    return DEVICE if _names_device(test) else ""


def _ends(block: Sequence[ast.stmt]) -> bool:
    """Return whether what follows a block is reached past it alone."""
    return isinstance(block[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)


def _names_device(test: ast.AST) -> bool:
    names: Iterable[str] = (getattr(node, "attr", None) or getattr(node, "id", None) or "" for node in ast.walk(test))
    return any(not _DEVICES.isdisjoint(name.lower().split("_")) for name in names)


def merged(told: Iterable[tuple[str, Iterable[Sequence[Any]] | None]]) -> dict[str, set[Decision]] | None:
    """Return kernel → what its calls decided in all workers, as each told it; None if that of some is not known."""
    found: dict[str, set[Decision]] = {}
    for kernel, decided in told:
        if decided is None:
            return None
        found.setdefault(kernel, set()).update((file, line, column, way) for file, line, column, way in decided)
    return found or None


def unreached(
    taken: Mapping[str, Collection[Decision]] | None, cases: Callable[[Collection[str]], int], *, decides: bool = False
) -> tuple[Unreached, ...] | None:
    """List the branches that no kernel took, in the order of files and lines; `cases` counts those of some kernels.

    With `decides`, kernels are inconclusive for those that handle inputs.

    Only sites to which some call came are looked at: of what lies behind a branch that was not taken, that branch alone
    is told. What one kernel took, its file's other kernels need not.
    """
    if taken is None:
        return None
    ways: dict[tuple[str, int, int], dict[int, dict[str, None]]] = {}
    for kernel, decided in taken.items():
        for file, line, column, way in decided:
            ways.setdefault((file, line, column), {}).setdefault(way, {})[kernel] = None
    files = sorted({file for file, _, _ in ways})
    found = []
    for file in files:
        for site in sites_of(file):
            seen = ways.get((file, site.line, site.column), {})
            kernels = tuple(dict.fromkeys(kernel for some in seen.values() for kernel in some))
            for way, never, besides in _not_taken(site, seen):
                why, wanted = besides or site.why.get(way, ""), site.wanted.get(way, "")
                where = file, site.shown, site.function, site.text, never
                found.append(Unreached(*where, kernels, cases(kernels), why, wanted, decides and not why))
    return tuple(found)


def _not_taken(site: Site, seen: Collection[int]) -> Iterator[tuple[int, str, str]]:
    """Yield each way that nobody went, what is said of it, and why where it is no branch; nothing if nobody came there.

    Of a mask only the first that applies is told.
    """
    masked = site.kind == "mask"
    seen = {way for way in seen if (way >= NONE) is masked}
    if not seen:
        return
    if masked:
        said = {"true": seen == {NONE}, "false": seen == {ALL}, "partly true": SOME not in seen}
        never = next((never for never, missing in said.items() if missing), "")
        yield from [(int(never != "false"), never, EXTENT)] * bool(never)
        return
    missing = {1: max(seen) < 1, 0: 0 not in seen}
    yield from ((way, never, "") for way, never in zip((1, 0), NEVER[site.kind], strict=False) if missing[way])
    if site.kind == "for" and site.program and max(seen) == 1:
        yield 1, "ran twice", EXTENT
