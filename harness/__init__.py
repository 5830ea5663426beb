"""lastbit: verifies numerical kernels to the last bit, against a rounding contract instead of a tolerance."""

from typing import TYPE_CHECKING

from harness.errors import LastbitError, UnsupportedCase
from harness.kernel import kernel

if TYPE_CHECKING:
    from harness.verify.assertion import ContractViolation, assert_contract

__all__ = ["ContractViolation", "LastbitError", "UnsupportedCase", "assert_contract", "kernel"]


def __getattr__(name: str) -> object:
    """What needs torch, when it is first asked for: importing it takes longer than a command line may."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from harness.verify import assertion

    return getattr(assertion, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
