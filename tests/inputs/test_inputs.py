"""Values, regimes, captured tensors, layouts, blocks and fingerprints."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from lastbit.case import TensorSpec, contiguous_strides, parse_case
from lastbit.dtypes import DTYPES
from lastbit.errors import UsageError
from lastbit.inputs import LAYOUTS, applicable_layouts, build, fingerprint, fingerprints, regimes, row_blocks
from lastbit.inputs.bits import bits_of, hashed
from lastbit.inputs.guards import separates
from lastbit.inputs.regimes import REGIMES
from lastbit.inputs.values import fill
from lastbit.numerics.formats import format_of

FLOATS = ("fp64", "fp32", "bf16", "fp16", "e4m3", "e5m2")


def values(dtype: str, shape: tuple[int, ...], regime: str, *, seed: int = 0, name: str = "x") -> torch.Tensor:
    """Make a contiguous tensor of a regime's values, in its own dtype."""
    tensor = torch.zeros(shape, dtype=DTYPES[dtype])
    fill(tensor, TensorSpec(name, dtype, shape, regime=regime), seed)
    return tensor


def wide(dtype: str, shape: tuple[int, ...], regime: str, *, seed: int = 0) -> torch.Tensor:
    """Make the values of a regime as fp64."""
    return values(dtype, shape, regime, seed=seed).to(torch.float64)


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(bits_of(a.contiguous()), bits_of(b.contiguous()))


# Values do not depend on where or how they are made


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("op x=bf16[64,128] weight=bf16[128]:near_one seed=17", "73c280a0a519078c"),
        ("op x=fp32[7,33]:rows weight=fp32[33]:small seed=1", "5f85fcea28ba5bae"),
        ("op x=fp16[3,5,16]@160,32,2+7:special seed=2", "4b6cc11c7d214ff6"),
        ("op x=e4m3[8,64]:huge scale=fp32[1]:scale_amax seed=3", "2905c23d3238e146"),
        ("op x=fp64[9,10]:offset index=int64[12]:below_9 mask=bool[9] seed=4", "4db78afe03155f60"),
        (
            "op x=bf16[4,256]:lattice y=e5m2[4,4]:subnormal z=fp32[4]:scale_random seed=9223372036854775807",
            "9e43a81997b42bdf",
        ),
        (
            "op x=bf16[4,64]:one_sign(,hidden) w=bf16[2,8,64]:one_sign_fan_in(a*b,hidden) y=fp32[9]:one_sign seed=5",
            "5e89e5833eb7fdab",
        ),
    ],
)
def test_golden_fingerprints(line: str, expected: str) -> None:
    """The values of these cases never change: not with torch, not with the device, not with this project."""
    assert build(parse_case(line), "cpu").fingerprint == expected


EVERY_REGIME = {
    "normal": "819c624c88ba9601",
    "uniform": "37aee7632085b631",
    "rows": "96e3d2756c39b824",
    "tiny": "5b54aad422f7d9b7",
    "tiniest": "3a253e419f6ee0fe",
    "outlier": "371cb0189a3207f4",
    "outlier_last": "9e0b23f617908b4c",
    "offset": "0006b5f9cf3711a3",
    "lattice": "ff0dc6eedc0f2637",
    "zero_rows": "ff4b5a53474f750d",
    "constant": "52f8f08c8125a4ee",
    "pow2": "813727ef6b063075",
    "subnormal": "8d31a9ebe3efe05e",
    "huge": "20219f98fc12b75f",
    "largest": "c60fb436996e2097",
    "special": "4a3418e191a45e2e",
    "special_columns": "697f67ebe4e59375",
    "masked": "e7dd30fb9156f2d9",
    "masked_classes": "1fa48df0737bf013",
    "sparse": "2ee83cd67e54c322",
    "near_one": "f69c3f0c88a0baeb",
    "ones": "e53812aa88f8a731",
    "zeros": "e78e07d2372794ac",
    "signs": "52a89cd1f1424230",
    "small": "781e0d3752be635f",
    "gates": "01795eb8f4dcd3a1",
    "saturated": "0b0cbcc492aa2492",
    "integers": "ba8bc467bc351c95",
    "scale_pow2": "87ce454245a9eaf9",
    "scale_amax": "91db33911a07e491",
    "scale_odd": "11d394833a6d55a4",
    "scale_random": "1ca8e1225ab8e6ae",
    "scale_overflow": "481526c0a98cff43",
    "fan_in": "43aba4d1fcac81f1",
    "few": "53c4bbc6e25dbb1d",
    "fractions": "d07be1b2b3d44492",
    "quarters": "0979cef5183bfd71",
    "sparse_signs": "c793c9d6dc067781",
    "one_sign": "a1429289825f4181",
    "one_sign_fan_in": "54a6e3ca76f14567",
}
EVERY_INTEGER_REGIME = {
    ("int64", "normal", 11): "9aa4b6035b522a3c",
    ("int32", "normal", 11): "42c9e21a495c8062",
    ("int8", "normal", 11): "72127fd9c1350bb5",
    ("uint8", "normal", 11): "2c6772b9abc4b2a2",
    ("bool", "normal", 11): "b538e797689d5ace",
    ("int64", "zeros", 11): "26f4bf9e1c173135",
    ("bool", "zeros", 11): "a5350cf2e69e6f53",
    ("int64", "ones", 11): "78a5ff5e4d0a7ef6",
    ("bool", "ones", 11): "b1281df88edafaed",
    ("bool", "spans", 11): "03c76ad2a01ac838",
    ("int64", "counting", 11): "6494a4ea63beb62b",
    ("uint8", "counting", 11): "6cdca88ad3c1c129",
    ("int64", "bits", 11): "9354a70ef3075dc0",
    ("int32", "bits", 11): "05e4e32305cc351f",
    ("int8", "bits", 11): "84c13de984eea19d",
    ("uint8", "bits", 11): "d667e119883dc4c0",
    ("bool", "bits", 11): "b538e797689d5ace",
    ("int64", "below_9", 11): "453463077c64c2d8",
    ("int8", "below_9", 11): "6f590441435db6b1",
    ("int64", "around_127", 11): "308fcc260b79cbad",
    ("uint8", "around_127", 11): "a8bf7233643637d4",
    ("int64", "labels_10", 11): "0ed48488e61f6747",
    ("int32", "labels_10", 11): "0ec0f5c9d12e6345",
    ("int64", "ends_10", 11): "98c9fec157603013",
    ("int32", "ends_10", 11): "3c51e33e34d7d65e",
    ("int64", "ends_9000", 11): "e962c0763f999d6b",
    ("int32", "ends_9000", 11): "e86f354070e43871",
    ("int64", "loads_12", 11): "607b379931ef5091",
    ("int32", "loads_12", 11): "58e9775e7afe019e",
    ("int64", "sequences_3", 11): "50c1a5ca3de58c4d",
    ("int32", "sequences_3", 11): "cf0dad13f289968c",
    ("int64", "lookalikes_2", 11): "49a54fd3383dad11",
    ("int32", "lookalikes_2", 11): "b040f895a40734e4",
    ("int64", "experts_8", 0): "db5745b4fa9e8bbc",
    ("int64", "experts_8", 1): "d7032015b42ff91d",
    ("int64", "experts_8", 2): "60a3bb166c717a96",
    ("int64", "experts_8", 3): "1643202b488d4c74",
    ("int64", "experts_8", 4): "b6b87c5c34aa8129",
    ("int64", "experts_8", 5): "cc8b5f8adde2aa73",
    ("int32", "experts_8", 0): "a5b0854ae957646c",
    ("int32", "experts_8", 1): "0d19a01cbb9cdcac",
    ("int32", "experts_8", 2): "58aaf523227cd06b",
    ("int32", "experts_8", 3): "d5831225f9cf8771",
    ("int32", "experts_8", 4): "c5e52f59fe94bc57",
    ("int32", "experts_8", 5): "a34396d62de1f1a2",
}


def test_golden_fingerprints_of_every_regime() -> None:
    """What a regime draws never changes, in narrow rows, in wide ones, and in each format: old case lines stay true."""
    line = "op a=bf16[40,24]:{0} b=fp16[2,3,7]:{0} c=e4m3[3]:{0} d=fp32[5,160]:{0} e=fp64[17,2]:{0} seed=9"
    assert {name: build(parse_case(line.format(name)), "cpu").fingerprint for name in REGIMES} == EVERY_REGIME
    line = "op a={0}[70,11]:{1} b={0}[2,3,5]:{1} seed={2}"
    integers = {key: build(parse_case(line.format(*key)), "cpu").fingerprint for key in EVERY_INTEGER_REGIME}
    assert integers == EVERY_INTEGER_REGIME


@given(data=st.data(), dtype=st.sampled_from(FLOATS), regime=st.sampled_from(sorted(REGIMES)))
def test_strides_change_no_value(data: st.DataObject, dtype: str, regime: str) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=4), label="shape"))
    layout = data.draw(st.sampled_from(applicable_layouts(shape, dtype)), label="layout")
    spec = TensorSpec("x", dtype, shape, layout.strides, layout.offset, regime)
    case = parse_case(f"op {spec} seed=5")
    [actual] = build(case, "cpu").tensors.values()
    expected = values(dtype, shape, regime, seed=5)
    if layout.name == "expanded":
        expected = expected[:1].expand(shape)
    assert equal_bits(actual, expected)
    assert actual.stride() == layout.strides


@given(
    shape=st.lists(st.integers(1, 6), max_size=4).map(tuple),
    regime=st.sampled_from(sorted(REGIMES)),
    budget=st.integers(1, 50),
)
def test_block_size_changes_no_value(shape: tuple[int, ...], regime: str, budget: int) -> None:
    spec = TensorSpec("x", "fp32", shape, regime=regime)
    expected, actual = torch.zeros(shape), torch.zeros(shape)
    fill(expected, spec, 3)
    fill(actual, spec, 3, budget=budget)
    assert equal_bits(actual, expected)


def test_expanded_in_the_middle_takes_index_zero() -> None:
    [actual] = build(parse_case("op x=fp32[3,4,5]@5,0,1 seed=1"), "cpu").tensors.values()
    assert equal_bits(actual, values("fp32", (3, 4, 5), "normal", seed=1)[:, :1].expand(3, 4, 5))


def test_words_are_those_of_splitmix64() -> None:
    """The first outputs of the published generator for seed 0."""
    words = [word % 2**64 for word in hashed(torch.tensor([1, 2, 3]), 0).tolist()]
    assert words == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_seed_and_name_change_values() -> None:
    a, b = values("fp32", (64,), "normal"), values("fp32", (64,), "normal", seed=1)
    c = values("fp32", (64,), "normal", name="y")
    assert not (a == b).any()
    assert not (a == c).any()


@pytest.mark.parametrize("offset", [0, 1, 8])
@pytest.mark.parametrize("dtype", ["e4m3", "bf16", "fp32", "fp64"])
def test_offset_counts_from_an_aligned_address(dtype: str, offset: int) -> None:
    [tensor] = build(parse_case(f"op x={dtype}[4,32]+{offset} seed=0"), "cpu").hand_out().values()
    assert tensor.data_ptr() % 256 == offset * tensor.element_size()


@pytest.mark.parametrize("text", ["bf16[]", "bf16[0]", "bf16[3,0]", "bf16[1]", "int32[0,4]"])
def test_scalars_and_empty_tensors(text: str) -> None:
    inputs = build(parse_case(f"op x={text} seed=0"), "cpu")
    assert str(list(inputs.tensors["x"].shape)).replace(" ", "") == text[text.index("[") :]
    assert inputs.violations() == []


def test_strides_that_overlap_are_refused() -> None:
    with pytest.raises(UsageError, match=r"strides \[2, 1\] of tensor 'x' with shape \[4, 3\]"):
        build(parse_case("op x=fp32[4,3]@2,1 seed=0"), "cpu")


# Regimes


def test_normal_moments() -> None:
    x = wide("fp64", (1024, 1024), "normal", seed=7).flatten()
    n = x.numel()
    assert abs(x.mean()) < 5 / math.sqrt(n)
    assert abs(x.var() - 1) < 5 * math.sqrt(1.9 / n)
    assert abs((x**3).mean()) < 5 * math.sqrt(15 / n)
    assert abs((x**4).mean() - 2.9) < 5 * math.sqrt(90 / n)
    assert x.abs().max() < 6


def test_normal_is_uncorrelated() -> None:
    x = wide("fp64", (512, 512), "normal")
    for other in (x.roll(1, 0), x.roll(1, 1), wide("fp64", (512, 512), "normal", seed=1)):
        assert abs((x * other).mean()) < 5 / 512


def test_normal_fills_the_significand() -> None:
    last_bits = bits_of(values("fp32", (1 << 16,), "normal")) & 1
    assert abs(last_bits.double().mean() - 0.5) < 5 * 0.5 / 256


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("regime", sorted(REGIMES))
def test_values_are_finite_unless_special(regime: str, dtype: str) -> None:
    x = values(dtype, (64, 48), regime).to(torch.float64)
    planted = regime in ("special", "special_columns", "masked", "masked_classes")
    beyond_448 = dtype == "e4m3" and regime in ("outlier", "outlier_last", "rows")
    assert planted or beyond_448 or x.isfinite().all()


@given(width=st.integers(1, 20_000), dtype=st.sampled_from(FLOATS), seed=st.integers(0, 2**63 - 1))
def test_lattice_squares_sum_exactly(width: int, dtype: str, seed: int) -> None:
    """Some power of two divides all values and leaves integers whose squares, all together, stay below 2**24."""
    x = wide(dtype, (2, width), "lattice", seed=seed)
    candidates = (x / 2.0**k for k in range(-4, 4))
    assert any(
        bool((units == units.round()).all()) and float(units.square().sum(-1).max()) < 2**24 for units in candidates
    )


@pytest.mark.parametrize(("dtype", "width", "largest"), [("fp32", 4096, 63), ("bf16", 128, 256), ("e4m3", 4096, 16)])
def test_lattice_uses_the_room_there_is(dtype: str, width: int, largest: int) -> None:
    x = wide(dtype, (64, width), "lattice")
    peak = x.abs().max().item()
    assert peak / largest in [2.0**k for k in range(-4, 4)]


def test_lattice_refuses_rows_that_are_too_long() -> None:
    spec = TensorSpec("x", "fp32", (1, 2**23), regime="lattice")
    with pytest.raises(UsageError, match="'lattice' of tensor 'x': 8388608 squares"):
        fill(torch.zeros(1, 2**23), spec, 0)


def test_rows_differ_in_scale_and_mean() -> None:
    x = wide("fp32", (2000, 256), "rows")
    scale = x.std(-1)
    assert scale.min() < 2.0**-13
    assert scale.max() > 2.0**5
    shifted = (x.mean(-1).abs() / scale) > 1
    assert 0.25 < shifted.double().mean() < 0.35


@pytest.mark.parametrize(("regime", "scale"), [("tiny", 1e-4), ("tiniest", 1e-8)])
def test_tiny(regime: str, scale: float) -> None:
    assert wide("fp32", (100, 100), regime).std().item() == pytest.approx(scale, rel=0.05)


def test_outliers_are_one_column() -> None:
    for seed in range(5):
        x = wide("bf16", (64, 100), "outlier", seed=seed).abs().mean(0)
        assert (x > 100).sum() == 1
    assert wide("bf16", (64, 100), "outlier_last").abs().mean(0).argmax() == 99


def test_offset_dwarfs_spread() -> None:
    x = wide("fp64", (200, 500), "offset")
    ratio = x.mean(-1).abs() / x.std(-1)
    assert 7 < ratio.min() < 20
    assert 1000 < ratio.max() < 2300


def test_zero_rows_has_three_kinds() -> None:
    x = wide("bf16", (300, 64), "zero_rows")
    zero, constant = (x == 0).all(-1), (x == x[:, :1]).all(-1)
    assert 50 < zero.sum() < 150
    assert 50 < (constant & ~zero).sum() < 150
    assert 50 < (~constant).sum() < 150


def test_constant_rows() -> None:
    x = wide("bf16", (10, 64), "constant")
    assert (x == x[:, :1]).all()
    assert len(x[:, 0].unique()) > 5


@pytest.mark.parametrize("dtype", FLOATS)
def test_pow2_is_exact(dtype: str) -> None:
    x = wide(dtype, (64, 64), "pow2")
    assert (torch.frexp(x.abs()).mantissa == 0.5).all()
    assert x.abs().min() == 2**-6
    assert x.abs().max() == 2**7


@pytest.mark.parametrize("dtype", FLOATS)
def test_subnormal_of_the_format(dtype: str) -> None:
    fmt = format_of(DTYPES[dtype])
    x = wide(dtype, (64, 64), "subnormal")
    assert (x != 0).all()
    assert (x.abs() < 2.0**fmt.min_exponent).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_huge_reaches_the_top(dtype: str) -> None:
    fmt = format_of(DTYPES[dtype])
    x = wide(dtype, (8192, 4), "huge")
    assert x.isfinite().all()
    assert x.abs().max() > fmt.max / 2
    if dtype in ("fp32", "bf16"):
        assert torch.square(x.to(torch.float32)).isinf().double().mean() > 0.9


@pytest.mark.parametrize("height", [8, 9, 64, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_special_rows(height: int, seed: int) -> None:
    x = wide("bf16", (height, 16), "special", seed=seed)
    up, down, nan = (x == math.inf).any(-1), (x == -math.inf).any(-1), x.isnan().any(-1)
    assert [int(kind.sum()) for kind in (up & ~down, down & ~up, up & down, nan)] == [1, 1, 1, 1]
    assert (~(up | down | nan)).sum() == height - 4


def test_special_nan_has_the_canonical_bits() -> None:
    x = values("bf16", (64, 16), "special")
    assert set(bits_of(x)[x.isnan()].tolist()) == {0x7FC0}


@pytest.mark.parametrize("shape", [(4,), (5, 16), (2, 3, 9)])
def test_special_columns(shape: tuple[int, ...]) -> None:
    x = values("bf16", shape, "special_columns").reshape(-1, shape[-1])
    nan = int(x[0].isnan().nonzero())
    column = (nan + torch.arange(4)) % shape[-1]
    assert x[:, column].tolist() == [[pytest.approx(math.nan, nan_ok=True), math.inf, -math.inf, 0]] * len(x)
    assert x[:, column[3]].signbit().all()
    assert int(x.isfinite().sum()) == len(x) * (shape[-1] - 3)


def test_special_columns_of_one_column_are_nan() -> None:
    assert values("fp32", (1,), "special_columns").isnan().all()


def test_sparse() -> None:
    assert 0.05 < (wide("bf16", (100, 100), "sparse") != 0).double().mean() < 0.075


def test_weight_regimes() -> None:
    near_one = wide("bf16", (10_000,), "near_one")
    assert near_one.mean().item() == pytest.approx(1, abs=0.01)
    assert near_one.std().item() == pytest.approx(0.1, rel=0.1)
    assert (wide("bf16", (100,), "ones") == 1).all()
    assert (wide("bf16", (100,), "zeros") == 0).all()
    assert wide("bf16", (100,), "signs").unique().tolist() == [-1, 1]
    assert wide("bf16", (1000,), "small").abs().max() <= 2**-8


def test_scale_regimes() -> None:
    scales = {
        regime: torch.cat([wide("fp32", (1,), regime, seed=seed) for seed in range(50)])
        for regime in ("scale_pow2", "scale_amax", "scale_odd", "scale_random", "scale_overflow")
    }
    assert (torch.frexp(scales["scale_pow2"]).mantissa == 0.5).all()
    assert {m * 8 for m in torch.frexp(scales["scale_odd"]).mantissa.tolist()} == {5, 6, 7}
    assert (torch.frexp(scales["scale_random"]).mantissa != 0.5).all()
    for regime, low, high in (
        ("scale_pow2", 2**-8, 4),
        ("scale_random", 2**-8, 4),
        ("scale_odd", 3 * 2**-10, 3.5),
        ("scale_amax", 1 / 449, 8.001 / 448),
        ("scale_overflow", 2**-11, 2**-10),
    ):
        assert scales[regime].min() >= low
        assert scales[regime].max() <= high
        assert len(scales[regime].unique()) >= 9
    x = wide("bf16", (10_000,), "normal")
    assert (x.abs() / scales["scale_overflow"].max() > 448).double().mean() > 0.5


def test_integers() -> None:
    x = values("int64", (10_000,), "normal")
    assert (x.min().item(), x.max().item()) == (-64, 63)
    below = values("int32", (1000,), "below_7")
    assert below.unique().tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert values("bool", (100,), "normal").unique().tolist() == [False, True]
    assert values("int8", (10,), "ones").unique().tolist() == [1]


def test_experts_have_every_id_however_they_are_spread() -> None:
    """One id alone, one in each row, or any anywhere; some draws have ids of no expert as well."""
    drawn = [values("int32", (8, 4), "experts_5", seed=seed) for seed in range(120)]
    elsewhere = [x for x in drawn if x.min() < 0 or x.max() > 4]
    own = [x for x in drawn if x.min() >= 0 and x.max() <= 4]
    alone = [x for x in own if (x == x[0, 0]).all()]
    rows = [x for x in own if (x == x[:, :1]).all() and not (x == x[0, 0]).all()]
    spread = [x for x in own if not (x == x[:, :1]).all()]
    for kind in (alone, rows, spread):
        assert len(kind) > 8 and torch.cat(kind).unique().tolist() == [0, 1, 2, 3, 4]
    assert len(elsewhere) > 8 and torch.cat(elsewhere).min() == -1 and torch.cat(elsewhere).max() > 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bf16[4]:norml", "unknown regime of tensor 'x': 'norml'; did you mean 'normal'"),
        ("int32[4]:rows", "regime 'rows' makes no int32 values for tensor 'x'"),
        ("bf16[4]:below_9", "regime 'below_9' makes no bf16 values"),
        ("int8[4]:below_129", "'below_129' of tensor 'x' exceeds 127, the most for int8"),
        ("bf16[4]:one_sign(a)", r"cannot read regime 'one_sign\(a\)': expected one_sign\(ROWS,COLUMNS\)"),
        ("bf16[4]:one_sign_fan_in(a,b*)", r"as in one_sign_fan_in\(gate\*up,hidden\)"),
        ("bf16[4]:normal(a,b)", r"unknown regime of tensor 'x': 'normal\(a,b\)'"),
        ("int32[4]:one_sign(a,b)", r"regime 'one_sign\(a,b\)' makes no int32 values"),
    ],
)
def test_wrong_regime(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build(parse_case(f"op x={text} seed=0"), "cpu")


def test_every_regime_has_a_line() -> None:
    for name, line in regimes().items():
        assert line.endswith("."), name
        assert "\n" not in line, name


# Signs that tensors share


def test_tensors_share_the_signs_of_a_label() -> None:
    """So that all terms of the dots of x with rows of w, and of these with y, have one sign."""
    line = "op x=bf16[5,64]:one_sign(,k) w=fp32[3,48,64]:one_sign_fan_in(a*b,k) y=fp16[48]:one_sign(,b*a) seed=1"
    x, w, y = (t.double() for t in build(parse_case(line), "cpu").tensors.values())
    rows = w.sign()[0, :, 0] * x.sign()[0, 0]
    for matrix in w:
        assert ((x[:, None] * matrix).sign() == rows[:, None]).all()
        assert ((matrix * y[:, None]).sign() == matrix.sign()[0] * y[0].sign()).all()
    assert 8 < (rows > 0).sum() < 40
    assert 0 < (x > 0).sum() < x.numel()


def test_labels_and_seeds_have_signs_of_their_own() -> None:
    of = (("a", 0), ("b", 0), ("a", 1))
    signs = [values("fp32", (64,), f"one_sign(,{label})", seed=seed).sign() for label, seed in of]
    for one, other in itertools.combinations(signs, 2):
        assert 16 < (one == other).sum() < 48


def test_tensors_share_nothing_but_signs() -> None:
    x, y = (values("fp32", (256,), "one_sign(,a)", name=name) for name in "xy")
    assert (x.sign() == y.sign()).all()
    assert not (x == y).any()
    assert x.abs().min() >= 0.25 and x.abs().max() < 1.25


# Captured values


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    path = tmp_path / "captured.safetensors"
    rows = torch.arange(48, dtype=torch.float32).reshape(6, 8)
    save_file({"layer.0": rows.to(torch.bfloat16), "scalar": torch.tensor(2.5), "u": rows.to(torch.uint8)}, path)
    return path


@pytest.mark.parametrize("rows", [6, 4, 1])
def test_captured_leading_rows(capture: Path, rows: int) -> None:
    line = f"op x=bf16[{rows},8]@16,1:captured({capture}#layer.0) s=fp32[]:captured({capture}#scalar) seed=0"
    tensors = build(parse_case(line), "cpu").tensors
    assert torch.equal(tensors["x"].to(torch.float32), torch.arange(rows * 8.0).reshape(rows, 8))
    assert tensors["s"].item() == 2.5


def test_captured_into_expanded(capture: Path) -> None:
    line = f"op x=bf16[3,8]@0,1:captured({capture}#layer.0) seed=0"
    [x] = build(parse_case(line), "cpu").tensors.values()
    assert torch.equal(x.to(torch.float32), torch.arange(8.0).expand(3, 8))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bf16[6,8]:captured({}.gone#layer.0)", "captured.safetensors.gone' does not exist"),
        ("bf16[6,8]:captured({}#layer.1)", "'layer.1'; did you mean 'layer.0'"),
        ("fp16[6,8]:captured({}#layer.0)", "'layer.0' in .* is bf16, but tensor 'x' is fp16"),
        ("bf16[7,8]:captured({}#layer.0)", r"has shape \[6, 8\], but tensor 'x' has \[7, 8\]"),
        ("bf16[6,4]:captured({}#layer.0)", r"has shape \[6, 8\], but tensor 'x' has \[6, 4\]"),
        ("bf16[48]:captured({}#layer.0)", r"has shape \[6, 8\], but tensor 'x' has \[48\]"),
        ("int8[6,8]:captured({}#u)", "is U8, a dtype that cases do not have"),
        ("bf16[6,8]:captured({})", r"expected captured\(PATH#KEY\)"),
        ("bf16[6,8]:captured", r"cannot read regime 'captured'"),
    ],
)
def test_captured_errors(capture: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build(parse_case(f"op x={text.format(capture)} seed=0"), "cpu")


def test_captured_from_a_file_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("no tensors")
    with pytest.raises(UsageError, match="is not a readable safetensors file"):
        build(parse_case(f"op x=bf16[6,8]:captured({path}#k) seed=0"), "cpu")


# Layouts


@given(
    shape=st.lists(st.integers(1, 6), min_size=2, max_size=4).map(tuple),
    dtype=st.sampled_from(sorted(DTYPES)),
    name=st.sampled_from(sorted(LAYOUTS)),
)
def test_layouts_are_valid(shape: tuple[int, ...], dtype: str, name: str) -> None:
    layout = LAYOUTS[name](shape, dtype)
    if layout is not None:
        assert layout.name == name
        assert len(layout.strides) == len(shape)
        assert separates(shape, layout.strides)
        assert (layout.strides[-1] == 1) == (name not in ("columns_first", "every_second"))
        if name not in ("contiguous", "unaligned"):
            differs = any(
                size > 1 and a != b for size, a, b in zip(shape, layout.strides, contiguous_strides(shape), strict=True)
            )
            assert differs or layout.offset or math.prod(shape[:-1]) == 1


@pytest.mark.parametrize(
    ("name", "shape", "strides", "offset"),
    [
        ("contiguous", (4, 8), (8, 1), 0),
        ("packed_qkv", (5, 3, 16), (144, 16, 1), 48),
        ("packed_qkv", (2, 5, 3, 16), (720, 144, 16, 1), 48),
        ("packed_qkv", (5, 16), (48, 1), 16),
        ("half", (4, 8), (16, 1), 8),
        ("transposed", (3, 4, 8), (8, 24, 1), 0),
        ("expanded", (3, 4), (0, 1), 0),
        ("expanded", (4,), (0,), 0),
        ("expanded", (3, 1), (0, 1), 0),
        ("columns_first", (3, 4), (1, 3), 0),
        ("columns_first", (2, 3, 4), (12, 1, 3), 0),
        ("every_second", (2, 3, 4), (24, 8, 2), 0),
        ("every_second", (4,), (2,), 0),
        ("unaligned", (4, 8), (8, 1), 1),
        ("padded", (4, 8), (16, 1), 0),
        ("non_flattenable", (2, 3, 8), (32, 8, 1), 0),
    ],
)
def test_layout_strides(name: str, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> None:
    layout = LAYOUTS[name](shape, "bf16")
    assert layout is not None
    assert (layout.strides, layout.offset) == (strides, offset)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *(("transposed", (4, 8)), ("non_flattenable", (4, 8)), ("expanded", (1, 8)), ("padded", (1, 8))),
        ("expanded", (2, 0)),
        *(("columns_first", (1, 8)), ("columns_first", (8,)), ("every_second", (8, 1)), ("every_second", (0, 8))),
    ],
)
def test_layouts_that_do_not_apply(name: str, shape: tuple[int, ...]) -> None:
    assert LAYOUTS[name](shape, "bf16") is None


def test_non_flattenable_has_no_flat_view() -> None:
    layout = LAYOUTS["non_flattenable"]((2, 3, 8), "fp32")
    assert layout is not None
    tensor = torch.zeros(100).as_strided((2, 3, 8), layout.strides)
    with pytest.raises(RuntimeError, match="not compatible"):
        tensor.view(6, 8)


# Blocks


@given(
    leading=st.lists(st.integers(0, 5), max_size=4).map(tuple),
    width=st.integers(1, 5),
    budget=st.integers(1, 60),
)
def test_row_blocks_cover_each_row_once_in_order(leading: tuple[int, ...], width: int, budget: int) -> None:
    numbers = torch.arange(math.prod(leading)).reshape(leading)
    seen: list[int] = []
    for block in row_blocks(leading, width, budget):
        assert len(block) == len(leading)
        part = numbers[block]
        assert part.numel() * width <= budget or part.numel() == 1
        seen += part.flatten().tolist()
    assert seen == list(range(math.prod(leading)))


def test_row_blocks_are_few() -> None:
    assert list(row_blocks((), 100, 1)) == [()]
    assert list(row_blocks((4, 6), 10, 1000)) == [(slice(0, 4), slice(0, 6))]
    assert len(list(row_blocks((4, 6), 10, 120))) == 2
    assert len(list(row_blocks((4, 6), 10, 30))) == 8


# Fingerprints


def test_fingerprint_sees_dtype_shape_order_and_signs() -> None:
    x = torch.arange(1.0, 13.0).reshape(3, 4)
    negated = x.clone()
    negated[1, 2] *= -1
    variants = [
        x,
        x.reshape(4, 3),
        x[:, [1, 0, 2, 3]],
        x[[1, 0, 2]],
        negated,
        x.to(torch.bfloat16),
        x.view(torch.int32),
        torch.zeros(3, 4),
        -torch.zeros(3, 4),
        torch.zeros(0),
        torch.zeros(()),
        torch.zeros(1),
    ]
    assert len({fingerprint(variant) for variant in variants}) == len(variants)


def test_fingerprint_ignores_strides_and_blocks() -> None:
    x = values("bf16", (300, 700), "normal")
    scattered = torch.zeros(700, 1000, dtype=torch.bfloat16)[:, 100:400].T
    scattered.copy_(x)
    assert fingerprint(scattered) == fingerprint(x)


def test_fingerprint_of_every_dtype() -> None:
    found = {fingerprint(torch.zeros(8, dtype=dtype)) for dtype in DTYPES.values()}
    assert len(found) == len(DTYPES)


def test_fingerprints_of_names() -> None:
    a, b = torch.zeros(3), torch.ones(3)
    assert fingerprints({"a": a, "b": b}) == fingerprints({"b": b, "a": a})
    assert fingerprints({"a": a, "b": b}) != fingerprints({"a": b, "b": a})


def test_case_fingerprint_is_that_of_its_tensors() -> None:
    inputs = build(parse_case("op x=bf16[4,8]@16,1+8:rows index=int32[4] seed=2"), "cpu")
    expected = fingerprints(inputs.tensors)
    inputs.hand_out()["x"].zero_()
    assert inputs.fingerprint == expected


def test_layouts_share_fingerprints() -> None:
    lines = [f"op x=bf16[4,8]{place}:rows seed=2" for place in ("", "@16,1", "+1", "@8,1+3")]
    prints = {build(parse_case(line), "cpu").fingerprint for line in lines}
    assert len(prints) == 1


def test_seeds_have_distinct_fingerprints() -> None:
    pairs = itertools.product(range(4), ("normal", "rows"))
    prints = {build(parse_case(f"op x=bf16[4,8]:{regime} seed={seed}"), "cpu").fingerprint for seed, regime in pairs}
    assert len(prints) == 8


# Regimes of integer tensors


INTEGER_LINES = ("normal", "zeros", "ones", "counting", "below_9", "sequences_1", "sequences_4")


@pytest.mark.parametrize("regime", INTEGER_LINES)
@pytest.mark.parametrize("dtype", ["int64", "int32"])
@pytest.mark.parametrize("budget", [1, 7, 50])
def test_block_size_changes_no_integer(regime: str, dtype: str, budget: int) -> None:
    actual = torch.zeros(9, 11, dtype=DTYPES[dtype])
    fill(actual, TensorSpec("x", dtype, (9, 11), regime=regime), 3, budget=budget)
    assert equal_bits(actual, values(dtype, (9, 11), regime, seed=3))


def test_golden_fingerprint_of_sequences() -> None:
    """The values of this case never change, as those of `test_golden_fingerprints`."""
    line = "op ids=int64[64,33]:sequences_3 short=int32[7,5]:sequences_1 ends=int64[3]:counting seed=6"
    assert build(parse_case(line), "cpu").fingerprint == "ef5307f2fc852cb2"


def test_counting() -> None:
    assert values("int64", (4,), "counting").tolist() == [0, 1, 2, 3]
    assert values("int8", (2, 3), "counting").tolist() == [[0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_sequences_have_rows_of_every_kind(dtype: str) -> None:
    x = values(dtype, (700, 40), "sequences_3")
    ends = (x >= 0) & (x < 3)
    count, first = ends.sum(-1), ends.to(torch.int8).argmax(-1)
    padded = ends & (x == x[:, -1:])
    kinds = {
        "no end": count == 0,
        "at the first position": (count == 1) & ends[:, 0],
        "at the last position": (count == 1) & ends[:, -1],
        "at another position": (count == 1) & ~ends[:, 0] & ~ends[:, -1],
        "several": (count > 1) & (count < 40 - first) & (first > 0),
        "everywhere": (count == 40) & ~padded.all(-1),
        "from a position on, one id": (count > 1) & (padded.sum(-1) == count) & (count == 40 - first),
    }
    for name, rows in kinds.items():
        assert 50 < rows.sum() < 150, name
    assert x[ends].unique().tolist() == [0, 1, 2]


@pytest.mark.parametrize(("dtype", "span"), [("int64", 2**32), ("int32", 2**16)])
def test_sequences_hold_ids_that_look_like_an_end(dtype: str, span: int) -> None:
    """In the lower half of their bits: what a kernel sees that compares no more of them."""
    x = values(dtype, (100, 100), "sequences_3").long()
    above, below = (x >= span) & (x < span + 3), (x >= -span) & (x < 3 - span)
    ordinary = (x >= 3) & (x < 2**17)
    for alike in (above, below, x == -100):
        assert 100 < alike.sum() < 600
    before_end = ((x < 0) | (x >= 3)).cumprod(-1).bool()
    assert (above & before_end).any(-1).sum() > 40
    assert (above | below | ordinary | (x == -100) | ((x >= 0) & (x < 3))).all()


@pytest.mark.parametrize(("dtype", "span"), [("int64", 1 << 32), ("int32", 1 << 16)])
def test_lookalikes(dtype: str, span: int) -> None:
    expected = [span, -span, -100, 1 + span, 1 - span, -100, span, -span]
    assert values(dtype, (8,), "lookalikes_2").tolist() == expected


@pytest.mark.parametrize(
    ("shape", "count", "loads"),
    [
        ((140, 2), 8, [0, 1, 16, 17, 32, 64, 128, 22]),
        ((25, 2), 4, [0, 1, 16, 33]),
        ((10, 1), 4, [0, 1, 9, 0]),
        ((300, 1), 12, [0, 1, 16, 17, 32, 64, 128, 0, 0, 0, 0, 42]),
        ((7, 1), 1, [7]),
    ],
)
def test_loads(shape: tuple[int, int], count: int, loads: list[int]) -> None:
    assert values("int64", shape, f"loads_{count}").flatten().bincount(minlength=count).tolist() == loads


def test_largest_overflows_in_pairs() -> None:
    x = wide("fp16", (2, 1000), "largest")
    assert x.isfinite().all() and (x.abs() >= 32752).all()
    assert (x.sum(0).abs().half().isinf() == (x[0].sign() == x[1].sign())).all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int8[4]:sequences_2", "'sequences_2' of tensor 'x' exceeds 127, the most for int8"),
        ("int64[4]:sequences_65537", "'sequences_65537' of tensor 'x': at most 65536 ids end a sequence"),
        ("int8[129]:counting", "'counting' of tensor 'x' exceeds 127, the most for int8"),
        ("bool[3]:counting", "'counting' of tensor 'x' exceeds 1, the most for bool"),
        ("int64[4]:sequences_N", "regime of tensor 'x': 'sequences_N'"),
        ("int64[4]:sequences_0", "regime of tensor 'x': 'sequences_0'"),
        ("int64[4]:normal_3", "regime of tensor 'x': 'normal_3'"),
        ("bf16[4]:counting", "regime 'counting' makes no bf16 values"),
    ],
)
def test_wrong_integer_regime(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build(parse_case(f"op x={text} seed=0"), "cpu")
