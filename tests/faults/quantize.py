"""Faults of quantization: what its kernels have got wrong about scales and codes, one deed and the case that shows it.

They are not hunted with drawn cases: for each there is one line.
"""

from __future__ import annotations

from functools import partial

from tests.faults.plant import Edit, Fault

_edit = partial(Edit, file="quantize.py")
_fault = partial(Fault, op="quantize", variant="quotient")
_amax = partial(_fault, exposed="amax", hidden="scale")
_scale = partial(_fault, exposed="scale", hidden="scale")
_scaled = partial(_fault, exposed="scaled", hidden="e4m3_codes")
_int8 = partial(_fault, exposed="int8_codes", hidden="int8_codes")

_ROWS = "quantize x=bf16[64,513]:rows dtype=e4m3 least_scale=4.359654017857143e-06 seed=1"
_GROUPS = "quantize x=bf16[32,512]:rows dtype=e4m3 group_size=128 least_amax=1e-10 seed=2"
_E8M0 = "quantize x=bf16[32,512]:rows dtype=e4m3 group_size=128 ue8m0=True least_amax=1e-10 seed=3"
_WHOLE = "quantize x=fp32[1,4]:values(448.0,-3.0,0.5,7.0) dtype=e4m3 ue8m0=True least_amax=1e-10 seed=4"
_LAST = "quantize x=bf16[5,67]:outlier_last dtype=e4m3 least_amax=1e-10 seed=5"
_NEGATIVE = "quantize x=fp32[1,3]:values(-9.0,1.0,2.0) dtype=e4m3 seed=6"
_SPECIAL = "quantize x=bf16[15,256]:special dtype=e4m3 least_amax=1e-10 seed=7"
_ZERO = "quantize x=bf16[15,64]:zero_rows dtype=e4m3 group_size=32 least_amax=1e-10 seed=8"
_LONG = "quantize x=bf16[2,16385]:rows dtype=e4m3 least_amax=1e-10 seed=9"
_STRIDED = "quantize x=bf16[6,128]@160,1 dtype=e4m3 group_size=64 least_amax=1e-10 seed=10"
_INT8 = "quantize x=bf16[40,192] dtype=int8 seed=11"
_TIES = "quantize x=bf16[40,192] scale=fp32[1]:scale_pow2 dtype=int8 seed=12"
_BEYOND = "quantize x=bf16[8,64]:largest scale=fp32[1]:scale_pow2 dtype=int8 seed=13"
_E5M2 = "quantize x=bf16[32,256]:rows dtype=e5m2 least_amax=1e-10 seed=14"
_STATIC = "quantize x=bf16[32,256] scale=fp32[1]:scale_odd dtype=e4m3 seed=15"

_QUOTIENT = "tl.div_rn(value, scale)"
_SCALE = "else tl.div_rn(amax, LARGEST)\n"
_AMAX = "amax = tl.maximum(amax, tl.max(tl.abs(value), axis=1, keep_dims=True))"
_LEAST = "        amax = tl.maximum(amax, least_amax)\n"
_UPWARD = "bits += 0x007FFFFF"
_POWER = "scale = _power_of_two(scale, True)"
_STORE = "tl.store(scale_ptr + unit, scale, mask=live)"
_RINT = "limited = libdevice.rint(limited)"
_CLAMP = "limited = tl.clamp(scaled, LOWEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)"
_MASK = "mask = live & (columns < n)\n            value ="

FAULTS: tuple[tuple[Fault, str], ...] = (
    (
        _scaled(
            "reciprocal in place of a quotient",
            "multiplies by the reciprocal of the scale, where the contract divides",
            (_edit(_QUOTIENT, "value * tl.div_rn(1.0, scale)"),),
        ),
        _ROWS,
    ),
    (
        _scaled(
            "quotient in place of a reciprocal",
            "divides, where the contract multiplies by the reciprocal",
            (_edit('if CODES == "quotient" else value * factor', "if True else value * factor"),),
            variant="reciprocal",
        ),
        _STATIC,
    ),
    (
        _scale(
            "amax times the reciprocal of the largest",
            "multiplies amax by 1 / 448, as torch does on CUDA for a quotient of a tensor and a number",
            (_edit(_SCALE, "else amax * (1.0 / LARGEST)\n"),),
        ),
        _GROUPS,
    ),
    (
        _scale(
            "largest code of another format",
            "takes the 240 of e4m3fnuz for the largest code",
            (_edit(_SCALE, "else tl.div_rn(amax, 240.0)\n"),),
        ),
        _ROWS,
    ),
    (
        _scale(
            "scale in bf16",
            "rounds the scale to the dtype of x",
            (_edit(_STORE, "scale = scale.to(tl.bfloat16).to(tl.float32)\n        " + _STORE),),
        ),
        _ROWS,
    ),
    (
        _scaled(
            "scaled numbers in bf16",
            "rounds the quotient to the dtype of x before its code",
            (_edit(_QUOTIENT, f"{_QUOTIENT}.to(tl.bfloat16).to(tl.float32)"),),
        ),
        _ROWS,
    ),
    (
        _amax(
            "last column left out",
            "looks for the largest magnitude in all columns but the last",
            (_edit(_MASK, _MASK.replace("columns < n", "columns < n - 1")),),
        ),
        _LAST,
    ),
    (
        _amax(
            "largest number",
            "takes the largest number for the largest magnitude",
            (_edit(_AMAX, "amax = tl.maximum(amax, tl.max(value, axis=1, keep_dims=True))"),),
        ),
        _NEGATIVE,
    ),
    (
        _amax(
            "NaN in the scale",
            "lets a NaN make the scale infinite",
            (_edit("tl.abs(value), axis", 'tl.where(value == value, tl.abs(value), float("inf")), axis'),),
        ),
        _SPECIAL,
    ),
    (
        _fault(
            "NaN as the largest code",
            "limits numbers by a minimum and a maximum that lose a NaN",
            (_edit(_CLAMP, "limited = tl.maximum(tl.minimum(scaled, LARGEST), LOWEST)"),),
            exposed="e4m3_codes",
            hidden="e4m3_codes",
        ),
        _SPECIAL,
    ),
    (
        _amax(
            "amax of the last block",
            "forgets the largest magnitude of a block when it comes to the next",
            (_edit(_AMAX, "amax = tl.max(tl.abs(value), axis=1, keep_dims=True)"),),
        ),
        _LONG,
    ),
    (
        _amax(
            "no least amax",
            "divides zeros by a scale of zero",
            (_edit(_LEAST, ""),),
        ),
        _ZERO,
    ),
    (
        _amax(
            "least amax added",
            "adds the least amax, as an eps, where the contract takes the larger of both",
            (_edit(_LEAST, "        amax = amax + least_amax\n"),),
        ),
        _ZERO.replace("1e-10", "0.0001"),
    ),
    (
        _scale(
            "no least scale",
            "forgets the least scale",
            (_edit("scale = tl.maximum(scale, least)", "scale = scale + 0.0"),),
        ),
        "quantize x=bf16[8,64]:tiniest dtype=e4m3 least_scale=4.359654017857143e-06 seed=16",
    ),
    (
        _scale(
            "power of two below",
            "rounds the scale down to a power of two, so that codes overflow",
            (_edit(_POWER, "scale = _power_of_two(scale, False)"),),
        ),
        _E8M0,
    ),
    (
        _scale(
            "nearest power of two",
            "rounds the scale to the nearer power of two",
            (_edit(_UPWARD, "bits += 0x00400000"),),
        ),
        _E8M0,
    ),
    (
        _scale(
            "power of two above a power of two",
            "takes the next power of two of a scale that is one",
            (_edit(_UPWARD, "bits += 0x00800000"),),
        ),
        _WHOLE,
    ),
    (
        _scaled(
            "codes of the unrounded scale",
            "divides by the scale before it is rounded to a power of two, and returns the rounded one",
            (_edit(_STORE, "tl.store(scale_ptr + unit, _power_of_two(scale, True), mask=live)"), _edit(_POWER, "pass")),
        ),
        _E8M0,
    ),
    (
        _fault(
            "rows without a gap",
            "takes rows for contiguous",
            (_edit("row_start(row, size_1, size_2, stride_0, stride_1, stride_2, FLAT)", "row * per_row * n"),),
            exposed="out_of_bounds",
            hidden="out_of_bounds",
        ),
        _STRIDED,
    ),
    (
        _fault(
            "scale of the row",
            "stores the scale of a group at the place of its row",
            (_edit(_STORE, "tl.store(scale_ptr + unit // per_row, scale, mask=live)"),),
            exposed="unwritten",
            hidden="unwritten",
        ),
        _GROUPS,
    ),
    (
        _int8(
            "int8 cut off",
            "converts to int8 without rounding, as Triton and C do",
            (_edit(_RINT, "limited = limited"),),
        ),
        _INT8,
    ),
    (
        _int8(
            "int8 half away",
            "rounds ties away from zero, as libdevice.round does",
            (_edit(_RINT, "limited = libdevice.round(limited)"),),
        ),
        _TIES,
    ),
    (
        _int8(
            "int8 half even",
            "rounds ties to even, where the contract rounds them away from zero",
            (_edit("limited = libdevice.round(limited)", "limited = libdevice.rint(limited)"),),
            variant="inverted+half_away",
        ),
        _TIES,
    ),
    (
        _int8(
            "int8 not limited",
            "lets numbers beyond 127 wrap around",
            (_edit(_CLAMP, "limited = scaled"),),
        ),
        _TIES.replace("scale_pow2", "scale_overflow"),
    ),
    (
        _int8(
            "int8 symmetric",
            "limits int8 codes to -127",
            (_edit('"LOWEST": -128.0 if dtype == "int8" else -LARGEST[dtype]', '"LOWEST": -LARGEST[dtype]'),),
        ),
        _BEYOND,
    ),
    (
        _fault(
            "e5m2 by e4m3",
            "rounds to e4m3 on the way to e5m2",
            (_edit("return limited.to(DTYPE)", "return limited.to(tl.float8e4nv).to(tl.float32).to(DTYPE)"),),
            exposed="e5m2_codes",
            hidden="e5m2_codes",
        ),
        _E5M2,
    ),
    (
        _scaled(
            "reciprocal of amax times the largest",
            "computes largest · (1 / amax), where the contract divides",
            (_edit("tl.div_rn(LARGEST, amax)", "LARGEST * tl.div_rn(1.0, amax)"),),
            variant="inverted+half_away",
        ),
        _ROWS,
    ),
)
