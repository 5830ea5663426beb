"""PyTorch functions followed on residues: right forms of a formula are equal, wrong ones are not."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lastbit.numerics.residues import Residues
from lastbit.shadows.aten import Following
from lastbit.shadows.memory import ShadowMemory

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def followed(function: Callable[..., Tensor], *inputs: Tensor, opaque: int = 0) -> Residues:
    """Return the residues of the result of a function."""
    memory = ShadowMemory()
    with Following(memory) as following:
        result = function(*inputs)
    assert len(following.opaque) == opaque, following.opaque
    return memory.read(result)


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def share_equal(a: Residues, b: Residues) -> float:
    """Return the share of equal elements, those left out that are OPEN."""
    asked = ~a.open & ~b.open
    assert asked.float().mean() > 0.05
    return float(a.equal(b)[asked].float().mean())


def norm(
    x: Tensor, weight: Tensor, *, eps: float = 1e-6, how: str = "", columns: int | None = None, native: bool = False
) -> Tensor:
    f = x.double() if how == "fp64" else x.float()
    squares = f[..., :columns].square()
    n = f.shape[-1]
    mean = {
        "sum / n": lambda: (f * f).sum(-1, keepdim=True) / n,
        "n - 1": lambda: f.square().sum(-1, keepdim=True) / (n - 1),
        "times 1 / n": lambda: f.pow(2).sum(-1, keepdim=True) * (1 / n),
        "halves": lambda: (squares[..., ::2].sum(-1, keepdim=True) + squares[..., 1::2].sum(-1, keepdim=True)) / n,
    }.get(how, lambda: squares.mean(-1, keepdim=True))()
    if how == "running":
        mean = torch.zeros_like(mean)
        for i in range(n):
            mean += (squares[..., i : i + 1] - mean) / (i + 1)
    normalized = f / torch.sqrt(mean + eps) if how == "division" else f * torch.rsqrt(mean + eps)
    return (normalized.to(x.dtype) * weight if native else normalized * weight.float()).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", ["sum / n", "times 1 / n", "halves", "running", "division", "fp64"])
def test_right_forms_of_a_norm_are_equal(dtype, how):
    x, weight = drawn(64, 96, dtype=dtype), drawn(96, dtype=dtype, seed=1)
    assert share_equal(followed(norm, x, weight), followed(lambda x, w: norm(x, w, how=how), x, weight)) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", [{"eps": 1e-5}, {"how": "n - 1"}, {"columns": 95}, {"native": True}])
def test_faults_of_a_norm_differ(dtype, fault):
    x, weight = drawn(64, 96, dtype=dtype), drawn(96, dtype=dtype, seed=1)
    share = share_equal(followed(norm, x, weight), followed(lambda x, w: norm(x, w, **fault), x, weight))
    assert share == 1 if "native" in fault and dtype == torch.float32 else share < 0.02


def test_strides_views_and_writing_in_place_make_no_difference():
    x, weight = drawn(64, 96), drawn(96, seed=1)

    def in_place(x: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty(96, 64).t()
        out.copy_(x)
        scale = torch.zeros(64)
        for k in range(0, 96, 32):
            scale[:] += out[:, k : k + 32].square_().sum(-1)
        torch.rsqrt(scale.div_(96).add_(1e-6), out=scale)
        torch.mul(x, scale[:, None], out=out[:64])
        return out.mul_(weight)

    assert share_equal(followed(norm, x, weight), followed(in_place, x, weight)) == 1


def test_autograd_of_a_norm_is_the_formula_by_hand():
    x, weight, dy = drawn(16, 32), drawn(32, seed=1), drawn(16, 32, seed=2)

    def by_autograd(f: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
        def gradient(x: Tensor, weight: Tensor, dy: Tensor) -> Tensor:
            leaf = x.detach().requires_grad_()
            return torch.autograd.grad(f(leaf), leaf, dy)[0]

        return gradient

    def by_hand(x: Tensor, weight: Tensor, dy: Tensor) -> Tensor:
        centered = x - x.mean(-1, keepdim=True)
        rstd = torch.rsqrt(centered.square().mean(-1, keepdim=True) + 1e-5)
        n, d = centered * rstd, dy * weight
        return (d - d.mean(-1, keepdim=True) - n * (n * d).mean(-1, keepdim=True)) * rstd

    def written_out(x: Tensor) -> Tensor:
        centered = x - x.mean(-1, keepdim=True)
        return centered / torch.sqrt(centered.var(-1, correction=0, keepdim=True) + 1e-5) * weight

    hand = followed(by_hand, x, weight, dy)
    for function in (lambda x: F.layer_norm(x, (32,), weight, None, 1e-5), written_out):
        assert share_equal(followed(by_autograd(function), x, weight, dy), hand) == 1
    wrong = followed(by_autograd(lambda x: F.layer_norm(x, (32,), weight, None, 1e-4)), x, weight, dy)
    assert share_equal(wrong, hand) == 0


def attention(q: Tensor, k: Tensor, v: Tensor, tile: int, *, fault: str = "") -> Tensor:
    """Return attention of tiles of keys, with a running maximum and sum."""
    top, total = torch.full((len(q), 1), -math.inf), torch.zeros(len(q), 1)
    result = torch.zeros(len(q), v.shape[1])
    for start in range(0, len(k), tile):
        scores = q @ k[start : start + tile].mT * q.shape[1] ** -0.5
        new = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights, rescale = torch.exp(scores - new), torch.exp(top - new)
        if fault == "key" and start:
            weights[:, 0] = 0
        total = total * rescale + weights.sum(-1, keepdim=True)
        result = result * (1 if fault == "rescale" else rescale) + weights @ v[start : start + tile]
        top = new
    return result / total


def test_attention_does_not_depend_on_tiles():
    q, k, v = (drawn(n, 16, seed=n) for n in (24, 64, 65))
    v = v[:64]
    whole = followed(lambda: F.scaled_dot_product_attention(*(x[None, None] for x in (q, k, v)))[0, 0])
    for tile in (16, 24, 64):
        assert share_equal(whole, followed(lambda tile=tile: attention(q, k, v, tile))) == 1
    assert share_equal(whole, followed(lambda: attention(q, k, v, 16, fault="key"))) == 0
    assert share_equal(whole, followed(lambda: attention(q, k, v, 16, fault="rescale"))) < 0.5


@pytest.mark.parametrize("dtype", DTYPES)
def test_losses_do_not_depend_on_the_shift(dtype):
    logits, labels = drawn(256, 33, dtype=dtype), torch.arange(256) % 33
    shifted = followed(lambda: F.cross_entropy(logits.float(), labels, reduction="none"))

    def without(x: Tensor) -> Tensor:
        return torch.log(torch.exp(x).sum(-1)) - x.gather(1, labels[:, None])[:, 0]

    assert share_equal(shifted, followed(lambda: without(logits.float()))) == 1
    assert share_equal(shifted, followed(lambda: without(logits.float()) + 1e-3)) == 0


def test_only_sound_claims_are_made_of_numbers_in_parts():
    x, w = drawn(16, 32), drawn(32, 8, seed=1)

    def in_three_parts(x: Tensor, w: Tensor) -> Tensor:
        first = x.bfloat16()
        second = (x - first).bfloat16()
        third = (x - first - second).bfloat16()
        return first.float() @ w + second.float() @ w + third.float() @ w

    assert not bool(followed(torch.mm, x, w).differs(followed(in_three_parts, x, w)).any())


def test_rounding_to_integers_by_a_constant_is_rounding():
    x, magic = drawn(64) * 50, 1.5 * 2**23
    rounded = followed(torch.round, x)
    assert rounded.equal(followed(lambda x: (x + magic) - magic, x)).all()
    assert rounded.equal(followed(lambda x: (x + torch.tensor(magic)).sub(magic), x)).all()


def test_bits_are_opaque_unless_they_are_moved_or_powers_of_two():
    x = drawn(64).abs() + 1

    def truncated(x: Tensor) -> Tensor:
        return (x.view(torch.int32) & -65536).view(torch.float32) * 3

    def power(x: Tensor) -> Tensor:
        return (x.view(torch.int32) & (0xFF << 23)).view(torch.float32) * 3

    assert followed(truncated, x, opaque=1).open.all()
    assert not followed(power, x).open.any()
    assert (
        followed(lambda x: (x * 3).view(torch.int32).flip(0).clone().view(torch.float32), x)
        .equal(followed(lambda x: x.flip(0) * 3, x))
        .all()
    )
