"""Result of `lastbit order`: in which order a kernel adds, as blocks, lanes and levels, and as JSON."""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

from rich.console import Console
from rich.text import Text

from lastbit.errors import UsageError
from lastbit.reports.paper import line, paragraph
from lastbit.reports.summary import plural


@dataclass(frozen=True)
class SumTree:
    """Groups in which terms are added; the order of two summands is no part of it, as it changes no bit.

    Attributes:
        terms: how many; they are the nodes 0, 1, …, in the order of their columns.
        parents: node → the node in which it is added to others; the last node, the root, has none. Nodes that add are
            numbered after the terms, those of fewer terms first, then those whose first term comes first: equal trees
            have equal parents.
    """

    terms: int
    parents: tuple[int, ...]

    @property
    def nodes(self) -> int:
        return len(self.parents) + 1

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Node → what it adds, those first whose first term comes first; nothing of a term."""
        found: list[list[int]] = [[] for _ in range(self.nodes)]
        for node, parent in enumerate(self.parents):
            found[parent].append(node)
        return tuple(tuple(sorted(own, key=self.firsts.__getitem__)) for own in found)

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """Node → its first term."""
        return self._upward([*range(self.terms), *[self.terms] * (self.nodes - self.terms)], min)

    @cached_property
    def lasts(self) -> tuple[int, ...]:
        """Node → its last term."""
        return self._upward([*range(self.terms), *[0] * (self.nodes - self.terms)], max)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Node → how many terms it is the sum of."""
        return self._upward([1] * self.terms + [0] * (self.nodes - self.terms), operator.add)

    @cached_property
    def height(self) -> int:
        """The most additions that a term passes through; one addition of several terms counts once."""
        return self._upward([0] * self.nodes, lambda own, below: max(own, below + 1))[-1]

    def _upward(self, values: list[int], joined: Callable[[int, int], int]) -> tuple[int, ...]:
        """Join the value of every node to that of the node in which it is added, from the terms on."""
        for node, parent in enumerate(self.parents):
            values[parent] = joined(values[parent], values[node])
        return tuple(values)

    @property
    def digest(self) -> str:
        """12 hex digits that equal trees share."""
        text = f"{self.terms}:{','.join(map(str, self.parents))}"
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Form:
    """The form of a tree or a part of it: the same wherever it begins.

    Attributes:
        kind: `term`; `chain`: parts are added one after the other to the sum of those before; `pairs`: two parts of one
            form are added, these sums again, and so on; `at once`: parts are added in one operation; `steps`: `width`
            parts at a time are added in one operation to the sum of those before; `row`: as a chain, but of parts of
            several forms; `other`: such parts in one operation.
        span: columns from the first to the last, both counted.
        strides: where the parts begin, as (count, distance), the innermost first: there are as many parts as the
            product of the counts. Of `pairs` these are the levels, in the order of the additions. Empty of parts
            without such a rule.
        parts: the forms of the parts, each with how many of it stand in a row.
        width: of `steps`, how many parts are added to the sum at a time.
    """

    kind: str
    terms: int = 1
    span: int = 1
    strides: tuple[tuple[int, int], ...] = ()
    parts: tuple[tuple[int, Form], ...] = ()
    width: int = 1

    @property
    def part(self) -> Form:
        """The first part."""
        return self.parts[0][1]

    @property
    def count(self) -> int:
        """The number of parts."""
        return sum(count for count, _ in self.parts)


TERM = Form("term")


@dataclass(frozen=True)
class Declared:
    """A kernel's declaration about its sums, against the tree.

    Attributes:
        what: `depth` or `order`.
        kept: whether the tree keeps it.
        said: the declaration, and what the tree has instead if it is not kept.
    """

    what: str
    kept: bool
    said: str


@dataclass(frozen=True)
class Order:
    """The order of one sum of a kernel, for one number of terms.

    Attributes:
        sum, about: name of the sum among those of its op, and what is added.
        terms, rows: how many terms there are, and how many sums in each call.
        read: what told whether a small term was lost, as in `output (bf16)`.
        tree, form: what was found; None where no tree was.
        triples: what contradicts every tree: for some columns, what the probes say of them.
        asked, calls: probes, and calls of the kernel.
        checked, contradicted: how many more triples of columns were asked, and of how many the tree says otherwise.
        notes: what else a reader must know.
        declared: declarations of the kernel that concern the sum.
        environment: versions and device.
    """

    kernel: str
    op: str
    contract: str
    device: str
    sum: str
    about: str
    terms: int
    rows: int
    dtype: str
    read: str = ""
    tree: SumTree | None = None
    form: Form | None = None
    reason: str = ""
    triples: tuple[str, ...] = ()
    asked: int = 0
    calls: int = 0
    checked: int = 0
    contradicted: int = 0
    notes: tuple[str, ...] = ()
    declared: tuple[Declared, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0 a tree was found, and keeps what is declared; 1 it does not; 3 there is none."""
        if self.tree is None:
            return 3
        return int(any(not d.kept for d in self.declared))


SCHEMA = 1
"""Version of the JSON."""

# With its head half a page; a tree that is longer is described by its form.
_LINES = 14
# Arbitrary: deeper than any line of 160 characters is.
_MOST_LEVELS = 16
# A line and a half of a terminal.
_LONGEST = 160


def print_order(order: Order, console: Console) -> None:
    """Print kernel and sum, the tree, how it was found, and the kernel's declarations."""
    about = f" ({order.about})" if order.about else ""
    where = f" on {order.device}: {order.sum} of {order.op}{about}"
    line(console, Text.assemble((order.kernel, "bold"), where))
    line(console, f"  {order.terms:,} terms of {order.dtype}, {plural(order.rows, 'sum')} in each call", "dim")
    if order.tree is None or order.form is None:
        paragraph(console, Text(f"No order: {order.reason}.", "yellow"), label="  ")
        for sentence in order.triples:
            line(console, f"    {sentence}")
    else:
        for text in tree_lines(order.form):
            line(console, f"  {text}")
        tree = f"height {order.tree.height:,}, tree {order.tree.digest}, form {notation(order.form)}"
        paragraph(console, Text(tree), label="  ")
    if order.asked:  # how it was found and checked
        read = f"read from {order.read}; " if order.read else ""
        checked = f"; checked on {order.checked:,} further triples, {order.contradicted:,} contradicted"
        how = f"{read}{order.asked:,} probes in {plural(order.calls, 'call')}{checked if order.checked else ''}"
        paragraph(console, Text(how, "dim"), label="  ")
    for note in order.notes:
        paragraph(console, Text(note), label="  note: ")
    for declared in order.declared:
        word, label_style, style = ("kept", "green", "") if declared.kept else ("FAILED", "bold red", "bold red")
        paragraph(console, Text(declared.said, style), label=f"  {word}: ", label_style=label_style)


def tree_lines(form: Form) -> Iterator[str]:
    """Yield a line for each level of a tree, indented by its depth."""
    found = list(_levels(form, "sum", 0))
    yield from found[:_LINES]
    if len(found) > _LINES:
        yield f"… and {plural(len(found) - _LINES, 'part')} more"


def _levels(form: Form, name: str, depth: int) -> Iterator[str]:
    if form.kind == "term":
        return
    yield f"{'  ' * depth}{name}: {head(form)}"
    if depth >= _LINES:
        return
    several = len(form.parts) > 1
    for count, part in form.parts:
        own = f"{_named(part)} of {part.terms:,} terms" + f" ({count} of them)" * (several and count > 1)
        yield from _levels(part, own if several else f"in each {_named(part)}", depth + 1)


def head(form: Form) -> str:
    """Describe the operands of a node in a line."""
    if form.kind in ("row", "other"):
        how = "one after the other" if form.kind == "row" else "at once"
        return f"{how}: " + ", ".join(_several(count, part) for count, part in form.parts)
    parts = _several(form.count, form.part)
    match form.kind:
        case "chain":
            return f"{parts} one after the other{_places(form)}"
        case "pairs":
            if len(form.strides) == 1:
                return f"{parts} added to each other, at distance {form.strides[0][1]:,}"
            distances = ", ".join(f"{distance:,}" for _, distance in form.strides)
            levels = plural(len(form.strides), "level")
            # The columns of a lane, if these are the ones with one remainder.
            regular = form.span == form.terms and form.part.kind == "chain" and len(form.part.strides) == 1
            modulus = f" (column mod {form.count:,})" * (regular and form.part.strides[0][1] == form.count)
            return f"{parts}{modulus}, joined in pairs over {levels}, at distances {distances}"
        case "steps":
            steps = plural(form.count // form.width, "step")
            return f"{parts} in {steps}, one after the other: each adds {form.width} at once to the sum so far"
        case _:
            return f"{parts} added at once"


def _several(count: int, part: Form) -> str:
    return plural(count, "term") if part.kind == "term" else f"{plural(count, _named(part))} of {part.terms:,} terms"


def _named(part: Form) -> str:
    """Name a part: a block has all columns from its first to its last; a lane leaves some to others."""
    if part.kind == "term":
        return "term"
    return "block" if part.span == part.terms else "lane"


def _places(form: Form) -> str:
    if not form.strides:
        return ", at irregular places"
    (count, distance), *further = form.strides
    direction = ", from the last to the first" if distance < 0 else ""
    if not further:
        return f"{direction}, at distance {abs(distance):,}"
    outer = "; such rows ".join(f"{n} times at distance {step:,}" for n, step in further)
    return f": {count} at distance {distance:,}, {outer}"


def notation(form: Form, *, longest: int = _LONGEST) -> str:
    """Write a form in a line: `chain 4@1024 of pairs 1,2,4 of chain 8@8`; equal trees have equal ones."""
    text = _notation(form, 0)
    return text if len(text) <= longest else f"{text[:longest]}…"


def _notation(form: Form, depth: int) -> str:
    if form.kind == "term":
        return "terms"
    if depth > _MOST_LEVELS:
        return "…"
    if form.kind in ("row", "other"):
        parts = (f"{count} × {_notation(part, depth + 1)}" for count, part in form.parts)
        return f"{'chain' if form.kind == 'row' else form.kind} of ({', '.join(parts)})"
    inner = "" if form.part.kind == "term" else f" of {_notation(form.part, depth + 1)}"
    if form.kind == "pairs":
        return f"pairs {','.join(str(distance) for _, distance in form.strides)}{inner}"
    places = ",".join(f"{count}@{distance}" for count, distance in form.strides) or f"{form.count}@?"
    width = f" {form.width} at once" if form.kind == "steps" else ""
    return f"{form.kind}{width} {places}{inner}"


def difference(first: Order, second: Order, names: tuple[str, str] = ("", "")) -> str:
    """Describe how the order of a sum differs in two places, in a sentence.

    An order without a name is called by its first attribute that differs from the other's. What is told is the first
    level, from the last addition on, at which their forms differ.
    """
    for what in ("kernel", "terms", "device", "rows", "dtype"):
        values = getattr(first, what), getattr(second, what)
        if values[0] != values[1]:
            own = tuple(f"{value:,} {what}" if isinstance(value, int) else str(value) for value in values)
            break
    else:
        own = "the first", "the second"
    one, other = (name or called for name, called in zip(names, own, strict=True))
    lacking = [f"{name} has none: {o.reason}" for name, o in ((one, first), (other, second)) if o.form is None]
    if lacking or first.form is None or second.form is None or first.tree is None or second.tree is None:
        return f"{first.sum}: no two orders to compare, {'; '.join(lacking)}."
    if first.tree == second.tree:
        return f"{first.sum}, N = {first.terms:,}: the same tree in {one} and {other}."
    level, a, b = "", first.form, second.form
    while a.kind == b.kind and a.strides == b.strides and a.width == b.width and len(a.parts) == len(b.parts) == 1:
        if a.count != b.count or "term" in (a.part.kind, b.part.kind):
            break
        level, a, b = f", in each {_named(a.part)} of {a.part.terms:,} terms", a.part, b.part
    sizes = f"N = {first.terms:,}" if first.terms == second.terms else f"N = {first.terms:,} and {second.terms:,}"
    return f"{first.sum}, {sizes}{level}: {head(a)} ({one}); {head(b)} ({other})."


# JSON


def to_json(orders: Sequence[Order]) -> str:
    """Write orders as a document that `from_json` reads."""
    documents = []
    for order in orders:
        tree = order.tree
        plain = {f.name: getattr(order, f.name) for f in fields(order) if f.name not in ("tree", "form", "declared")}
        plain["declared"] = [asdict(declared) for declared in order.declared]
        plain["form"] = notation(order.form, longest=10_000) if order.form else None
        plain["height"], plain["tree"] = (tree.height, tree.digest) if tree else (None, None)
        documents.append({**plain, "parents": list(tree.parents) if tree else None})
    return json.dumps({"schema": SCHEMA, "orders": documents})


def from_json(text: str, source: str) -> list[Order]:
    """Read the orders of a document, without their forms.

    Raises:
        UsageError: it is none; `source` is named.
    """
    names, orders = {f.name for f in fields(Order)} - {"tree", "form", "declared"}, []
    try:
        document = json.loads(text)
        if document["schema"] != SCHEMA:
            raise UsageError(f"{source} has schema {document['schema']}; this lastbit reads {SCHEMA}")
        for plain in document["orders"]:
            known = ((name, value) for name, value in plain.items() if name in names)
            own: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in known}
            parents = plain["parents"]
            tree = None if parents is None else SumTree(int(plain["terms"]), tuple(map(int, parents)))
            orders.append(Order(**own, tree=tree, declared=tuple(Declared(**d) for d in plain["declared"])))
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{source} holds no orders; write it with lastbit order K --json ({error!r})") from error
    return orders


def print_differences(sentences: Iterable[str], console: Console) -> None:
    for sentence in sentences:
        paragraph(console, Text(sentence, "bold"), label="→ ")
