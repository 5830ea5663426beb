"""Drafts: cases whose tensors can be cut and their elements replaced; the case line lists the elements that remain.

Plainer numbers are one, zero, a power of two, a short significand, a small integer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lastbit.case import Case
from lastbit.inputs import bits_of, build
from lastbit.inputs.given import MOST_GIVEN, given, is_given
from lastbit.verify.shrink import Place, Places, in_shapes, sizes_of

# Up to bf16's 8 one by one where it matters to a reader; 12 is beyond fp16.
_BITS = (1, 2, 3, 4, 6, 8, 12)  # of a significand


@dataclass(frozen=True, eq=False)
class Draft:
    """A case with the elements of its tensors.

    Attributes:
        case: the line lists the elements of every tensor that has few enough.
        values: name → elements in logical order, on the CPU.
        sizes: what can be cut, also where the line no longer says so: that the numbers of one tensor count another's
            rows.
    """

    case: Case
    values: Mapping[str, Tensor]
    sizes: Mapping[Place, int] = field(default_factory=dict)

    @classmethod
    def of(cls, case: Case) -> Draft:
        """Make a draft of an unchanged case."""
        tensors = build(case.gathered(), "cpu").tensors
        values = {name: tensor.contiguous() for name, tensor in tensors.items()}
        few = {name: tensor for name, tensor in values.items() if tensor.numel() <= MOST_GIVEN}
        listed = cls(case, values, sizes_of(case)).with_values(few)
        assert listed is not None
        return listed

    def with_values(self, values: Mapping[str, Tensor]) -> Draft | None:
        """Return the draft with other elements in some tensors; None if one has too many for a case line."""
        if any(tensor.numel() > MOST_GIVEN for tensor in values.values()):
            return None
        shaped = in_shapes(self.case, {name: tuple(tensor.shape) for name, tensor in values.items()})
        tensors = tuple(replace(t, regime=given(values[t.name])) if t.name in values else t for t in shaped.tensors)
        seed = 0 if all(is_given(spec.regime) for spec in tensors) else self.case.seed
        return replace(self, case=replace(self.case, tensors=tensors, seed=seed), values={**self.values, **values})

    def without(self, left_out: Case) -> Draft:
        """Return the draft of a case with the same elements but perhaps fewer tensors and parameters."""
        names = left_out.names
        values = {name: tensor for name, tensor in self.values.items() if name in names}
        return Draft(left_out, values, {place: size for place, size in self.sizes.items() if place[0] in names})

    def cut(self, places: Places, parts: int, kept: Sequence[int]) -> Draft | None:
        """Divide each place into `parts` equal parts and keep some of them; return None as in `with_values`.

        Numbers that refer to parts are renumbered; a reference to a part that was cut goes to any that remains.
        """
        values = dict[str, Tensor]()
        params, sizes = dict(self.case.params), dict(self.sizes)
        for name, dim in places:
            each = sizes[name, dim] // parts
            sizes[name, dim] = each * len(kept)
            if dim == 0:
                params[name] = sizes[name, dim]
                continue
            tensor, indices = values.get(name, self.values[name]), [k * each + i for k in kept for i in range(each)]
            if dim == 1:
                values[name] = _counted_anew(tensor, indices)
            else:
                values[name] = bits_of(tensor).index_select(dim, torch.tensor(indices)).view(tensor.dtype)
        return replace(self, case=replace(self.case, params=params), sizes=sizes).with_values(values)


def _counted_anew(numbers: Tensor, kept: Sequence[int]) -> Tensor:
    """Renumber references to things of which `kept` remain; one to a removed thing goes to another, negatives stay."""
    places = {index: place for place, index in enumerate(kept)}
    return torch.tensor(
        [places.get(int(n), int(n) % len(kept)) if n >= 0 else int(n) for n in numbers.flatten()], dtype=numbers.dtype
    ).view(numbers.shape)


def plainer_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield tensors of the same shape in which every number is plainer, the plainest first."""
    for number in (1, 0):
        yield torch.full_like(tensor, number, dtype=torch.float32).to(tensor.dtype)
    if tensor.is_floating_point():
        numbers = _numbers(tensor)
        for bits in _BITS:
            yield _like([_shortened(number, bits) for number in numbers], tensor)


def plainer_elements(tensor: Tensor, place: int) -> Iterator[Tensor]:
    """Yield tensors with a plainer number at one place in row-major order, the plainest first."""
    numbers = _numbers(tensor)
    number = numbers[place]
    found: list[float] = [1, 0]
    if math.isfinite(number) and tensor.is_floating_point():
        found += [*(_shortened(number, bits) for bits in _BITS), abs(number)]
    elif math.isfinite(number):
        found += [2, int(number) // 2]
    for other in dict.fromkeys(found):
        if _key(other) < _key(number):
            yield _like([*numbers[:place], other, *numbers[place + 1 :]], tensor)


def _key(number: float) -> tuple[float, float, bool]:
    """Return a sort key by plainness: few bits in the significand, magnitude near one, positive."""
    if not math.isfinite(number):
        return math.inf, 0.0, False
    if not number:
        return 1, 0.5, math.copysign(1, number) < 0
    fraction, exponent = math.frexp(float(abs(number)))
    bits = int(fraction * 2**53)
    return 53 - (bits & -bits).bit_length() + 1, abs(exponent - 1), number < 0


def _shortened(number: float, bits: int) -> float:
    if not math.isfinite(number) or not number:
        return number
    fraction, exponent = math.frexp(number)
    return math.ldexp(round(math.ldexp(fraction, bits)), exponent - bits)


def _numbers(tensor: Tensor) -> list[float]:
    narrow = tensor.is_floating_point() and tensor.dtype is not torch.float64
    numbers: list[float] = (tensor.float() if narrow else tensor).flatten().tolist()
    return numbers


def _like(numbers: list[float], tensor: Tensor) -> Tensor:
    """Make a tensor of these numbers with the shape and dtype of another; numbers of that dtype stay exact."""
    wide = torch.float64 if tensor.is_floating_point() else tensor.dtype
    return torch.tensor(numbers, dtype=wide).to(tensor.dtype).view(tensor.shape)
