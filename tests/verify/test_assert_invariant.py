"""Properties of a kernel, asserted in anyone's test."""

import pytest

import lastbit
from lastbit.errors import UsageError
from lastbit.kernel import kernel
from lastbit.property_result import PropertyOutcome
from tests.verify.test_property_checks import by_number_of_rows, in_one_sum, wrong_alone

LINE = "rms_norm x=fp32[40,256] weight=fp32[256] eps=1e-06 seed=1"


def test_a_kernel_that_holds_passes_and_one_that_does_not_is_told() -> None:
    own = {"op": "rms_norm", "contract": "fp32_multiply", "cases": [LINE]}
    [rows] = lastbit.assert_invariant(in_one_sum, "rows", **own)
    assert rows.outcome is PropertyOutcome.HOLDS
    with pytest.raises(lastbit.InvarianceViolation, match="changes between 18 and 19 rows") as raised:
        lastbit.assert_invariant(by_number_of_rows, "rows", **own)
    assert raised.value.results[0].outcome is PropertyOutcome.BROKEN
    with pytest.raises(
        lastbit.InvarianceViolation, match="rows cannot be asked on any of 1 cases: the case has 1 rows"
    ):
        lastbit.assert_invariant(in_one_sum, "rows", **{**own, "cases": [LINE.replace("[40,", "[1,")]})


def test_what_a_decorated_function_declares_is_asserted() -> None:
    declares = kernel("rms_norm", contract="fp32_multiply", invariant=("rows",))(by_number_of_rows)
    with pytest.raises(lastbit.InvarianceViolation, match="rows, which the kernel declares, is broken"):
        lastbit.assert_invariant(declares, cases=[LINE])
    with pytest.raises(UsageError, match="is not decorated"):
        lastbit.assert_invariant(wrong_alone, "rows")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cases": ["layer_norm x=fp32[4,16] seed=1"]}, "is one of layer_norm, and the kernel is one of rms_norm"),
        ({"cases": ["rms_norm x=fp32[4,16] eps=1e-06 seed=1"]}, "the kernel needs weight"),
        ({"cases": [LINE], "device": "tpu"}, "device 'tpu'"),
    ],
)
def test_what_cannot_be_asserted_is_told(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        lastbit.assert_invariant(in_one_sum, "rows", op="rms_norm", contract="fp32_multiply", **options)
