"""Faults of the completion mask: what trainers and kernels get wrong about the end of a sequence, one deed at a time.

A mask on the wrong device needs two devices, so that no fault here shows it.
"""

from __future__ import annotations

from functools import partial

from tests.faults.plant import Edit, Fault

BOTH = ("int64", "int32")
GROUPS = {
    "one block": dict.fromkeys(BOTH, (("ids length", "L65to512"),)),
    "several blocks": dict.fromkeys(BOTH, (("ids length", "L513to3000"),)),
}
"""Options of a fault → dtype of the ids → options of the combinations that it is hunted with."""

_edit = partial(Edit, file="completion_mask.py")
_fault = partial(Fault, op="completion_mask", variant="completion_mask", options="one block", dtypes=BOTH)

_EQUAL = "(ids == tl.load(eos_ids_ptr + k * eos_stride))"
_ENDS = "for k in range(0, eos_count):"
_KEEP_FIRST = "first = tl.minimum(first, tl.where(is_eos, columns, n))"
_EOS_INDEX = "eos_index = tl.min(first, axis=1, keep_dims=True)\n"
_LAST = "last = tl.where((eos_index == n) & (mask_truncated != 0), -1, eos_index)"
_ADDRESS = "ids_ptr + row * row_stride + columns * column_stride"
_STORE = "(columns <= last).to(tl.int32), mask=inside)"

INDEX = (
    _fault(
        "first end id only",
        "looks for the first of the end ids alone",
        (_edit(_ENDS, "for k in range(0, 1):"),),
        exposed="is_eos",
        hidden="mask",
    ),
    _fault(
        "lower half of the ids",
        "compares the lower 32 bits of the ids",
        (_edit(_EQUAL, "(ids.to(tl.int32) == tl.load(eos_ids_ptr + k * eos_stride).to(tl.int32))"),),
        exposed="is_eos",
        hidden="mask",
        dtypes=("int64",),
    ),
    _fault(
        "lower 16 bits of the ids",
        "compares the lower 16 bits of the ids",
        (_edit(_EQUAL, "(ids.to(tl.int16) == tl.load(eos_ids_ptr + k * eos_stride).to(tl.int16))"),),
        exposed="is_eos",
        hidden="mask",
        dtypes=("int32",),
    ),
    _fault(
        "last end",
        "takes the last end of a row, as an argmax that breaks ties the other way",
        (
            _edit(_KEEP_FIRST, "first = tl.where(is_eos & (columns < n), columns, first)"),
            _edit(
                _EOS_INDEX,
                "eos_index = tl.max(tl.where(first < n, first, -1), axis=1, keep_dims=True)\n"
                "    eos_index = tl.where(eos_index < 0, n, eos_index)\n",
            ),
        ),
        exposed="eos_index",
        hidden="mask",
    ),
    _fault(
        "first end of the last block",
        "forgets the ends of a block when it comes to the next one that has any",
        (_edit(_KEEP_FIRST, "first = tl.where(is_eos & (columns < n), columns, first)"),),
        exposed="eos_index",
        hidden="mask",
        options="several blocks",
    ),
    _fault(
        "first block only",
        "looks for ends in the first block alone",
        (_edit("        first = tl.minimum", "        if start == 0:\n            first = tl.minimum"),),
        exposed="eos_index",
        hidden="mask",
        options="several blocks",
    ),
    _fault(
        "no end as an end at 0",
        "takes 0 for the index of the end in a row that has none, as an argmax without a guard",
        (_edit(_EOS_INDEX, _EOS_INDEX + "    eos_index = tl.where(eos_index == n, 0, eos_index)\n"),),
        exposed="eos_index",
        hidden="mask",
    ),
)

MASK = (
    _fault(
        "end excluded",
        "leaves the token that ends a sequence out of the mask",
        (_edit("columns <= last", "columns < last"),),
        exposed="mask",
        hidden="mask",
    ),
    _fault(
        "token after the end",
        "keeps one token after the end",
        (_edit("columns <= last", "columns <= last + 1"),),
        exposed="mask",
        hidden="mask",
    ),
    _fault(
        "truncated rows kept",
        "does not mask truncated rows",
        (_edit(_LAST, "last = eos_index"),),
        exposed="mask",
        hidden="mask",
    ),
    _fault(
        "truncated rows always masked",
        "masks truncated rows also where they should be kept",
        (_edit("(eos_index == n) & (mask_truncated != 0)", "eos_index == n"),),
        exposed="mask",
        hidden="mask",
    ),
    _fault(
        "end at the last position as truncated",
        "masks rows that end with their last token as truncated",
        (_edit("(eos_index == n) &", "(eos_index >= n - 1) &"),),
        exposed="mask",
        hidden="mask",
    ),
)

MEMORY = (
    _fault(
        "row stride ignored",
        "reads the ids as if rows followed each other without a gap",
        (_edit(_ADDRESS, "ids_ptr + row * n + columns * column_stride"),),
        exposed="is_eos or out_of_bounds",
        hidden="mask or out_of_bounds",
    ),
    _fault(
        "column stride ignored",
        "reads the ids as if columns followed each other without a gap",
        (_edit(_ADDRESS, "ids_ptr + row * row_stride + columns"),),
        exposed="is_eos or out_of_bounds",
        hidden="mask or out_of_bounds",
    ),
    _fault(
        "stride of the end ids ignored",
        "reads the end ids as if they followed each other without a gap",
        (_edit("k * eos_stride", "k"),),
        exposed="is_eos or out_of_bounds",
        hidden="mask or out_of_bounds",
    ),
    _fault(
        "tail not written",
        "leaves what follows the last whole block of a row unwritten",
        (_edit(_STORE, "(columns <= last).to(tl.int32), mask=inside & (columns < n // BLOCK * BLOCK))"),),
        exposed="unwritten",
        hidden="unwritten",
        options="several blocks",
    ),
    _fault(
        "rows of the last program",
        "writes the rows of the last program without asking whether there are as many",
        (_edit(_STORE, "(columns <= last).to(tl.int32), mask=columns < n)"),),
        exposed="wrote_outside or out_of_bounds",
        hidden="wrote_outside or out_of_bounds",
    ),
    _fault(
        "lanes past the row compared",
        "fills the lanes past the row with an end id and compares them too",
        (_edit("mask=inside, other=0)", "mask=inside, other=tl.load(eos_ids_ptr))"),),
        exposed="",
        hidden="",
        equivalent="columns past the row are no smaller than L, which stands for no end",
    ),
)

FAULTS = (*INDEX, *MASK, *MEMORY)
