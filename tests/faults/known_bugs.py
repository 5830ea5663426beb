"""Known bugs of mixtures of experts with LoRA (M) and of quantized weights (Q), and what becomes of each here.

Bugs of ktransformers' SFT operator while it was written and after, and of related operators elsewhere, by numbers of
this list. Most are planted; the description of the fault ends with the number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

ROWS = (
    *(f"M{n}" for n in (*range(1, 9), *range(10, 26), 27, 29, 30, 33, 34, 36)),
    *(f"M{n}" for n in (*range(38, 43), *range(44, 49), 50, 51, 52)),
    *(f"Q{n}" for n in (4, *range(7, 12))),
)

_SEQUENCES = "tests/kernels/test_moe_lora_sequences.py"

NOT_PLANTED: Mapping[str, str] = {
    "M3": "A full stack of forwards without backward: there is no stack. A forward returns its state; "
    f"`{_SEQUENCES}::test_backwards_in_any_order_and_twice_give_the_same_bits`.",
    "M4": "Tensors of a test so small that they hide errors: no fault of a kernel. The columns of "
    "docs/measurements/sight_moe.md show what such tensors hide.",
    "M5": "Dtypes promoted in a reference: no fault of a kernel. References compute in fp64, and round where the "
    "contract says; `tests/references/test_moe_lora_reference.py::test_contracts_round_where_the_specification_says`.",
    "M16": "Sharded weights freed before the backward: shards are views, of which there is nothing to free; "
    "`tests/kernels/test_moe_lora_shards.py::test_shards_are_views_and_no_two_have_an_element`.",
    "M18": "Sharded adapters not copied again after a step: `StaleShards`, found by "
    f"`{_SEQUENCES}::test_the_sequences_find`; a changed parameter is refused, "
    f"`{_SEQUENCES}::test_a_tensor_that_changed_after_the_forward_is_refused`.",
    "M19": "A group size of zero, by which a loader divides: the size follows from the shape of the scale; one that "
    "does not fit is refused; "
    "`tests/kernels/test_kernels_quantized_weights.py::test_tensors_that_are_no_weight_are_refused`.",
    "M20": "Pointers without a value that are taken for tensors: an argument of Python is a tensor or None.",
    "M21": "Zero points given or left out against the scheme: refused; "
    "`tests/kernels/test_kernels_moe_lora_quantized.py::test_codes_that_do_not_fit_are_refused`.",
    "M44": "Buffers for gate and up that two layers share: `SharedScratch`, found by "
    f"`{_SEQUENCES}::test_the_sequences_find`.",
    "M47": "A pool of caches of all layers, last in, first out: `LastInFirstOut`, found by "
    f"`{_SEQUENCES}::test_the_sequences_find`.",
    "Q4": "A scale of zero for a row of zeros: made by quantizers, not by what reads the codes. Planted in RMSNorm as "
    "“scale without a floor”; "
    "`tests/numerics/test_quantizers.py::test_rows_whose_scale_has_no_reciprocal_get_codes_of_zero`.",
}
"""Row → why no fault of a kernel stands for it, and what does instead."""


def rows_of(description: str) -> tuple[str, ...]:
    """Return the rows that the description of a fault names, in parentheses."""
    return tuple(re.findall(r"\b[MQ]\d+\b", " ".join(re.findall(r"\(([^()]*)\)", description))))
