"""How kernels read quantised weights: tiles against `dequantized`, slices, transposes, and what is refused."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from lastbit.kernel import load_file
from lastbit.numerics.formats import cast, format_of
from lastbit.numerics.quantized import SCHEMES, dequantized
from tests.quantized_weights import every_storage, stored, weights
from tests.quantizers import Quantized, encoded, pack
from tests.rms_norm_contract import BF16, DEVICE, FLOAT, FOLDER, FP16, assert_bits, needs_device

pytestmark = needs_device

MODULE = load_file(FOLDER / "quantized_weights.py")
base_weight, load_quantized = MODULE.base_weight, MODULE.load_quantized
N, K = 7, 64
every_dtype = pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)


@triton.jit
def _tile_kernel(
    codes_ptr, scale_ptr, zero_ptr, out_ptr, n_size, k_size, n_stride, word_stride,
    scale_start: tl.int64, scale_n_stride, scale_group_stride,
    A: tl.constexpr, SCHEME: tl.constexpr, GROUP: tl.constexpr, TURNED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [N, K], or with TURNED [K, N], where the mask lets it; the lanes beyond it must be zero."""
    if TURNED:
        n, k = tl.arange(0, BLOCK_N)[None, :], tl.arange(0, BLOCK_K)[:, None]
    else:
        n, k = tl.arange(0, BLOCK_N)[:, None], tl.arange(0, BLOCK_K)[None, :]
    mask = (n < n_size) & (k < k_size)
    tile = load_quantized(
        codes_ptr, scale_ptr, zero_ptr, n, k, n_stride, word_stride, scale_start, scale_n_stride, scale_group_stride,
        mask, A, SCHEME, GROUP,
    )  # fmt: skip
    tl.store(out_ptr + (k * BLOCK_N + n if TURNED else n * BLOCK_K + k), tile)


def tile(weight, expert: int, *, turned: bool = False) -> Tensor:
    """Load one expert, [N, K] or [K, N], with 16 × 128 lanes."""
    n, k = weight.shape[1:]
    out = torch.full((128, 16) if turned else (16, 128), 7.0, dtype=weight.dtype, device=DEVICE)
    codes, scale = weight.codes[expert], weight.scale
    _tile_kernel[(1,)](
        codes, scale, weight.zero, out, n, k, *codes.stride(), expert * scale.stride(0), *scale.stride()[1:],
        A=tl.bfloat16 if weight.dtype == BF16 else tl.float16, SCHEME=weight.scheme, GROUP=weight.group,
        TURNED=turned, BLOCK_N=16, BLOCK_K=128,
    )  # fmt: skip
    inside = out[:k, :n] if turned else out[:n, :k]
    assert out.count_nonzero() == inside.count_nonzero(), "lanes beyond the mask are zero"
    return inside


def on_device(quantized: Quantized) -> Quantized:
    return Quantized(*(t if t is None else t.to(DEVICE) for t in quantized))


def expected(quantized: Quantized, dtype: torch.dtype) -> Tensor:
    return cast(dequantized(*quantized, fmt=format_of(dtype)).value, dtype)


def two_experts(storage: str) -> Quantized:
    return on_device(stored(storage, torch.stack([weights(N, K, seed=s) for s in (1, 2)])))


@pytest.mark.parametrize("turned", [False, True])
@every_dtype
@every_storage
def test_a_tile_is_what_the_codes_stand_for(storage, dtype, turned):
    quantized = two_experts(storage)
    weight = base_weight("gate", *quantized, columns=K, dtype=dtype)
    assert weight.shape == (2, N, K)
    for expert in (0, 1):
        wanted = expected(quantized, dtype)[expert]
        assert_bits(tile(weight, expert, turned=turned), wanted.t() if turned else wanted, storage)
        assert_bits((weight.transpose(1, 2) if turned else weight)[expert], wanted.t() if turned else wanted, storage)


@every_dtype
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_code(scheme, dtype):
    one = SCHEMES[scheme]
    codes = torch.arange(1 << one.bits).repeat(64 // one.bits)[: 128 * N].reshape(1, -1, 128)
    rows = codes.shape[1]
    scale = {
        torch.float32: torch.linspace(0.1, 2, rows)[None],
        torch.uint8: torch.arange(100, 100 + rows * 4).to(torch.uint8).reshape(1, rows, 4),
    }.get(one.scales[0], torch.linspace(0.1, 2, rows * 4).reshape(1, rows, 4).to(one.scales[0]))
    zero = (torch.arange(rows * 4) % 16).to(torch.int8).reshape(1, rows, 4) if one.has_zero else None
    quantized = on_device(Quantized(pack(codes, one.words, one.bits), scale, zero))
    weight = base_weight("up", *quantized, columns=128, dtype=dtype)
    assert_bits(tile(weight, 0), expected(quantized, dtype)[0], scheme)
    assert_bits(weight[0], expected(quantized, dtype)[0], scheme)


def test_every_power_of_two_of_e8m0():
    codes = torch.full((1, 16, 64), 0x12, dtype=torch.uint8, device=DEVICE)  # 1 and 0.5
    for first in range(0, 256, 64):
        scale = torch.arange(first, first + 64).to(torch.uint8).reshape(1, 16, 4).to(DEVICE)
        quantized = Quantized(codes, scale, None)
        weight = base_weight("up", *quantized, columns=128, dtype=BF16)
        for actual in (tile(weight, 0), weight[0]):
            assert_bits(actual, expected(quantized, BF16)[0], f"exponents from {first} on")


@pytest.mark.parametrize("turned", [False, True])
@every_storage
def test_shards_are_views_of_their_columns_or_rows(storage, turned):
    quantized = on_device(stored(storage, weights(8, 128)[None]))
    weight = base_weight("down", *quantized, columns=128, dtype=BF16)
    whole = expected(quantized, BF16)[0]
    for dim in (1, 2):
        for shard, wanted in enumerate(whole.chunk(2, dim - 1)):
            if turned:
                part = weight.transpose(1, 2).chunk(2, 3 - dim)[shard].transpose(1, 2)
            else:
                part = weight.chunk(2, dim)[shard]
            assert part.shape == (1, *wanted.shape)
            for actual in (tile(part, 0), part[0]):
                assert_bits(actual, wanted, f"shard {shard} along {dim}")
    quantized.codes.zero_()
    second = weight.chunk(2, 2)[1]
    assert_bits(tile(second, 0), expected(quantized, BF16)[0][:, 64:], "after a write to the codes")


def test_zero_points_with_strides_of_their_own():
    codes, scale, zero = two_experts("int4_asymmetric")
    strided = torch.stack([zero, zero + 1], -1)[..., 0]
    actual = tile(base_weight("up", codes, scale, strided, columns=K, dtype=BF16), 1)
    assert_bits(actual, expected(Quantized(codes, scale, zero), BF16)[1], "zero with a stride of 2")


def test_weights_in_floating_point_are_left_alone():
    weight = torch.ones(2, N, K, dtype=BF16, device=DEVICE)
    assert base_weight("gate", weight, None, None, columns=K, dtype=BF16) is weight


# Errors, before anything is launched.


@pytest.mark.parametrize(
    ("storage", "shards", "fits"),
    [
        ("int8", 64, True),
        ("int4_symmetric", 4, True),
        ("int4_symmetric", 8, False),
        ("int4_asymmetric", 8, True),
        ("int4_asymmetric", 16, False),
        ("mxfp4", 2, True),
        ("mxfp4", 4, False),
        ("int8", 3, False),
    ],
)
def test_shards_that_would_cut_a_group_or_a_word_are_refused(storage, shards, fits):
    weight = base_weight("down", *two_experts(storage), columns=K, dtype=BF16)
    assert len(weight.chunk(N, 1)) == N
    if fits:
        assert [part.shape for part in weight.chunk(shards, 2)] == [(2, N, K // shards)] * shards
    else:
        with pytest.raises(
            ValueError, match=rf"down_proj: {shards} shards of its 64 columns would cut {storage} codes"
        ):
            weight.chunk(shards, 2)


def test_a_shard_that_cuts_a_word_of_whole_groups_is_refused():
    quantized = on_device(encoded(weights(N, 8)[None], "int4_symmetric", 4))
    weight = base_weight("down", *quantized, columns=8, dtype=BF16)
    assert_bits(tile(weight, 0), expected(quantized, BF16)[0], "groups of half a word")
    with pytest.raises(ValueError, match=r"share a word \(8 of them\) or a scale \(4\)"):
        weight.chunk(2, 2)


_SCALE = torch.ones(2, 4, 2, dtype=BF16, device=DEVICE)
_ZERO = torch.zeros(2, 4, 2, dtype=torch.int8, device=DEVICE)
_INT8 = torch.zeros(2, 4, 64, dtype=torch.int8, device=DEVICE)
_INT4 = torch.zeros(2, 4, 8, dtype=torch.int32, device=DEVICE)
_MXFP4 = torch.zeros(2, 4, 32, dtype=torch.uint8, device=DEVICE)

WRONG = {
    "codes of no scheme": ((_INT8.short(), _SCALE, None), TypeError, r"up_proj is torch\.int16; it must be of"),
    "scale of plain weights": ((_INT8.half(), _SCALE, None), ValueError, "up_scale is given, but up_proj is"),
    "zero of plain weights": ((_INT8.half(), None, _ZERO), ValueError, "up_zero is given, but up_proj is"),
    "no scale": ((_INT8, None, None), ValueError, r"up_scale is missing; up_proj is torch\.int8, which is int8"),
    "bf16 scale of int8": ((_INT8, _SCALE[..., 0], None), TypeError, r"up_scale is torch\.bfloat16; with int8 codes"),
    "grouped int8": ((_INT8, _SCALE.float(), None), ValueError, r"shape \(2, 4, 2\); int8 has one per row"),
    "zero of int8": ((_INT8, _SCALE[..., 0].float(), _ZERO), ValueError, "up_zero is given, but int8 codes have no"),
    "zero missing": ((_INT4, _SCALE.half(), None), TypeError, "must be torch.bfloat16; with zero points it is another"),
    "fp32 scale": ((_INT4, _SCALE.float(), _ZERO), TypeError, r"must be torch\.float16 or torch\.bfloat16"),
    "zero in int32": ((_INT4, _SCALE, _ZERO.int()), TypeError, r"up_zero is torch\.int32; it must be torch\.int8"),
    "zero per row": ((_INT4, _SCALE, _ZERO[..., 0]), ValueError, r"up_zero has shape \(2, 4\), but up_scale has"),
    "scale per row": ((_INT4, _SCALE[..., 0], None), ValueError, r"up_scale has shape \(2, 4\); .* one per group"),
    "scale of other rows": ((_INT4, _SCALE[:, :3], None), ValueError, r"up_scale has shape \(2, 3, 2\)"),
    "group size 0": ((_INT4, _SCALE[..., :0], None), ValueError, r"up_scale has shape \(2, 4, 0\); .* one per group"),
    "three groups": ((_INT4, _SCALE[..., :1].repeat(1, 1, 3), None), ValueError, "3 groups, which do not cut 64"),
    "groups of 16": ((_MXFP4, _SCALE.repeat(1, 1, 2).byte(), None), ValueError, "into groups of 32"),
    "codes of bf16 width": ((_INT4.repeat(1, 1, 8), _SCALE, None), ValueError, r"must be \(E, N, 8\)"),
    "half the codes": ((_MXFP4[..., :16], _SCALE, None), ValueError, r"must be \(E, N, 32\)"),
    "two dimensions": ((_INT8[0], _SCALE[0, :, 0].float(), None), ValueError, r"must be \(E, N, 64\)"),
    "elsewhere": ((_INT4, torch.empty_like(_SCALE, device="meta"), None), ValueError, "up_scale is on meta, but"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "error", "message"), WRONG.values(), ids=WRONG.keys())
def test_tensors_that_are_no_weight_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        base_weight("up", *arguments, columns=64, dtype=BF16)


def test_only_the_matrix_is_transposed():
    weight = base_weight("up", _INT8, torch.ones(2, 4, dtype=FLOAT, device=DEVICE), None, columns=64, dtype=BF16)
    assert weight.transpose(1, 2).shape == (2, 64, 4)
    assert weight.transpose(2, 1).transpose(1, 2).shape == weight.shape
    with pytest.raises(ValueError, match="up_proj: only dimensions 1 and 2"):
        weight.transpose(0, 1)
