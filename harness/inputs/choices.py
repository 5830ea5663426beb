"""The choices of the cases of an op: dtype, regime and layout of every tensor, and values of parameters.

Options have names, so that a design can see to it that each of them is judged, and a report can say which were not:

    choices = {**tensor_choices("x", ("bf16",), ("normal", "rows"), row_layouts(64)), "eps": (1e-6, 1e-5)}
    x = chosen_tensor("x", chosen, shape)        # chosen: name of a choice → one of its options

A choice of a tensor is called `x dtype`, `x regime`, `x layout` or `x columns % 64`, a parameter's as the parameter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple, Self

from lastbit.case import Case, Choices, Chosen, Group, Option, TensorSpec
from lastbit.errors import UsageError, unknown
from lastbit.inputs.layouts import LAYOUTS, applicable_layouts, contiguous, layout_of

DRAWN = "drawn"
"""The option of a parameter whose value is drawn; None is the option to leave it out."""

_LEADING = ((1,), (2,), (2, 2))
"""Shapes of rows, the first of which a layout applies to says what it needs."""

_NUMBER = re.compile(r"_\d+$")
_WHAT = re.compile(r"dtype|regime|layout|columns % [1-9]\d*")


class Residue(int):
    """The remainder of sizes divided by a modulus, and the sizes that are meant.

    Attributes:
        sizes: a range of all that a group of cases has, or a tuple of those that a kernel takes.
    """

    sizes: Sequence[int]

    def __new__(cls, value: int, sizes: Sequence[int] = range(0)) -> Self:
        made = super().__new__(cls, value)
        made.sizes = sizes
        return made

    def among(self, taken: Collection[object]) -> Residue | None:
        """Return the residue with those of its sizes that are in `taken`; None if there are none."""
        left = tuple(size for size in self.sizes if size in taken)
        return Residue(self, left) if left else None


def tensor_choices(
    name: str, dtypes: Sequence[str], regimes: Sequence[str], layouts: Sequence[str] = ("contiguous",)
) -> dict[str, tuple[Option, ...]]:
    """Return the choices of a tensor; `below_N` stands for a regime with any number.

    >>> tensor_choices("x", ("bf16", "fp16"), ("normal", "special"), ("contiguous", "transposed"))
    {'x dtype': ('bf16', 'fp16'), 'x regime': ('normal', 'special'), 'x layout': ('contiguous', 'transposed')}
    """
    chosen = {"dtype": dtypes, "regime": regimes, "layout": layouts}
    return {f"{name} {what}": tuple(dict.fromkeys(options)) for what, options in chosen.items()}


def check_choices(group: Group, inputs: Collection[str], params: Collection[str]) -> None:
    """Raise `UsageError` unless the choices of a group are ones of an op with these tensors and parameters."""
    if group.choices and not callable(group.strategy):
        raise UsageError(f"group {group.name!r} has choices, but its strategy is no function of what is chosen")
    declared: Mapping[str, object] = group.choices
    for choice, options in declared.items():
        where = f"choice {choice!r} of group {group.name!r}"
        name, _, what = str(choice).partition(" ")
        if not what and name not in params:
            raise unknown(f"{where}: parameter", name, params)
        if what and name not in inputs:
            raise unknown(f"{where}: tensor", name, inputs)
        if what and not _WHAT.fullmatch(what):
            raise UsageError(f"{where} must be 'T dtype', 'T regime', 'T layout' or 'T columns % N' of a tensor T")
        if what in ("regime", "layout") and f"{name} dtype" not in group.choices:
            raise UsageError(f"{where} needs the choice '{name} dtype': its options count by dtype")
        if not isinstance(options, tuple | list) or not options:
            raise UsageError(f"{where} has the options {options!r}; give a tuple of one or more")
        if wrong := [o for o in options if not isinstance(o, bool | int | float | str | None) or o != o]:
            raise UsageError(f"{where}: option {wrong[0]!r} must be a number, True, False, a word or None")
        if len(set(options)) < len(options):
            raise UsageError(f"{where} has options that are equal: {options!r}")
        if what == "layout" and (other := [o for o in options if o not in LAYOUTS]):
            raise unknown(f"{where}: layout", str(other[0]), LAYOUTS)


def chosen_tensor(name: str, chosen: Chosen, shape: tuple[int, ...], number: int = 0) -> TensorSpec:
    """Return the tensor of that shape as chosen, with `number` for the N of its regime.

    It is contiguous where the layout means nothing for the shape.

    >>> str(chosen_tensor("x", {"x dtype": "bf16", "x regime": "special", "x layout": "every_second"}, (4, 128)))
    'x=bf16[4,128]@256,2:special'
    """
    if f"{name} dtype" not in chosen:
        raise unknown("tensor of the choices:", name, (choice.partition(" ")[0] for choice in chosen if " " in choice))
    dtype, regime, layout = (chosen[f"{name} {what}"] for what in ("dtype", "regime", "layout"))
    placed = LAYOUTS[layout](shape, dtype) or contiguous(shape, dtype)
    regime = f"{regime[:-1]}{number}" if regime.endswith("_N") else regime
    return TensorSpec(name, dtype, shape, placed.strides, placed.offset, regime)


def layouts_like(*shape: int) -> tuple[str, ...]:
    """Return the names of the layouts that apply to a shape."""
    return tuple(layout.name for layout in applicable_layouts(shape, "bf16"))


def row_layouts(most: int) -> tuple[str, ...]:
    """Return the names of the layouts of tensors of rows, of which there may be `most`."""
    return layouts_like(*next(rows for rows in reversed(_LEADING) if math.prod(rows) <= max(most, 1)), 64)


def least_rows(chosen: Chosen) -> tuple[int, ...]:
    """Return the smallest leading dimensions to which every chosen layout applies."""
    layouts = {str(option) for choice, option in chosen.items() if choice.endswith(" layout")}
    fitting = (rows for rows in _LEADING if all(LAYOUTS[layout]((*rows, 64), "bf16") for layout in layouts))
    return next(fitting, _LEADING[-1])


def residues(narrow: int, wide: int, modulus: int = 64) -> tuple[Residue, ...]:
    """Return the remainders of `narrow` to `wide` columns after division by `modulus`, for `x columns % 64`.

    >>> residues(6, 9, modulus=8)
    (0, 1, 6, 7)
    """
    first = range(narrow, min(wide, narrow + modulus - 1) + 1)
    return tuple(sorted(Residue(width % modulus, range(width, wide + 1, modulus)) for width in first))


class Feature(NamedTuple):
    """An option of a choice; of regimes and layouts, with the dtype of their tensor."""

    choice: str
    option: Option
    dtype: str = ""


def features(chosen: Chosen) -> Iterator[Feature]:
    """Yield the features of a case with these options; a dtype counts with the other choices of its tensor."""
    for choice, option in chosen.items():
        if not choice.endswith(" dtype"):
            yield Feature(choice, option, "" if option is None else dtype_of(choice, chosen))


def dtype_of(choice: str, chosen: Chosen) -> str:
    """Return the dtype that was chosen for the tensor of a choice; empty if its options count without one."""
    dtype = _dtype_of(choice)
    return str(chosen[dtype]) if dtype else ""


def all_features(choices: Choices) -> Iterator[Feature]:
    """Yield the features that cases which choose from these can have."""
    for choice, options in choices.items():
        if not choice.endswith(" dtype"):
            dtypes = choices[_dtype_of(choice)] if _dtype_of(choice) else ("",)
            pairs = ((dtype, option) for dtype in dtypes for option in options)
            yield from (Feature(choice, option, "" if option is None else str(dtype)) for dtype, option in pairs)


@cache
def _dtype_of(choice: str) -> str:
    """Return the dtype choice that belongs to `choice`; empty if its options count without a dtype."""
    tensor, _, what = choice.partition(" ")
    return f"{tensor} dtype" if what in ("regime", "layout") else ""


def features_of(case: Case, choices: Choices) -> Iterator[Feature]:
    """Yield the features that a case has among these choices, read off its line."""
    tensors = {tensor.name: tensor for tensor in case.tensors}
    for choice, options in choices.items():
        name, _, what = choice.partition(" ")
        if what == "dtype" or (what and name not in tensors and None not in options):
            continue
        tensor, option = tensors.get(name), case.params.get(name)
        if not what:
            option = DRAWN if option is not None and option not in options and DRAWN in options else option
        elif tensor is None:
            option = None
        elif what == "layout":
            option = layout_of(tensor)
        elif what == "regime":
            option = tensor.regime if tensor.regime in options else kind_of_regime(tensor.regime)
        else:
            option = tensor.shape[-1] % int(what.rpartition(" ")[2])
        dtype = tensor.dtype if tensor is not None and _dtype_of(choice) else ""
        yield Feature(choice, option, dtype)


def kind_of_regime(regime: str) -> str:
    """Return the regime with N for the number in it, and without its arguments in parentheses."""
    return _NUMBER.sub("_N", regime.partition("(")[0])
