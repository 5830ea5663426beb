"""Lines whose mend is of integers, of NaN, of a limit, of a rounding, or of what another line or call defines."""

from __future__ import annotations

import pytest
import triton

from lastbit.interpret import install
from tests.diagnosing.test_mends_in_memory import traced

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="the traces are of the interpreter")

if triton.knobs.runtime.interpret:
    install()

SEQUENCES = "completion_mask ids=int64[4,257]:sequences_3 eos_ids=int32[2]@0:below_3 mask_truncated=True seed=495"
LOOKALIKES = "completion_mask ids=int64[64,50]:sequences_2 eos_ids=int64[6]:lookalikes_2 mask_truncated=True seed=6"
BLOCKS = "completion_mask ids=int64[5,1031]:sequences_4 eos_ids=int32[3]@2:below_4 seed=479001599"
GATES = (
    "swiglu x=bf16[2,1,274]@822,274,1+274:gates interleaved=True swiglu_limit=7.0 alpha=1.702 up_offset=1.0 "
    "seed=73069367"
)
STRIDES = "swiglu x=fp16[1,5,5,49]@2450,490,98,1+49:rows up=fp16[1,5,5,49] alpha=0.0 up_offset=-0.25 seed=115235"
SPECIAL = (
    "rms_norm x=bf16[6,7,1,24]:special weight=bf16[24]:special_columns scale=fp32[1]:scale_overflow eps=1e-05 "
    "quant=static seed=173"
)
GRADIENT = (
    "layer_norm_gated_backward x=bf16[5,1,384] dy=bf16[5,1,384] weight=bf16[384] "
    "rstd=fp32[5,1,1]@1,1,5:scale_random seed=12085269"
)


@pytest.mark.parametrize(
    ("name", "line", "text", "mend"),
    [
        ("completion_mask: token after the end", SEQUENCES, "columns <= last + 1", "compared by <, not <="),
        ("completion_mask: no negative end", LOOKALIKES, "(ids == tl.load(eos_ids_ptr + k", "its first operand"),
        ("completion_mask: end ids of 32 bits", LOOKALIKES, "ids == tl.load(", "of integers that are not cut"),
        ("completion_mask: first end of the last block", BLOCKS, "tl.where(is_eos &", "at most its second value"),
        ("rms_norm: NaN becomes 448", SPECIAL, "tl.clamp(output", "NaN where an operand is NaN"),
        (
            "swiglu: up limited above only",
            GATES,
            "tl.where(up > limit, limit, up)",
            "and then at least minus swiglu_limit",
        ),
        # The line before rounds nothing, which the same rounding would mend as well.
        ("swiglu: output truncated", "swiglu x=bf16[2,2,1,176] seed=4237893", "output.to(X,", "rounded to bf16"),
        (
            "softmax: log2(e) in bf16",
            "softmax x=bf16[2,2,2,224] scale=1.0 seed=122603411",
            "tl.constexpr(1.4453125)",
            "with 1.44269504 in place of 1.4453125",
        ),
        # The function that takes the stride is right for the gate.
        ("swiglu: rows of up as those of the gate", STRIDES, "row_start(row, size_1,", "with 49 in place of 98"),
        # What is left is a value that was right before, and a stage that the kernel does not compute.
        (
            "layer_norm_gated_backward: projection left out",
            GRADIENT,
            "normalized * 0.0",
            "with c1 for its second operand",
        ),
    ],
)
def test_the_line_whose_mending_makes_every_element_right(name: str, line: str, text: str, mend: str) -> None:
    found = traced(name, line)
    assert found.blamed is not None
    assert found.blamed.text.startswith(text)
    assert found.blamed.mend == mend


def test_another_round_of_a_loop_is_no_mend() -> None:
    """The third id alone is met, so that its place in that of the first makes all right; but the loop is too short."""
    line = (
        "completion_mask ids=int64[12,208]:sequences_4 eos_ids=int32[3]@2:lookalikes_4 mask_truncated=True seed=4188561"
    )
    found = traced("completion_mask: first end id only", line)
    assert found.wrong == "eos_index"
    assert found.blamed is None


def test_what_another_function_hands_on_is_not_wrong_where_it_is_taken() -> None:
    """`activated` returns the sigmoid, which is right: it lacks a factor there, not in the line that takes it."""
    found = traced("swiglu: no silu", "swiglu x=bf16[2,2,1,176] seed=4237893")
    assert found.blamed is None or found.blamed.file.endswith("swiglu_tile.py")
