"""Rules of PyTorch's operations on residues: tables from the name of an operation to its formula.

A rule takes the mode that follows a kernel, the results of the operation and its arguments. Choices go by the values.
Operations that are missing here are taken apart by PyTorch's own decompositions, or are opaque.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from lastbit.numerics import algebraic
from lastbit.numerics.formats import BF16, E4M3, E5M2, FP16
from lastbit.numerics.residues import Residues, concatenated, constant, zeros_like
from lastbit.numerics.residues.field import P, Q
from lastbit.numerics.residues.numbers import NO_EXPONENT, NONE, ROOT, SIGN

Result = TypeVar("Result")
Dims = int | Sequence[int] | None
aten = torch.ops.aten


class Mode(Protocol):
    """The mode that follows a kernel, for one type of device."""

    device_type: str

    def of(self, x: object) -> Residues: ...
    def apart(self, parts: Callable[..., Result], *args: Tensor) -> Result: ...


Rule = Callable[..., "Residues | Tensor | Sequence[Residues | Tensor | None]"]
"""Returns the residues of each result, or tensors whose operations were followed, neither rounded to its dtype yet."""

_MOVES = (
    "alias_copy as_strided_scatter cat clone constant_pad_nd copy diag_embed diagonal_backward diagonal_scatter "
    "embedding expand_copy flip gather index index_copy index_fill index_select lift_fresh_copy masked_fill "
    "masked_scatter masked_select narrow_copy permute_copy pixel_shuffle pixel_unshuffle repeat repeat_interleave "
    "roll rot90 scatter select_backward select_copy select_scatter slice_backward slice_copy slice_scatter "
    "split_copy split_with_sizes_copy squeeze_copy stack t_copy take transpose_copy tril triu "
    "unsqueeze_copy view_copy _unsafe_index _unsafe_masked_index channel_shuffle trace_copy"
)
MOVES = frozenset(_MOVES.split())
"""Operations that only move elements, and do it to numbers of any kind."""

_EXACT = (
    "arange bernoulli bucketize empty empty_like empty_strided eye floor_divide frexp heaviside "
    "multinomial new_empty new_empty_strided new_ones new_zeros normal one_hot ones ones_like rand rand_like "
    "randint randint_like randn randn_like sgn sign zero zeros zeros_like _efficientzerotensor"
)
EXACT = frozenset(_EXACT.split())
"""Operations whose values are the exact numbers: integers, and what was drawn."""


_LARGE = 2.0**16
"""Integers to which numbers are rounded are codes and places below, and digits of fixed-point numbers above."""


def _number(x: int) -> Residues:
    return Residues.of(torch.tensor(x))


ONE = _number(1)
LN2, LOG10E = (constant(x) for x in (math.log(2.0), math.log10(math.e)))


_MOST_HALVES = 128  # of an exponent whose power is a product; others are powers of e


def _power(x: Residues, exponent: float) -> Residues:
    """Return the product of whole factors and one root."""
    if exponent < 0:
        return _power(x, -exponent).reciprocal()
    whole = int(exponent)
    factors = [x] * whole + ([x.sqrt()] if exponent != whole else [])
    return reduce(operator.mul, factors) if factors else _constant_like(x, ONE)


def _constant_like(x: Residues, number: Residues) -> Residues:
    return number + zeros_like(x)


_PRIMITIVES = ["sqrt", "rsqrt", "exp", "exp2", "expm1", "log", "log2", "log1p", "sigmoid", "tanh", "erf", "sin", "cos"]

FORMULAS: Mapping[str, Callable[..., Residues]] = {
    **{name: algebraic.FORMULAS[name] for name in _PRIMITIVES},
    "mul": operator.mul,
    "multiply": operator.mul,
    "neg": operator.neg,
    "reciprocal": Residues.reciprocal,
    "square": lambda x: x * x,
    "log10": lambda x: x.log() * LOG10E,
    "silu": lambda x: x * algebraic.sigmoid(x),
    "silu_backward": lambda grad, x: grad * algebraic.sigmoid(x) * (ONE + x * (ONE - algebraic.sigmoid(x))),
    "tanh_backward": lambda grad, y: grad * (ONE - y * y),
    "erfc": lambda x: ONE - algebraic.FORMULAS["erf"](x),
    "hypot": lambda a, b: (a * a + b * b).sqrt(),
    "logaddexp": lambda a, b: (a.exp() + b.exp()).log(),
    "dot": lambda a, b: (a * b).total(keepdim=False),
    "mv": lambda a, b: (a @ b[..., None])[..., 0],
    "mm": operator.matmul,
    "bmm": operator.matmul,
}
"""Functions of residues alone."""


def _alone(formula: Callable[..., Residues]) -> Rule:
    return lambda mode, out, *args: formula(*map(mode.of, args))


# Sums and differences, of which some are made in order to round


def _add(mode: Mode, out: Tensor, a: Any, b: Any, alpha: float = 1) -> Residues:
    if _rounds(a, b, out) or _rounds(b, a, out):
        return Residues.of(out)
    x, y = mode.of(a), mode.of(b)
    x, y = _unless_negligible(x, y, a, b)
    return x + (y if alpha == 1 else y * mode.of(alpha))


def _sub(mode: Mode, out: Tensor, a: Any, b: Any, alpha: float = 1) -> Residues:
    if _rounds(a, b, out):
        return Residues.of(out)
    x, y = mode.of(a), mode.of(b)
    u, v = _unless_negligible(x, y, a, b)
    difference = u - (v if alpha == 1 else v * mode.of(alpha))
    return difference if alpha != 1 else difference.open_where(_rest(x, y, a, b, out))


def _unless_negligible(x: Residues, y: Residues, a: Any, b: Any) -> tuple[Residues, Residues]:
    u, v = torch.as_tensor(a), torch.as_tensor(b)
    return x.beside(u, v), y.beside(v, u)


def _rounds(x: object, number: object, out: Tensor) -> bool:
    """Return whether adding a number rounds x to integers, as 1.5 · 2^23 does in fp32."""
    if isinstance(number, Tensor):
        if number.is_floating_point() and number.numel():
            first = number.flatten()[0].item()
            number = first if abs(first) >= 2.0**22 and bool((number == first).all()) else 0.0
        else:
            number = 0.0
    if not isinstance(number, (int, float)) or not isinstance(x, Tensor) or not out.is_floating_point():
        return False
    least = {torch.float32: 2.0**22, torch.float64: 2.0**51}.get(out.dtype, math.inf)
    if not least <= abs(number) < math.inf or math.frexp(abs(number))[0] not in (0.5, 0.75):
        return False
    return bool((x.abs() <= abs(number) / 2).all())


def _rest(x: Residues, y: Residues, a: object, b: object, out: Tensor) -> Tensor | None:
    """Return the mask in which b is a rounded to a narrow format, so that the difference is the rest of a."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or out.dtype.itemsize < 4 or not a.is_floating_point():
        return None
    small = (out.abs() <= a.abs() / 4) & (out != 0)
    if int(small.sum()) * 4 < int((out != 0).sum()) or not bool(small.any()):
        return None
    rests = [y.equal(x.rounded(fmt, a)) for fmt in (BF16, FP16, E4M3, E5M2)]
    return reduce(operator.or_, rests) & ~x.equal(y)


def _div(mode: Mode, out: Tensor, a: Any, b: Any, rounding_mode: str | None = None) -> Residues:
    return Residues.of(out) if rounding_mode else mode.of(a) / mode.of(b)


def _pow(mode: Mode, out: Tensor, a: Any, b: Any) -> Residues:
    if isinstance(b, (int, float)):
        if 2 * b in range(-_MOST_HALVES, _MOST_HALVES + 1):
            return _power(mode.of(a), b)
        return (mode.of(a).log() * mode.of(b)).exp().open_where(a <= 0)
    if isinstance(a, Tensor) and a.numel() == 1 and bool(mode.of(a).equal(constant(a.item())).all()):
        a = a.item()
    if isinstance(a, (int, float)) and a > 0:
        exponent = mode.of(b) * LN2
        return (exponent if a == 2 else exponent * constant(math.log2(a))).exp()
    raise NotImplementedError("a power of numbers that vary")


# Choices, which go by the values


def _abs(mode: Mode, out: Tensor, x: Tensor) -> Residues:
    own = mode.of(x)
    return Residues.where(x < 0, -own, own).open_where((x == 0) & (own.p != 0))


def _clamp(mode: Mode, out: Tensor, x: Tensor, min: Any = None, max: Any = None) -> Residues:
    own = mode.of(x)
    for limit, beyond in ((min, operator.lt), (max, operator.gt)):
        if limit is not None:
            end = mode.of(limit)
            size = limit.abs() if isinstance(limit, Tensor) else abs(limit)
            near = ((x - limit).abs() <= 2.0**-18 * size) & torch.isfinite(x)
            changed = Residues.where(beyond(x, limit), end, own).unlimited
            own = changed.open_where(near & ~own.equal(end)) if bool(near.any()) else changed
    return own


def _chosen(mode: Mode, out: Tensor, a: Tensor, b: Tensor, first: Callable[[Tensor, Tensor], Tensor]) -> Residues:
    return Residues.chosen(first(a, b), mode.of(a), mode.of(b), torch.as_tensor(a == b)).unlimited


def _copysign(mode: Mode, out: Tensor, x: Any, sign: Any) -> Residues:
    own = mode.of(x)
    turned = torch.signbit(out) != torch.signbit(torch.as_tensor(x))
    return Residues.where(turned, -own, own)


def _at(residues: Residues, dim: int, places: Tensor) -> Residues:
    """Return the elements at places along a dimension."""
    if not places.ndim:
        return residues.moved(lambda n: n.reshape(4, -1)[:, places] if residues.shape else n)
    dim = dim % len(residues.shape) + 1
    return residues.moved(lambda n: n.gather(dim, places.expand(4, *places.shape)))


def _extreme(arg: Callable[..., Tensor]) -> Rule:
    """Return the rule of amax or amin, along any dimensions."""

    def rule(mode: Mode, out: Tensor, x: Tensor, dim: Dims = None, keepdim: bool = False) -> Residues:
        values, own = _joined(x, dim), mode.of(x).moved(lambda n: _joined(n, dim, stacked=True))
        return _shaped(_at(own, -1, arg(values, -1, keepdim=True)), out)

    return rule


def _with_places(mode: Mode, out: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Apply the rule of max, min, sort, topk, kthvalue, median and mode, which return the places of elements."""
    if isinstance(out, Tensor):
        raise NotImplementedError("it does not say which element it takes")
    values, places = out
    dims = [a for a in args if isinstance(a, int) and not isinstance(a, bool)]
    dim = kwargs.get("dim", dims[-1] if dims else -1)
    own, short = mode.of(x), places.ndim < x.ndim
    found = _at(own, dim, places.unsqueeze(dim) if short else places)
    return found.moved(lambda n: n.reshape(4, *values.shape)), None


def _one_or_places(arg: Callable[..., Tensor]) -> Rule:
    """Return the rule of max or min, of all elements or along a dimension."""

    def rule(mode: Mode, out: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(out, Tensor):
            return _extreme(arg)(mode, out, x)
        return _with_places(mode, out, x, *args[:1], **kwargs)

    return rule


def _topk(mode: Mode, out: Any, x: Tensor, k: int, dim: int = -1, *args: Any, **kwargs: Any) -> Any:
    return _with_places(mode, out, x, dim)


def is_fixed_point(x: Tensor, residues: Residues) -> Tensor:
    """Return the mask of numbers that become digits of fixed-point numbers as integers, or were rounded to such before.

    Beside large numbers, small ones count, too.
    """
    finite = x.isfinite()
    return ((x != x.trunc()) | residues.open) & finite & ((x.abs() >= _LARGE) & finite).any()


def whole(x: Tensor, residues: Residues, out: Tensor) -> Residues:
    """Return the residues of numbers that were rounded to integers: those of the integers.

    They are OPEN where the numbers are, and where these are digits of fixed-point sums. Large values that are integers
    already keep their residues.
    """
    stays = (x.abs() >= _LARGE) & (x == out)
    return Residues.where(stays, residues, Residues.of(out)).open_where(is_fixed_point(x, residues) | residues.open)


def _whole(mode: Mode, out: Tensor, x: Tensor, *, decimals: int = 0) -> Residues:
    if decimals:
        raise NotImplementedError("rounding to digits of ten")
    return whole(x, mode.of(x), out)


def _remainder(mode: Mode, out: Tensor, a: Any, b: Any, rounding: Callable[[Tensor], Tensor] = torch.floor) -> Residues:
    whole = rounding(torch.as_tensor(a).double() / torch.as_tensor(b).double())
    return mode.of(a) - mode.of(b) * Residues.of(whole)


# Sums


def _joined(x: Tensor, dim: Dims, *, stacked: bool = False) -> Tensor:
    """Return a tensor with the dimensions given as one, the last; all if none are given."""
    first = int(stacked)
    given, rank = [dim] if isinstance(dim, int) else list(dim or []), x.ndim - first
    dims = [d + first for d in sorted(d % max(rank, 1) for d in given) or range(rank)]
    kept = [d for d in range(x.ndim) if d not in dims]
    return x.permute(*kept, *dims).reshape(*(x.shape[d] for d in kept), -1) if x.ndim > first else x.unsqueeze(-1)


def _total(mode: Mode, out: Tensor, x: Tensor, dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> Residues:
    joined = mode.of(x).moved(lambda n: _joined(n, dim, stacked=True))
    return _shaped(joined.total(), out)


def _mean(mode: Mode, out: Tensor, x: Tensor, dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> Residues:
    return _total(mode, out, x, dim) / _number(max(x.numel(), 1) // max(out.numel(), 1))


def _var(mode: Mode, out: Any, x: Tensor, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    joined = mode.of(x).moved(lambda n: _joined(n, dim, stacked=True))
    mean = joined.total() / _number(joined.shape[-1])
    centered = joined - mean
    divisor = joined.shape[-1] - (1 if correction is None else correction)
    count = _number(int(divisor)) if divisor == int(divisor) else constant(divisor)
    both = isinstance(out, tuple)
    found = [_shaped(r, out[0] if both else out) for r in ((centered * centered).total() / count, mean)]
    return found if both else found[0]


def _std(mode: Mode, out: Any, x: Tensor, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    found = _var(mode, out, x, dim, correction=correction)
    return [found[0].sqrt(), found[1]] if isinstance(found, list) else found.sqrt()


def _norm(mode: Mode, out: Tensor, x: Tensor, ord: float = 2, dim: Dims = None, *args: Any, **kwargs: Any) -> Residues:
    own = mode.of(x).moved(lambda n: _joined(n, dim, stacked=True))
    values = _joined(x, dim)
    positive = Residues.where(values < 0, -own, own)
    if ord == 2:
        found = (own * own).total().sqrt()
    elif ord == 1:
        found = positive.total()
    elif ord == math.inf:
        found = _at(positive, -1, values.abs().argmax(-1, keepdim=True))
    else:
        raise NotImplementedError(f"a norm of order {ord}")
    return _shaped(found, out)


def _product(mode: Mode, out: Tensor, x: Tensor, dim: Dims = None, *args: Any, **kwargs: Any) -> Residues:
    own = mode.of(x).moved(lambda n: _joined(n, dim, stacked=True))
    while (n := own.shape[-1]) > 1:
        pairs = own[..., 0 : n - 1 : 2] * own[..., 1:n:2]
        own = concatenated([pairs, own[..., n - 1 :]], -1) if n & 1 else pairs
    return _shaped(own, out)


def _linear(func: Callable[..., Tensor]) -> Callable[..., Residues]:
    """Return the rule of a linear operation that PyTorch has for integers, too: 2^32 residues sum to below 2^63."""

    def rule(mode: Mode, out: Tensor, *args: Any, **kwargs: Any) -> Residues:
        kwargs.pop("dtype", None)
        given = [mode.of(x) if isinstance(x, Tensor) and x.is_floating_point() else x for x in args]
        whole = [x for x in given if isinstance(x, Residues)]

        def plane(of: Callable[[Residues], Tensor]) -> Tensor:
            return func(*(of(x) if isinstance(x, Residues) else x for x in given), **kwargs)

        def reached(lost: Callable[[Residues], Tensor]) -> Tensor | bool:
            return plane(lambda x: lost(x).long()) > 0 if any(bool(lost(x).any()) for x in whole) else False

        p, q = plane(lambda x: x.p) % P, plane(lambda x: x.q) % Q
        made = Residues(torch.stack([p, q, torch.full_like(p, NONE), torch.zeros_like(p)]))
        made = made.open_where(_mask(reached(lambda x: x.open | (x.numbers[2] != NONE)), p))
        flags = made.flags
        for flag in (NO_EXPONENT, SIGN, ROOT):
            known = _mask(reached(lambda x, flag=flag: x.flags & flag != 0), p)  # type: ignore[misc]
            flags = torch.where(known, flags | flag, flags)
        return Residues(torch.stack([*made.numbers[:3], flags]))

    return rule


_SUMS = ("cumsum", "unfold_backward", "scatter_add", "embedding_dense_backward", "trace")


def _mask(reached: Tensor | bool, like: Tensor) -> Tensor:
    return reached if isinstance(reached, Tensor) else torch.zeros_like(like, dtype=torch.bool)


def _index_put(mode: Mode, out: Tensor, x: Tensor, indices: Any, values: Tensor, accumulate: bool = False) -> Residues:
    if accumulate:
        return _linear(lambda a, b: aten.index_put(a, indices, b, True))(mode, out, x, values)
    index = (slice(None), *(slice(None) if i is None else i for i in indices))
    numbers, put = mode.of(x).numbers.clone(), mode.of(values).numbers
    numbers[index] = put.reshape(4, *[1] * (numbers[index].ndim - put.ndim), *values.shape)
    return Residues(numbers)


def _index_add(
    mode: Mode, out: Tensor, x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1
) -> Residues:
    own = mode.of(source)
    return _linear(aten.index_add)(mode, out, x, dim, index, own if alpha == 1 else own * mode.of(alpha))


def _bincount(mode: Mode, out: Tensor, index: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Residues:
    count = torch.zeros(len(out), dtype=torch.int64)
    return _linear(lambda w: count.index_add(0, index, w))(mode, out, weights)


def _scatter_reduce(
    mode: Mode, out: Tensor, x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Residues:
    if reduce != "sum" or not include_self:
        raise NotImplementedError(f"scatter_reduce of {reduce}")
    return _linear(aten.scatter_add)(mode, out, x, dim, index, src)


# Products of matrices


def _with_bias(
    mode: Mode, out: Tensor, c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
) -> Residues:
    """Return β c + α a b."""
    x, y = mode.of(a), mode.of(b)
    product = (x @ y[..., None])[..., 0] if b.ndim < a.ndim else x @ y
    product = product if alpha == 1 else product * mode.of(alpha)
    own = mode.of(c)
    return product if beta == 0 else product + (own if beta == 1 else own * mode.of(beta))


def _linear_layer(mode: Mode, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Residues:
    product = mode.of(x) @ mode.of(weight).moved(lambda n: n.transpose(-1, -2))
    return product if bias is None else product + mode.of(bias)


# Softmax, whose shift cancels


def _softmax(mode: Mode, out: Tensor, x: Tensor, dim: int, wide: bool) -> Residues:
    e = _exp_of_row(mode, x, dim)
    return e / e.total(dim % max(x.ndim, 1)) if x.ndim else _constant_like(e, ONE)


def _log_softmax(mode: Mode, out: Tensor, x: Tensor, dim: int, wide: bool) -> Residues | Tensor:
    dim = dim % max(x.ndim, 1)
    if mode.device_type == "cpu" and x.dtype.itemsize < 4 and dim == x.ndim - 1:
        return mode.apart(_log_softmax_of_cpu, x)
    return mode.of(x) - _exp_of_row(mode, x, dim).total(dim).log()


def _exp_of_row(mode: Mode, x: Tensor, dim: int) -> Residues:
    return mode.of(x).masked(x - x.amax(dim, keepdim=True)).exp()


def _log_softmax_of_cpu(x: Tensor) -> Tensor:
    """Compute the log-softmax of 16-bit numbers as the CPU does, in fp32 with the sum and its logarithm rounded."""
    shifted = x.float() - x.amax(-1, keepdim=True).float()
    return shifted - shifted.exp().sum(-1, keepdim=True).to(x.dtype).float().log().to(x.dtype).float()


def _log_sum_exp(mode: Mode, out: Tensor, x: Tensor, dim: Dims, keepdim: bool = False) -> Residues | Tensor:
    if x.dtype.itemsize < 4:
        return mode.apart(lambda: _log_sum_exp_of_halves(_joined(x, dim)).reshape(out.shape))
    values = _joined(x, dim)
    joined = mode.of(x).moved(lambda n: _joined(n, dim, stacked=True)).masked(values - values.amax(-1, keepdim=True))
    return _shaped(joined.exp().total().log(), out)


def _log_sum_exp_of_halves(x: Tensor) -> Tensor:
    """Compute the log-sum-exp of 16-bit numbers in fp32, with every step before the last rounded to 16 bits."""
    largest = x.amax(-1, keepdim=True)
    largest = torch.where(largest.isinf(), 0.0, largest)
    return (x - largest).exp().sum(-1).log().float() + largest[..., 0].float()


def _sigmoid_backward(mode: Mode, out: Tensor, grad: Tensor, y: Tensor) -> Residues | Tensor:
    if y.dtype == torch.float16:  # each step is rounded
        return mode.apart(lambda: (grad * (1 - y)).float() * y.float())
    return mode.of(grad) * (ONE - mode.of(y)) * mode.of(y)


def _softmax_backward(mode: Mode, out: Tensor, grad: Tensor, y: Tensor, dim: int, dtype: Any) -> Residues:
    g, p = mode.of(grad), mode.of(y)
    return p * (g - (g * p).total(dim % max(y.ndim, 1)))


def _log_softmax_backward(mode: Mode, out: Tensor, grad: Tensor, y: Tensor, dim: int, dtype: Any) -> Residues:
    g = mode.of(grad)
    return g - mode.of(y).exp() * g.total(dim % max(y.ndim, 1))


def _attention_of_cpu(
    mode: Mode, out: Any, q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False, **kwargs: Any
) -> list[Tensor]:
    if q.dtype.itemsize < 4 or dropout:
        raise NotImplementedError("where it rounds depends on its tiles")

    def attention() -> list[Tensor]:
        scores = _scores(q, k, causal, **kwargs)
        return [(torch.softmax(scores, -1) @ v).expand_as(out[0]), torch.logsumexp(scores, -1).expand_as(out[1])]

    return mode.apart(attention)


def _attention_of_cpu_backward(
    mode: Mode, out: Any, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, dropout: float,
    causal: bool, **kwargs: Any,
) -> list[Tensor]:  # fmt: skip
    if q.dtype.itemsize < 4 or dropout:
        raise NotImplementedError("where it rounds depends on its tiles")

    def gradients() -> list[Tensor]:
        scale = kwargs.get("scale") or q.shape[-1] ** -0.5
        weights = torch.exp(_scores(q, k, causal, **kwargs) - lse[..., None])
        inner = weights * (grad @ v.mT - (grad * y).sum(-1, keepdim=True)) * scale
        return [inner @ k, inner.mT @ q, weights.mT @ grad]

    return mode.apart(gradients)


def _scores(q: Tensor, k: Tensor, causal: bool, attn_mask: Tensor | None = None, scale: float | None = None) -> Tensor:
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    if attn_mask is None:
        return scores
    return scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask


# Norms


def _rows(mode: Mode, x: Tensor, shape: Sequence[int]) -> Residues:
    return mode.of(x).moved(lambda n: n.reshape(4, -1, math.prod(shape)))


def _layer_norm(mode: Mode, out: Any, x: Tensor, shape: Any, weight: Any, bias: Any, eps: float) -> list[Residues]:
    own = _rows(mode, x, shape)
    n = _number(own.shape[-1])
    mean = own.total() / n
    centered = own - mean
    rstd = ((centered * centered).total() / n + mode.of(eps)).sqrt().reciprocal()
    y = centered * rstd
    y = y if weight is None else y * _rows(mode, weight, shape)[0]
    y = y if bias is None else y + _rows(mode, bias, shape)[0]
    return [_shaped(r, like) for r, like in zip((y, mean, rstd), out, strict=True)]


def _shaped(residues: Residues, like: Tensor) -> Residues:
    return residues.moved(lambda n: n.reshape(4, *like.shape))


def _layer_norm_backward(
    mode: Mode,
    out: Any,
    grad: Tensor,
    x: Tensor,
    shape: Any,
    mean: Tensor,
    rstd: Tensor,
    weight: Any,
    bias: Any,
    asked: Any,
) -> list[Residues]:
    dy, own = _rows(mode, grad, shape), _rows(mode, x, shape)
    n = _number(own.shape[-1])
    mu, r = (mode.of(s).moved(lambda n: n.reshape(4, -1, 1)) for s in (mean, rstd))
    normalized = (own - mu) * r
    d = dy if weight is None else dy * _rows(mode, weight, shape)[0]
    dx = (d - d.total() / n - normalized * ((d * normalized).total() / n)) * r
    found = [dx, (dy * normalized).total(0), dy.total(0)]
    return [_shaped(r, t) for r, t, wanted in zip(found, (x, weight, bias), asked, strict=True) if wanted]


def _gelu(mode: Mode, out: Tensor, x: Tensor, *, approximate: str = "none") -> Residues:
    own = mode.of(x)
    half = own * constant(0.5)
    if approximate == "none":
        return half * (ONE + algebraic.FORMULAS["erf"](own * constant(math.sqrt(0.5))))
    inner = constant(math.sqrt(2 / math.pi)) * (own + constant(0.044715) * own * own * own)
    return half * (ONE + algebraic.FORMULAS["tanh"](inner))


RULES: dict[str, Rule] = {name: _alone(formula) for name, formula in FORMULAS.items()} | {
    "add": _add,
    "sub": _sub,
    "rsub": lambda mode, out, a, b, alpha=1: (
        _sub(mode, out, b, a, alpha) if alpha == 1 else _add(mode, out, b, a, -alpha)
    ),
    "div": _div,
    "true_divide": _div,
    "pow": _pow,
    "addcmul": lambda mode, out, c, a, b, *, value=1: mode.of(c) + mode.of(value) * mode.of(a) * mode.of(b),
    "addcdiv": lambda mode, out, c, a, b, *, value=1: mode.of(c) + mode.of(value) * mode.of(a) / mode.of(b),
    "lerp": lambda mode, out, a, b, t: mode.of(a) + mode.of(t) * (mode.of(b) - mode.of(a)),
    "exp": lambda mode, out, x: mode.of(x).masked(x).exp(),
    "exp2": lambda mode, out, x: FORMULAS["exp2"](mode.of(x).masked(x)),
    "sigmoid_backward": _sigmoid_backward,
    "gelu": _gelu,
    "_to_copy": lambda mode, out, x, **kwargs: mode.of(x),
    "full": lambda mode, out, size, value, **kwargs: mode.of(value),
    "new_full": lambda mode, out, x, size, value, **kwargs: mode.of(value),
    "full_like": lambda mode, out, x, value, **kwargs: mode.of(value),
    "scalar_tensor": lambda mode, out, value, **kwargs: mode.of(value),
    "fill": lambda mode, out, x, value: mode.of(value),
    "copy": lambda mode, out, x, source, *args: mode.of(source),
    "abs": _abs,
    "where": lambda mode, out, mask, a, b: Residues.chosen(mask, mode.of(a), mode.of(b), torch.as_tensor(a == b)),
    "clamp": _clamp,
    "clamp_min": lambda mode, out, x, end: _clamp(mode, out, x, min=end),
    "clamp_max": lambda mode, out, x, end: _clamp(mode, out, x, max=end),
    "relu": lambda mode, out, x: _clamp(mode, out, x, min=0),
    "threshold_backward": lambda mode, out, grad, x, limit: Residues.where(x > limit, mode.of(grad), _number(0)),
    "maximum": lambda mode, out, a, b: _chosen(mode, out, a, b, torch.ge),
    "minimum": lambda mode, out, a, b: _chosen(mode, out, a, b, torch.le),
    "fmax": lambda mode, out, a, b: _chosen(mode, out, a, b, lambda x, y: (x >= y) | y.isnan()),
    "fmin": lambda mode, out, a, b: _chosen(mode, out, a, b, lambda x, y: (x <= y) | y.isnan()),
    "copysign": _copysign,
    "nan_to_num": lambda mode, out, x, *args, **kw: Residues.where(x.isfinite(), mode.of(x), Residues.of(out)),
    "amax": _extreme(torch.argmax),
    "amin": _extreme(torch.argmin),
    "max": _one_or_places(torch.argmax),
    "min": _one_or_places(torch.argmin),
    **dict.fromkeys(("sort", "median", "nanmedian", "mode", "cummax", "cummin"), _with_places),
    "topk": _topk,
    "kthvalue": _topk,
    **dict.fromkeys(("ceil", "floor", "round", "trunc"), _whole),
    "fmod": lambda mode, out, a, b: _remainder(mode, out, a, b, torch.trunc),
    "remainder": _remainder,
    "frac": lambda mode, out, x: mode.of(x) - Residues.of(x.trunc()),
    "sum": _total,
    "mean": _mean,
    "var": _var,
    "var_mean": _var,
    "std": _std,
    "std_mean": _std,
    "linalg_vector_norm": _norm,
    "norm": _norm,
    "prod": _product,
    "index_add": _index_add,
    "bincount": _bincount,
    **{name: _linear(getattr(aten, name)) for name in _SUMS},
    "scatter_reduce": _scatter_reduce,
    "index_put": _index_put,
    "_unsafe_index_put": _index_put,
    **dict.fromkeys(("addmm", "addmv", "baddbmm"), _with_bias),
    "linear": _linear_layer,
    "_softmax": _softmax,
    "_safe_softmax": lambda mode, out, x, dim, dtype=None: _softmax(mode, out, x, dim, False),
    "_log_softmax": _log_softmax,
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax_backward_data": _log_softmax_backward,
    "logsumexp": _log_sum_exp,
    "_scaled_dot_product_flash_attention_for_cpu": _attention_of_cpu,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_of_cpu_backward,
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
}


def _complex_product(a: Any, b: Any) -> Tensor:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        a, b = (b, a) if isinstance(b, Tensor) else (a, b)
        return torch.view_as_real(a).mul(b)
    (x, y), (u, v) = (
        (torch.view_as_real(c).unbind(-1) if c.is_complex() else (c, torch.zeros_like(c))) for c in (a, b)
    )
    return torch.stack([x * u - y * v, x * v + y * u], -1)


COMPLEX: dict[str, Callable[..., Tensor]] = {
    "mul": _complex_product,
    "add": lambda a, b: torch.view_as_real(a) + torch.view_as_real(b),
    "sub": lambda a, b: torch.view_as_real(a) - torch.view_as_real(b),
    "clone": lambda x, **kwargs: torch.view_as_real(x).clone(),
    "polar": lambda size, angle: torch.stack([size * angle.cos(), size * angle.sin()], -1),
}
"""Operations on complex numbers, as functions of real ones, which stand along the last dimension."""
