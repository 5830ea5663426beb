"""Values that stand in the case line: the regime `values(V,V,…)` lists the elements in row-major order.

A number is written as the shortest decimal that stands for it in fp64: `1.5`, `-0`, `1e-30`. It must be a number of the
tensor's dtype, so that nothing is rounded in silence. Infinities are `inf` and `-inf`, truth values `True` and `False`.
`nan` is the one NaN of values; `0x7fc1` gives the bits of any element, as wide as its dtype.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from lastbit.case import TensorSpec
from lastbit.dtypes import DTYPE_NAMES
from lastbit.errors import UsageError
from lastbit.inputs.bits import INTEGER_OF_SIZE, NAN_BITS, bits_of
from lastbit.inputs.guards import integer_of
from lastbit.numerics.formats import FP64, cast, format_of, round_to

# A line of some 60 KB; a longer one is read by nobody, and a file of tensors holds more.
MOST_GIVEN = 4096
"""Elements of a tensor whose values a line can hold."""

_LIST = re.compile(r"values\((?P<words>[^()]*)\)")
_DECIMAL = re.compile(r"[+-]?([0-9]{1,400}\.?[0-9]{0,400}|\.[0-9]{1,400})([eE][+-]?[0-9]{1,5})?|[+-]?inf|nan")
_INTEGER = re.compile(r"[+-]?[0-9]{1,40}")
_BITS = re.compile(r"0x[0-9a-fA-F]{1,16}")


def is_given(regime: str) -> bool:
    """Return whether `regime` lists values (perhaps wrongly spelled)."""
    return regime == "values" or regime.startswith("values(")


def given(tensor: Tensor) -> str:
    """Return the regime that lists the elements of `tensor`, bit for bit.

    Raises:
        UsageError: there are more than `MOST_GIVEN`.
    """
    if tensor.numel() > MOST_GIVEN:
        raise UsageError(f"a case line holds {MOST_GIVEN:,} values of a tensor at most, and not {tensor.numel():,}")
    elements = tensor.detach().flatten().cpu()
    return f"values({','.join(map(str, _words(elements)))})"


def fill_given(target: Tensor, spec: TensorSpec) -> None:
    """Copy the values that `spec.regime` lists into `target`, which may have size 1 where `spec` has stride 0."""
    values = _bits_of(spec).reshape(spec.shape)[tuple(slice(0, size) for size in target.shape)]
    bits_of(target).copy_(values.view(target.shape))


def check_given(spec: TensorSpec) -> None:
    """Raise a `UsageError` unless `spec.regime` lists a value of its dtype for each element, equal ones where it must.

    These are the elements along a stride of 0, which are one in memory.
    """
    bits = _bits_of(spec).reshape(spec.shape)
    for dim, (size, stride) in enumerate(zip(spec.shape, spec.element_strides, strict=True)):
        if size > 1 and stride == 0 and not torch.equal(bits, bits.narrow(dim, 0, 1).expand_as(bits)):
            raise UsageError(
                f"tensor {spec.name!r} has stride 0 in dimension {dim}, so the {size} values along it are one in "
                f"memory, but {_quoted(spec.regime)} gives different ones"
            )


def _words(elements: Tensor) -> list[object]:
    """Return the words that stand for the elements in a case line."""
    dtype = elements.dtype
    if not dtype.is_floating_point:
        return list(elements.tolist())
    mask = (1 << 8 * dtype.itemsize) - 1
    numbers = (elements if dtype is torch.float64 else elements.to(torch.float32)).tolist()
    words: list[object] = []
    for number, own in zip(numbers, bits_of(elements).tolist(), strict=True):
        other_nan = math.isnan(number) and own & mask != NAN_BITS[dtype]
        words.append(hex(own & mask) if other_nan else repr(number).removesuffix(".0"))
    return words


def _bits_of(spec: TensorSpec) -> Tensor:
    """Return the bits of the elements in logical order, in the integers of their size; not to be changed."""
    try:
        return _read(spec.regime, spec.torch_dtype, spec.numel)
    except UsageError as error:
        raise UsageError(f"tensor {spec.name!r}: {error}") from error


@functools.lru_cache(maxsize=256)
def _read(regime: str, dtype: torch.dtype, count: int) -> Tensor:
    found = _LIST.fullmatch(regime)
    if found is None:
        raise UsageError(
            f"cannot read regime {_quoted(regime)}: expected values(V,V,…), the elements in row-major order, no blanks"
        )
    words = found["words"].split(",") if found["words"] else []
    if max(count, len(words)) > MOST_GIVEN:
        many = f"{max(count, len(words)):,}"
        raise UsageError(f"values(…) lists {MOST_GIVEN:,} elements at most, and not {many}: use captured(PATH#KEY)")
    if len(words) != count:
        raise UsageError(f"{_quoted(regime)} lists {len(words):,} values for {count:,} elements; give one for each")
    decimal = [dtype.is_floating_point and word != "nan" and bool(_DECIMAL.fullmatch(word)) for word in words]
    others = [0 if decimal[place] else _bits(word, place + 1, dtype) for place, word in enumerate(words)]
    bits = torch.tensor([integer_of(own, dtype.itemsize) for own in others], dtype=INTEGER_OF_SIZE[dtype.itemsize])
    return torch.where(torch.tensor(decimal), _bits_of_decimals(words, decimal, dtype), bits) if any(decimal) else bits


def _bits(word: str, place: int, dtype: torch.dtype) -> int:
    """Return the bits of an element, as an integer that is not negative."""
    width = 8 * dtype.itemsize
    if _BITS.fullmatch(word):
        bits, digits = int(word, 16), 1 if dtype is torch.bool else 2 * dtype.itemsize
        if len(word) - 2 > digits or (dtype is torch.bool and bits > 1):
            raise UsageError(f"{word} (value {place}) has more bits than {DTYPE_NAMES[dtype]} does")
        if len(word) - 2 < digits:
            asked = f"the bits of {DTYPE_NAMES[dtype]} are 0x{bits:0{digits}x}, {digits} digits"
            raise UsageError(f"{word} (value {place}) is too short: {asked}")
        return bits
    if dtype is torch.bool:
        if word not in ("True", "False"):
            raise _unreadable(word, place, "True or False")
        return int(word == "True")
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        if not _INTEGER.fullmatch(word):
            raise _unreadable(word, place, "an integer, or the bits of the element as in 0x7f")
        if not info.min <= (value := int(word)) <= info.max:
            raise UsageError(
                f"{DTYPE_NAMES[dtype]} has no {word} (value {place}); give an integer from {info.min} to {info.max}"
            )
        return value % (1 << width)
    if word != "nan":
        raise _unreadable(word, place, "a decimal, inf, -inf, nan, or the bits of the element as in 0x7fc1")
    return NAN_BITS[dtype]


def _bits_of_decimals(words: Sequence[str], decimal: Sequence[bool], dtype: torch.dtype) -> Tensor:
    """Return the bits of the numbers that are written as decimals, as integers of their size; of others, zero."""
    numbers = [float(word) if d else 0.0 for word, d in zip(words, decimal, strict=True)]
    wanted = torch.tensor(numbers, dtype=torch.float64)
    stored = cast(wanted, dtype)
    inexact = (stored if dtype is torch.float64 else stored.float()).double().ne(wanted).tolist()
    for place, word in enumerate(words):
        if decimal[place] and (inexact[place] or _is_lost(word, numbers[place])):
            raise UsageError(f"{DTYPE_NAMES[dtype]} has no {word} (value {place + 1}); {_near(numbers[place], dtype)}")
    return bits_of(stored)


def _is_lost(word: str, number: float) -> bool:
    """Return whether fp64 has made an infinity or a zero of another number."""
    if not number:
        return bool(re.search("[1-9]", re.split("[eE]", word)[0]))
    return math.isinf(number) and "inf" not in word


def _near(number: float, dtype: torch.dtype) -> str:
    """Return, in words, the numbers that could be written in place of one; a dtype without infinities has a largest."""
    fmt = format_of(dtype)
    inner = torch.tensor([min(abs(number), fmt.max)], dtype=torch.float64)
    bits = bits_of(cast(inner if fmt is FP64 else round_to(inner, fmt.toward("zero")), dtype))
    inward, outward = map(str, _words(torch.cat([bits, bits + 1]).view(dtype)))
    low, high = (inward, outward) if math.copysign(1, number) > 0 else (f"-{outward}", f"-{inward}")
    if high == "nan":
        return f"its largest number is {low}"
    return f"its least number is {high}" if low == "-nan" else f"its neighbours are {low} and {high}"


def _unreadable(word: str, place: int, expected: str) -> UsageError:
    return UsageError(f"cannot read {_quoted(word)} (value {place}): expected {expected}")


def _quoted(text: str) -> str:
    """Return `text` for a message, which quotes no more of a long one than its beginning."""
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")


# Half a line of a terminal, beside the sentence that it stands in.
_SHOWN = 60
