"""Quantised weights: what their codes stand for, against numpy loops, ml_dtypes and values by hand."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from lastbit.numerics.formats import BF16, FP16, FP32, Format
from lastbit.numerics.quantized import SCHEMES, dequantized, unpack
from tests.quantized_weights import STORED, every_storage, stored, value, weights
from tests.quantizers import Quantized, pack

NIBBLES = torch.arange(16)
every_format = pytest.mark.parametrize("fmt", [BF16, FP16], ids=lambda fmt: fmt.name)
NUMPY = {FP32: np.float32, BF16: ml_dtypes.bfloat16, FP16: np.float16}


def level(scheme: str, words: np.ndarray, column: int) -> float:
    """Decode one element of a row of words before its zero point and scale, byte by byte."""
    if scheme == "int8":
        return float(words[column])
    raw = words.astype(words.dtype.newbyteorder("<")).tobytes()
    nibble = raw[column // 2] // 16 if column % 2 else raw[column // 2] % 16
    if scheme == "mxfp4":
        return float(np.array([nibble], np.uint8).view(ml_dtypes.float4_e2m1fn)[0])
    return float(nibble - 8 if scheme == "int4_symmetric" else nibble)


def slow_values(scheme: str, quantized: Quantized, columns: int, fmt: Format) -> list[list[float]]:
    """Decode the elements of a weight [N, K], one by one in numpy's fp32 and ml_dtypes' casts."""
    words, scale = quantized.codes.numpy(), quantized.scale
    powers = ml_dtypes.float8_e8m0fnu
    scales = (scale.numpy().view(powers) if scale.dtype == torch.uint8 else scale.float().numpy()).astype(np.float32)
    scales = scales.reshape(len(words), -1)
    size = columns // scales.shape[1]
    rows = []
    for n in range(len(words)):
        row = []
        for k in range(columns):
            zero = 0 if quantized.zero is None else int(quantized.zero[n, k // size])
            product = np.float32(level(scheme, words[n], k) - zero) * scales[n, k // size]
            row.append(float(product.astype(NUMPY[fmt])))
        rows.append(row)
    return rows


@every_format
@every_storage
def test_a_weight_is_what_slow_loops_make_of_its_codes(storage, fmt):
    quantized = stored(storage, weights(7, 64))
    wanted = torch.tensor(slow_values(STORED[storage][0], quantized, 64, fmt), dtype=torch.float64)
    assert torch.equal(value(quantized, fmt), wanted)
    assert wanted.abs().max() > 1


# Codes.


def test_every_byte():
    codes = torch.arange(-128, 128).to(torch.int8).reshape(2, 128)
    assert torch.equal(value(Quantized(codes, torch.tensor([1.0, 0.5]), None)), codes * torch.tensor([[1.0], [0.5]]))


@pytest.mark.parametrize("scheme", ["int4_symmetric", "int4_asymmetric", "mxfp4"])
def test_every_nibble_in_every_place_of_a_word(scheme):
    one = SCHEMES[scheme]
    codes = torch.stack([NIBBLES.roll(shift).repeat(2) for shift in range(16)])
    scale = (
        torch.full((16, 1), 127, dtype=torch.uint8) if scheme == "mxfp4" else torch.ones(16, 1, dtype=torch.bfloat16)
    )
    zero = torch.zeros(16, 1, dtype=torch.int8) if one.has_zero else None
    actual = value(Quantized(pack(codes, one.words), scale, zero))
    meaning = {
        "int4_symmetric": torch.arange(-8, 8),
        "int4_asymmetric": NIBBLES,
        "mxfp4": torch.from_numpy(NIBBLES.numpy().astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)),
    }[scheme].double()
    assert torch.equal(actual, meaning[codes])
    assert torch.equal(torch.signbit(actual), torch.signbit(meaning[codes]))


@pytest.mark.parametrize("zero", range(16))
def test_every_zero_point_with_every_nibble(zero):
    weight = pack(NIBBLES[None], torch.int32)
    scale, zeros = torch.full((1, 1), 0.5, dtype=torch.float16), torch.full((1, 1), zero, dtype=torch.int8)
    assert value(Quantized(weight, scale, zeros)).tolist() == [[(code - zero) / 2 for code in range(16)]]


def test_every_exponent_of_a_scale_in_e8m0():
    scales = torch.arange(256).to(torch.uint8)[:, None]
    codes = torch.full((256, 16), 0x62, dtype=torch.uint8)  # 1 and 4
    actual = dequantized(codes, scales, fmt=FP32).value[:, :2]
    powers = torch.from_numpy(scales.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64))
    wanted = torch.cat([powers, 4 * powers], -1).float().double()  # beyond fp32 from 2**128 on
    assert actual[0, 0] == 2.0**-127 and actual[255].isnan().all()
    assert torch.equal(actual[:255], wanted[:255])


def test_a_scale_that_is_nan_spoils_its_own_group_only():
    codes = torch.zeros(1, 32, dtype=torch.uint8)
    actual = value(Quantized(codes, torch.tensor([[255, 127]], dtype=torch.uint8), None))
    assert actual.isnan().tolist() == [[True] * 32 + [False] * 32]


# Words.


def test_the_first_code_is_in_the_lowest_bits():
    assert pack(NIBBLES, torch.int32).tolist() == [0x76543210, 0xFEDCBA98 - 2**32]
    assert pack(torch.tensor([1, 2, 15, 0]), torch.uint8).tolist() == [0x21, 0x0F]
    assert pack(torch.tensor([0x80, 0xFF]), torch.int8, bits=8).tolist() == [-128, -1]


@pytest.mark.parametrize(("words", "bits"), [(torch.int32, 4), (torch.uint8, 4), (torch.int8, 8)])
def test_unpacking_is_the_inverse_of_packing(words, bits):
    codes = torch.randint(0, 2**bits, (3, 5, 64), generator=torch.Generator().manual_seed(0))
    packed = pack(codes, words, bits)
    assert packed.dtype == words
    assert torch.equal(unpack(packed, bits), codes)
    assert torch.equal(pack(unpack(packed, bits), words, bits), packed)


@pytest.mark.parametrize(("codes", "words", "message"), [
    (torch.arange(7), torch.int32, "7 codes do not fill words of torch.int32, which hold 8"),
    (torch.tensor([0, 16]), torch.uint8, "codes are 0 to 16; 4 bits hold 0 to 15"),
    (torch.tensor([-1, 0]), torch.uint8, "codes are -1 to 0"),
])  # fmt: skip
def test_codes_that_fit_no_word(codes, words, message):
    with pytest.raises(ValueError, match=message):
        pack(codes, words)


# Rounding.


def test_the_product_is_rounded_to_fp32_before_the_operand_is_rounded():
    quantized = Quantized(torch.tensor([[-6]], dtype=torch.int8), torch.tensor([float.fromhex("0x1.14aaaap0")]), None)
    enclosure = dequantized(*quantized, fmt=BF16)
    assert enclosure.exact.item() == -6 * float.fromhex("0x1.14aaaap0")
    assert enclosure.value.item() == -6.5, "one rounding would give -6.46875"


def test_an_operand_beyond_fp16_is_infinite():
    quantized = Quantized(torch.tensor([[127, -128, 1]], dtype=torch.int8), torch.tensor([600.0]), None)
    assert value(quantized, FP16).tolist() == [[torch.inf, -torch.inf, 600.0]]


def test_weights_of_floating_point_numbers_are_left_alone():
    weight = torch.tensor([[1.0, -0.3]], dtype=torch.bfloat16)
    assert torch.equal(dequantized(weight, fmt=BF16).value, weight.double())


# Faults that were seen in other implementations.


@pytest.mark.parametrize("scheme", ["int4_symmetric", "int4_asymmetric"])
def test_nibbles_are_unsigned(scheme):
    scale, has_zero = torch.ones(1, 1, dtype=torch.bfloat16), SCHEMES[scheme].has_zero
    zero = torch.zeros(1, 1, dtype=torch.int8) if has_zero else None
    actual = value(Quantized(torch.full((1, 1), -1, dtype=torch.int32), scale, zero))
    assert actual.tolist() == [[15.0 if has_zero else 7.0] * 8], "a signed nibble of four ones would be -1"


def test_a_scale_in_e8m0_is_no_number():
    codes = torch.full((1, 16), 0x22, dtype=torch.uint8)
    assert value(Quantized(codes, torch.tensor([[130]], dtype=torch.uint8), None)).eq(8).all()
    with pytest.raises(ValueError, match=r"scale is torch\.float16; mxfp4 has torch\.uint8 or torch\.bfloat16"):
        dequantized(codes, torch.tensor([[130.0]], dtype=torch.float16), fmt=BF16)


# Errors.

_SCALE = torch.ones(4, 2, dtype=torch.bfloat16)
_ZERO = torch.zeros(4, 2, dtype=torch.int8)
_INT8 = torch.zeros(4, 64, dtype=torch.int8)
_INT4 = torch.zeros(4, 8, dtype=torch.int32)
_MXFP4 = torch.zeros(4, 32, dtype=torch.uint8)

WRONG = {
    "codes of no scheme": ((_INT8.short(), _SCALE, None), r"a weight of torch\.int16 is of no scheme"),
    "scale of plain weights": ((_INT8.float(), _SCALE, None), r"scale is given with a weight of torch\.float32"),
    "zero of plain weights": ((_INT8.float(), None, _ZERO), "zero is given with a weight of"),
    "no scale": ((_INT8, None, None), r"scale is missing; a weight of torch\.int8 is int8"),
    "bf16 scale of int8": ((_INT8, _SCALE[:, 0], None), r"scale is torch\.bfloat16; int8 has torch\.float32"),
    "grouped scale of int8": ((_INT8, _SCALE.float(), None), r"scale has shape \(4, 2\); .* it must be \(4\)"),
    "zero of int8": ((_INT8, _SCALE[:, 0].float(), _ZERO), "zero is given, but int8 has no zero point"),
    "zero missing": ((_INT4, _SCALE.half(), None), r"int4_symmetric has torch\.bfloat16; with a zero point"),
    "fp32 scale": ((_INT4, _SCALE.float(), _ZERO), r"int4_asymmetric has torch\.float16 or torch\.bfloat16"),
    "zero in int32": ((_INT4, _SCALE, _ZERO.int()), r"zero is torch\.int32; it must be torch\.int8"),
    "zero too large": ((_INT4, _SCALE, _ZERO + 16), "zero holds 16 to 16; it must be 0 to 15"),
    "signed zero": ((_INT4, _SCALE, _ZERO - 8), "zero holds -8 to -8"),
    "zero per row": ((_INT4, _SCALE, _ZERO[:, 0]), r"zero has shape \(4,\), but scale has \(4, 2\)"),
    "scale per row": ((_INT4, _SCALE[:, 0], None), r"scale has shape \(4,\); .* it must be \(4, groups\)"),
    "scale of other rows": ((_INT4, _SCALE[:3], None), r"scale has shape \(3, 2\); .* it must be \(4, groups\)"),
    "no groups": ((_INT4, _SCALE[:, :0], None), "scale has 0 groups in a row; they do not cut its 64 columns"),
    "three groups": ((_INT4, torch.ones(4, 3).bfloat16(), None), "scale has 3 groups in a row; they do not cut"),
    "mxfp4 in groups of 16": ((_MXFP4, torch.ones(4, 4).byte(), None), "64 columns into groups of 32"),
    "zero of mxfp4": ((_MXFP4, _SCALE, _ZERO), "zero is given, but mxfp4 has no zero point"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG.keys())
def test_tensors_that_are_no_weight_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        dequantized(*arguments, fmt=BF16)


@pytest.mark.parametrize(("codes", "scale"), [(_INT4, _SCALE), (_MXFP4, _SCALE), (_INT8, _SCALE[:, 0].float())])
def test_codes_of_another_width_than_the_weight_are_refused(codes, scale):
    dequantized(codes, scale, fmt=BF16, columns=64)
    message = (
        rf"which is 64 columns at {SCHEMES['int8'].codes_per_word if codes is _INT8 else 64 // codes.shape[1]} per"
    )
    with pytest.raises(ValueError, match=message):
        dequantized(codes, scale, fmt=BF16, columns=128)
