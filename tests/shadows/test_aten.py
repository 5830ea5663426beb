"""PyTorch functions followed on residues: right forms of a formula are equal, wrong ones are not."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lastbit.numerics.residues import Residues
from lastbit.shadows import aten
from lastbit.shadows.aten import Following
from lastbit.shadows.shadow_memory import ShadowMemory

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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [0, -1])
def test_a_cpu_rounds_on_the_way_to_a_log_softmax_of_16_bits_along_the_last_dimension(dtype, dim):
    x = drawn(64, 33, dtype=dtype)

    def by_hand(x: Tensor, *, to: torch.dtype) -> Tensor:
        shifted = x.float() - x.amax(dim, keepdim=True).float()
        total = shifted.exp().sum(dim, keepdim=True).to(to).float()
        return (shifted - total.log().to(to).float()).to(x.dtype)

    own = followed(lambda x: F.log_softmax(x, dim), x)
    once, twice = followed(partial(by_hand, to=torch.float32), x), followed(partial(by_hand, to=dtype), x)
    right, wrong = (twice, once) if dim == -1 else (once, twice)
    assert share_equal(own, right) == 1
    assert dtype == torch.float32 or share_equal(own, wrong) < 0.8


@pytest.mark.parametrize("dtype", DTYPES)
def test_operations_that_are_taken_apart_follow_their_operands(dtype):
    x, labels = drawn(64, 9, dtype=dtype) * 3, torch.arange(64) % 9
    picked = followed(lambda x: F.nll_loss(x * 3, labels, reduction="none"), x)
    assert share_equal(picked, followed(lambda x: -(x * 3).gather(1, labels[:, None])[:, 0], x)) == 1
    assert share_equal(picked, followed(lambda x: -(x * 5).gather(1, labels[:, None])[:, 0], x)) < 0.1


def test_only_sound_claims_are_made_of_numbers_in_parts():
    x, w = drawn(16, 32), drawn(32, 8, seed=1)

    def in_three_parts(x: Tensor, w: Tensor) -> Tensor:
        first = x.bfloat16()
        second = (x - first).bfloat16()
        third = (x - first - second).bfloat16()
        return first.float() @ w + second.float() @ w + third.float() @ w

    assert not bool(followed(torch.mm, x, w).differs(followed(in_three_parts, x, w)).any())


@pytest.mark.parametrize(("dtype", "lost"), [(torch.float32, 16), (torch.float32, 12), (torch.float64, 45)])
def test_only_sound_claims_are_made_of_numbers_that_a_large_multiple_rounds(dtype: torch.dtype, lost: int) -> None:
    x, weight = drawn(64).to(dtype), drawn(64, seed=1).to(dtype)

    def veltkamp(x: Tensor, weight: Tensor) -> Tensor:
        large = x * (2.0**lost + 1)
        return (large - (large - x)) * weight

    def cast(x: Tensor, weight: Tensor) -> Tensor:
        return x.bfloat16().to(dtype) * weight

    assert lost == 12 or torch.equal(veltkamp(x, weight), cast(x, weight))
    assert not bool(followed(veltkamp, x, weight).differs(followed(cast, x, weight)).any())


def test_powers_of_any_exponent_are_followed_where_their_sign_is_known():
    x = drawn(64).abs() + 0.5
    for exponent in (-0.7, 1.25, 2.0001):
        power = followed(lambda x, e=exponent: x**e, x)
        assert 0.3 < power.open.float().mean() < 0.7
        assert power.equal(followed(lambda x, e=exponent: torch.exp(e * torch.log(x)), x)).all()
        other = followed(lambda x, e=exponent: x ** (e + 0.001), x)
        assert torch.equal(power.differs(other), ~power.open & ~other.open)
    assert followed(lambda x: (x - 5.0) ** 0.3, x).open.all()


def test_rounding_to_integers_by_a_constant_is_rounding():
    x, magic = drawn(64) * 50, 1.5 * 2**23
    rounded = followed(torch.round, x)
    assert rounded.equal(followed(lambda x: (x + magic) - magic, x)).all()
    assert rounded.equal(followed(lambda x: (x + torch.tensor(magic)).sub(magic), x)).all()


def test_what_overflows_is_open_and_no_infinity_of_the_formula():
    x = torch.tensor([-3e38, 1.0])

    def softmax(x: Tensor, scale: float) -> Tensor:
        scaled = x * scale
        terms = torch.exp2(scaled - scaled.amax())
        return terms / terms.sum()

    assert followed(lambda x: softmax(x, 1.4426950408889634), x).open.all()
    assert not followed(lambda x: softmax(x.masked_fill(x < 0, -math.inf), 1.4426950408889634), x).open.any()


def test_bits_are_opaque_unless_they_are_moved_or_powers_of_two():
    x = drawn(64).abs() + 1

    def truncated(x: Tensor) -> Tensor:
        return (x.view(torch.int32) & -65536).view(torch.float32) * 3

    def power(x: Tensor) -> Tensor:
        return (x.view(torch.int32) & (0xFF << 23)).view(torch.float32) * 3

    assert followed(truncated, x, opaque=1).open.all()
    assert followed(truncated, torch.exp2(x.round()), opaque=1).open.all()  # powers of two by chance
    assert not followed(power, x).open.any()
    assert (
        followed(lambda x: (x * 3).view(torch.int32).flip(0).clone().view(torch.float32), x)
        .equal(followed(lambda x: x.flip(0) * 3, x))
        .all()
    )


def test_integers_are_known_unless_they_are_digits_or_come_of_what_is_open():
    x = drawn(64)

    def cut(digits: int) -> Callable[[Tensor], Tensor]:
        return lambda x: (x * 2.0**digits).trunc() / 2.0**digits

    def of_bits(x: Tensor) -> Tensor:
        return ((x.view(torch.int32) & -65536).view(torch.float32) * 8).floor()

    assert not followed(cut(4), x).open.any()
    large = x.abs() + 0.5
    fixed, same = followed(lambda x: cut(24)(x * x * x), large), followed(lambda x: x * x * x, large)
    assert not fixed.differs(same).any() and fixed.equal(same).any() and fixed.open.any()
    assert followed(of_bits, x, opaque=1).open.all()
    assert followed(lambda x: x.round(decimals=2), x, opaque=1).open.all()


def test_what_is_rounded_to_zero_may_be_left_out():
    x = torch.cat([drawn(64) * 2.0**-26, torch.zeros(2), drawn(64) * 2.0**-20])
    kept = followed(lambda x: (x * x.abs().sqrt().half().float() * 3).half().float() * 5, x)
    spared = followed(
        lambda x: torch.where((y := (x * x.abs().sqrt().half().float() * 3).half()) != 0, y.float() * 5, 0.0), x
    )
    assert kept.equal(spared)[~kept.open].all()
    assert not kept.open.all()


def integers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed))


def changed(x: Tensor, change: Callable[[Tensor], object]) -> Tensor:
    x = x.clone()
    change(x)
    return x


def gradient(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    result = f(leaf)
    return torch.autograd.grad(result, leaf, torch.full_like(result, 2))[0]


PLACES = torch.tensor([2, 0, 2])
EXACT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "arithmetic": lambda x, y: torch.add(x * y - 2, y, alpha=2) / 4 + (3 - x) ** 2 + 2 * x,
    "powers of two": lambda x, y: torch.exp2(x) * 8 + 2.0 ** (y.abs()),
    "whole quotients": lambda x, y: x // 2 + x % 2 + torch.fmod(y, 3) + (x / 2).trunc() + (y / 2).frac(),
    "rounding": lambda x, y: (x / 2).round() + (y / 2).floor() + (x / 2).ceil() + (x / 2).to(torch.int8) * y.sign(),
    "choices": lambda x, y: x.abs() + F.relu(y) + x.clamp(-1, 2) + x.clamp(y - 1, y + 1) + torch.maximum(x, y),
    "masks": lambda x, y: torch.where(x > 0, y, 0.5) + x.masked_fill(y > 0, 2.0) + torch.copysign(x, y) + (x > y) * x,
    "sums": lambda x, y: x.sum((0, 1)) + y.sum(0).sum() + x.sum(-1, keepdim=True) + y[:, :4].mean(1, keepdim=True),
    "extremes": lambda x, y: (
        x.amax(0) + y.amin(0) + x.max(0)[0] + y.min(0)[0] + x.max() + x.median(0)[0] + x.amax((0, 1))
    ),
    "sorted": lambda x, y: torch.cat([x.sort(0)[0], y.sort(1, descending=True)[0], x.topk(6, 1)[0], y.cummax(1)[0]]),
    "running": lambda x, y: x.cumsum(1) + y.cumsum(0) + x.sign().prod(1, keepdim=True),
    "products": lambda x, y: (
        torch.addmm(x[:, :4], x, y.mT, beta=2, alpha=3) + torch.einsum("ij,kj->ik", x, y) + x @ y[0]
    ),
    "batches": lambda x, y: torch.baddbmm(x[:, :4].view(4, 2, 2), x.view(4, 2, 3), y.view(4, 3, 2)),
    "layers": lambda x, y: F.linear(x[None], y, y[:, 0]) + F.embedding(PLACES, x)[:, :4].sum(),
    "joined": lambda x, y: torch.cat([torch.stack([x, y], 1).flatten(0, 1), x.repeat(2, 1), y.repeat_interleave(2, 0)]),
    "turned": lambda x, y: (
        x.flip(0) + y.roll(2, 1) + x.t().reshape(4, 6) + y.tril() + x.triu(1) + torch.rot90(y).reshape(4, 6)
    ),
    "padded": lambda x, y: F.pad(x, (1, 2, 0, 1), value=1.5) + torch.diag(y[0, :5]).sum() + x.unfold(1, 3, 1).sum(),
    "gathered": lambda x, y: x[PLACES] + y.index_select(0, PLACES) + x.take(PLACES)[:, None] + x[PLACES, PLACES].sum(),
    "split": lambda x, y: torch.cat(x.chunk(2, 1)[::-1], 1) + y.split([2, 4], 1)[1].sum() + sum(x.unbind(0)),
    "put": lambda x, y: changed(x, lambda z: z.index_put_((PLACES,), y[:3], accumulate=True)),
    "put at masks": lambda x, y: changed(x, lambda z: (z.__setitem__(y > 0, 1.5), z.masked_scatter_(y < 0, y))),
    "put at columns": lambda x, y: changed(x, lambda z: z.__setitem__((slice(None), [0, 3]), y[:, :2])),
    "added at": lambda x, y: (
        x.index_add(0, PLACES, y[:3], alpha=2) + y.scatter_add(0, PLACES[None].expand(4, 3), x[:, :3])
    ),
    "in place": lambda x, y: changed(
        x, lambda z: (z.t().add_(1).mul_(2).sub_(y.t()), z[1:3].fill_(3.0), z[:, 1].zero_())
    ),
    "out": lambda x, y: torch.mul(x, y, out=torch.empty(0, dtype=x.dtype)) + torch.sum(x, 0, out=y.new_empty(6)),
    "two outs": lambda x, y: torch.max(x, 1, out=(y.new_empty(4), torch.empty(4, dtype=torch.int64)))[0],
    "lists": lambda x, y: torch._foreach_add([x, y], [y, x], alpha=2)[1],
    "new": lambda x, y: (
        torch.arange(6, dtype=x.dtype) * x + torch.full_like(y, 3) + torch.tensor([2.0] * 6) + y.new_ones(6)
    ),
    "counted": lambda x, y: (
        torch.bincount(PLACES, weights=x[0, :3].float()) + F.one_hot(PLACES).to(x.dtype) @ y[:3, :1]
    ),
    "complex": lambda x, y: torch.view_as_real(
        torch.view_as_complex(x.float().view(4, 3, 2)) * torch.view_as_complex(y.float().view(4, 3, 2))
    ),
    "in fp8": lambda x, y: x.to(torch.float8_e4m3fn).to(x.dtype) * y,
    "bytes of fp8": lambda x, y: torch.cat([x.to(torch.float8_e4m3fn).view(torch.uint8)] * 2).view(torch.float8_e4m3fn),
    "gradient of products": lambda x, y: gradient(lambda x: (x @ y.mT) * y[:, :4], x),
    "gradient of slices": lambda x, y: gradient(
        lambda x: x[:, 1:3] * y[:, 1:3] + x[PLACES[:1]].sum() + x.select(0, 1)[:2], x
    ),
    "gradient of choices": lambda x, y: gradient(lambda x: torch.where(y > 0, x, y).clamp(-1, 1) * y + F.relu(x), x),
    "gradient of gathered": lambda x, y: gradient(
        lambda x: x.gather(0, PLACES[None].expand(2, 3)) * x.sort(0)[0][:2, :3], x
    ),
    "gradient of sums": lambda x, y: gradient(
        lambda x: x.cumsum(1) * y + x[:, :4].mean(1, keepdim=True) + x.unfold(1, 3, 1).sum(), x
    ),
}


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("name", EXACT)
def test_exact_results_have_the_residues_of_their_values(name, dtype):
    x, y = (integers(4, 6, seed=seed).to(dtype) for seed in (3, 4))
    memory = ShadowMemory()
    with Following(memory) as following:
        result = EXACT[name](x, y)
    residues = memory.read(result)
    assert not following.opaque
    assert not residues.open.any()
    assert residues.equal(Residues.of(result)).all()


def test_large_finite_numbers_mask_as_minus_infinity_does() -> None:
    x, keep = drawn(4, 12), torch.arange(12) < 9
    least = torch.finfo(torch.float32).min

    def by_hand(scores: Tensor) -> Tensor:
        e = torch.exp(scores - scores.amax(-1, keepdim=True))
        return e / (e.sum(-1, keepdim=True) + 1e-20)

    right = followed(lambda x: torch.softmax(x[:, :9], -1), x)
    forms = (
        lambda x: torch.softmax(x.masked_fill(~keep, -1e9), -1),
        lambda x: torch.log_softmax(torch.where(keep, x, -1e30), -1).exp(),
        lambda x: torch.exp(x - torch.logsumexp(torch.where(keep, x, least), -1, keepdim=True)),
        lambda x: by_hand(F.pad(x[:, :9], (0, 3), value=-10000.0)),
    )
    for form in forms:
        found = followed(form, x)
        assert found[:, :9].equal(right).all() and not found[:, :9].open.any()
    wrong = followed(lambda x: torch.softmax(x.masked_fill(torch.arange(12) > 7, -1e9), -1), x)
    assert wrong[:, :8].differs(right[:, :8]).all()


@pytest.mark.parametrize(
    ("name", "file", "compiled"),
    [
        ("compile_wrapper", "torch/_dynamo/eval_frame.py", True),
        ("compile_wrapper", "kernels/mine.py", False),
        ("another", "torch/_dynamo/eval_frame.py", False),
    ],
)
def test_a_call_from_what_torch_compiles_is_known_by_its_frame(name: str, file: str, compiled: bool) -> None:
    inner = {"asked": aten._is_compiled}
    exec(compile(f"def {name}(): return (lambda: asked())()", file, "exec"), inner)
    assert inner[name]() is compiled
