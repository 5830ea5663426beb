"""Rules for sums, means, extremes, softmax and matrix products, of which a kernel may add the terms in any order, for
choices, and for functions that are formulas of others.
"""

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


# Choices, and functions that are formulas of others, which are written below the reference


FORMULAS = {
    "_silu": '''
def _silu(x: Enclosure) -> Enclosure:
    """x · sigmoid(x), or x / (1 + exp(-x))."""
    return hull(x * sigmoid(x), x / (exp(-x) + 1.0))
''',
    "_gelu": '''
def _gelu(x: Enclosure) -> Enclosure:
    """x / 2 · (1 + erf(x / sqrt(2)))."""
    return x * 0.5 * (erf(x * 0.5**0.5) + 1.0)
''',
    "_gelu_tanh": '''
def _gelu_tanh(x: Enclosure) -> Enclosure:
    """x / 2 · (1 + tanh(sqrt(2 / pi) · (x + 0.044715 · x³))), the products in any order."""
    cube = x * x * x
    inner = hull(multiply_add(cube, 0.044715, x), x + x * 0.044715 * x * x, x * multiply_add(x * x, 0.044715, 1.0))
    return x * 0.5 * (tanh(inner * (2 / pi) ** 0.5) + 1.0)
''',
    "_cube": '''
def _cube(x: Enclosure, fmt: Format) -> Enclosure:
    """x³; PyTorch 2.13 on a CPU rounds the square before it, too, in bf16 and not in fp16."""
    return hull(x * x * x, (x * x).rounded(fmt) * x)
''',
    "_taken": '''
def _taken(number: float, fmt: Format, contract: Contract) -> float:
    """A number as an addition takes it: in fp32, or rounded to the format of the result, as PyTorch does on a CPU."""
    return float(Enclosure.point(number).rounded(fmt).value) if contract.has("rounded_scalars") else number
''',
    "_layer_norm": '''
def _layer_norm(x: Enclosure, weight: Enclosure, bias: Enclosure, eps: float) -> Enclosure:
    """(x - mean) / sqrt(variance + eps) · weight + bias; the variance in two passes or by updates."""
    center = mean(x)
    found = []
    for middle, variance in ((center, variance_about(x, center)), mean_and_variance(x)):
        rstd, centered = rsqrt(variance + eps), x - middle
        pairs = (centered * rstd, weight), (centered, rstd * weight), (centered * weight, rstd)
        found += [multiply_add(a, b, bias) for a, b in (*pairs, (difference_of_products(x, middle, rstd), weight))]
    return hull(*found)
''',
    "_softplus": '''
def _softplus(x: Enclosure) -> Enclosure:
    """log(1 + exp(x)), which is x from 20 on."""
    return where(x > 20.0, x, log1p(exp(x)))
''',
}
"""Name → function that a reference brings along; what it calls is in lastbit.numerics, or the constant pi."""


@RULES("silu")
def silu(x: Value, inplace: Value | None = None) -> Value:
    """Return `_silu`: a product with the sigmoid, unless it is computed as a quotient."""
    x = numbers(x)
    return call("_silu", x, computed=True, factors=(x, call("sigmoid", x)), staged=True)


@RULES("gelu")
def gelu(x: Value, approximate: Value | None = None) -> Value:
    exact = approximate is None or approximate.example == "none"
    return call("_gelu" if exact else "_gelu_tanh", numbers(x), computed=True)


@RULES("softplus")
def softplus(x: Value, beta: Value | None = None, threshold: Value | None = None) -> Value:
    if (beta is not None and beta.example != 1) or (threshold is not None and threshold.example != 20):
        raise Unmapped("softplus is mapped with beta=1 and threshold=20 only")
    return call("_softplus", numbers(x), computed=True)


@RULES("dropout")
def dropout(x: Value, p: Value | None = None, training: Value | None = None, inplace: Value | None = None) -> Value:
    if (p is None or p.example != 0) and (training is None or training.example):
        raise Unmapped("dropout is mapped with p=0 or training=False only; nothing is said about random numbers")
    return x


@RULES("relu")
def relu(x: Value, inplace: Value | None = None) -> Value:
    return call("at_least", numbers(x), "0.0")


@RULES("abs", "absolute")
def magnitude(x: Value) -> Value:
    return Value(f"{x.within(ATOM)}.abs()", kind=x.kind) if x.kind == "integers" else call("abs", x)


@RULES("clamp", "clip")
def clamp(x: Value, min: Value | None = None, max: Value | None = None) -> Value:
    ends = [None if end is None or end.example is None else end for end in (min, max)]
    if x.kind != "numbers":
        raise Unmapped("clamp of integers is not mapped")
    if any(end is not None and end.kind == "numbers" for end in ends):
        raise Unmapped("clamp to tensors is not mapped; maximum and minimum are")
    low, high = ends
    if high is None and low is not None:
        return call("at_least", x, low)
    if low is None or high is None:
        return x if high is None else call("minimum", x, high)
    return call("clamp", x, low, high)


RULES("clamp_min")(clamp)
RULES("clamp_max")(lambda x, max: clamp(x, None, max))
RULES("maximum")(lambda x, y: call("maximum", numbers(x), numbers(y)))
RULES("minimum")(lambda x, y: call("minimum", numbers(x), numbers(y)))


def _with_indices(name: str, extreme: str) -> None:
    def found(x: Value, dim: Value | None = None, keepdim: Value | None = None) -> Value:
        if dim is None or dim.kind != "number":
            raise Unmapped(f"{name} is mapped over a dimension; {name}imum chooses between two tensors")
        indices = Value("unmapped", "other", example="indices")
        return Value("", "sequence", items=(RULES.functions[extreme](x, dim, keepdim), indices))

    RULES(name)(found)


_with_indices("max", "amax")
_with_indices("min", "amin")


@RULES("where")
def where(condition: Value, x: Value, y: Value) -> Value:
    """Write the function; the method `x.where(condition, y)` is one of integers or is written in this order, too."""
    if condition.kind == "integers" and {x.kind, y.kind} <= {"integers", "number"} and "integers" in (x.kind, y.kind):
        if x.kind == "integers":
            return Value(f"{x.within(ATOM)}.where({condition.text}, {y.text})", kind="integers", computed=True)
        return Value(f"{y.within(ATOM)}.where(~{condition.within(ATOM)}, {x.text})", kind="integers", computed=True)
    if condition.kind not in ("integers", "truth"):
        raise Unmapped(f"where takes a condition, and not {condition.kind}")
    return call("where", condition, numbers(x), numbers(y))


@RULES("masked_fill")
def masked_fill(x: Value, mask: Value, value: Value) -> Value:
    if x.kind == "integers":
        return Value(f"{x.within(ATOM)}.masked_fill({mask.text}, {value.text})", kind="integers", computed=True)
    return call("where", mask, value, x)


@RULES("isin")
def isin(elements: Value, test_elements: Value) -> Value:
    if elements.kind != "integers" or test_elements.kind != "integers":
        raise Unmapped("isin of numbers is not mapped")
    own = elements.within(ATOM)
    return Value(
        f"({own}[..., None] == {test_elements.within(ATOM)}.reshape(-1)).any(-1)", kind="integers", computed=True
    )


@RULES("rms_norm")
def rms_norm(x: Value, normalized_shape: Value, weight: Value | None = None, eps: Value | None = None) -> Value:
    if len(normalized_shape.example) != 1 or eps is None or eps.example is None:
        raise Unmapped("rms_norm is mapped over the last dimension, and with an eps that is given")
    variance = last(x, Value("-1", "number", example=-1), Value("True", "other", example=True), "mean_of_squares")
    root = f"rsqrt({variance.text} + {eps.text})"
    if weight is None or weight.example is None:
        return Value(f"{x.within(ATOM)} * {root}", level=3, computed=True)
    return call("product_in_any_order", x, root, weight, computed=True)


@RULES("layer_norm")
def layer_norm(
    x: Value, normalized_shape: Value, weight: Value | None = None, bias: Value | None = None, eps: Value | None = None
) -> Value:
    given = [v for v in (weight, bias) if v is not None and v.kind == "numbers"]
    if len(normalized_shape.example) != 1 or len(given) < 2:
        raise Unmapped("layer_norm is mapped over the last dimension, with weight and bias")
    return call("_layer_norm", x, *given, "1e-05" if eps is None else eps, computed=True)
