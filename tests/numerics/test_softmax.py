"""Softmax and its relatives by brute force: what kernels compute in fp32, in whichever way, lies inside the bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from lastbit.numerics import (
    Enclosure,
    Premises,
    exponentials,
    format_of,
    hull,
    log_softmax,
    log_sum_exp,
    rescaled_accumulation,
    softmax,
    using,
)
from lastbit.numerics.premises import REAL

LOG2_E = torch.tensor(math.log2(math.e)).double()  # as fp32 has it
ROWS = 8


def fp32(x: Tensor) -> Tensor:
    """Round to fp32, in fp64."""
    return x.float().double()


def inside(found: Tensor, e: Enclosure) -> Tensor:
    found = found.double()
    unknown = torch.isneginf(e.lo) & torch.isposinf(e.hi)
    return ((found >= e.lo) & (found <= e.hi)) | (torch.isnan(found) & torch.isnan(e.lo)) | unknown


@dataclass
class Way:
    """One way to compute a softmax in fp32.

    Attributes:
        generator: of the errors of its exponentials, which are as large as they may be.
        block: elements that are added before earlier ones are rescaled; all of them where there is one block.
        form: how the argument is computed: `natural`, `folded` (log2(e) · x, then the shift), `fused` (in one FMA).
        reciprocal: whether it multiplies by 1 / sum.
    """

    generator: torch.Generator
    block: int
    form: str
    reciprocal: bool

    def exp(self, x: Tensor, shift: Tensor) -> Tensor:
        if self.form == "natural":
            power = fp32(fp32(x - shift) * LOG2_E)
        elif self.form == "folded":
            power = fp32(fp32(x * LOG2_E) - fp32(shift * LOG2_E))
        else:
            power = fp32(x * LOG2_E - fp32(shift * LOG2_E))
        signs = torch.rand(power.shape, generator=self.generator, dtype=torch.float64) * 2 - 1
        error = torch.where(power == 0, 0.0, signs.sign() * 3.9 * 2.0**-24)
        return fp32(torch.exp2(power) * (1 + error))

    def rescale(self, old: Tensor, new: Tensor) -> Tensor:
        """Return what brings results of an old shift to a new one: from the shifts as taken, or their difference."""
        if self.form == "fused" and self.reciprocal:
            return self.exp(fp32(old - new), torch.zeros_like(new))
        return self.exp(old, new) if self.form != "fused" else replace(self, form="folded").exp(old, new)

    def sums(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Shift and sum of each row, blocks in ascending order, in each of which elements are added one by one."""
        shift, total = torch.full_like(x[:, :1], -math.inf), torch.zeros_like(x[:, :1])
        for part in x.split(self.block, dim=-1):
            larger = torch.maximum(shift, part.amax(-1, keepdim=True))
            anew = torch.zeros_like(total)
            for term in self.exp(part, larger).unbind(-1):
                anew = fp32(anew + term[:, None])
            kept = torch.where(torch.isneginf(shift), 0.0, fp32(total * self.rescale(shift, larger)))
            shift, total = larger, fp32(kept + anew)
        return shift, total

    def softmax(self, x: Tensor) -> Tensor:
        shift, total = self.sums(x)
        terms = self.exp(x, shift)
        return fp32(terms * fp32(1 / total)) if self.reciprocal else fp32(terms / total)

    def log_sum_exp(self, x: Tensor) -> Tensor:
        shift, total = self.sums(x)
        return fp32(shift + fp32(torch.log(total)))

    def log_softmax(self, x: Tensor) -> Tensor:
        shift, total = self.sums(x)
        return fp32(fp32(x - shift) - fp32(torch.log(total)))


def rows(kind: str, columns: int, generator: torch.Generator) -> Tensor:
    """fp32 numbers [ROWS, columns] as fp64."""
    x = torch.randn(ROWS, columns, generator=generator)
    if kind == "wide":
        x = x * 30
    elif kind == "offset":
        x = x + 1000
    elif kind == "ascending":
        x = x.sort(-1).values
    elif kind == "masked":
        x = x.masked_fill(torch.rand(x.shape, generator=generator) < 0.5, -math.inf)
        x[:, 0] = 0.25
    elif kind == "equal":
        x = torch.full_like(x, 3.7)
    return x.double()


@pytest.mark.parametrize("form", ["natural", "folded", "fused"])
@pytest.mark.parametrize("kind", ["normal", "wide", "offset", "ascending", "masked", "equal"])
def test_every_way_lies_inside(kind: str, form: str) -> None:
    generator = torch.Generator().manual_seed(sum(map(ord, kind + form)))
    for columns, block in [(1, 8), (5, 8), (60, 8), (60, 60), (200, 16), (333, 64)]:
        x = rows(kind, columns, generator)
        way = Way(generator, block, form, reciprocal=bool(block % 3))
        e = Enclosure.point(x)
        assert inside(way.softmax(x), softmax(e, form != "natural")).all()
        assert inside(way.log_sum_exp(x), log_sum_exp(e, form != "natural")).all()
        assert inside(way.log_softmax(x), log_softmax(e, form != "natural")).all()
        assert inside(torch.softmax(x.float(), -1), softmax(e)).all()
        assert inside(torch.log_softmax(x.float(), -1), log_softmax(e)).all()


@pytest.mark.parametrize("function", [softmax, log_softmax, log_sum_exp])
@pytest.mark.parametrize("kind", ["normal", "wide", "offset", "masked"])
def test_value_lies_inside(kind: str, function: object) -> None:
    generator = torch.Generator().manual_seed(5)
    for columns in (1, 3, 100):
        e = function(Enclosure.point(rows(kind, columns, generator)))  # type: ignore[operator]
        assert ((e.value >= e.lo) & (e.value <= e.hi)).all()
        assert torch.allclose(e.exact, e.value, rtol=1e-4)


def test_folding_x_is_seen_without_it() -> None:
    """x · log2(e) is rounded before the shift is taken: an error of the size of x, not of differences."""
    generator = torch.Generator().manual_seed(1)
    x = rows("normal", 100, generator) + 5000
    found = Way(generator, 100, "folded", reciprocal=False).softmax(x)
    assert not inside(found, softmax(Enclosure.point(x))).all()
    assert inside(found, softmax(Enclosure.point(x), folded=True)).all()


@pytest.mark.parametrize(("columns", "bf16", "fp16"), [(128, 0.99, 0.95), (1024, 0.96, 0.77), (4096, 0.89, 0.3)])
def test_share_that_is_decided(columns: int, bf16: float, fp16: float) -> None:
    x = torch.randn(32, columns, generator=torch.Generator().manual_seed(2))
    e = softmax(Enclosure.point(x))
    for dtype, least in ((torch.bfloat16, bf16), (torch.float16, fp16)):
        rounded = e.rounded(format_of(dtype))
        assert (rounded.lo == rounded.hi).double().mean() > least


def test_the_shift_cancels() -> None:
    """Adding one number to all leaves exact differences, and the same bounds."""
    x = torch.randint(-64, 64, (4, 50), generator=torch.Generator().manual_seed(3)).double() / 16
    near, far = softmax(Enclosure.point(x)), softmax(Enclosure.point(x + 2.0**15))
    assert torch.equal(near.parts, far.parts)


def test_an_uncertain_row_knows_its_own_element() -> None:
    """An element that moves by 0.1 moves its own term in the sum, too: a row of one large one stays near 1."""
    x = Enclosure.point(torch.tensor([[10.0, 0.0, 0.0]]))
    moved = Enclosure(torch.cat([x.full[:2], x.full[2:3] - 0.1, x.full[3:] + 0.1]))
    e = softmax(moved)
    for first in (-0.1, 0.1):
        for others in (-0.1, 0.1):
            found = torch.softmax(torch.tensor([[10.0 + first, others, others]]), -1)
            assert inside(found, e).all()
            assert inside(found.log(), log_softmax(hull(moved, moved))).all()
    assert e.lo[0, 0] > 0.9998
    assert e.hi[0, 0] < 1.00001
    naive = exponentials(moved)
    assert (naive.terms.lo / naive.total.hi)[0, 0] < 0.9


def test_uncertain_rows_hold_the_softmax_of_whatever_is_in_them() -> None:
    generator = torch.Generator().manual_seed(4)
    x, radius = torch.randn(16, 40, generator=generator).double() * 4, torch.rand(16, 40, generator=generator) * 0.5
    lo, hi = fp32(x - radius), fp32(x + radius)
    e = Enclosure(torch.stack([x, fp32(x), lo, hi]))
    for _ in range(20):
        share = torch.rand(x.shape, generator=generator, dtype=torch.float64).round()
        inner = (lo + (hi - lo) * share).float()
        assert inside(torch.softmax(inner, -1), softmax(e)).all()
        assert inside(torch.log_softmax(inner, -1), log_softmax(e)).all()
        assert inside(torch.logsumexp(inner, -1, keepdim=True), log_sum_exp(e)).all()


def test_a_row_of_known_terms_is_a_count() -> None:
    total = exponentials(Enclosure.point(torch.tensor([[2.5, 2.5, -math.inf, 2.5, -1e30]]))).total
    assert total.lo == total.hi == 3


def test_special_values() -> None:
    inf, nan = math.inf, math.nan
    x = torch.tensor([[1.0, -inf, 2.0], [1.0, inf, 2.0], [1.0, nan, 2.0], [-inf, -inf, -inf], [3e38, -3e38, 0.0]])
    e = softmax(Enclosure.point(x))
    assert e.lo[0, 1] == e.hi[0, 1] == 0
    assert torch.isnan(e.lo[1:4]).all()
    assert torch.isnan(e.hi[1:4]).all()
    assert (e.lo[4, 1:] == 0).all()
    assert (e.hi[4, 1:] == 0).all()
    assert inside(torch.softmax(x, -1), e).all()
    logs = log_softmax(Enclosure.point(x))
    assert logs.lo[0, 1] == logs.hi[0, 1] == logs.hi[4, 1] == -inf
    assert inside(torch.log_softmax(x, -1), logs).all()
    assert inside(torch.logsumexp(x[:1], -1, keepdim=True), log_sum_exp(Enclosure.point(x[:1]))).all()
    assert torch.isneginf(log_sum_exp(Enclosure.point(x)).lo[3])


@pytest.mark.parametrize(("empty", "lo", "hi"), [("zero", 0.0, 0.0), ("any", -math.inf, math.inf)])
def test_an_empty_row(empty: str, lo: float, hi: float) -> None:
    e = softmax(Enclosure.point(torch.full((1, 2), -math.inf)), empty=empty)  # type: ignore[arg-type]
    assert (e.lo == lo).all()
    assert (e.hi == hi).all()


def test_a_row_that_may_be_empty_or_infinite_is_unknown() -> None:
    inf = math.inf
    ends = torch.tensor(
        [[[0.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]], [[-inf, -inf], [0.0, 0.0]], [[0.0, 0.0], [0.0, inf]]]
    )
    e = softmax(Enclosure(ends.double()))
    assert torch.isneginf(e.lo).all()
    assert torch.isposinf(e.hi).all()


def test_folded_overflow_is_unknown() -> None:
    x = Enclosure.point(torch.tensor([[3e38, 1.0]]))
    assert torch.isneginf(softmax(x, folded=True).lo).all()
    assert softmax(x).lo[0, 0] > 0.99


def test_a_subnormal_result_may_be_flushed() -> None:
    x = torch.tensor([[0.0, -88.0, -100.0, -104.0, -110.0]])
    e = softmax(Enclosure.point(x))
    found = torch.softmax(x, -1)
    assert inside(found, e).all()
    assert (e.lo[0, 1:] == 0).all()
    assert inside(torch.where(found < 2.0**-126, 0.0, found), e).all()
    assert (e.hi[0, 4:] == 0).all()


U = 2.0**-24


def worked(low: list[float], high: list[float], folded: bool) -> dict[str, list[tuple[float, float]]]:
    """Work out the ends of a row element by element, by the bounds of docs/primitives.md, before rounding to fp32."""
    count, top, least = len(low), max(high), max(low)
    fold = U * max(abs(top), abs(least)) * folded
    height = (count + math.ceil(math.log2(count)) * 6) * U

    def term(x: float, sign: int) -> float:
        d = top - x
        if d == 0 and top == least and not folded:
            return 1.0  # exp(0) of the known largest
        return math.exp(-d + sign * (5 * U * d + fold)) * (1 + sign * 4 * U)

    below, above = [term(x, -1) for x in low], [term(x, +1) for x in high]
    summed = 0.0 if below == above == [1.0] * count else height / (1 - height)
    sums = []  # as an element at its upper end sees the least one, and at its lower end the largest one
    for i in range(count):
        mine = sum(below[:i] + below[i + 1 :]) + term(high[i], -1), sum(above[:i] + above[i + 1 :]) + term(low[i], +1)
        sums.append((max(mine[0], sum(below)) * (1 - summed), min(mine[1], sum(above)) * (1 + summed)))

    def of_logarithm(a: float, b: float) -> float:
        """4u, and 2u for a rounded ln 2, of a logarithm that is at most log n."""
        return 6 * U * min(max(abs(math.log(a)), abs(math.log(b)) + top - least), math.log(count) + 2.0**-10)

    total = sum(below) * (1 - summed), sum(above) * (1 + summed)
    ends = top + math.log(total[0]), top + math.log(total[1])
    error = of_logarithm(*total) + folded * U * (2 * max(abs(top), abs(least)) + 3 * max(map(abs, ends)))
    shares, logs = [], []
    for i, (fewest, most) in enumerate(sums):
        shares.append((below[i] / most * (1 - 4 * U), above[i] / fewest * (1 + 4 * U)))
        a, b = low[i] - top - math.log(most), high[i] - top - math.log(fewest)
        lost = of_logarithm(fewest, most)
        more = [folded * U * (2 * abs(top) + 3 * abs(x)) + 5 * U * (top - y) for x, y in ((a, low[i]), (b, high[i]))]
        logs.append((a - lost - more[0], b + lost + more[1]))
    whole = (max(ends[0], least - 1) - error, ends[1] + error)
    return {"softmax": shares, "log_softmax": logs, "log_sum_exp": [whole]}


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize(
    ("low", "high"),
    [
        ([0.0, -1.0, -4.0, 2.0], [0.0, -1.0, -4.0, 2.0]),
        ([3.5, 3.5, 3.5], [3.5, 3.5, 3.5]),
        ([-9.0, -7.25], [-9.0, -7.25]),
        ([0.0, -1.25, -4.0, 2.0], [0.5, -1.0, -4.0, 2.0]),
        ([100.0, 101.0, 99.0, 98.0, 70.0], [100.125, 101.5, 99.5, 101.25, 70.5]),
        ([-0.5, 0.25], [3.0, 0.25]),
    ],
)
def test_the_ends_are_those_of_the_documented_bounds(low: list[float], high: list[float], folded: bool) -> None:
    """To the bit: a looser bound would hold every kernel as well, and see less."""
    one = torch.tensor(low)
    x = Enclosure.point(one) if low == high else hull(Enclosure.point(one), Enclosure.point(torch.tensor(high)))
    expected = worked(low, high, folded)
    for function in (softmax, log_softmax, log_sum_exp):
        e = function(x[None,], folded)
        ends = torch.tensor(expected[function.__name__]).float().double()
        assert torch.equal(torch.stack([e.lo[0], e.hi[0]], -1), ends), function.__name__


def test_terms_that_are_shown_have_the_factor_that_the_shift_leaves_open() -> None:
    """The shift may be anything from 0 to 1, so a kernel's terms are up to e times those for a shift of 1."""
    ends = Enclosure(torch.tensor([0.0, 0.0, 0.0, 1.0]).double()[:, None, None])
    for folded, fold in ((False, 0.0), (True, 2 * U)):
        shares = exponentials(ends, folded)
        terms, total = shares.shown
        assert torch.equal(terms.full[:2], shares.terms.full[:2])
        assert terms.lo.item() == pytest.approx(shares.terms.lo.item() * math.exp(-fold), rel=1e-14)
        assert terms.hi.item() == pytest.approx(shares.terms.hi.item() * math.exp(1 + fold), rel=1e-14)
        for side in ("lo", "hi"):
            whole = getattr(shares.total, side).item() * math.exp(-fold if side == "lo" else 1 + fold)
            assert getattr(total, side).item() == torch.tensor(whole).float().item()


def test_the_sum_and_the_terms_of_special_rows_as_they_are_shown() -> None:
    inf, nan = math.inf, math.nan
    x = torch.tensor([[1.0, nan], [-inf, -inf], [0.0, 0.0], [inf, 0.0]])
    total = exponentials(Enclosure.point(x)).shown[1]
    assert [str(v) for v in total.lo.flatten().tolist()] == ["nan", "-inf", "2.0", "nan"]
    assert [str(v) for v in total.hi.flatten().tolist()] == ["nan", "inf", "2.0", "nan"]
    settled = exponentials(Enclosure.point(x)).settled(exponentials(Enclosure.point(x)).total, 0.0)
    assert settled.lo[1].item() == settled.hi[1].item() == settled.value[1].item() == 0.0


@pytest.mark.parametrize(("limit", "known"), [(127 * math.log(2), True), (3.4e38, False)])
def test_a_folded_element_may_overflow_by_its_product_with_log2_e(limit: float, known: bool) -> None:
    for sign in (1, -1):
        e = softmax(Enclosure.point(torch.tensor([[sign * limit, sign * limit]])), folded=True)
        assert torch.isfinite(e.lo).all() == torch.isfinite(e.hi).all() == known
    below = Enclosure.point(torch.tensor([[2.35e38]]))  # 3.39e38 by log2(e); the largest number is 3.4028e38
    assert exponentials(below, folded=True).lost[2].item() is False
    assert exponentials(Enclosure.point(torch.tensor([[2.37e38]])), folded=True).lost[2].item() is True


@pytest.mark.parametrize("far", [1.0, 50.0, 400.0])
def test_real_logarithms_of_shares_near_one_keep_their_digits(far: float) -> None:
    """log softmax of the largest of two is -log1p(exp(-far)), of which a difference would leave nothing."""
    with using(REAL):
        e = log_softmax(Enclosure.point(torch.tensor([[7.0, 7.0 - far]])))
        many = log_softmax(Enclosure.point(torch.tensor([[7.0, 7.0 - far, 7.0 - far, -math.inf]])))
    for row, others in ((e, 1), (many, 2)):
        right = -math.log1p(others * math.exp(-far))
        assert row.lo[0, 0] <= right <= row.hi[0, 0] and row.hi[0, 0] - row.lo[0, 0] <= 1e-12 * -right
        right -= far
        assert row.lo[0, 1] <= right <= row.hi[0, 1] and row.hi[0, 1] - row.lo[0, 1] <= 2e-14 * -right


def test_real_shares_are_as_narrow_as_fp64() -> None:
    x = torch.tensor([[0.5, -1.0, 3.0, 2.0]])
    right = torch.softmax(x.double(), -1)
    with using(REAL):
        e, logs = softmax(Enclosure.point(x)), log_sum_exp(Enclosure.point(x))
    assert ((e.lo < right) & (right < e.hi) & (e.hi - e.lo < 5e-14 * right)).all()
    whole = torch.logsumexp(x.double(), -1, keepdim=True)
    assert ((logs.lo < whole) & (whole < logs.hi) & (logs.hi - logs.lo < 2e-14 * whole)).all()


@pytest.mark.parametrize(
    ("terms", "units"), [(1, 1), (2, 2 + 6), (3, 3 + 12), (4, 4 + 12), (5, 5 + 18), (1000, 1000 + 60)]
)
def test_what_rescaling_adds_to_the_height_of_a_sum(terms: int, units: int) -> None:
    """u for each term, and 6u for each of log2 n times that parts are joined: 4u of exp, a product, an addition."""
    assert rescaled_accumulation(terms) == pytest.approx(units * U / (1 - units * U), rel=1e-9)
    with using(Premises(depth=lambda count: 3)):
        assert rescaled_accumulation(terms) == pytest.approx(min(units, 24) * U / (1 - min(units, 24) * U), rel=1e-9)


def test_a_sum_of_too_many_terms_has_no_bound() -> None:
    assert rescaled_accumulation(2**24 - 200) < math.inf == rescaled_accumulation(2**24)


def test_rescaling_costs_as_much_as_the_height_or_less() -> None:
    any_order = rescaled_accumulation(4096)
    assert 4096 * 2.0**-24 < any_order < 1.03 * 4096 * 2.0**-24
    with using(Premises(depth=lambda terms: 12)):
        assert rescaled_accumulation(4096) < 0.03 * any_order
    with using(Premises(exact_sums=True)):
        assert rescaled_accumulation(4096) == 2.0**-24


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="empty='none' is none of"):
        softmax(Enclosure.point(torch.zeros(1, 1)), empty="none")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no elements"):
        softmax(Enclosure.point(torch.zeros(1, 0)))
