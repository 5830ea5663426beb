"""Faults of attention: what kernels get wrong about masks, tiles, sinks and roundings, one deed at a time."""

from __future__ import annotations

from lastbit import DRAWN
from tests.faults.plant import Edit, Fault

GROUPS = {
    "plain": {"bf16": (("sinks dtype", None), ("cap", None))},
    "causal": {"fp16": (("causal", True),)},
    "cap": {"bf16": (("cap", DRAWN),)},
    "sinks": {"fp16": (("sinks dtype", "fp16"), ("causal", None))},
    "edges": {"bf16": "edges", "fp16": "edges"},
}
"""Options of a fault → dtype of q → the group of cases that it is hunted with, or options of combinations."""

_DOT = 'scores = tl.dot(q, k, input_precision="ieee")'
_TOTAL = "total = total * factor + tl.sum(weights, 1)"
_PRODUCT = 'sums = tl.dot(weights.to(v.dtype), v, sums * factor[:, None], input_precision="ieee")'
_HEAD = "token, head = row // shared, group.to(tl.int32) * shared + row % shared"
_SINK = "largest = sink * LOG2E if BASE_2 else sink"
_SHIFT = 'shift = tl.where(larger == float("-inf"), 0.0, larger)'
_SEEN = "key[None, :] <= last"
_KEY = "key.to(tl.int64) * k_token\n        k = tl.load(k_at[None, :]"


def _fault(
    name: str,
    description: str,
    *edits: tuple[str, str],
    named: str = "lse or output",
    options: str = "plain",
    variant: str = "attention+flash",
) -> Fault:
    """Return a change of the text of attention.py: old and new."""
    changed = tuple(Edit(old, new, "attention.py") for old, new in edits)
    dtypes = ("fp16",) if options in ("sinks", "causal") else ("bf16",)
    return Fault(name, description, changed, named, named, "attention", variant, options, dtypes)


ROUNDINGS = (
    _fault(
        "scores rounded",
        "rounds the scores to the dtype of q",
        (_DOT, f"{_DOT}.to(q.dtype).to(tl.float32)"),
    ),
    _fault(
        "weights not rounded",
        "multiplies weights of fp32 with the values",
        (_PRODUCT, 'sums = tl.dot(weights, v.to(tl.float32), sums * factor[:, None], input_precision="ieee")'),
        named="output",
    ),
    _fault(
        "rounded weights in the sum",
        "adds the rounded weights",
        (_TOTAL, "total = total * factor + tl.sum(weights.to(q.dtype).to(tl.float32), 1)"),
    ),
    _fault(
        "sums in 16 bits",
        "rounds the sum of each tile to the dtype of v",
        (_PRODUCT, f"{_PRODUCT}.to(v.dtype).to(tl.float32)"),
        named="output",
    ),
    _fault(
        "output cut off",
        "rounds the output toward zero",
        (
            "output.to(output_ptr.dtype.element_ty)",
            'output.to(output_ptr.dtype.element_ty, fp_downcast_rounding="rtz")',
        ),
        named="output",
    ),
    _fault(
        "query scaled and rounded",
        "scales the query and rounds it",
        ("SCALED_QUERY=scaled_query and cap is None", "SCALED_QUERY=cap is None"),
    ),
)

TILES = (
    _fault(
        "sum not rescaled",
        "adds weights that are relative to different scores",
        (_TOTAL, "total = total + tl.sum(weights, 1)"),
    ),
    _fault(
        "output not rescaled",
        "adds values weighed relative to different scores",
        (_PRODUCT, 'sums = tl.dot(weights.to(v.dtype), v, sums, input_precision="ieee")'),
        named="output",
    ),
    _fault(
        "relative to the tile",
        "takes weights relative to the largest score of their tile alone, and rescales as if not",
        ("larger = tl.maximum(largest, tl.max(scores, 1))", "larger = tl.max(scores, 1)"),
    ),
    _fault(
        "last tile left out",
        "walks whole tiles alone",
        ("range(0, end, BLOCK_N)", "range(0, end - end % BLOCK_N, BLOCK_N)"),
    ),
    _fault(
        "keys beyond the last",
        "counts the keys of the last tile that do not exist as scores of 0",
        ("if CAUSAL else there[None, :]", "if CAUSAL else there[None, :] | True"),
    ),
    _fault(
        "relative to nothing",
        "takes exponentials of scores as they are, which overflow",
        (_SHIFT, "larger = larger * 0.0\n        shift = larger"),
        options="edges",
    ),
    _fault(
        "nothing divided by nothing",
        "divides by a sum of 0 where a query sees no key",
        ("tl.where(total == 0.0, 1.0, total)", "total"),
        named="output",
        options="edges",
    ),
    _fault(
        "difference of infinities",
        "subtracts the largest score where no key was seen yet",
        (_SHIFT, "shift = larger"),
        options="edges",
    ),
)

MASKS = (
    _fault(
        "own key masked",
        "masks the key of the query itself",
        (_SEEN, "key[None, :] < last"),
        options="causal",
    ),
    _fault(
        "one key too many",
        "lets a query see the key after its own",
        (_SEEN, "key[None, :] <= 1 + last"),
        ("-1), 0) + 1)", "-1), 0) + 2)"),
        options="causal",
    ),
    _fault(
        "aligned at the start",
        "lets the first query see the first key alone",
        ("last = token + (keys - queries)", "last = token"),
        options="causal",
    ),
    _fault(
        "mask of 0",
        "gives masked keys a score of 0",
        ('scores = tl.where(seen, scores, float("-inf"))', "scores = tl.where(seen, scores, 0.0)"),
        options="causal",
    ),
    _fault(
        "cap left out of the division",
        "caps scores without dividing them first",
        ("else scale / cap", "else scale"),
        options="cap",
    ),
    _fault(
        "clipped, not capped",
        "clips scores at the cap",
        ("libdevice.tanh(scores) * cap", "tl.clamp(scores, -1.0, 1.0) * cap"),
        options="cap",
    ),
    _fault(
        "scale of the width",
        "takes 1 / sqrt(D) for the scale",
        ("factor = scale * last if", "factor = width**-0.5 * last if"),
    ),
)

HEADS = (
    _fault(
        "heads interleaved",
        "gives the heads of q to the heads of k in turn",
        (_HEAD, "token, head = row // shared, row % shared * groups + group.to(tl.int32)"),
    ),
    _fault(
        "first head of keys",
        "takes the first head of keys for all",
        (_KEY, "key.to(tl.int64) * k_token - group * k_head\n        k = tl.load(k_at[None, :]"),
    ),
    _fault(
        "values by the strides of keys",
        "walks the values as the keys",
        ("key.to(tl.int64) * v_token", "key.to(tl.int64) * k_token"),
        named="output or out_of_bounds",
    ),
    _fault(
        "numbers without a gap",
        "takes the numbers of a query to follow each other without a gap",
        ("d[None, :] * q_number", "d[None, :]"),
        named="lse or output or out_of_bounds",
    ),
    _fault(
        "sink left out of the sum",
        "leaves the sink out of the sum",
        ("total += 1.0", "total += 0.0"),
        options="sinks",
    ),
    _fault(
        "sink scaled",
        "scales the sink as a score",
        (_SINK, "largest = sink * scale"),
        options="sinks",
    ),
    _fault(
        "one sink for all",
        "takes the sink of the first head for all",
        ("sinks_ptr + head * sinks_stride", "sinks_ptr + head * 0"),
        options="sinks",
    ),
    _fault(
        "lse to base 2",
        "returns the logarithm to base 2",
        ("lse = (largest + tl.log2(total)) * LN2", "lse = largest + tl.log2(total)"),
        named="lse",
        variant="attention+base_2",
    ),
    _fault(
        "lse without the largest",
        "returns the logarithm of the sum alone",
        ("else largest + tl.log(total)", "else tl.log(total)"),
        named="lse",
    ),
)

FAULTS = (*ROUNDINGS, *TILES, *MASKS, *HEADS)
