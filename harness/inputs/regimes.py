"""Regimes: named ways to make the values of a floating-point tensor.

A regime is a function from a `DrawnBlock` to fp64 values. To give the same bits on every device and torch version, it
uses integer operations and single fp64 operations that IEEE 754 rounds correctly (+ − × ÷), and nothing else: no exp,
log or sums over elements. A divisor is a tensor, because torch on CUDA multiplies by the reciprocal of a scalar one.

Regimes of the factors of dots: sums of their products keep a scale of one, or are exact in fp32 in any order.
With x `few`, gate weights `fractions`, their adapters `fractions` and `quarters`, up weights `integers` or `signs` and
down weights `sparse_signs`, a whole mixture of experts is exact up to its roundings, which all are visible in bf16 and
fp16: from a width of about 64 on, nearly all gates lie above 17.33, where the sigmoid is 1, and they need more bits
than the format has.

Regimes of one sign: the terms of a dot share a sign, because the tensors of a case share signs per index.
Where all terms have one sign, Σ|t| = |Σt|, and the bound of a sum in any order is a relative one: in bf16 most results
of long dots then have one legal value. A label names one random sign per index, the same for every tensor of the case
that names it. With x `one_sign(,hidden)` and W `one_sign_fan_in(gate,hidden)` each term of x · Wᵀ has the sign of its
row of W, and half of the results are negative.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lastbit.errors import UsageError
from lastbit.inputs.draws import DrawnBlock
from lastbit.inputs.integer_regimes import kept

# Elements of a row that are kept, on average. Arbitrary: several, among many zeros.
_FEW = 8


def fan_in(block: DrawnBlock) -> Tensor:
    """Draw normal values divided by the root of the width: dots of such rows with normal ones have variance 1."""
    return block.normal(block.elements) / torch.full_like(block.elements, math.sqrt(block.width), dtype=torch.float64)


def few(block: DrawnBlock) -> Tensor:
    """Draw integers from 1 to 4 in about eight columns of each row, whatever the width, and zeros."""
    kept = block.integers(block.elements, 0, max(1, block.width // _FEW) - 1, "kept") == 0
    return torch.where(kept, block.integers(block.elements, 1, 4), 0).to(torch.float64)


def fractions(block: DrawnBlock) -> Tensor:
    """Draw multiples of 2**-8 between 0 and 1, both excluded."""
    return block.integers(block.elements, 1, 255).to(torch.float64) * 2.0**-8


def quarters(block: DrawnBlock) -> Tensor:
    """Draw 0, 0.25, 0.5 or 0.75."""
    return block.integers(block.elements, 0, 3).to(torch.float64) * 0.25


def sparse_signs(block: DrawnBlock) -> Tensor:
    """Draw 1 or -1 in one column of sixteen, but about four per row at least, and zeros."""
    kept = block.integers(block.elements, 0, max(1, min(16, block.width // 4)) - 1, "kept") == 0
    return torch.where(kept, block.signs(block.elements), 0.0)


_LABELS = r"(?:[A-Za-z_]\w*(?:\*[A-Za-z_]\w*)*)?"
_CALL = re.compile(rf"(?P<word>\w+)\((?P<rows>{_LABELS}),(?P<columns>{_LABELS})\)$")
# The mean of the magnitudes of `one_sign`: from 0.25 to 1.25.
_MEAN = 0.75


def one_sign(block: DrawnBlock) -> Tensor:
    """Draw magnitudes uniform in [0.25, 1.25), all positive."""
    return block.uniform(block.elements) + 0.25


def one_sign_fan_in(block: DrawnBlock) -> Tensor:
    """Draw positive magnitudes that vary fivefold, as do their rows, divided by the width: dots keep a size of one."""
    scale = (block.uniform(block.rows, "scale") + 0.25) * 2
    return one_sign(block) * scale / torch.full_like(block.elements, _MEAN * block.width, dtype=torch.float64)


POSITIVE: Mapping[str, Callable[[DrawnBlock], Tensor]] = {r.__name__: r for r in (one_sign, one_sign_fan_in)}
"""Name → regime of positive values, to which labels give signs."""

SIGNED: Mapping[str, str] = {
    f"{name}(ROWS,COLUMNS)": f"As {name}, with a sign per row and column that tensors share by labels such as gate*up."
    for name in POSITIVE
}
"""How a regime with signs is written → one-line description."""


def signed(name: str) -> Callable[[DrawnBlock], Tensor] | None:
    """Return the regime `WORD(ROWS,COLUMNS)`: `WORD` times the signs of the labels of an element's row and column.

    A row counts within its matrix, the last two dimensions. Labels are joined by `*`; without one the sign is plus.

    Raises:
        UsageError: a word that takes labels is followed by something else.
    """
    word, parenthesis, _ = name.partition("(")
    if not parenthesis or word not in POSITIVE:
        return None
    match = _CALL.match(name)
    if match is None:
        raise UsageError(
            f"cannot read regime {name!r}: expected {word}(ROWS,COLUMNS), where either is empty or labels joined by *, "
            f"as in {word}(gate*up,hidden)"
        )
    rows, columns = (match[part].split("*") if match[part] else [] for part in ("rows", "columns"))

    def with_signs(block: DrawnBlock) -> Tensor:
        values = POSITIVE[word](block)
        for index, labels in ((block.rows_of_matrix, rows), (block.columns, columns)):
            for label in labels:
                values = values * block.shared.signs(index, label)
        return values

    return with_signs


Regime = Callable[[DrawnBlock], Tensor]


def normal(block: DrawnBlock) -> Tensor:
    """Draw normal values, mean 0 and variance 1."""
    return block.normal(block.elements)


def uniform(block: DrawnBlock) -> Tensor:
    """Draw uniform values in [-1, 1)."""
    return block.uniform(block.elements) * 2 - 1


def rows(block: DrawnBlock) -> Tensor:
    """Draw normal rows of scales from 2**-14 to 2**6; three in ten have a mean of two standard deviations."""
    scale = block.powers(block.rows, -14, 5) * (1 + block.uniform(block.rows, "mantissa"))
    shifted = block.uniform(block.rows, "shifted") < 0.3  # a share that most cases have; other rows have no mean
    mean = torch.where(shifted, 2 * block.signs(block.rows), 0.0)
    return (block.normal(block.elements) + mean) * scale


def tiny(block: DrawnBlock) -> Tensor:
    """Draw normal values times 1e-4: an eps of 1e-6 or more dominates their squares."""
    return block.normal(block.elements) * 1e-4


def tiniest(block: DrawnBlock) -> Tensor:
    """Draw normal values times 1e-8: eps alone decides, and fp16 keeps hardly anything."""
    return block.normal(block.elements) * 1e-8


def outlier(block: DrawnBlock) -> Tensor:
    """Draw normal values with one column, the same in all rows, a thousand times larger."""
    column = block.column(block.whole, "integers")
    values = block.normal(block.elements)
    return torch.where(block.columns == column, values * 1000, values)


def outlier_last(block: DrawnBlock) -> Tensor:
    """Draw normal values with the last column a thousand times larger."""
    values = block.normal(block.elements)
    return torch.where(block.columns == block.width - 1, values * 1000, values)


def offset(block: DrawnBlock) -> Tensor:
    """Draw rows whose mean (1 to 2, either sign) is 8 to 2048 times their standard deviation."""
    mean = (1 + block.uniform(block.rows)) * block.signs(block.rows)
    return mean + block.normal(block.elements) * block.powers(block.rows, -10, -3)


def lattice(block: DrawnBlock) -> Tensor:
    """Draw small integers times one power of two: sums of squares over a row are exact in fp32 in any order."""
    limit = min(math.isqrt(2**24 // block.width) - 1, 2**block.fmt.precision)
    if limit < 1:
        raise UsageError(
            f"regime 'lattice' of tensor {block.name!r}: {block.width} squares of integers do not sum exactly in fp32"
        )
    integers = block.integers(block.elements, -limit, limit).to(torch.float64)
    return integers * block.powers(block.whole, -4, 3)


def zero_rows(block: DrawnBlock) -> Tensor:
    """Mix rows of three kinds: all zero, one constant, and normal."""
    kind = block.integers(block.rows, 0, 2)
    constants = torch.where(kind == 0, 0.0, block.normal(block.rows, "constant"))
    return torch.where(kind == 2, block.normal(block.elements), constants)


def constant(block: DrawnBlock) -> Tensor:
    """Draw one normal value per row, repeated."""
    return block.normal(block.rows) + torch.zeros_like(block.columns, dtype=torch.float64)


def pow2(block: DrawnBlock) -> Tensor:
    """Draw powers of two from 2**-6 to 2**7, either sign."""
    return block.powers(block.elements, -6, 7) * block.signs(block.elements)


def subnormal(block: DrawnBlock) -> Tensor:
    """Draw nonzero subnormal numbers of the tensor's format, either sign."""
    largest = 2 ** (block.fmt.precision - 1) - 1
    fraction = block.uniform(block.elements) * min(largest, 2**52)
    return (torch.floor(fraction) + 1) * block.fmt.quantum * block.signs(block.elements)


def huge(block: DrawnBlock) -> Tensor:
    """Draw rows up to the largest finite number: squares overflow fp32 (fp32, bf16) or their own format (fp16, fp8)."""
    top = math.frexp(block.fmt.max)[1] - 1
    scale = block.powers(block.rows, top // 2 if top > 64 else top - 3, top)  # 64: half of fp32's and bf16's 127
    magnitude = (1 + block.uniform(block.elements)) * scale
    return magnitude.clamp(max=block.fmt.max) * block.signs(block.elements)


def largest(block: DrawnBlock) -> Tensor:
    """Draw numbers from half of the largest finite one up to it, either sign: two of one sign overflow the format."""
    magnitude = (0.5 + 0.5 * block.uniform(block.elements)) * block.fmt.max
    return magnitude * block.signs(block.elements)


def special(block: DrawnBlock) -> Tensor:
    """Draw normal values; one row with inf, one with -inf, one with NaN, one with both infinities (from 8 rows on)."""
    period = max(block.height, 8)
    position = (block.rows + block.integers(block.whole, 0, min(period, 2**31) - 1, "shift")) % period
    spaced = position % (period // 4) == 0
    kind = torch.where(spaced, position // (period // 4), 4)
    column = block.column(block.rows)
    here, next_to = block.columns == column, block.columns == (column + 1) % block.width
    values = block.normal(block.elements)
    for number, place, value in (
        (0, here, math.inf),
        (1, here, -math.inf),
        (2, here, math.nan),
        (3, here, math.inf),
        (3, next_to, -math.inf),
    ):
        values = torch.where((kind == number) & place, value, values)
    return values


def special_columns(block: DrawnBlock) -> Tensor:
    """Draw normal values; NaN in one column, the same in all rows, inf and -inf in the two after it, -0 in the next."""
    first = block.column(block.whole)
    values = block.normal(block.elements)
    for place, value in enumerate((-0.0, -math.inf, math.inf, math.nan)):  # NaN last: it stays where columns are few
        values = torch.where(block.columns == (first + 3 - place) % block.width, value, values)
    return values


def masked_classes(block: DrawnBlock) -> Tensor:
    """Draw normal values; half of the rows have -inf before some column, others after it, as masked classes have."""
    column = block.column(block.rows)
    before = block.integers(block.rows, 0, 1, "before") == 0
    hidden = torch.where(before, block.columns - column, column - block.columns) < 0
    return torch.where(hidden, -math.inf, block.normal(block.elements))


def sparse(block: DrawnBlock) -> Tensor:
    """Draw one normal value in sixteen, and zeros."""
    kept = block.integers(block.elements, 0, 15) == 0
    return torch.where(kept, block.normal(block.elements), 0.0)


def masked(block: DrawnBlock) -> Tensor:
    """Draw 0, or normal values, to be added to scores; -inf or the lowest finite number where `spans` is false."""
    added = torch.where(block.integers(block.rows, 0, 1, "added") == 0, 0.0, block.normal(block.elements))
    finite = block.integers(block.rows, 0, 1, "lowest") == 0
    lowest = torch.where(finite, added * 0.0 - block.fmt.max, -math.inf)
    return torch.where(kept(block), added, lowest)


def near_one(block: DrawnBlock) -> Tensor:
    """Draw 1 plus normal values times 0.1, as trained norm weights are."""
    return 1 + block.normal(block.elements) * 0.1


def ones(block: DrawnBlock) -> Tensor:
    """Fill with 1."""
    return torch.ones_like(block.elements, dtype=torch.float64)


def zeros(block: DrawnBlock) -> Tensor:
    """Fill with 0."""
    return torch.zeros_like(block.elements, dtype=torch.float64)


def signs(block: DrawnBlock) -> Tensor:
    """Draw 1 or -1."""
    return block.signs(block.elements)


def small(block: DrawnBlock) -> Tensor:
    """Draw uniform values in (-2**-8, 2**-8), as weights that are added to one."""
    return (block.uniform(block.elements) * 2 - 1 + 2.0**-53) * 2.0**-8


def gates(block: DrawnBlock) -> Tensor:
    """Draw normal values times a power of two from 2**-6 to 2**7, either sign: sigmoids from 0 over the middle to 1."""
    return block.normal(block.elements) * block.powers(block.elements, -6, 7)


def saturated(block: DrawnBlock) -> Tensor:
    """Draw integers from 18 to 24, whose sigmoid is 1 in fp32, so that z · sigmoid(z) is z itself."""
    return block.integers(block.elements, 18, 24).to(torch.float64)


def integers(block: DrawnBlock) -> Tensor:
    """Draw integers from -8 to 8: sums of products of several such factors are exact in fp32 in any order."""
    return block.integers(block.elements, -8, 8).to(torch.float64)


def scale_pow2(block: DrawnBlock) -> Tensor:
    """Draw a quantization scale that is a power of two, 2**-8 to 2**2: quotients are exact, so ties occur."""
    return block.powers(block.elements, -8, 2)


def scale_amax(block: DrawnBlock) -> Tensor:
    """Draw a quantization scale u/448, u in [1, 8] of 8 bits, as the largest magnitude in bf16: codes fall on ties."""
    amax = block.integers(block.elements, 32, 256).to(torch.float64) * 2.0**-5
    return amax / torch.full_like(amax, 448.0)


def scale_odd(block: DrawnBlock) -> Tensor:
    """Draw a quantization scale of 3, 5 or 7 times a power of two: multiples fall on ties, and 1 / scale is rounded."""
    return (2 * block.integers(block.elements, 1, 3) + 1).to(torch.float64) * block.powers(block.elements, -10, -1)


def scale_random(block: DrawnBlock) -> Tensor:
    """Draw a quantization scale from 2**-8 to 2**2, no power of two."""
    return block.powers(block.elements, -8, 1) * (1 + block.uniform(block.elements))


def scale_overflow(block: DrawnBlock) -> Tensor:
    """Draw a quantization scale from 2**-11 to 2**-10: most normal values divided by it exceed 448."""
    return 2.0**-11 * (1 + block.uniform(block.elements))


REGIMES: Mapping[str, Regime] = {
    regime.__name__: regime
    for regime in (
        *(normal, uniform, rows, tiny, tiniest, outlier, outlier_last, offset, lattice, zero_rows, constant, pow2),
        *(subnormal, huge, largest, special, special_columns, masked, masked_classes, sparse),
        *(near_one, ones, zeros, signs, small, gates, saturated, integers),
        *(scale_pow2, scale_amax, scale_odd, scale_random, scale_overflow),
        *(fan_in, few, fractions, quarters, sparse_signs),
        *POSITIVE.values(),
    )
}
"""Name → function of every regime for floating-point tensors."""
