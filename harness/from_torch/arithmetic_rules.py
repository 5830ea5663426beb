"""Rules for arithmetic that torch computes in fp32 and then rounds to the dtype of the result.

A product of fp32 numbers that nothing rounds may be multiplied in another order, or fused into the addition after it:
kernels that keep the contract do so, and the reference allows it.
"""

from __future__ import annotations

from lastbit.from_torch.expressions import (
    ATOM,
    COMPARISON,
    PRODUCT,
    RULES,
    SUM,
    UNARY,
    Kind,
    Unmapped,
    Value,
    binary,
    call,
)


def plain(sign: str, level: int, left: Value, right: Value) -> Value | None:
    """Return the operation in Python's own form if both are numbers, or integers that are exact; otherwise None."""
    kinds = {left.kind, right.kind}
    if kinds <= {"number", "sequence"} and (level == COMPARISON or "sequence" not in kinds):
        return binary(left, sign, right, level, kind="number")
    return binary(left, sign, right, level, kind="integers") if kinds <= {"number", "integers"} else None


def numbers(value: Value) -> Value:
    """Return the value as an enclosure: integers and truth values are known exactly."""
    if value.kind == "integers":
        return call("Enclosure.point", value)
    if value.kind not in ("numbers", "number"):
        raise Unmapped(f"an operand is {value.kind}, and not numbers")
    return value


@RULES("mul", "multiply")
def mul(x: Value, y: Value) -> Value:
    if (exact := plain("*", PRODUCT, x, y)) is not None:
        return exact
    x, y = numbers(x), numbers(y)
    factors = (*(x.factors or (x,)), *(y.factors or (y,)))
    square = x if x.text == y.text else None
    product = binary(x, "*", y, PRODUCT, factors=(x, y), square_of=square)
    if len(factors) == 2 or any(f.kind != "numbers" for f in factors):
        return product
    free = call("product_in_any_order", *factors, computed=True, factors=factors)
    if any(v.factors and v.staged for v in (x, y)):
        return call("hull", product, free, computed=True, factors=factors, pair=(x, y))
    return free


@RULES("div", "divide", "true_divide", "truediv")
def div(x: Value, y: Value, *, rounding_mode: Value | None = None) -> Value:
    if rounding_mode is not None:
        raise Unmapped("division with a rounding_mode is not mapped")
    if x.kind == y.kind == "number":
        return binary(x, "/", y, PRODUCT, kind="number", computed=False)
    return binary(numbers(x), "/", numbers(y), PRODUCT)


@RULES("add")
def add(x: Value, y: Value, *, alpha: Value | None = None) -> Value:
    if alpha is not None:
        y = mul(alpha, y)
    if (exact := plain("+", SUM, x, y)) is not None:
        return exact
    x, y = numbers(x), numbers(y)
    return fused(x, y) if x.factors or y.factors else binary(x, "+", y, SUM)


@RULES("sub", "subtract")
def sub(x: Value, y: Value, *, alpha: Value | None = None) -> Value:
    if alpha is not None:
        y = mul(alpha, y)
    if (exact := plain("-", SUM, x, y)) is not None:
        return exact
    x, y = numbers(x), numbers(y)
    if x.factors or y.factors:
        return fused(x, y, minus=True)
    centered = (x, y) if y.mean_of == x.text else None
    return binary(x, "-", y, SUM, about=centered)


RULES("rsub")(lambda x, y: sub(y, x))


def fused(x: Value, y: Value, *, minus: bool = False) -> Value:
    """Return x + y, or x - y, of which one side or both are products, one of which may be fused into the sum."""
    texts = [f"{x.within(SUM)} {'-' if minus else '+'} {y.within(PRODUCT)}"] if x.staged or y.staged else []
    added = f"-{y.within(UNARY)}" if minus else y.text
    texts += [f"multiply_add({a}, {b}, {added})" for a, b in _pairs(x)]
    texts += [f"multiply_add({f'-{a}' if minus else a}, {b}, {x.text})" for a, b in _pairs(y)]
    return Value(texts[0], computed=True) if len(texts) == 1 else call("hull", *texts, computed=True)


def _pairs(product: Value) -> list[tuple[str, str]]:
    """Return the pairs of operands that the last multiplication of a product may have; none if it is no product.

    The first one binds as tightly as a sign before it.
    """
    factors = product.factors
    if not product.pair:
        return _splits(factors) if factors else []
    known = {v.factors for v in product.pair if v.staged}
    others = [s for n, s in enumerate(_splits(factors)) if factors[: -1 - n] + factors[len(factors) - n :] not in known]
    return [_sides(product.pair), *others]


def _sides(pair: tuple[Value, ...]) -> tuple[str, str]:
    """Return two factors, an enclosure first."""
    first, second = sorted(pair, key=lambda f: f.kind == "number")
    return first.within(UNARY), second.text


def _splits(factors: tuple[Value, ...]) -> list[tuple[str, str]]:
    """Return for each factor the product of all others, and that factor, from the last factor to the first."""
    if len(factors) == 2:
        return [_sides(factors)]
    found = []
    for at in reversed(range(len(factors))):
        rest = factors[:at] + factors[at + 1 :]
        product = binary(rest[0], "*", rest[1], PRODUCT) if len(rest) == 2 else call("product_in_any_order", *rest)
        found.append((product.text, factors[at].text))
    return found


@RULES("addcmul")
def addcmul(x: Value, a: Value, b: Value, *, value: Value | None = None) -> Value:
    return add(x, mul(a, b) if value is None else mul(mul(a, b), value))


@RULES("neg", "negative")
def neg(x: Value) -> Value:
    return Value(f"-{x.within(UNARY)}", kind=x.kind, level=UNARY)


RULES("pos", "positive")(lambda x: x)
RULES("square")(lambda x: mul(x, x))


@RULES("pow")
def power(x: Value, exponent: Value) -> Value:
    if x.kind == "number":
        return Value(f"{x.within(ATOM)} ** {exponent.within(UNARY)}", kind="number", level=UNARY)
    roots = {0.5: "sqrt", -0.5: "rsqrt"}
    if exponent.kind != "number" or exponent.example not in (1, 2, 3, -1, *roots):
        raise Unmapped(f"a power with exponent {exponent.text} is not mapped; 2, 3, 0.5, -0.5 and -1 are")
    if exponent.example in roots:
        return call(roots[exponent.example], x, computed=True)
    if exponent.example == -1:
        return reciprocal(x)
    return x if exponent.example == 1 else mul(x, x) if exponent.example == 2 else mul(mul(x, x), x)


@RULES("reciprocal")
def reciprocal(x: Value) -> Value:
    return binary(Value("1.0", kind="number"), "/", x, PRODUCT)


for _name in ("rsqrt", "sqrt", "sigmoid", "exp", "exp2", "expm1", "log", "log2", "log1p", "tanh", "erf", "sin", "cos"):
    RULES(_name)(lambda x, *, name=_name: call(name, numbers(x), computed=True))


@RULES("floor", "ceil", "trunc")
def unknown_rounding(x: Value) -> Value:
    raise Unmapped("roundings to integers are not mapped; lastbit.numerics has floor, ceil, trunc and round_half_even")


def _of_integers(names: tuple[str, ...], sign: str, what: str) -> None:
    def divide(x: Value, y: Value) -> Value:
        if (exact := plain(sign, PRODUCT, x, y)) is None:
            raise Unmapped(f"{what} of numbers is not mapped")
        return exact

    RULES(*names)(divide)


_of_integers(("floordiv", "floor_divide"), "//", "floor division")
_of_integers(("mod", "remainder"), "%", "the remainder of a division")


def _comparison(name: str, sign: str) -> None:
    def compare(x: Value, y: Value) -> Value:
        if (exact := plain(sign, COMPARISON, x, y)) is not None:
            return exact
        if sign in ("==", "!="):
            raise Unmapped(f"{sign} of numbers that are computed is not mapped")
        return binary(numbers(x), sign, numbers(y), COMPARISON, kind="truth", computed=False)

    RULES(name)(compare)


for _name, _sign in {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}.items():
    _comparison(_name, _sign)


def _logic(names: tuple[str, ...], sign: str) -> None:
    def combine(x: Value, y: Value) -> Value:
        if {x.kind, y.kind} - {"integers", "truth"}:
            raise Unmapped(f"{sign} of {x.kind} and {y.kind} is not mapped")
        kind: Kind = "truth" if "truth" in (x.kind, y.kind) else "integers"
        return Value(f"{x.within(ATOM)} {sign} {y.within(ATOM)}", kind=kind, level=COMPARISON)

    RULES(*names)(combine)


_logic(("and_", "logical_and", "bitwise_and"), "&")
_logic(("or_", "logical_or", "bitwise_or"), "|")


@RULES("invert", "logical_not", "bitwise_not")
def invert(x: Value) -> Value:
    if x.kind in ("integers", "truth"):
        return Value(f"~{x.within(UNARY)}", kind=x.kind, level=UNARY)
    raise Unmapped(f"~ of {x.kind} is not mapped")
