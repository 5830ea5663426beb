"""The rules that put weights into codes, against numpy loops, ml_dtypes and values by hand."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from lastbit.numerics.quantized import unpack
from tests.quantized_weights import STORED, every_storage, stored, value, weights
from tests.quantizers import Quantized, encoded


def test_codes_of_int8_against_a_loop_over_rows():
    weight = weights(40, 100)
    codes, scale, _ = encoded(weight, "int8")
    for n, row in enumerate(weight.numpy()):
        s = np.abs(row).max() / np.float32(127)
        assert scale[n].item() == s
        inverse = np.float32(1) / s if s else np.float32(0)
        assert codes[n].tolist() == np.rint(row * inverse).tolist()
    assert codes.max() == 127 and codes[1].eq(0).all() and scale[1] == 0


def test_codes_of_int8_come_from_the_reciprocal_of_the_scale():
    rows = (np.append(np.arange(largest * 2) / 2, largest).astype(np.float32) for largest in range(1, 100))
    seen = 0
    for row in rows:
        s = row[-1] / np.float32(127)
        wanted = np.rint(row * (np.float32(1) / s))
        assert encoded(torch.from_numpy(row)[None], "int8").codes[0].tolist() == wanted.tolist()
        seen += int((np.rint(row / s) != wanted).any())
    assert seen, "some row must tell the reciprocal from a division"


def test_rows_whose_scale_has_no_reciprocal_get_codes_of_zero():
    codes, scale, _ = encoded(torch.tensor([[2.0**-140, -(2.0**-149)], [0.0, 0.0]]), "int8")
    assert codes.eq(0).all()
    assert torch.isfinite(scale).all()


def test_symmetric_codes_come_from_the_scale_in_fp32():
    # s = 1.01 is stored as 1.0078125. 3.532 / s is below 3.5, 3.532 / 1.0078125 above.
    weight = torch.tensor([[7.07, 3.532, -7.07, 0.505, -0.505, 1.6, 0.0, -3.6]])
    codes, scale, zero = encoded(weight, "int4_symmetric", 8)
    assert zero is None and scale.item() == 1.0078125
    assert unpack(codes).tolist() == [[15, 11, 1, 8, 8, 10, 8, 4]]
    assert round(3.532 / 1.0078125) == 4 and round(3.532 / 1.01) == 3


def test_ties_of_symmetric_codes_go_to_the_even_one_and_zeros_keep_the_least_scale():
    weight = torch.tensor([[7.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -7.0], [0.0] * 8])
    codes, scale, _ = encoded(weight, "int4_symmetric", 8)
    assert (unpack(codes) - 8).tolist() == [[7, 0, 2, 2, 0, -2, -2, -7], [0] * 8]
    assert scale.tolist() == [[1.0], [torch.tensor(1e-8 / 7).bfloat16().item()]]


def test_asymmetric_codes_by_hand():
    weight = torch.tensor([[-3.0, 12.0, 0.0, 0.5, 1.5, -0.5, 11.4, 5.0], [2.0, 17.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]])
    codes, scale, zero = encoded(weight, "int4_asymmetric", 8)
    assert scale.dtype == torch.float16 and scale.tolist() == [[1.0], [1.0]]
    assert zero.tolist() == [[3], [0]], "a zero point is never negative"
    assert unpack(codes).tolist() == [[0, 15, 3, 3, 5, 3, 14, 8], [2, 15, 3, 4, 5, 6, 7, 8]]


def test_asymmetric_codes_of_a_constant_group_are_finite():
    codes, scale, zero = encoded(torch.tensor([[0.0] * 8, [5.0] * 8, [-5.0] * 8]), "int4_asymmetric", 8)
    assert zero.flatten().tolist() == [0, 0, 15]
    assert unpack(codes)[:, 0].tolist() == [0, 15, 0]
    assert scale.eq(torch.tensor(1e-5 / 15).half()).all()


@pytest.mark.parametrize("storage", ["int4_symmetric", "int4_asymmetric", "int4_asymmetric in bf16"])
def test_nibbles_against_a_loop_over_elements(storage):
    scheme, size, _ = STORED[storage]
    weight = weights(9, 64, seed=3)
    codes, _, zero = stored(storage, weight)
    for n, row in enumerate(weight.numpy()):
        for k, w in enumerate(row):
            group = row[k // size * size : (k // size + 1) * size]
            if scheme == "int4_symmetric":
                s = np.maximum(np.abs(group).max(), np.float32(1e-8)) / np.float32(7)
                wanted = min(max(np.rint(w / s), -8), 7) + 8
            else:
                s = np.maximum(group.max() - group.min(), np.float32(1e-5)) / np.float32(15)
                z = min(max(np.rint(-group.min() / s), 0), 15)
                assert zero[n, k // size] == z
                wanted = min(max(np.rint(w / s) + z, 0), 15)
            assert unpack(codes)[n, k] == wanted


def test_mxfp4_by_hand():
    row = torch.tensor([7.9, 1.0, -1.0, 0.25, 0.75, -0.25, 2.5, 3.5, 5.0, -5.1, 0.0, -0.0, 1.25, 1.75, 6.0, -7.0])
    codes, scale, _ = encoded(torch.cat([row, torch.zeros(16)])[None], "mxfp4")
    assert scale.tolist() == [[127]], "floor(log2(7.9)) = 2 is the largest exponent of E2M1"
    wanted = [6, 1, -1, 0, 1, -0.0, 2, 4, 4, -6, 0, -0.0, 1, 2, 6, -6]
    actual = value(Quantized(codes, scale, None))[0, :16]
    assert actual.tolist() == wanted
    assert torch.signbit(actual).tolist() == [str(v).startswith("-") for v in wanted]


def test_mxfp4_against_the_casts_of_ml_dtypes():
    weight = weights(60, 64, seed=5) * 2.0 ** torch.arange(-90, 90, 3)[:, None]
    codes, scale, _ = encoded(weight, "mxfp4")
    for n, k in np.ndindex(60, 2):
        group = weight[n, 32 * k : 32 * k + 32].double().numpy()
        power = scale[n, k].numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
        assert not group.any() or 4 * power <= np.abs(group).max() < 8 * power
        elements = np.clip(group / power, -6, 6).astype(ml_dtypes.float4_e2m1fn)
        assert unpack(codes)[n, 32 * k : 32 * k + 32].tolist() == elements.view(np.uint8).tolist()


def test_scales_in_e8m0_stay_within_its_exponents():
    weight = torch.zeros(4, 32)
    weight[0, 0], weight[1, 0], weight[2, 0] = 2.0**-149, 3.0e38, 2.0**-126
    codes, scale, _ = encoded(weight, "mxfp4")
    assert scale.flatten().tolist() == [0, 252, 0, 0]
    assert unpack(codes)[:, 0].tolist() == [0, 7, 4, 0]


def test_no_code_is_lost_to_a_saturating_addition():
    """Rounding an 8-bit code to 4 bits with a signed saturating + 8 makes 7 of 120 to 127, which is 8."""
    byte = torch.arange(241)
    rounded = unpack(encoded(torch.nn.functional.pad(byte / 16, (0, 7))[None], "int4_asymmetric", 248).codes)[0, :241]
    nearest, tie = (byte + 8) // 16, byte % 16 == 8
    assert torch.equal(rounded[~tie], nearest[~tie])
    assert rounded[120:128].eq(8).all()
    saturated = torch.where((byte >= 120) & (byte < 128), 7, nearest)
    assert (rounded != saturated)[~tie].sum() == 7


@pytest.mark.parametrize(("arguments", "message"), [
    (("int3",), "scheme 'int3' is not one of 'int8'"),
    (("int4_symmetric", 0), "group_size=0 does not divide the 64 columns"),
    (("int4_symmetric",), "group_size=0 does not divide the 64 columns"),
    (("int4_asymmetric", 24), "group_size=24 does not divide the 64 columns"),
    (("int8", 32), "group_size=32, but int8 has one scale per 64 of 64 columns"),
    (("mxfp4", 16), "group_size=16, but mxfp4 has one scale per 32"),
])  # fmt: skip
def test_schemes_and_groups_that_do_not_exist(arguments, message):
    with pytest.raises(ValueError, match=message):
        encoded(torch.ones(4, 64), *arguments)


def test_weights_that_have_no_code_are_refused():
    weight = torch.ones(4, 64)
    with pytest.raises(ValueError, match=r"scale_dtype=torch\.float32, but mxfp4 has torch\.uint8 or torch\.bfloat16"):
        encoded(weight, "mxfp4", scale_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"a group needs the scale 66666\.7, which is beyond"):
        encoded(weight * torch.tensor([-1e6, 0]).repeat(32), "int4_asymmetric", 64)
    weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        encoded(weight, "int8")


@every_storage
def test_leading_dimensions_are_independent_weights(storage):
    weight = torch.stack([weights(5, 64, seed=s) for s in (1, 2)])
    both = stored(storage, weight)
    for one, quantized in enumerate(stored(storage, part) for part in weight):
        assert all(torch.equal(a[one], b) for a, b in zip(both, quantized, strict=True) if b is not None)
        assert torch.equal(value(both)[one], value(quantized))
