"""Faults of the mixture of experts, and of its gradients, in how base weights in codes are read."""

from __future__ import annotations

from functools import partial

from tests.faults import moe_lora_backward
from tests.faults.moe_lora import BASES, FROM_BASES, fault
from tests.faults.plant import Edit

_read = partial(Edit, file="quantized_weights.py")
_forward = partial(fault, exposed="gate_base", hidden="saved_gate")
_backward = partial(moe_lora_backward.fault, exposed="grad_intermediate", hidden="grad_gate_lora_b")

_CODE = "code = (word >> (k % CODES * 4)) & 15"
_INT8 = "level = tl.load(pointers, mask=mask, other=0).to(tl.float32)"
_LEVEL = '_e2m1(code) if SCHEME == "mxfp4" else code.to(tl.float32)'
_ZERO = "level = level - tl.load(zero_ptr + group, mask=mask, other=0).to(tl.float32)"
_PRODUCT = "level * scale.to(tl.float32)"
_SIGN = "tl.where(code > 7, -0.5, 0.5)"

NO_ZERO = (_read(_ZERO, "level = level * 1.0"),)
RAW = (_read(_LEVEL, _LEVEL.replace("code.to(tl.float32)", "((word & 65535) << 16).to(tl.float32, bitcast=True)")),)
BIAS = (_read("code << 23)", "(code + 1) << 23)"),)
SCALE_IN_A = (_read(_PRODUCT, "level * scale.to(A).to(tl.float32)"),)
FIRST_GROUP = (_read("k // GROUP * scale_group_stride", "k // GROUP * 0"),)

FORWARD = (
    _forward(
        "zero point left out", "does not subtract the zero points (Q7)", NO_ZERO, options="int4_asymmetric",
    ),
    _forward(
        "codes from zero", "takes codes from 0 to 15 for themselves, where 8 stands for zero (Q7)",
        (_read("level = level - 8.0", "level = level * 1.0"),), options="int4_symmetric",
    ),
    _forward(
        "codes in two's complement", "takes codes from 8 to 15 for negative numbers, where 8 stands for zero (Q7)",
        (_read("level = level - 8.0", "level = level - tl.where(level > 7, 16.0, 0.0)"),), options="int4_symmetric",
    ),
    _forward(
        "saturated code", "reads 7 for the code 8, as after packing with an addition that saturates (Q8)",
        (_read(_CODE, f"{_CODE}\n        code = tl.where(code == 8, 7, code)"),), options="int4_asymmetric",
    ),
    _forward(
        "codes read as bf16", "takes the bits of packed codes for bf16 (M22, Q9)", RAW, options="int4_symmetric",
    ),
    _forward(
        "codes in the other order", "takes the first code of a word from its highest bits",
        (_read(_CODE, _CODE.replace("k % CODES", "(CODES - 1 - k % CODES)")),), options="int4_symmetric",
    ),
    _forward(
        "first group's scale", "multiplies by the scale of the first group of a row", FIRST_GROUP,
        options="int4_asymmetric", exposed=BASES, hidden=FROM_BASES,
    ),
    _forward(
        "groups of 32", "takes groups of 32, whatever their size",
        (_read("k // GROUP * scale", "k // tl.maximum(GROUP, 32) * scale"),), options="int4_asymmetric",
        exposed=BASES, hidden=FROM_BASES,
    ),
    _forward(
        "scale of fp16 read as bf16", "takes the bits of scales in fp16 for bf16 (Q10)",
        (_read(_PRODUCT, "level * scale.to(tl.bfloat16, bitcast=True).to(tl.float32)"),), options="int4_asymmetric",
    ),
    _forward("bias of 126", "takes E8M0 scales as 2^(code − 126) (Q10)", BIAS, options="mxfp4"),
    _forward(
        "scale as a number", "multiplies by the code of an E8M0 scale (Q10)",
        (_read("scale = _e8m0(scale)", "scale = scale.to(tl.float32)"),), options="mxfp4",
    ),
    _forward(
        "NaN scale as one", "takes the E8M0 scale for NaN for 1 (Q11)",
        (_read("code == 255, 0x7FC00000", "code == 255, 0x3F800000"),), options="mxfp4",
        exposed=BASES, hidden=FROM_BASES,
    ),
    _forward(
        "one half as zero", "takes ±0.5 of E2M1 for zero",
        (_read("digits < 2, digits", "digits < 2, 0"),), options="mxfp4",
    ),
    _forward(
        "sign left out", "takes negative numbers of E2M1 for positive ones", (_read(_SIGN, "0.5"),),
        options="mxfp4",
    ),
    _forward(
        "unsigned bytes", "takes codes of 8 bits for unsigned ones",
        (_read(_INT8, f"{_INT8}\n        level = tl.where(level < 0, level + 256.0, level)"),), options="int8",
    ),
    _forward("scale rounded", "rounds the scale to x's dtype before the product", SCALE_IN_A, options="int8"),
)  # fmt: skip

BACKWARD = (
    _backward(
        "zero point left out", "does not subtract the zero points (Q7)", NO_ZERO, options="int4_asymmetric",
    ),
    _backward(
        "codes read as bf16", "takes the bits of packed codes for bf16 (M22, Q9)", RAW, options="int4_symmetric",
    ),
    _backward(
        "first group's scale", "multiplies by the scale of the first group of a row", FIRST_GROUP,
        options="int4_asymmetric",
        exposed="grad_intermediate or grad_expert_input", hidden="grad_gate_lora_b or grad_input",
    ),
    _backward("bias of 126", "takes E8M0 scales as 2^(code − 126) (Q10)", BIAS, options="mxfp4"),
    _backward(
        "scale rounded", "rounds the scale to x's dtype before the product", SCALE_IN_A, options="int8",
        exposed="grad_intermediate or grad_expert_input", hidden="grad_gate_lora_b or grad_input",
    ),
)  # fmt: skip

FAULTS = (*FORWARD, *BACKWARD)
