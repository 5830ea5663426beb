"""lastbit: verifies numerical kernels to the last bit, against a rounding contract instead of a tolerance.

All that a reference, a kernel, cases or a test need is here, with enclosures in `harness.numerics` and relations
between calls in `harness.relations`. What `__all__` names stays as it is until a release that says otherwise.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from harness.errors import LastbitError, UnsupportedCase
from harness.kernel import kernel

__version__ = "0.1.0"

if TYPE_CHECKING:
    from harness import numerics, relations
    from harness.case import Case, Choices, Chosen, Group, Option, Param, TensorSpec, parse_case
    from harness.chains import Part, chain
    from harness.inputs import (
        DRAWN,
        LAYOUTS,
        chosen_tensor,
        cut_rows,
        layouts_like,
        leading_dims,
        least_rows,
        residues,
        row_layouts,
        tensor_choices,
        widths,
        widths_with,
    )
    from harness.interpret import interpret_triton
    from harness.judges.pool import Judges, judge
    from harness.ops import Contract, Latent, Op, Rounds, StageRecorder, op
    from harness.placement import moved
    from harness.sums import ProbedSum
    from harness.verify.assert_invariant import InvarianceViolation, assert_invariant
    from harness.verify.assertion import ContractViolation, Undecided, assert_contract

_NAMES = {
    "harness.case": ("Case", "Choices", "Chosen", "Group", "Option", "Param", "TensorSpec", "parse_case"),
    "harness.chains": ("Part", "chain"),
    "harness.errors": ("LastbitError", "UnsupportedCase"),
    "harness.inputs": (
        "DRAWN",
        "LAYOUTS",
        "chosen_tensor",
        "cut_rows",
        "layouts_like",
        "leading_dims",
        "least_rows",
        "residues",
        "row_layouts",
        "tensor_choices",
        "widths",
        "widths_with",
    ),
    "harness.interpret": ("interpret_triton",),
    "harness.judges.pool": ("Judges", "judge"),
    "harness.kernel": ("kernel",),
    "harness.ops": ("Contract", "Latent", "Op", "Rounds", "StageRecorder", "op"),
    "harness.placement": ("moved",),
    "harness.sums": ("ProbedSum",),
    "harness.verify.assert_invariant": ("InvarianceViolation", "assert_invariant"),
    "harness.verify.assertion": ("ContractViolation", "Undecided", "assert_contract"),
}
"""Module → what it has of `__all__`. Most need torch or Hypothesis, which take longer to import than a command may."""

_MODULES = frozenset({"numerics", "relations"})
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "DRAWN",
    "LAYOUTS",
    "Case",
    "Choices",
    "Chosen",
    "Contract",
    "ContractViolation",
    "Group",
    "InvarianceViolation",
    "Judges",
    "LastbitError",
    "Latent",
    "Op",
    "Option",
    "Param",
    "Part",
    "ProbedSum",
    "Rounds",
    "StageRecorder",
    "TensorSpec",
    "Undecided",
    "UnsupportedCase",
    "assert_contract",
    "assert_invariant",
    "chain",
    "chosen_tensor",
    "cut_rows",
    "interpret_triton",
    "judge",
    "kernel",
    "layouts_like",
    "leading_dims",
    "least_rows",
    "moved",
    "numerics",
    "op",
    "parse_case",
    "relations",
    "residues",
    "row_layouts",
    "tensor_choices",
    "widths",
    "widths_with",
]


def __getattr__(name: str) -> object:
    """What `__all__` names, when it is first asked for."""
    if name in _MODULES:
        return import_module(f"harness.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
