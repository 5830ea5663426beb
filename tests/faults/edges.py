"""Faults of the norms and of the completion mask that only the edges of `cases/edges` expose."""

from __future__ import annotations

from functools import partial

from tests.faults.plant import Edit, Fault

GROUPS = {"edges": dict.fromkeys(("bf16", "fp16", "fp32", "int64", "int32"), "edges")}
"""Options of a fault → dtype of the op's first input → the group of cases that it is hunted with."""

_norm = partial(Fault, options="edges", dtypes=("bf16",))
_gated = partial(Fault, op="layer_norm_gated", variant="single_rounding", options="edges", dtypes=("bf16",))
_backward = partial(_gated, op="layer_norm_gated_backward", variant="gated_backward")
_mask = partial(Fault, op="completion_mask", variant="completion_mask", options="edges", dtypes=("int64",))
_rows = partial(Edit, file="row_layout.py")
_forward_text = partial(Edit, file="layer_norm_gated.py")
_backward_text = partial(Edit, file="layer_norm_gated_backward.py")
_launch = partial(Edit, file="layer_norm_gated_backward_launch.py")
_mask_text = partial(Edit, file="completion_mask.py")

_SQUARES = "squares += squared * squared"
_PRODUCT = "(normalized * weight.to(tl.float32)).to(weight.dtype).to(tl.float32)"
_SUM = "rounded = total.to(x.dtype).to(tl.float32)"
_AGAIN = (
    "            _, value, _ = _load(x_ptr, residual_ptr, x_row, residual_row, columns, mask, RULE, ALIGNED)\n"
    "        gain = _load_weight(weight_ptr, columns, n, ALIGNED) if LOOP else weight\n"
    "        normalized, "
)
_NOT_CONTIGUOUS = "t.strides[-1] != 1 and columns > 1"
_BIAS = "None if bias is None else bias.contiguous()"
_FINITE = "tl.clamp(total, -3.3895313892515355e38, 3.3895313892515355e38, propagate_nan=tl.PropagateNan.ALL)"
_STATISTIC = "(leading_dims(name, given[name])[0][1], given[name].strides[-1])"
_RSTD = "tl.load(rstd_ptr + row * rstd_row_stride + group * rstd_group_stride, mask=live, other=0.0)"
_EQUAL = "(ids == tl.load(eos_ids_ptr + k * eos_stride))"
_END = "tl.load(eos_ids_ptr + k * eos_stride)"

WIDE = (
    _norm(
        "blocks after the first not squared", "squares the first block of a row alone",
        (Edit(_SQUARES, "squares += tl.where(start == 0, squared * squared, 0.0)"),),
        "variance", "output",
    ),
    _norm(
        "last block for all", "normalizes the last block of a row that it has in registers in place of every block",
        (Edit(_AGAIN, "            pass\n" + _AGAIN[_AGAIN.index("\n") + 1 :]),), "normalized", "output",
    ),
    _norm(
        "scale of the last block", "takes the scale of a row from its last block",
        (Edit("amax = tl.maximum(amax, tl.max(tl.abs(output), axis=1, keep_dims=True))",
              "amax = tl.max(tl.abs(output), axis=1, keep_dims=True)"),),
        "scale", "scale", dtypes=("fp16",),
    ),
)  # fmt: skip

STRIDES = (
    _norm(
        "columns without a gap", "takes the columns of x and of the residual to follow each other without a gap",
        (_rows(f"any({_NOT_CONTIGUOUS} for t in tensors)", "False"),),
        "variance or out_of_bounds", "output or quantized or out_of_bounds",
    ),
    _norm(
        "a dense square", "takes a matrix with strides of 1 and N for one whose rows follow each other",
        (_rows(_NOT_CONTIGUOUS, f"sorted(t.strides) != [1, columns] and {_NOT_CONTIGUOUS}"),),
        "variance", "output",
    ),
    _norm(
        "stride of the weight ignored", "reads the weight as if it had no stride",
        (Edit("weight = weight if weight is None else weight.contiguous()", "pass"),),
        "product or out_of_bounds", "output or out_of_bounds",
    ),
    _norm(
        "leading dimensions beyond the third", "leaves tensors of more leading dimensions than strides as they are",
        (_rows("len(outer) > dims or any", "any"),), "variance", "output",
    ),
    _gated(
        "stride of the bias ignored", "reads the bias as if it had no stride",
        (_forward_text(_BIAS, "bias"),),
        "affine or out_of_bounds", "output or out_of_bounds", dtypes=("fp16",),
    ),
    _backward(
        "statistics as they lie", "reads the statistics where the forward pass would have stored them",
        (_launch(_STATISTIC, "(1, given[name].shape[:-1].numel())"),),
        "normalized or out_of_bounds", "output or dz or out_of_bounds",
    ),
)  # fmt: skip

ROWS = (
    _norm(
        "first row read", "reads the first row, also where there is none",
        (Edit("if plan.launch is not None:", "if x.reshape(-1, x.shape[-1])[0].numel():"),), "errored", "errored",
    ),
    _backward(
        "sums of no rows", "launches nothing where there are no rows, and leaves the sums over them unwritten",
        (_backward_text("parts * groups, parameters", "parts * groups * min(count, 1), parameters"),),
        "uninitialised", "uninitialised",
    ),
    _backward(
        "four tiles for a program", "gives each program four tiles, also where there are more than all programs take",
        (_launch("return parts, triton.cdiv(tiles, parts)", "return parts, min(TILES_PER_PART, tiles)"),),
        "unwritten", "unwritten", dtypes=("fp32",),
    ),
)  # fmt: skip

VALUES = (
    _norm(
        "zero times NaN", "takes the product of zero and a weight for zero, also where that is NaN or infinite",
        (Edit(_PRODUCT, f"tl.where(normalized == 0.0, 0.0, {_PRODUCT})"),), "product", "output",
    ),
    _norm(
        "NaN of a weight dropped", "clamps the weight with a maximum that ignores NaN",
        (Edit(_PRODUCT, _PRODUCT.replace("weight.to(tl.float32)", "tl.maximum(weight.to(tl.float32), -1e38)")),),
        "product", "output",
    ),
    _norm(
        "eps of 0 replaced", "adds the smallest normal number where eps is less",
        (Edit("tl.sqrt_rn(variance + eps)", "tl.sqrt_rn(variance + tl.maximum(eps, 1.1754944e-38))"),),
        "inv_rms", "output",
    ),
    _norm(
        "sum saturates", "gives the largest finite number for sums with the residual that overflow",
        (Edit(_SUM, _SUM.replace("total", _FINITE)),), "residual_sum or variance", "residual_sum or quantized",
    ),
    _norm(
        "scale without a reciprocal", "divides by the smallest normal number where a static scale is zero",
        (Edit("tl.div_rn(1.0, tl.load(scale_ptr))", "tl.div_rn(1.0, tl.maximum(tl.load(scale_ptr), 1.1754944e-38))"),),
        "quantized", "quantized", dtypes=("fp16",),
    ),
    _gated(
        "eps of 0 replaced", "adds 1e-30 where eps is less",
        (_forward_text("inverse_root(variance + eps)", "inverse_root(variance + tl.maximum(eps, 1e-30))"),),
        "rstd", "output", dtypes=("fp16",),
    ),
    _gated(
        "zero times NaN", "takes the product of zero and a weight for zero, also where that is NaN or infinite",
        (_forward_text("        affine = normalized * weight\n",
                       "        affine = tl.where(normalized == 0.0, 0.0, normalized * weight)\n"),),
        "affine", "output",
    ),
    _gated(
        "NaN of a bias dropped", "adds no bias where it is NaN",
        (_forward_text("affine += bias", "affine += tl.where(bias == bias, bias, 0.0)"),),
        "affine", "output",
    ),
    _backward(
        "rstd clamped", "takes 1e30 for an rstd above it",
        (_backward_text(_RSTD, f"tl.minimum({_RSTD}, 1e30, propagate_nan=tl.PropagateNan.ALL)"),),
        "normalized", "output", dtypes=("fp32",),
    ),
)  # fmt: skip

ENDS = (
    _mask(
        "first eight end ids", "looks for the first eight of the end ids alone",
        (_mask_text("for k in range(0, eos_count):", "for k in range(0, tl.minimum(eos_count, 8)):"),),
        "is_eos", "mask",
    ),
    _mask(
        "no negative end", "takes a negative end id for none",
        (_mask_text(_EQUAL, f"({_EQUAL} & ({_END} >= 0))"),), "is_eos", "mask",
    ),
    _mask(
        "end ids cut to the ids", "compares in the dtype of the ids",
        (_mask_text(_EQUAL, f"(ids == {_END}.to(ids.dtype))"),), "is_eos", "mask", dtypes=("int32",),
    ),
    _mask(
        "end ids of 32 bits", "compares with the lower 32 bits of the end ids, sign included",
        (_mask_text(_EQUAL, f"(ids == {_END}.to(tl.int32))"),), "is_eos", "mask",
    ),
    _mask(
        "columns of 16 bits", "counts columns in 16 bits",
        (_mask_text("tl.where(is_eos, columns, n)", "tl.where(is_eos, columns.to(tl.uint16).to(tl.int32), n)"),),
        "eos_index", "mask", dtypes=("int32",),
    ),
)  # fmt: skip

FAULTS = (*WIDE, *STRIDES, *ROWS, *VALUES, *ENDS)
