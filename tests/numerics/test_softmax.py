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
