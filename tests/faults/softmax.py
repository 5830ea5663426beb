"""Faults of softmax: what kernels get wrong about shifts, masks, rescaling and roundings, one deed at a time."""

from __future__ import annotations

from functools import partial

from tests.faults.plant import ALL, Edit, Fault

GROUPS = {
    "plain": dict.fromkeys(ALL, (("mask dtype", None), ("keep dtype", None))),
    "mask": {"bf16": (("mask dtype", "bf16"),)},
    "keep": {"fp32": (("mask dtype", None), ("keep dtype", "bool"))},
    "both": {"fp16": (("keep dtype", "bool"),)},
}
"""Options of a fault → dtype of x → options of the combinations that it is hunted with."""

ONLINE = "fp32_scores+base2+zero_rows"

_edit = partial(Edit, file="softmax.py")
_fault = partial(Fault, op="softmax", variant="fp32_scores", options="plain", dtypes=("bf16",))

_SHIFT = "shift = _finite_shift(larger)"
_LARGER = "larger = tl.maximum(largest, tl.max(scores, axis=1, keep_dims=True))"
_SCALE = "        scaled = scaled * scale\n"
_MASK = (
    "masked = scaled + tl.load(address(mask_ptr, mask_row, columns, ALIGNED), mask=inside, other=0.0).to(tl.float32)"
)
_KEPT = "    kept = inside\n"
_IN_BASE_2 = "        if BASE2:\n            scores = scores * LOG2_E\n"
_KEEP = "kept = kept & (tl.load(address(keep_ptr, keep_row, columns, ALIGNED), mask=inside, other=0) != 0)"
_TERMS = "        terms = _exp(scores, shift, BASE2)\n        total ="
_RESCALED = "total * _exp(largest, shift, BASE2)"
_SUM = "tl.sum(terms, axis=1, keep_dims=True)"
_DIVISOR = "    divisor = total\n"
_OUTPUT = "output = terms / divisor"
_STORED = "output.to(output_ptr.dtype.element_ty), mask=inside)"
_X = "x_ptr.dtype.element_ty"
_TO_X = f".to({_X}).to(tl.float32)"

SHIFT = (
    _fault(
        "no shift",
        "takes exp of the scores themselves",
        (_edit(_SHIFT, "shift = larger * 0.0"),),
        exposed="total",
        hidden="output or probabilities",
    ),
    _fault(
        "difference rounded",
        "rounds the difference from the largest score to x's dtype, as a kernel that does not leave it",
        (_edit(_TERMS, f"        scores = (scores - shift){_TO_X} + shift\n" + _TERMS),),
        exposed="total",
        hidden="output or probabilities",
    ),
    _fault(
        "sum not rescaled",
        "adds blocks with another shift as they are",
        (_edit(_RESCALED, "total"),),
        exposed="total",
        hidden="output or probabilities",
        variant=ONLINE,
        options="mask",
    ),
    _fault(
        "largest of the last block",
        "forgets the largest score of a block when it comes to the next one",
        (_edit(_LARGER, "larger = tl.max(scores, axis=1, keep_dims=True)"),),
        exposed="total",
        hidden="output or probabilities",
        variant=ONLINE,
        dtypes=("fp16",),
    ),
    _fault(
        "NaN of an empty block",
        "subtracts -inf from -inf where a row has kept nothing so far",
        (_edit("return tl.where(largest == -float(\"inf\"), 0.0, largest)", "return largest"),),
        exposed="total or output or probabilities",
        hidden="output or probabilities",
        variant=ONLINE,
        options="both",
        dtypes=("fp16",),
    ),
    _fault(
        "log2(e) missing",
        "takes exp2 of the natural scores",
        (_edit(_IN_BASE_2 + "        larger", "        larger"),),
        exposed="total",
        hidden="output or probabilities",
        variant=ONLINE,
    ),
    _fault(
        "log2(e) in bf16",
        "has log2(e) in three digits",
        (_edit("LOG2_E = tl.constexpr(math.log2(math.e))", "LOG2_E = tl.constexpr(1.4453125)"),),
        exposed="total",
        hidden="output or probabilities",
        variant=ONLINE,
    ),
)  # fmt: skip

SCORES = (
    _fault(
        "scale missing",
        "does not scale",
        (_edit(_SCALE, ""),),
        exposed="total",
        hidden="output or probabilities",
    ),
    _fault(
        "scale after the mask",
        "scales the mask, too",
        (_edit(_SCALE, ""), _edit(_KEPT, "    if SCALED:\n        masked = masked * scale\n" + _KEPT)),
        exposed="total",
        hidden="output or probabilities",
        options="mask",
    ),
    _fault(
        "scores rounded",
        "rounds scaled and masked scores to x's dtype",
        (_edit('"ROUNDED": rounded', '"ROUNDED": True'),),
        exposed="total",
        hidden="output or probabilities",
        options="mask",
    ),
    _fault(
        "scores not rounded",
        "keeps scores in fp32, where the contract rounds them to x's dtype",
        (_edit('"ROUNDED": rounded', '"ROUNDED": False'),),
        exposed="scaled or masked",
        hidden="output or probabilities",
        variant="rounded_scores",
        options="mask",
    ),
    _fault(
        "mask as a factor",
        "multiplies by the mask",
        (_edit(_MASK, _MASK.replace("scaled +", "scaled *")),),
        exposed="total",
        hidden="output or probabilities",
        options="mask",
    ),
    _fault(
        "keep ignored",
        "keeps every column",
        (_edit(_KEEP, "kept = inside"),),
        exposed="total",
        hidden="output or probabilities",
        options="both",
        dtypes=("fp16",),
    ),
    _fault(
        "-10000 for -inf",
        "gives what is not kept a score of -10000, which makes a row of nothing else uniform",
        (_edit("tl.where(kept, masked, -float(\"inf\"))", "tl.where(kept, masked, -10000.0)"),),
        exposed="total or output or probabilities",
        hidden="output or probabilities",
        options="keep",
        dtypes=("fp32",),
    ),
    _fault(
        "empty rows zero",
        "gives zeros in a row that keeps nothing, where the contract says NaN",
        (_edit('"ZERO_ROWS": zero_rows', '"ZERO_ROWS": True'),),
        exposed="output or probabilities",
        hidden="output or probabilities",
        options="keep",
        dtypes=("fp32",),
    ),
)  # fmt: skip

SUM = (
    _fault(
        "lanes past the row counted",
        "gives lanes past the row a score of 0",
        (_edit(_KEPT, "    kept = columns >= 0\n"),),
        exposed="total",
        hidden="output or probabilities",
    ),
    _fault(
        "last column left out",
        "leaves the last column out of the sum",
        (_edit(_SUM, "tl.sum(tl.where(columns < n - 1, terms, 0.0), axis=1, keep_dims=True)"),),
        exposed="total",
        hidden="output or probabilities",
    ),
    _fault(
        "terms rounded",
        "rounds each exponential to x's dtype before it is added and divided",
        (_edit(_TERMS, f"        terms = _exp(scores, shift, BASE2){_TO_X}\n        total ="),),
        exposed="total",
        hidden="output or probabilities",
    ),
    _fault(
        "terms rounded after the sum",
        "rounds each exponential to x's dtype before it is divided",
        (_edit(_OUTPUT, f"output = terms{_TO_X} / divisor"),),
        exposed="output or probabilities",
        hidden="output or probabilities",
    ),
    _fault(
        "inverse rounded",
        "multiplies by the inverse of the sum in x's dtype",
        (_edit(_OUTPUT, f"output = terms * (1.0 / divisor){_TO_X}"),),
        exposed="output or probabilities",
        hidden="output or probabilities",
    ),
    _fault(
        "eps in the sum",
        "adds 1e-6 to the sum before it divides",
        (_edit(_DIVISOR, "    divisor = total + 1e-6\n"),),
        exposed="output or probabilities",
        hidden="output or probabilities",
        dtypes=("fp32",),
    ),
    _fault(
        "store truncates",
        "rounds the output toward zero",
        (_edit(_STORED, 'output.to(output_ptr.dtype.element_ty, fp_downcast_rounding="rtz"), mask=inside)'),),
        exposed="output",
        hidden="output",
        options="both",
        dtypes=("fp16",),
    ),
)

MEMORY = (
    _fault(
        "mask with the strides of x",
        "finds the rows of the mask where those of x would be",
        (_edit("row_start(row, size_1, size_2, mask_stride_0, mask_stride_1, mask_stride_2, FLAT)", "x_row"),),
        exposed="total or out_of_bounds",
        hidden="output or probabilities or out_of_bounds",
        options="mask",
    ),
    _fault(
        "rows of the last program",
        "writes the rows of the last program without asking whether there are as many",
        (_edit(_STORED, "output.to(output_ptr.dtype.element_ty), mask=columns < n)"),),
        exposed="wrote_outside or out_of_bounds",
        hidden="wrote_outside or out_of_bounds",
    ),
    _fault(
        "tail not written",
        "leaves what follows the last whole block of a row unwritten",
        (_edit(_STORED, "output.to(output_ptr.dtype.element_ty), mask=inside & (columns < n // 16 * 16))"),),
        exposed="unwritten",
        hidden="unwritten",
    ),
)

FAULTS = (*SHIFT, *SCORES, *SUM, *MEMORY)
