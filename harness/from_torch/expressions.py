"""The expressions of a reference that the operations of a trace become, and what is known of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from lastbit.errors import UsageError

Kind = Literal["numbers", "integers", "truth", "number", "sequence", "other"]

ATOM, UNARY, PRODUCT, SUM, COMPARISON = 5, 4, 3, 2, 1
"""How tightly the parts of an expression hold together; a name and a call are atoms."""


class Unmapped(UsageError):
    """An error: there is no rule for an operation, or none for its arguments."""


@dataclass(frozen=True)
class Value:
    """An expression of the reference.

    Attributes:
        text: the expression.
        kind: an enclosure of numbers, a tensor of integers or truth values, a comparison of enclosures, a Python
            number, or a sequence of these.
        level: how tightly it holds together.
        example: what it is on the example.
        computed: an operation that rounds its result, and no choice among numbers that are there.
        factors: what it is the product of, if nothing rounded it since; a compiler may multiply in another order.
        pair: two operands that it is the product of, one of which is the product of some of the factors.
        square_of: what it is the square of, likewise.
        about: the numbers and their mean, if it is their difference.
        mean_of: the numbers that it is the mean of, over the last dimension.
        staged: whether it may be something else than the product of the factors, such as what a kernel gave as a stage.
        items: of a sequence.
    """

    text: str
    kind: Kind = "numbers"
    level: int = ATOM
    example: Any = None
    computed: bool = False
    factors: tuple[Value, ...] = ()
    pair: tuple[Value, ...] = ()
    square_of: Value | None = None
    about: tuple[Value, Value] | None = None
    mean_of: str = ""
    staged: bool = False
    items: tuple[Value, ...] = field(default=())

    @property
    def named(self) -> bool:
        """Return whether it is a variable of the reference."""
        return self.text.isidentifier()

    @property
    def rank(self) -> int:
        return int(self.example.ndim)

    def within(self, level: int) -> str:
        """Return the text as part of an expression that holds its parts together as tightly as `level`."""
        return self.text if self.level >= level else f"({self.text})"


def call(function: str, *arguments: Value | str, computed: bool = False, **known: Any) -> Value:
    """Return a call of a function."""
    texts = [a if isinstance(a, str) else a.text for a in arguments]
    return Value(f"{function}({', '.join(texts)})", computed=computed, **known)


def binary(left: Value, sign: str, right: Value, level: int, *, computed: bool = True, **known: Any) -> Value:
    """Return two operands with a sign between them."""
    text = f"{left.within(level)} {sign} {right.within(level + 1)}"
    return Value(text, level=level, computed=computed, **known)


@dataclass(frozen=True)
class ValueRules:
    """The rules for operations: name of the operation → function from its arguments to a value."""

    functions: dict[str, Callable[..., Value]] = field(default_factory=dict)

    def __call__(self, *names: str) -> Callable[[Callable[..., Value]], Callable[..., Value]]:
        """Make a function the rule of these operations."""

        def register(function: Callable[..., Value]) -> Callable[..., Value]:
            self.functions.update(dict.fromkeys(names, function))
            return function

        return register


RULES = ValueRules()
