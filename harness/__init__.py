"""lastbit: verifies numerical kernels to the last bit, against a rounding contract instead of a tolerance.

All that a reference, a kernel, cases or a test need is here, with enclosures in `lastbit.numerics` and relations
between calls in `lastbit.relations`. What `__all__` names stays as it is until a release that says otherwise.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ != "lastbit":  # `import harness` in a checkout, by the name of this folder
    sys.path.insert(0, str(Path(__file__).with_name("checkout")))

from lastbit.errors import LastbitError, UnsupportedCase
from lastbit.kernel import kernel
from lastbit.old_name import OldName

if __name__ == "lastbit":
    sys.meta_path.append(OldName)
else:
    sys.modules[__name__] = OldName.module(__name__)

__version__ = "0.2.0"

if TYPE_CHECKING:
    from lastbit import numerics, relations
    from lastbit.case import Case, Choices, Chosen, Group, Option, Param, TensorSpec, parse_case
    from lastbit.chains import Part, chain
    from lastbit.in_place import Out
    from lastbit.inputs import (
        DRAWN,
        LAYOUTS,
        Accepted,
        build,
        chosen_tensor,
        combinations,
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
    from lastbit.interpret import interpret_triton
    from lastbit.judges.warm_judges import Judges, judge
    from lastbit.ops import Contract, Latent, Op, ProbedSum, Rounds, StageRecorder, op
    from lastbit.orders.reveal import Revealed, reveal
    from lastbit.placement import moved
    from lastbit.verify.assert_invariant import InvarianceViolation, assert_invariant
    from lastbit.verify.assertion import ContractViolation, Undecided, assert_contract

_NAMES = {
    "lastbit.case": ("Case", "Choices", "Chosen", "Group", "Option", "Param", "TensorSpec", "parse_case"),
    "lastbit.chains": ("Part", "chain"),
    "lastbit.errors": ("LastbitError", "UnsupportedCase"),
    "lastbit.in_place": ("Out",),
    "lastbit.inputs": (
        *("DRAWN", "LAYOUTS", "Accepted", "build", "chosen_tensor", "combinations", "cut_rows", "layouts_like"),
        *("leading_dims", "least_rows", "residues", "row_layouts", "tensor_choices", "widths", "widths_with"),
    ),
    "lastbit.interpret": ("interpret_triton",),
    "lastbit.judges.warm_judges": ("Judges", "judge"),
    "lastbit.kernel": ("kernel",),
    "lastbit.ops": ("Contract", "Latent", "Op", "ProbedSum", "Rounds", "StageRecorder", "op"),
    "lastbit.orders.reveal": ("Revealed", "reveal"),
    "lastbit.placement": ("moved",),
    "lastbit.verify.assert_invariant": ("InvarianceViolation", "assert_invariant"),
    "lastbit.verify.assertion": ("ContractViolation", "Undecided", "assert_contract"),
}
"""Module → what it has of `__all__`. Most need torch or Hypothesis, which take longer to import than a command may."""

_MODULES = frozenset({"numerics", "relations"})
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "DRAWN",
    "LAYOUTS",
    "Accepted",
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
    "Out",
    "Param",
    "Part",
    "ProbedSum",
    "Revealed",
    "Rounds",
    "StageRecorder",
    "TensorSpec",
    "Undecided",
    "UnsupportedCase",
    "assert_contract",
    "assert_invariant",
    "build",
    "chain",
    "chosen_tensor",
    "combinations",
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
    "reveal",
    "row_layouts",
    "tensor_choices",
    "widths",
    "widths_with",
]


def __getattr__(name: str) -> object:
    """Import what `__all__` names when it is first asked for."""
    if name in _MODULES:
        return import_module(f"lastbit.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
