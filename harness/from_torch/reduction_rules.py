"""Rules for sums, means, extremes, softmax and matrix products, of which a kernel may add the terms in any order."""

from __future__ import annotations

from lastbit.from_torch.arithmetic_rules import add, numbers
from lastbit.from_torch.expressions import ATOM, RULES, Unmapped, Value, call
from lastbit.from_torch.shape_rules import as_method, moved


def last(x: Value, dim: Value | None, keepdim: Value | None, rule: str, mean_of: str = "") -> Value:
    """Apply a function over the last dimension, which it keeps, to the dimensions that are asked for."""
    x = numbers(x)
    dims = _dims(x, dim)
    kept = _is_kept(keepdim)
    if len(dims) > 1:
        if dims != tuple(range(-len(dims), 0)) or kept or len(dims) != 2:
            raise Unmapped(f"{rule} over the dimensions {dims} is not mapped; the last, or the last two are")
        joined = Value(f"{x.within(ATOM)}.joined()")
        return Value(f"{call(rule, joined).text}[..., 0]", computed=True)
    (one,) = dims
    made = call(rule, x if one == -1 else moved(x, one, -1), computed=True)
    if not kept:
        return Value(f"{made.text}[..., 0]", computed=True, mean_of=mean_of)
    if one == -1:
        return Value(made.text, computed=True, mean_of=mean_of)
    return Value(moved(Value(made.text, example=x.example), -1, one).text, computed=True)


def _dims(x: Value, dim: Value | None) -> tuple[int, ...]:
    """Return the dimensions, counted from the last one, in order."""
    if dim is None or (dim.kind == "other" and dim.example is None):
        if x.rank != 1:
            raise Unmapped("a reduction of all elements is not mapped; a loss over rows is written with sum_of_rows")
        return (-1,)
    given = [i.example for i in dim.items] if dim.kind == "sequence" else [dim.example]
    return tuple(sorted(int(i) - x.rank if i >= 0 else int(i) for i in given))


@RULES("mean")
def mean(x: Value, dim: Value | None = None, keepdim: Value | None = None, *, dtype: Value | None = None) -> Value:
    if x.square_of is not None and not x.named:
        if x.square_of.about is None or _dims(x, dim) != (-1,):
            return last(x.square_of, dim, keepdim, "mean_of_squares")
        return _at_once("variance_about", x.square_of.about, keepdim)  # whose error counts once for a row
    if _is_product(x) and _dims(x, dim) == (-1,):
        return _at_once("mean_of_products", x.factors, keepdim)
    return last(x, dim, keepdim, "mean", mean_of=x.text)


@RULES("sum")
def total(x: Value, dim: Value | None = None, keepdim: Value | None = None, *, dtype: Value | None = None) -> Value:
    if x.kind == "integers":
        return as_method("sum", x, dim=dim, keepdim=keepdim)
    if _is_product(x) and _dims(x, dim) == (-1,):
        return _at_once("total_of_products", x.factors, keepdim)
    return last(x, dim, keepdim, "total")


def _is_product(x: Value) -> bool:
    return len(x.factors) == 2 and not x.staged and not x.named and all(f.kind == "numbers" for f in x.factors)


def _at_once(rule: str, arguments: tuple[Value, ...], keepdim: Value | None) -> Value:
    """Return a sum over the last dimension of products, each of which may be fused into it."""
    made = call(rule, *arguments, computed=True)
    return made if _is_kept(keepdim) else Value(f"{made.text}[..., 0]", computed=True)


def _is_kept(keepdim: Value | None) -> bool:
    return keepdim is not None and bool(keepdim.example)


def _extreme(name: str) -> None:
    def extreme(x: Value, dim: Value | None = None, keepdim: Value | None = None) -> Value:
        if x.kind == "integers":
            return as_method(name, x, dim=dim, keepdim=keepdim)
        made = last(x, dim, keepdim, name)
        return Value(made.text)

    RULES(name)(extreme)


_extreme("amax")
_extreme("amin")


def _exponentials(name: str) -> None:
    def exponentials(
        x: Value, dim: Value | None = None, _stacklevel: Value | None = None, dtype: Value | None = None
    ) -> Value:
        if dim is None or _dims(x, dim) != (-1,):
            raise Unmapped(f"{name} is mapped over the last dimension only")
        return call(name, numbers(x), computed=True)

    RULES(name)(exponentials)


_exponentials("softmax")
_exponentials("log_softmax")


RULES("logsumexp")(lambda x, dim, keepdim=None: last(x, dim, keepdim, "log_sum_exp"))


@RULES("matmul", "bmm", "mm")
def matmul(a: Value, b: Value) -> Value:
    if a.rank < 2 or b.rank < 2:
        raise Unmapped(f"a product of tensors with {a.rank} and {b.rank} dimensions is not mapped; both need two")
    return call("dot", numbers(a), numbers(b), computed=True)


@RULES("linear")
def linear(x: Value, weight: Value, bias: Value | None = None) -> Value:
    """Return x · weightᵀ + bias, rounded once: bias is where accumulation starts, or is added in fp32."""
    if x.rank < 2:
        raise Unmapped("linear of a tensor of one dimension is not mapped; add one")
    product = call("dot", numbers(x), f"{numbers(weight).within(ATOM)}.transposed", computed=True)
    return product if bias is None or bias.kind == "other" else add(product, bias)
