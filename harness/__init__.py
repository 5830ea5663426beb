"""lastbit: verifies numerical kernels to the last bit, against a rounding contract instead of a tolerance."""

from harness.errors import LastbitError, UnsupportedCase
from harness.kernel import kernel
from harness.verify.assertion import ContractViolation, assert_contract

__all__ = ["ContractViolation", "LastbitError", "UnsupportedCase", "assert_contract", "kernel"]
