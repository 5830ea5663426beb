"""Dots that are walked in a declared order lie within its bound, however their blocks are added; others need not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lastbit.calibrate import measure
from lastbit.errors import UsageError
from lastbit.judging.problem import Problem
from lastbit.judging.verdict import judge
from lastbit.kernel import Kernel
from lastbit.numerics import (
    BY_CAPABILITY,
    LOOSEST,
    Enclosure,
    Factor,
    Groups,
    Premises,
    TensorCores,
    dot,
    dots,
    grouped_dot,
    grouped_outer,
    round_to,
    using,
)
from lastbit.numerics.dots import dot_of
from lastbit.numerics.formats import BF16
from lastbit.ops import Contract, StageRecorder, op
from lastbit.result import Verdict
from lastbit.verify.assertion import assert_contract
from lastbit.verify.check import Subject
from tests.numerics.test_tensor_cores import simulated

CPU = Premises(tensor_cores=None)
U = 2.0**-24
Block = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Adds the products of two blocks [rows, terms] to fp32 numbers [rows]."""


def normals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# Ways to add a block to the sum so far


def chained(order: Callable[[Tensor], Tensor], *, fma: bool, last: bool = False) -> Block:
    """One product after the other, in an order by their values; from the sum on, or by themselves and then added."""

    def add(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
        products = a.double() * b.double()
        products = products.gather(-1, order(products))
        found = torch.zeros_like(total) if last else total
        for p in (products if fma else products.float().double()).unbind(-1):
            found = (found.double() + p).float()
        return total + found if last else found

    return add


def tree(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Neighbours, the sum so far among them."""
    numbers = torch.cat([a.float() * b.float(), total[:, None]], -1)
    numbers = numbers.roll(numbers.shape[-1] // 2, -1)
    while numbers.shape[-1] > 1:
        numbers = torch.nn.functional.pad(numbers, (0, numbers.shape[-1] % 2))
        numbers = numbers[:, ::2] + numbers[:, 1::2]
    return numbers[:, 0]


def as_given(p: Tensor) -> Tensor:
    return torch.arange(p.shape[-1]).expand_as(p)


ROUNDED: dict[str, Block] = {
    "FMA from the sum on": chained(as_given, fma=True),
    "products rounded, backwards": chained(lambda p: as_given(p).flip(-1), fma=False),
    "positive ones first": chained(lambda p: p.argsort(-1, descending=True), fma=True),
    "the smallest first": chained(lambda p: p.abs().argsort(-1), fma=False),
    "alone, then added": chained(as_given, fma=False, last=True),
    "alone, positive ones first": chained(lambda p: p.argsort(-1, descending=True), fma=True, last=True),
    "a tree": tree,
}

MODELS = {cores.devices.split(",")[0]: cores for cores in BY_CAPABILITY.values()}


def on_cores(cores: TensorCores, *, turned: bool = False, last: bool = False) -> Block:
    def add(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
        a, b = (a.flip(-1), b.flip(-1)) if turned else (a, b)
        return total + simulated(cores, a, b).float() if last else simulated(cores, a, b, total).float()

    return add


def walked(add: Block, a: Tensor, b: Tensor, order: int, pieces: int = 1) -> Tensor:
    """Dots of the rows of a and b, every piece in blocks from its first term on."""
    total = torch.zeros(len(a))
    for left, right in zip(a.chunk(pieces, -1), b.chunk(pieces, -1), strict=True):
        for x, y in zip(left.split(order, -1), right.split(order, -1), strict=True):
            total = add(total, x, y)
    return total


# Data


def adversarial(length: int, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Random numbers; and one large product early, late or taken back, sums that grow, fall and cancel, subnormals."""
    a, b = normals(8, length), normals(8, length, seed=1)
    spread = (normals(8, length, seed=2) * 4).round().clamp(-7, 7).exp2()
    small = a.abs() * 2.0**-11, b.abs() * 2.0**-12
    pairs = [(a, b), (a.abs(), b.abs()), (a * spread, b)]
    for place in (0, length // 3, length - 1):
        left, right = small[0].clone(), small[1].clone()
        left[:, place], right[:, place] = 1.0, 1.5
        pairs.append((left, right))
    left, right = small[0].clone(), small[1].clone()
    left[:, [0, -1]], right[:, 0], right[:, -1] = 1.0, 1.5, -1.5
    growing = torch.linspace(-9, 3, length).exp2()
    half = normals(8, length // 2, seed=3)
    cancelling = torch.cat([half, -half, half[:, : length % 2]], -1)
    pairs += [(left, right), (a.abs() * growing, b.abs()), (a * growing.flip(-1), b), (cancelling, torch.ones_like(b))]
    tiny = 2.0**-21 if dtype is torch.float16 else 2.0**-130
    pairs.append((a * tiny, b * 4))
    return ((x.to(dtype), y.to(dtype)) for x, y in pairs)


def crossing(length: int, block: int, term: float) -> tuple[Tensor, Tensor]:
    """Let a block's first product take the sum beyond a power of two, and the last one of the next block back."""
    a = torch.full((1, length), term)
    a[0, :block] = 0.0
    a[0, 0] = 1.8515625 * 2.0**24
    a[0, block :: 2 * block] = 0.203125 * 2.0**24
    a[0, 3 * block - 1 :: 2 * block] = -0.203125 * 2.0**24
    return a.bfloat16(), torch.ones(1, length).bfloat16()


def bounds(premises: Premises, a: Tensor, b: Tensor, pieces: int = 1) -> Enclosure:
    """Of the dots of the rows of a and b."""
    left, right = Enclosure.point(a[:, None, :]), Enclosure.point(b[:, :, None])
    with using(premises):
        return dot_of(Factor.left(left), Factor.right(right), pieces)[:, 0, 0]


def outside(found: Enclosure, result: Tensor) -> int:
    return int(((result < found.lo) | (result > found.hi)).sum())


# Dots that keep the order


@pytest.mark.parametrize("way", ROUNDED)
@pytest.mark.parametrize(("length", "order"), [(256, 16), (300, 64), (520, 200), (270, 1 << 40)])
def test_rounded_dots_lie_within(way: str, length: int, order: int) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for a, b in adversarial(length, dtype):
            for premises in (CPU, Premises(tensor_cores=BY_CAPABILITY[9, 0])):
                found = bounds(replace(premises, order=order), a, b)
                assert outside(found, walked(ROUNDED[way], a, b, order)) == 0


@pytest.mark.parametrize("way", ["alone, then added", "alone, positive ones first"])
def test_a_height_that_holds_tightens_what_it_may(way: str) -> None:
    """Of one block and one addition per block."""
    known = replace(CPU, order=64, depth=lambda n: 64 + n // 64)
    for a, b in adversarial(1000, torch.bfloat16):
        found, wider = bounds(known, a, b), bounds(replace(CPU, order=64), a, b)
        assert outside(found, walked(ROUNDED[way], a, b, 64)) == 0
        assert bool((found.hi - found.lo <= wider.hi - wider.lo).all())


@pytest.mark.parametrize("cores", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(("length", "order"), [(256, 16), (300, 64)])
def test_dots_on_tensor_cores_lie_within(cores: TensorCores, length: int, order: int) -> None:
    """Whichever way they take through a block, and whether or not it is added alone."""
    ways = [on_cores(cores), on_cores(cores, turned=True), on_cores(cores, last=True)]
    for dtype in (torch.bfloat16, torch.float16):
        for a, b in adversarial(length, dtype):
            results = [walked(way, a, b, order) for way in ways]
            for model in (cores, LOOSEST):
                found = bounds(Premises(tensor_cores=model, order=order, depth=lambda n: 1), a, b)
                assert not any(outside(found, result) for result in results)


def test_what_is_lost_beyond_a_power_of_two_counts() -> None:
    """Nearly half of the last place of the sum that a block goes through, and not of the one that it starts with."""
    a, b = crossing(1024, 64, 1.9375)
    result = walked(ROUNDED["FMA from the sum on"], a, b, 64)
    assert outside(bounds(replace(CPU, order=64), a, b), result) == 0
    assert float((a.double() * b.double()).sum() - result) > 14 * 62 * 1.9


@pytest.mark.parametrize("cores", MODELS.values(), ids=MODELS)
def test_what_tensor_cores_cut_off_counts(cores: TensorCores) -> None:
    """Small products that are cut off whole, beside a large one or a sum that is about as large as a power of two."""
    place = 2.0 ** (2 - cores.extra_bits)
    large = torch.full((1, 1024), place * 0.99)
    large[0, 0] = 2.0**25
    for a, b, order in [
        (large.bfloat16(), torch.ones(1, 1024).bfloat16(), 64),
        (*crossing(1024, 16, place * 0.99), 16),
    ]:
        known = Premises(tensor_cores=cores, order=order, depth=lambda n: 1)
        result, found = walked(on_cores(cores), a, b, order), bounds(known, a, b)
        assert outside(found, result) == 0
        assert float((found.value - result) / (found.value - found.lo)) > 0.5


def test_pieces_are_walked_each_from_its_first_term() -> None:
    for a, b in adversarial(400, torch.bfloat16):
        for way in ("positive ones first", "alone, then added"):
            assert outside(bounds(replace(CPU, order=64), a, b, 4), walked(ROUNDED[way], a, b, 64, 4)) == 0


def test_the_ends_of_intervals_are_passed_through() -> None:
    """All middles are 0, and the sums of the upper ends are rounded up."""
    end = torch.full((1, 512), 1 + 2.0**-16 + 2.0**-20)
    ones = torch.ones(1, 512)
    left = Factor.left(Enclosure(torch.stack([0 * end, 0 * end, -end, end]).double()[:, :, None, :]))
    with using(replace(CPU, order=32)):
        found = dot_of(left, Factor.right(Enclosure.point(ones[..., None])))[:, 0, 0]
    result = walked(ROUNDED["FMA from the sum on"], end, ones, 32)
    assert float(result) > float(end.double().sum())
    assert outside(found, result) == 0


# What it decides


@pytest.mark.parametrize(
    ("cores", "order", "least"), [(None, 32, 0.92), (None, 64, 0.88), (BY_CAPABILITY[9, 0], 16, 0.9)], ids=str
)
def test_most_long_dots_of_random_numbers_are_decided(cores: TensorCores | None, order: int, least: float) -> None:
    """Any order decides none of them, and the height alone at most two thirds."""
    a, b = normals(8, 4096).bfloat16(), normals(128, 4096, seed=1).bfloat16()
    known = Premises(tensor_cores=cores, depth=lambda n: order + n // order)
    shares = []
    for premises in (known, replace(known, order=order)):
        with using(premises):
            found = dot(Enclosure.point(a), Enclosure.point(b.T))
        shares.append(float((round_to(found.lo, BF16) == round_to(found.hi, BF16)).double().mean()))
    assert shares[1] >= least > shares[0] + 0.05


# What does not keep it


def small_then_large(length: int) -> tuple[Tensor, Tensor]:
    """Make the last product so large that each of the others, added to it alone, is lost."""
    a = torch.full((1, length), 1.5)
    a[0, -1] = 2.0**25
    return a.bfloat16(), torch.ones(1, length).bfloat16()


def backwards(add: Block, a: Tensor, b: Tensor) -> Tensor:
    return walked(add, a.flip(-1), b.flip(-1), 64)


def test_a_dot_that_is_walked_backwards_is_outside() -> None:
    """It is not where no order is declared."""
    a, b = small_then_large(4096)
    add = ROUNDED["FMA from the sum on"]
    known = replace(CPU, order=64)
    assert outside(bounds(known, a, b), walked(add, a, b, 64)) == 0
    assert outside(bounds(known, a, b), backwards(add, a, b)) == 1
    assert outside(bounds(CPU, a, b), backwards(add, a, b)) == 0


def test_a_dot_that_is_split_is_outside() -> None:
    """The second half alone goes on from a large product, which the last one of the first half takes back."""
    a, b = torch.full((1, 4096), 1.5), torch.ones(1, 4096).bfloat16()
    a[0, 2047], a[0, 2048] = 2.0**25, -(2.0**25)
    a, add = a.bfloat16(), ROUNDED["FMA from the sum on"]
    halves = [walked(add, x, y, 64) for x, y in zip(a.chunk(2, -1), b.chunk(2, -1), strict=True)]
    found = bounds(replace(CPU, order=64), a, b)
    assert outside(found, walked(add, a, b, 64)) == 0
    assert outside(found, halves[0] + halves[1]) == 1


def test_a_dot_of_pieces_may_be_outside_of_one_that_is_walked_as_a_whole() -> None:
    """The block of the whole that has both large products has 64 terms, and the two blocks of the pieces have 100."""
    a, b = torch.full((1, 400), 1.9375), torch.ones(1, 400).bfloat16()
    a[0, 64], a[0, 127] = 2.0**25, -(2.0**25)
    a, known = a.bfloat16(), replace(CPU, order=64)
    result = walked(ROUNDED["positive ones first"], a, b, 64, 4)
    assert outside(bounds(known, a, b, 4), result) == 0
    assert outside(bounds(known, a, b, 1), result) == 1


@op(rows=())
def product(x: Enclosure, w: Enclosure, *, contract: Contract, stage: StageRecorder) -> None:
    """x [M, K] times w [K, N]."""
    stage("product", dot(x, w), result=True)


def ascending(x: Tensor, w: Tensor) -> Tensor:
    return torch.stack([walked(ROUNDED["FMA from the sum on"], x, c.expand_as(x), 64) for c in w.T], -1)


def descending(x: Tensor, w: Tensor) -> Tensor:
    return ascending(x.flip(-1), w.flip(0))


def test_a_wrong_declaration_hurts_no_kernel_but_its_own() -> None:
    """It fails a kernel that is right, and a kernel that is wrong passes with it no sooner than without."""
    x, w = small_then_large(4096)
    tensors = {"x": x, "w": w.T.contiguous()}
    kernels = {"ascending": ascending, "descending": descending, "without some": lambda x, w: ascending(x, w) - 200}
    passed = {}
    for name, call in kernels.items():
        for order in (None, 64):
            subject = Subject(Kernel(name, "product", "", call, order=order), product, torch.device("cpu"), CPU)
            problem = Problem(product, subject.contract, tensors, {}, subject.bounds)
            passed[name, order] = judge(problem, {"product": call(**tensors)}).verdict is not Verdict.FAILED
    right = {("ascending", None): True, ("ascending", 64): True}
    undeclared = {("descending", None): True, ("without some", None): True}
    assert passed == right | undeclared | {("descending", 64): False, ("without some", 64): False}


# Calibration


def test_calibration_finds_a_device_that_walks_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Block by block from the first on, as is declared, and term by term from the last on."""
    holds = []
    for width, turn in ((64, 1), (1, -1)):
        monkeypatch.setattr(measure.kernels, "dot", lambda a, b, block, w=width, t=turn: by_blocks(a, b, w, t))
        holds.append(measure._walked(torch.device("cpu"), torch.bfloat16, 64).holds)
    assert holds == [True, False]


def by_blocks(a: Tensor, b: Tensor, width: int, turn: int) -> Tensor:
    total = torch.zeros(a.shape[0], b.shape[1])
    for x, y in list(zip(a.float().split(width, 1), b.float().split(width, 0), strict=True))[::turn]:
        total += x @ y
    return total


# Where it counts


def test_nothing_changes_where_no_order_is_declared_or_a_dot_is_short() -> None:
    a, b = normals(4, 512).bfloat16(), normals(4, 512, seed=1).bfloat16()
    short = dots.SHORTEST - 1
    for premises in (CPU, Premises()):
        known = replace(premises, order=64)
        assert torch.equal(
            bounds(known, a[:, :short], b[:, :short]).parts, bounds(premises, a[:, :short], b[:, :short]).parts
        )
        plain, tight = bounds(premises, a, b), bounds(known, a, b)
        assert torch.equal(plain.parts[:2], tight.parts[:2])
        assert bool((plain.lo <= tight.lo).all() and (tight.hi <= plain.hi).all())
        assert float((tight.hi - tight.lo).mean()) < 0.4 * float((plain.hi - plain.lo).mean())


def test_a_lattice_stays_a_point_and_what_is_not_finite_as_it_is() -> None:
    a, b = (normals(4, 512) * 4).round(), (normals(4, 512, seed=1) * 4).round()
    with_order = bounds(replace(CPU, order=64), a, b)
    assert torch.equal(with_order.lo, with_order.hi)
    for bad in (math.inf, math.nan, 3e38):
        wrong = normals(4, 512)
        wrong[0, 3] = bad
        wrong[1, [5, 9]] = torch.tensor([bad, -bad])
        plain, tight = bounds(CPU, wrong, b), bounds(replace(CPU, order=64), wrong, b)
        for row in (0, 1) if bad != 3e38 else (1,):
            assert torch.equal(plain.parts[:, row].nan_to_num(7.0), tight.parts[:, row].nan_to_num(7.0))
        assert bool((tight.hi - tight.lo)[2:].lt((plain.hi - plain.lo)[2:]).all())


def test_sums_that_are_taken_as_exact_have_no_order() -> None:
    a, b = normals(4, 512), normals(4, 512, seed=1)
    exact = replace(CPU, exact_sums=True)
    assert torch.equal(bounds(exact, a, b).parts, bounds(replace(exact, order=64), a, b).parts)


@pytest.mark.parametrize(("order", "block"), [(5, 20), (16, 16), (17, 17), (1000, 1000), (None, 0)])
def test_blocks_are_those_of_the_order_or_of_several(order: int | None, block: int) -> None:
    with using(replace(CPU, order=order)):
        assert [dots.block_of(terms) for terms in (255, 256, 5000)] == [0, block, block]


def test_how_many_blocks_are_looked_at_together_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = normals(4, 1000).bfloat16(), normals(4, 1000, seed=1).bfloat16()
    known = replace(CPU, order=64)
    before = bounds(known, a, b, 2)
    monkeypatch.setattr(dots, "_TOGETHER_ON_CPU", 12)
    assert torch.equal(bounds(known, a, b, 2).parts, before.parts)


def test_grouped_dots_and_sums_of_outer_products_are_walked() -> None:
    """Rows of a group in ascending order; the large product is in the last row of the first group."""
    a, b = small_then_large(600)
    numbers = torch.tensor([0, 1]).repeat(600)[:1199]
    rows = torch.ones(1199, 1, dtype=torch.float64)
    rows[::2, 0] = a[0].double()
    groups = Groups(numbers, 2)
    add = ROUNDED["FMA from the sum on"]
    right, wrong = walked(add, a, b, 64), backwards(add, a, b)
    weights = Enclosure(torch.ones(1, 1, 600, 1, dtype=torch.float64))
    with using(replace(CPU, order=64)):
        sums = grouped_outer(Enclosure(rows[None]), Enclosure(torch.ones(1, 1199, 1, dtype=torch.float64)), groups)
        products = grouped_dot(
            Enclosure(a.double()[None]), Groups(torch.tensor([0]), 1), lambda experts: Factor.right(weights), 1
        )
    for found in (sums[0, 0, 0:], products[0, 0:]):
        assert (outside(found, right), outside(found, wrong)) == (0, 1)


def test_an_order_that_means_nothing_is_refused() -> None:
    x = normals(2, 8)
    for order in (0, -64, True, 64.0):
        with pytest.raises(UsageError, match="is no number of terms; give an integer from 1"):
            assert_contract("rms_norm", x, x=x, eps=1e-6, contract="fp32_multiply", order=order)  # type: ignore[arg-type]
