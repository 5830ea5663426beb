"""Faults in one combination of dtypes and options alone, which no other case shows: one deed and the case that does."""

from __future__ import annotations

from functools import partial

from tests.faults.plant import Edit, Fault

_swiglu = partial(Fault, op="swiglu", variant="swiglu+fp32_silu")
_quantize = partial(Fault, op="quantize", variant="quotient")
_of_swiglu = partial(Edit, file="swiglu.py")
_of_quantize = partial(Edit, file="quantize.py")

_TWO = "gate, up = gate_and_up(x, up, interleaved=options.interleaved)"
_ONE = "one = up is None and not options.interleaved and x.dtype == torch.float32"
_LARGEST = '"LARGEST": LARGEST[dtype]'
_INTEGERS = '"INTEGERS": integers if'
_WEIGHT = "        weight = weight if weight is None else weight.contiguous()\n"
_MASK = "tl.load(address(mask_ptr, mask_row, columns, ALIGNED), mask=inside, other=0.0)"

FAULTS: tuple[tuple[Fault, str], ...] = (
    (
        _swiglu(
            "fp16 interleaved rounds silu",
            "rounds silu to fp16 where gate and up are interleaved",
            (
                _of_swiglu(
                    '{"SILU": silu}',
                    '{"SILU": "rounded_silu" if options.interleaved and gate.dtype == torch.float16 else silu}',
                ),
            ),
            exposed="silu",
            hidden="output",
        ),
        "swiglu x=fp16[17,64] interleaved=True seed=1",
    ),
    (
        _swiglu(
            "fp32 halves by way of fp16",
            "reads up through fp16 where it is the second half of a tensor of fp32",
            (_of_swiglu(_TWO, f"{_ONE}\n    {_TWO}\n    up = up.half().float() if one else up"),),
            exposed="output",
            hidden="output",
        ),
        "swiglu x=fp32[17,64] seed=2",
    ),
    (
        _quantize(
            "240 for fp16 rows",
            "takes the 240 of e4m3fnuz for the largest code of rows in fp16",
            (
                _of_quantize(
                    _LARGEST,
                    '"LARGEST": 240.0 if str(x.dtype) == "torch.float16" and dtype == "e4m3" '
                    "and group_size is scale is None else LARGEST[dtype]",
                ),
            ),
            exposed="scale",
            hidden="scale",
        ),
        "quantize x=fp16[8,96] dtype=e4m3 seed=3",
    ),
    (
        _quantize(
            "int8 groups of bf16 cut off",
            "converts groups of bf16 to int8 without rounding",
            (
                _of_quantize(
                    _INTEGERS, '"INTEGERS": "" if group_size and str(x.dtype) == "torch.bfloat16" else integers if'
                ),
            ),
            exposed="int8_codes",
            hidden="int8_codes",
        ),
        "quantize x=bf16[8,96] dtype=int8 group_size=32 seed=4",
    ),
    (
        _quantize(
            "groups of 256",
            "has a block of 128 columns for any group",
            (_of_quantize('"BLOCK": block,', '"BLOCK": min(block, 128) if group_size else block,'),),
            exposed="unwritten",
            hidden="unwritten",
        ),
        "quantize x=bf16[4,512] dtype=e4m3 group_size=256 seed=5",
    ),
    (
        Fault(
            "weight of bf16 in fp16",
            "converts a weight of bf16 to the fp16 of x before the product",
            (
                Edit(
                    _WEIGHT,
                    _WEIGHT
                    + "        if f'{x.dtype} {getattr(weight, \"dtype\", None)}' == 'torch.float16 torch.bfloat16':\n"
                    "            weight = weight.to(x.dtype)\n",
                ),
            ),
            exposed="normalized",
            hidden="output",
        ),
        "rms_norm x=fp16[8,96] weight=bf16[96] eps=1e-06 seed=6",
    ),
    (
        Fault(
            "mask in the dtype of x",
            "converts the mask to the dtype of x before it is added",
            (Edit(f"{_MASK}.to(tl.float32)", f"{_MASK}.to(x.dtype).to(tl.float32)", file="softmax.py"),),
            exposed="total",
            hidden="output",
            op="softmax",
            variant="fp32_scores",
        ),
        "softmax x=bf16[8,96] mask=fp32[8,96] seed=7",
    ),
)
