"""lastbit: verifies numerical kernels to the last bit, against a rounding contract instead of a tolerance."""

from importlib import import_module
from typing import TYPE_CHECKING

from harness.errors import LastbitError, UnsupportedCase
from harness.kernel import kernel

__version__ = "0.1.0"

if TYPE_CHECKING:
    from harness.judges.pool import Judges, judge
    from harness.verify.assert_invariant import InvarianceViolation, assert_invariant
    from harness.verify.assertion import ContractViolation, assert_contract

_FROM = {
    "ContractViolation": "harness.verify.assertion",
    "InvarianceViolation": "harness.verify.assert_invariant",
    "Judges": "harness.judges.pool",
    "assert_contract": "harness.verify.assertion",
    "assert_invariant": "harness.verify.assert_invariant",
    "judge": "harness.judges.pool",
}
"""What needs torch → the module that has it."""

__all__ = [
    "ContractViolation",
    "InvarianceViolation",
    "Judges",
    "LastbitError",
    "UnsupportedCase",
    "assert_contract",
    "assert_invariant",
    "judge",
    "kernel",
]


def __getattr__(name: str) -> object:
    """What needs torch, when it is first asked for: importing it takes longer than a command line may."""
    if name not in _FROM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_FROM[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
