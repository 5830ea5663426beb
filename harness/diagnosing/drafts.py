"""A case with the elements of its tensors, of which some can be left out or replaced; its line lists what remains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lastbit.case import Case
from lastbit.inputs import bits_of, build
from lastbit.inputs.given import MOST_GIVEN, given, is_given
from lastbit.verify.shrink import Place, Places, in_shape, sizes_of


@dataclass(frozen=True, eq=False)
class Draft:
    """A case and its elements.

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
        """A case as it is."""
        tensors = build(case.gathered(), "cpu").tensors
        values = {name: tensor.contiguous() for name, tensor in tensors.items()}
        few = {name: tensor for name, tensor in values.items() if tensor.numel() <= MOST_GIVEN}
        listed = cls(case, values, sizes_of(case)).with_values(few)
        assert listed is not None
        return listed

    def with_values(self, values: Mapping[str, Tensor]) -> Draft | None:
        """The case with other elements in some tensors; None where they are too many for a line."""
        if any(tensor.numel() > MOST_GIVEN for tensor in values.values()):
            return None
        specs = {name: in_shape(self.case[name], tuple(tensor.shape)) for name, tensor in values.items()}
        specs |= {name: replace(spec, regime=given(values[name])) for name, spec in specs.items()}
        tensors = tuple(specs.get(spec.name, spec) for spec in self.case.tensors)
        seed = 0 if all(is_given(spec.regime) for spec in tensors) else self.case.seed
        return replace(self, case=replace(self.case, tensors=tensors, seed=seed), values={**self.values, **values})

    def without(self, left_out: Case) -> Draft:
        """The draft of a case that has no other elements, and perhaps fewer tensors and parameters."""
        names = left_out.names
        values = {name: tensor for name, tensor in self.values.items() if name in names}
        return Draft(left_out, values, {place: size for place, size in self.sizes.items() if place[0] in names})

    def cut(self, places: Places, parts: int, kept: Sequence[int]) -> Draft | None:
        """The case with those of so many equal `parts` of each place that are kept; None as in `with_values`.

        Numbers that count the parts are those of the parts that remain, and where theirs does not, of any.
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
            values[name] = _counted_anew(tensor, indices) if dim == 1 else _selected(tensor, dim, indices)
        return replace(self, case=replace(self.case, params=params), sizes=sizes).with_values(values)


def _selected(tensor: Tensor, dim: int, indices: Sequence[int]) -> Tensor:
    return bits_of(tensor).index_select(dim, torch.tensor(indices)).view(tensor.dtype)


def _counted_anew(numbers: Tensor, kept: Sequence[int]) -> Tensor:
    """Numbers of things of which some are kept, as numbers among these; what is no number of any stays so."""
    places = {index: place for place, index in enumerate(kept)}
    return torch.tensor(
        [places.get(int(n), int(n) % len(kept)) if n >= 0 else int(n) for n in numbers.flatten()], dtype=numbers.dtype
    ).view(numbers.shape)
