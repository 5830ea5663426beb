"""Operations of PyTorch on small integers, whose results are exact: their residues are those of the results."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lastbit.numerics.residues import Residues
from lastbit.shadows.aten import Following
from lastbit.shadows.shadow_memory import ShadowMemory

X = torch.tensor([[3.0, -5.0, 2.0, 8.0], [-7.0, 4.0, -1.0, 6.0]])
Y = torch.tensor([[2.0, -4.0, 1.0, 8.0], [4.0, -2.0, 16.0, 1.0]])
INDEX = torch.tensor([[1, 3, 0, 2], [0, 0, 2, 1]])


def followed(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, Residues]:
    memory = ShadowMemory()
    with Following(memory) as following:
        result = function(*(x.clone() for x in inputs))
    assert not following.opaque
    return result, memory.read(result)


def in_place(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty(2, 4)
    torch.mul(x, y, out=out)
    return out.add_(1.0).sub_(x, alpha=2).mul_(y)


EXACT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, y: x + y,
    "add, alpha": lambda x, y: torch.add(x, y, alpha=3),
    "add a number": lambda x, y: x + 7,
    "sub": lambda x, y: x - y,
    "sub, alpha": lambda x, y: torch.sub(x, y, alpha=3),
    "rsub": lambda x, y: 5 - x,
    "rsub, alpha": lambda x, y: torch.rsub(x, y, alpha=3),
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "div by a number": lambda x, y: x / 8,
    "div, floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "div, trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "neg": lambda x, y: -x,
    "reciprocal": lambda x, y: y.reciprocal(),
    "square": lambda x, y: x.square(),
    "pow 0": lambda x, y: x**0,
    "pow 1": lambda x, y: x**1,
    "pow 5": lambda x, y: x**5,
    "pow -2": lambda x, y: y**-2,
    "2 to the power": lambda x, y: torch.pow(2.0, x),
    "4 to the power": lambda x, y: torch.pow(torch.tensor(4.0), x),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=3),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y, value=3),
    "lerp": lambda x, y: torch.lerp(x, y, 0.25),
    "abs": lambda x, y: x.abs(),
    "where": lambda x, y: torch.where(x > y, x, y * 2),
    "clamp": lambda x, y: x.clamp(y - 3, y + 3) + x.clamp(max=y - 50) + x.clamp(min=y + 50),
    "threshold": lambda x, y: torch.ops.aten.threshold_backward(y, x, 0.0),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "copysign": torch.copysign,
    "copysign of a number": lambda x, y: torch.copysign(x, -1.0),
    "nan_to_num": lambda x, y: torch.nan_to_num(x),
    "amax": lambda x, y: x.amax(-1),
    "amax of rows": lambda x, y: x.amax(0, keepdim=True),
    "amax of all": lambda x, y: x.amax(),
    "amin of both": lambda x, y: x.amin((0, 1)),
    "max": lambda x, y: x.max() * 2,
    "max of rows": lambda x, y: x.max(0).values,
    "min": lambda x, y: x.min(-1, keepdim=True).values,
    "sort": lambda x, y: x.sort(-1, descending=True).values,
    "sort of rows": lambda x, y: x.sort(0).values,
    "median": lambda x, y: x.median(-1).values,
    "mode": lambda x, y: x.mode(0).values,
    "cummax": lambda x, y: x.cummax(-1).values,
    "cummin": lambda x, y: x.cummin(0).values,
    "topk": lambda x, y: x.topk(2, -1).values,
    "topk of rows": lambda x, y: x.topk(1, 0, largest=False).values,
    "kthvalue": lambda x, y: x.kthvalue(2).values,
    "floor": lambda x, y: (x / 4).floor(),
    "ceil": lambda x, y: (x / 4).ceil(),
    "round": lambda x, y: (x / 4).round(),
    "trunc": lambda x, y: (x / 4).trunc(),
    "frac": lambda x, y: (x / 4).frac(),
    "rounded by a large number": lambda x, y: (x / 4 + 1.5 * 2.0**23) - 1.5 * 2.0**23,
    "fmod": torch.fmod,
    "remainder": torch.remainder,
    "remainder of a number": lambda x, y: x % 3,
    "sum": lambda x, y: x.sum(),
    "sum of rows": lambda x, y: x.sum(0),
    "sum, kept": lambda x, y: x.sum(-1, keepdim=True),
    "sum of both": lambda x, y: x.sum((0, -1)),
    "mean": lambda x, y: x.mean(),
    "mean of rows": lambda x, y: x.mean(0),
    "mean of columns": lambda x, y: x.mean(-1, keepdim=True),
    "var": lambda x, y: x.var(-1, correction=0),
    "var of rows": lambda x, y: x.var(0),
    "var, kept": lambda x, y: x.var(-1, correction=2, keepdim=True),
    "var_mean": lambda x, y: torch.stack(torch.var_mean(x, -1, correction=0)),
    "norm of order 1": lambda x, y: torch.linalg.vector_norm(x, 1, -1),
    "norm of order inf": lambda x, y: torch.linalg.vector_norm(x, math.inf, 0),
    "prod": lambda x, y: x.prod(-1),
    "prod of three": lambda x, y: x[:, :3].prod(-1),
    "prod of all": lambda x, y: x.prod(),
    "cumsum": lambda x, y: x.cumsum(-1),
    "cumsum of rows": lambda x, y: x.cumsum(0),
    "cumprod": lambda x, y: x.cumprod(-1),
    "trace": lambda x, y: x.trace(),
    "index_put": lambda x, y: x.index_put((torch.tensor([1, 0]), torch.tensor([2, 3])), y[0, :2]),
    "index_put, added": lambda x, y: x.index_put((torch.tensor([1, 1]),), y, accumulate=True),
    "index_add": lambda x, y: x.index_add(0, torch.tensor([1, 1]), y),
    "index_add, alpha": lambda x, y: x.index_add(1, torch.tensor([0, 0, 3, 3]), y, alpha=2),
    "bincount": lambda x, y: torch.bincount(INDEX[0], y[0], 6),
    "scatter": lambda x, y: x.scatter(-1, INDEX[:, :1], y),
    "scatter_add": lambda x, y: x.scatter_add(-1, INDEX, y),
    "scatter_reduce": lambda x, y: x.scatter_reduce(-1, INDEX, y, "sum"),
    "embedding": lambda x, y: F.embedding(INDEX[1] // 2, x),
    "gather": lambda x, y: x.gather(-1, INDEX),
    "moves": lambda x, y: torch.cat([x.flip(-1), y.roll(1, 0)]).t().contiguous().reshape(4, 4)[1:, [0, 2]],
    "padded": lambda x, y: F.pad(x, (1, 2), value=3.0),
    "masked_fill": lambda x, y: x.masked_fill(y > 2, 7.0),
    "tril": lambda x, y: x.tril() + y.triu(1),
    "dot": lambda x, y: x[0].dot(y[0]),
    "mv": lambda x, y: x.mv(y[0]),
    "mm": lambda x, y: x @ y.mT,
    "bmm": lambda x, y: x[None] @ y.mT[None],
    "addmm": lambda x, y: torch.addmm(x[:, :2], x, y.mT),
    "addmm, scaled": lambda x, y: torch.addmm(x[:, :2], x, y.mT, beta=3, alpha=2),
    "addmm, only the product": lambda x, y: torch.addmm(x[:, :2], x, y.mT, beta=0, alpha=2),
    "addmv": lambda x, y: torch.addmv(x[:, 0], x, y[0], beta=2),
    "baddbmm": lambda x, y: torch.baddbmm(x[None, :, :2], x[None], y.mT[None], alpha=-1),
    "linear": lambda x, y: F.linear(x, y),
    "linear, bias": lambda x, y: F.linear(x, y, y[:, 0]),
    "relu": lambda x, y: F.relu(x) + F.relu6(x),
    "full": lambda x, y: torch.full((2, 4), 3.0) + torch.full_like(x, 0.5) + x.new_full((4,), 0.25),
    "ones": lambda x, y: torch.ones(2, 4) + torch.zeros_like(x) + torch.arange(4.0) + torch.eye(2, 4),
    "sign": lambda x, y: torch.sign(x) * torch.heaviside(x, y),
    "in place": in_place,
    "lists": lambda x, y: torch.stack(torch._foreach_add([x, y], [y, y], alpha=2)),
    "complex product": lambda x, y: torch.view_as_real(
        torch.view_as_complex(x.view(2, 2, 2)) * torch.view_as_complex(y.view(2, 2, 2))
    ),
    "softmax of one": lambda x, y: torch.softmax(x[:, :1], -1),
    "softmax's gradient": lambda x, y: torch.ops.aten._softmax_backward_data(x, y, -1, torch.float32),
    "sigmoid's gradient": lambda x, y: torch.ops.aten.sigmoid_backward(x, y),
    "tanh's gradient": lambda x, y: torch.ops.aten.tanh_backward(x, y),
    "from fp64": lambda x, y: (x.double() * y).float(),
    "through bf16": lambda x, y: (x.bfloat16() * y.bfloat16()).float(),
}


@pytest.mark.parametrize("name", EXACT)
def test_residues_of_exact_results_are_those_of_the_results(name: str) -> None:
    result, found = followed(EXACT[name], X, Y)
    right = Residues.of(result.double())
    assert found.shape == result.shape and not found.open.any()
    assert found.equal(right).all() and (found.q == right.q)[found.flags & 2 == 0].all()


ROOTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sqrt": lambda x, y: x.square().sqrt() * x.sign(),
    "pow 2.5": lambda x, y: x.square() ** 1.5,
    "rsqrt": lambda x, y: y.square().rsqrt(),
    "hypot": lambda x, y: torch.hypot(torch.tensor([3.0, 5.0]), torch.tensor([4.0, 12.0])),
    "norm": lambda x, y: torch.linalg.vector_norm(torch.tensor([[3.0, 4.0], [6.0, 8.0]]), 2, -1),
    "std": lambda x, y: torch.tensor([[3.0, -3.0, 3.0, -3.0]]).std(-1, correction=0),
    "std_mean": lambda x, y: torch.stack(torch.std_mean(torch.tensor([[5.0, 1.0, 5.0, 1.0]]), -1, correction=0)),
    "layer_norm": lambda x, y: F.layer_norm(torch.tensor([[5.0, 1.0, 5.0, 1.0]]), (4,), y[0], y[1], 0.0),
}


@pytest.mark.parametrize("name", ROOTS)
def test_roots_are_right_but_for_their_sign(name: str) -> None:
    result, found = followed(ROOTS[name], X, Y)
    right = Residues.of(result.double())
    assert (found.equal(right) | found.equal(-right) | (name == "layer_norm")).all()
    assert not found.differs(right).any() or name == "layer_norm"
    assert not found.equal(Residues.of(result.double() + 1)).any()


ALIKE: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "exp2": (lambda x, y: torch.exp2(x), lambda x, y: torch.pow(2.0, x)),
    "log10": (lambda x, y: torch.log10(y.abs()), lambda x, y: y.abs().log() * math.log10(math.e)),
    "silu": (lambda x, y: F.silu(x), lambda x, y: x / (1 + (-x).exp())),
    "silu's gradient": (
        lambda x, y: torch.ops.aten.silu_backward(y, x),
        lambda x, y: y * torch.sigmoid(x) * (1 + x * (1 - torch.sigmoid(x))),
    ),
    "erfc": (lambda x, y: torch.erfc(x), lambda x, y: 1 - torch.erf(x)),
    "logaddexp": (lambda x, y: torch.logaddexp(x, y), lambda x, y: (x.exp() + y.exp()).log()),
    "logsumexp": (lambda x, y: torch.logsumexp(x, -1), lambda x, y: x.exp().sum(-1).log()),
    "log_softmax": (lambda x, y: torch.log_softmax(x, -1), lambda x, y: x - x.exp().sum(-1, keepdim=True).log()),
    "log_softmax of rows": (lambda x, y: torch.log_softmax(x, 0), lambda x, y: x - x.exp().sum(0).log()),
    "softmax": (lambda x, y: torch.softmax(x, 0), lambda x, y: x.exp() / x.exp().sum(0)),
    "log_softmax's gradient": (
        lambda x, y: torch.ops.aten._log_softmax_backward_data(x, y, -1, torch.float32),
        lambda x, y: x - y.exp() * x.sum(-1, keepdim=True),
    ),
    "gelu": (lambda x, y: F.gelu(x), lambda x, y: 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))),
    "gelu by tanh": (
        lambda x, y: F.gelu(x, approximate="tanh"),
        lambda x, y: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    ),
    "gradient of a bias": (
        lambda x, y: torch.ops.aten.native_layer_norm_backward(
            x, y, [4], y.mean(-1, True), torch.ones(2, 1), y[0], y[1], [False, True, True]
        )[2],
        lambda x, y: x.sum(0),
    ),
    "attention": (
        lambda x, y: F.scaled_dot_product_attention(x[None, None], y[None, None], x[None, None], scale=0.5)[0, 0],
        lambda x, y: torch.softmax(x @ y.mT * 0.5, -1) @ x,
    ),
    "causal attention": (
        lambda x, y: F.scaled_dot_product_attention(x[None, None], y[None, None], x[None, None], is_causal=True)[0, 0],
        lambda x, y: (
            torch.softmax((x @ y.mT / 2).masked_fill(torch.tensor([[0, 1], [0, 0]]).bool(), -math.inf), -1) @ x
        ),
    ),
}


ALONG: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "sum": lambda x, y, dim: x.sum(dim),
    "mean": lambda x, y, dim: x.mean(dim),
    "amax": lambda x, y, dim: x.amax(dim),
    "min": lambda x, y, dim: x.min(dim).values,
    "var": lambda x, y, dim: x.var(dim),
    "prod": lambda x, y, dim: x.prod(dim),
    "cumsum": lambda x, y, dim: x.cumsum(dim),
    "cumprod": lambda x, y, dim: x.cumprod(dim),
    "cummax": lambda x, y, dim: x.cummax(dim).values,
    "sort": lambda x, y, dim: x.sort(dim).values,
    "topk": lambda x, y, dim: x.topk(1, dim).values,
    "median": lambda x, y, dim: x.median(dim).values,
    "norm of order 1": lambda x, y, dim: torch.linalg.vector_norm(x, 1, dim),
    "logsumexp": lambda x, y, dim: torch.logsumexp(x, dim),
    "softmax": lambda x, y, dim: torch.softmax(x, dim),
    "log_softmax": lambda x, y, dim: torch.log_softmax(x, dim),
    "softmax's gradient": lambda x, y, dim: torch.ops.aten._softmax_backward_data(x, y, dim, torch.float32),
    "log_softmax's gradient": lambda x, y, dim: torch.ops.aten._log_softmax_backward_data(x, y, dim, torch.float32),
    "cat": lambda x, y, dim: torch.cat([x, y], dim),
    "flip and roll": lambda x, y, dim: x.flip(dim) + y.roll(1, dim),
    "index_select": lambda x, y, dim: x.index_select(dim, torch.tensor([1, 0, 1])),
    "index_add": lambda x, y, dim: x.index_add(dim, torch.tensor([1, 0]), y.narrow(dim, 0, 2)),
}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", ALONG)
def test_dimensions_are_counted_from_either_end(name: str, dim: int) -> None:
    def along(x: Tensor, y: Tensor, dim: int) -> Tensor:
        return ALONG[name](x, y, dim)

    def turned(x: Tensor, y: Tensor) -> Tensor:
        found = along(x.mT.contiguous(), y.mT.contiguous(), 1 - dim)
        return found.mT.contiguous() if found.ndim == 2 else found

    _, one = followed(lambda x, y: along(x, y, dim), X, Y)
    assert one.equal(followed(lambda x, y: along(x, y, dim - 2), X, Y)[1]).all()
    assert one.equal(followed(turned, X, Y)[1]).all()


@pytest.mark.parametrize("name", ALIKE)
def test_a_function_is_its_formula(name: str) -> None:
    one, other = (followed(function, X, Y)[1] for function in ALIKE[name])
    asked = ~one.open & ~other.open
    assert asked.float().mean() > 0.4 and not one.differs(other).any()
    assert one.equal(other)[asked].float().mean() > 0.4


def test_ties_and_constants_that_are_chosen_are_open() -> None:
    """Where either of two equal values may have been taken, and where a written limit was."""
    x, small = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0**-30, 2.0**-30, 1.0])
    for function in (torch.maximum, torch.minimum, torch.fmax, lambda a, b: torch.where(a > b, a, b)):
        assert followed(lambda x, small, own=function: own(x, x + small), x, small)[1].open.tolist() == [
            True,
            True,
            False,
        ]
    _, limited = followed(lambda x: x.clamp(min=2.0), x)
    assert limited.open.tolist() == [True, False, False]
    _, near = followed(lambda x: (x + 2.0**-20).clamp(max=2.0), x)
    assert near.open.tolist() == [False, True, True]
    _, zero = followed(lambda x, small: (x + small - x).abs(), x, small)
    assert zero.open.tolist() == [True, True, False]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.linalg.vector_norm(x, 3),
        lambda x: x.round(decimals=1),
        lambda x: torch.pow(x.abs() + 1, x),
        lambda x: x.scatter_reduce(-1, INDEX, x, "amax"),
    ],
)
def test_operations_without_a_rule_are_opaque(function: Callable[[Tensor], Tensor]) -> None:
    memory = ShadowMemory()
    with Following(memory) as following:
        result = function(X.clone())
    assert following.opaque and memory.read(result).open.all()


def drawn_in_place(x: Tensor) -> Tensor:
    return torch.empty(2, 4).copy_(x).uniform_(0.0, 1.0)


def listed_in_place(x: Tensor) -> Tensor:
    parts = [x.clone(), x * 2]
    torch._foreach_mul_(parts, 3.0)
    return torch.cat(parts)


def through_bits(x: Tensor) -> Tensor:
    return x.view(torch.int32).view(torch.float32) * 2


@pytest.mark.parametrize("function", [drawn_in_place, listed_in_place, through_bits])
def test_what_is_drawn_listed_or_seen_as_bits_is_known(function: Callable[[Tensor], Tensor]) -> None:
    result, found = followed(function, X)
    assert not found.open.any() and found.equal(Residues.of(result.double())).all()


@pytest.mark.parametrize(
    ("function", "known"),
    [
        (lambda x: (x.view(torch.int32) & -(1 << 23)).view(torch.float32), True),  # the exponent alone
        (lambda x: (x.view(torch.int32) & -(1 << 16)).view(torch.float32), False),
        (lambda x: (x.view(torch.int32) + 1).view(torch.float32), False),
        (lambda x: (x.view(torch.int32) << 23).view(torch.float32), True),
        (lambda x: (x.view(torch.int32) << 4).view(torch.float32), False),
    ],
)
def test_bits_that_are_computed_with_are_open_unless_a_power_of_two_is_left(
    function: Callable[[Tensor], Tensor], known: bool
) -> None:
    memory = ShadowMemory()
    with Following(memory) as following:
        result = function(X.clone())
    found = memory.read(result)
    assert (not found.open.any() and not following.opaque) == known
    if known:
        assert found.equal(Residues.of(result.double())).all()
