"""The gated LayerNorms against their formula in fp64, and bit for bit where it leaves one legal value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit.cases.layer_norm_gated import _SIZES, groups, norms, rows
from lastbit.errors import UnsupportedCase
from lastbit.kernel import Kernel
from lastbit.numerics.formats import cast
from tests.layer_norm_gated_formula import (
    KERNELS,
    OPTIONS,
    assert_near,
    call,
    centred_integers,
    forward,
    option_id,
    rounded,
    saturated,
    scaled_groups,
)
from tests.rms_norm_contract import (
    BF16,
    DEVICE,
    DTYPES,
    EPS,
    FLOAT,
    FP16,
    LAYOUTS,
    assert_bits,
    integers,
    needs_device,
    normals,
    strided,
)

pytestmark = needs_device

TRITON, STEPWISE = "triton[single_rounding]", "triton[stepwise]"
PER_GROUP = ("mean", "variance", "rstd")
with_options = pytest.mark.parametrize("options", OPTIONS, ids=option_id)


def test_every_kernel_is_registered_and_says_what_it_takes():
    tensors = {"x", "weight", "z", "eps", "group_size", "norm_before_gate", "is_rms_norm"}
    for name in ("triton[single_rounding]", "eager[single_rounding]"):
        assert KERNELS[name].contract == "single_rounding"
        assert KERNELS[name].accepts == tensors | {"bias", "activation"}
    for name in ("triton[stepwise]", "eager[stepwise]"):
        assert KERNELS[name].contract == "stepwise"
        assert KERNELS[name].accepts == tensors
    for one in KERNELS.values():
        assert one.placement == ("moves" if one.name.startswith("triton") else "refuses")


@pytest.mark.parametrize("group_size", [None, 24, 8, 1])
@with_options
@pytest.mark.parametrize("name", [TRITON, "eager[single_rounding]"])
def test_single_rounding_is_the_formula(name, options, group_size):
    x = scaled_groups(9, 72, groups=3)
    weight, bias, z = normals(72, seed=1), normals(72, seed=2), normals(9, 72, seed=3)
    for tensors in ((weight,), (weight, bias), (weight, None, z), (weight, bias, z)):
        output = call(name)(x, *tensors, eps=1e-3, group_size=group_size, **options)
        expected = forward(x, *tensors, eps=1e-3, group_size=group_size, **options)["output"]
        assert_near(output, expected, name, relative=2.0**-21)


@pytest.mark.parametrize("group_size", [None, 24])
@with_options
def test_stages_are_the_formula_and_change_no_bit(options, group_size):
    x, weight, bias, z = scaled_groups(9, 72, groups=3), normals(72), normals(72, seed=2), normals(9, 72, seed=3)
    one = KERNELS[TRITON]
    for gate in (z, None):
        arguments = {"eps": 1e-3, "group_size": group_size, **options}
        returned = one.call(x, weight, bias, gate, **arguments, stages=one.stages)
        expected = forward(x, weight, bias, gate, **arguments)
        assert returned.keys() == expected.keys()
        for stage, actual in returned.items():
            assert actual.dtype == FLOAT
            assert_near(actual, expected[stage], stage, relative=2.0**-20)
        assert_bits(returned["output"], one.call(x, weight, bias, gate, **arguments), "output")


def exact_case(x_dtype: torch.dtype, weight_dtype: torch.dtype, *, rms: bool, gated: bool) -> tuple[Any, ...]:
    """x, weight, z of which the formula leaves one legal result; for LayerNorm, only if the gate comes last."""
    x = integers(9, 96, dtype=x_dtype) if rms else centred_integers(9, 96, groups=3, dtype=x_dtype)
    return x, normals(96, dtype=weight_dtype, seed=1), saturated(9, 96, dtype=x_dtype) if gated else None


@pytest.mark.parametrize("gate", ["none", "after", "before"])
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("contract", ["single_rounding", "stepwise"])
def test_rms_norm_bit_for_bit(contract, dtype, weight_dtype, gate):
    one = KERNELS[f"triton[{contract}]"]
    x, weight, z = exact_case(dtype, weight_dtype, rms=True, gated=gate != "none")
    options = {"eps": EPS, "group_size": 32, "norm_before_gate": gate != "before", "is_rms_norm": True}
    stepwise = contract == "stepwise"
    if stepwise and weight_dtype not in (dtype, FLOAT):
        with pytest.raises(UnsupportedCase, match=f"weight is {weight_dtype}; with x {dtype}"):
            one.call(x, weight, z, **options)
        return
    expected = forward(x, weight, None, z, **options, stepwise=stepwise, fp32=rounded)
    returned = one.call(x, weight, z=z, **options, stages=one.stages)
    assert returned.keys() == expected.keys()
    for name, actual in returned.items():
        assert_bits(actual, cast(expected[name], dtype if name == "output" else FLOAT), name)
    plain = one.call(x, weight, z=z, **options)
    assert_bits(plain, returned["output"], "output without stages")


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_norm_bit_for_bit(dtype, gated):
    x, weight, z = exact_case(dtype, FLOAT, rms=False, gated=gated)
    bias = normals(96, dtype=FP16, seed=2)
    one = KERNELS[TRITON]
    expected = forward(x, weight, bias, z, eps=EPS, group_size=32, fp32=rounded)
    for name, actual in one.call(x, weight, bias, z, eps=EPS, group_size=32, stages=one.stages).items():
        assert_bits(actual, cast(expected[name], dtype if name == "output" else FLOAT), name)


def test_the_contracts_differ_and_the_eager_kernels_keep_theirs():
    """On rows whose mean square is one, so that rsqrt is exact; torch multiplies in the order of the formula."""
    x = torch.where(integers(9, 96) < 0, -1.0, 1.0).to(BF16)
    weight, z = normals(96, dtype=BF16, seed=1), normals(9, 96, dtype=BF16, seed=2).abs() + 17
    outputs = {}
    for contract in ("single_rounding", "stepwise"):
        options = {"eps": 0.0, "is_rms_norm": True}
        outputs[contract] = call(f"triton[{contract}]")(x, weight, z=z, **options)
        assert_bits(call(f"eager[{contract}]")(x, weight, z=z, **options), outputs[contract], contract)
    x = integers(9, 96, dtype=BF16, most=200)
    both = [call(f"eager[{c}]")(x, weight, z=z, eps=EPS, is_rms_norm=True) for c in ("single_rounding", "stepwise")]
    assert not torch.equal(*both)


@pytest.mark.parametrize("n", [1, 5, 128, 129, 769, 5125])
@pytest.mark.parametrize("dtype", [BF16, FLOAT], ids=str)
def test_group_sizes(n, dtype):
    x, weight, z = integers(2, 2 * n, dtype=dtype), normals(2 * n, dtype=dtype), saturated(2, 2 * n, dtype=dtype)
    options = {"eps": EPS, "group_size": n, "is_rms_norm": True}
    expected = forward(x, weight, None, z, **options, fp32=rounded)["output"]
    assert_bits(call(TRITON)(x, weight, None, z, **options), cast(expected, dtype), "output")


@pytest.mark.parametrize("rows", range(1, 18))
def test_numbers_of_rows(rows):
    x, weight = integers(rows, 40, dtype=BF16), normals(40, dtype=BF16)
    expected = forward(x, weight, eps=EPS, group_size=20, is_rms_norm=True, fp32=rounded)["output"]
    output = call(TRITON)(x, weight, eps=EPS, group_size=20, is_rms_norm=True)
    assert_bits(output, cast(expected, BF16), "output")


@pytest.mark.parametrize(("dtype", "largest"), [(BF16, 32768), (FP16, 32768), (FLOAT, 16384)], ids=str)
def test_the_largest_group_is_64_kib(dtype, largest):
    x, weight = integers(1, 2 * largest, dtype=dtype), normals(2 * largest, dtype=dtype)
    options = {"eps": EPS, "group_size": largest, "is_rms_norm": True}
    expected = forward(x, weight, **options, fp32=rounded)["output"]
    assert_bits(call(TRITON)(x, weight, **options), cast(expected, dtype), "output")
    too_large = torch.empty(1, largest + 1, dtype=dtype, device="meta")  # nothing can be computed there
    message = rf"group_size={largest + 1} of {dtype} takes \d+ bytes.* at most 65536 bytes.*group_size={largest}"
    with pytest.raises(UnsupportedCase, match=message):
        call(TRITON)(too_large, too_large[0], eps=EPS)


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("dtype", [BF16, FLOAT], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_x_and_z(layout, dtype, offset):
    shape, strides = LAYOUTS[layout]
    x = strided(shape, strides, dtype, offset=offset)
    weight, bias = strided((shape[-1],), (3,), dtype), strided((shape[-1],), (2,), FLOAT)
    other = normals(*shape, dtype=dtype)
    for tensors in ((x, weight, bias, other), (other, weight, bias, x), (x, weight, bias, x)):
        output = call(TRITON)(*tensors, eps=1e-3)
        copies = (None if t is None else t.clone(memory_format=torch.contiguous_format) for t in tensors)
        assert output.is_contiguous()
        assert_bits(output, call(TRITON)(*copies, eps=1e-3), layout)
        expected = forward(*tensors, eps=1e-3)["output"]
        assert_near(output, expected, layout, relative=2.0**-21 if dtype == FLOAT else 2.0**-8)


def test_z_may_have_other_leading_dimensions():
    """x of tokens · heads rows, and a gate that is a part of each head's row in a wider tensor."""
    x, weight = normals(20, 64, dtype=BF16), normals(64, dtype=BF16)
    z = strided((5, 4, 64), (1000, 130, 1), BF16)
    expected = call(TRITON)(x, weight, None, z.reshape(20, 64), eps=EPS)
    for name in (TRITON, "eager[single_rounding]"):
        assert_bits(call(name)(x, weight, None, z, eps=EPS), expected, name)
        again = call(name)(x.view(5, 4, 64), weight, None, z.reshape(20, 64), eps=EPS)
        assert_bits(again.view(20, 64), expected, name)


def test_statistics_lie_group_after_group():
    x, weight = scaled_groups(2, 5, 72, groups=3), normals(72)
    returned = call(TRITON)(x, weight, eps=1e-3, group_size=24, stages=PER_GROUP)
    expected = forward(x, weight, eps=1e-3, group_size=24)
    assert returned.keys() == {*PER_GROUP, "output"}
    for name in PER_GROUP:
        assert returned[name].shape == (2, 5, 3)
        memory = returned[name].as_strided((30,), (1,))  # group g of row m at g · M + m
        assert_near(memory.view(3, 10).t().reshape(2, 5, 3), expected[name], name, relative=2.0**-21)


def test_only_the_stages_that_exist_and_are_asked_for_are_returned():
    x, weight, z = normals(3, 40), normals(40), normals(3, 40)
    everything = KERNELS[TRITON].stages
    for arguments, lacking in (
        ({}, {"gate", "gated_input"}),
        ({"z": z}, {"gated_input"}),
        ({"z": z, "norm_before_gate": False}, set()),
        ({"is_rms_norm": True}, {"gate", "gated_input", "mean"}),
    ):
        returned = call(TRITON)(x, weight, **arguments, eps=EPS, stages=everything)
        assert returned.keys() == {*everything, "output"} - lacking
    assert call(TRITON)(x, weight, eps=EPS, stages=("rstd",)).keys() == {"rstd", "output"}
    assert call(TRITON)(x, weight, eps=EPS, stages=("affine",)).keys() == {"affine", "output"}


@pytest.mark.parametrize("shape", [(0, 40), (3, 0, 40)])
def test_no_rows(shape):
    x, weight = torch.empty(shape, dtype=BF16, device=DEVICE), normals(40)
    returned = call(TRITON)(x, weight, None, x, eps=EPS, group_size=20, stages=("gate", "rstd"))
    shapes = {name: tuple(t.shape) for name, t in returned.items()}
    assert shapes == {"gate": shape, "rstd": (*shape[:-1], 2), "output": shape}
    assert call("eager[single_rounding]")(x, weight, None, x, eps=EPS, group_size=20).shape == shape


def test_gates_of_any_size():
    z = torch.tensor([[-1e4, 1e4, -100.0, float("inf"), float("-inf"), float("nan"), 0.0, -0.0]], device=DEVICE)
    x, weight = torch.ones_like(z), torch.ones(8, device=DEVICE)
    nan = float("nan")
    for activation, wanted in (
        ("silu", [0.0, 1e4, 0.0, float("inf"), nan, nan, 0.0, 0.0]),
        ("sigmoid", [0.0, 1.0, 0.0, 1.0, 0.0, nan, 0.5, 0.5]),
    ):
        returned = call(TRITON)(x, weight, None, z, eps=0.0, is_rms_norm=True, activation=activation, stages=("gate",))
        expected = torch.tensor([wanted], device=DEVICE)
        for name, actual in returned.items():
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-40, equal_nan=True, msg=name)


@pytest.mark.parametrize("n", [100, 1000])
def test_the_variance_is_that_about_the_mean(n):
    """Far from zero, the mean of squares minus the square of the mean has no correct digit."""
    x, weight = normals(6, n) + 3000, normals(n, seed=1)
    returned = call(TRITON)(x, weight, eps=1e-6, stages=("variance", "rstd", "mean"))
    expected = forward(x, weight, eps=1e-6)
    for name in ("variance", "rstd", "mean"):
        assert_near(returned[name], expected[name], name, relative=2.0**-20)


def test_a_subnormal_variance_gives_a_finite_rstd():
    x, weight = torch.full((1, 4), 2.0**-65, device=DEVICE), torch.ones(4, device=DEVICE)
    returned = call(TRITON)(x, weight, eps=0.0, is_rms_norm=True, stages=("rstd",))
    assert returned["rstd"].item() == 2.0**65


def test_rows_beyond_the_reach_of_32_bit_offsets():
    try:
        memory = torch.empty(2**31 + 64, dtype=BF16, device=DEVICE)
    except RuntimeError as error:
        pytest.skip(f"no 4 GiB of addresses: {error}")
    x = memory.as_strided((2, 40), (2**31, 1))
    x.copy_(normals(2, 40, dtype=BF16))
    weight = normals(40, dtype=BF16)
    assert_bits(
        call(TRITON)(x, weight, None, x, eps=EPS), call(TRITON)(x.clone(), weight, None, x.clone(), eps=EPS), ""
    )


@pytest.mark.parametrize("name", [TRITON, "eager[single_rounding]"])
def test_arguments_that_do_not_fit_are_refused(name):
    x, weight = normals(3, 40, dtype=BF16), normals(40)
    refused = [
        ({"weight": normals(39)}, ValueError, r"weight has shape \(39,\); with x \(3, 40\) it must be \(40,\)"),
        ({"weight": normals(40).double()}, TypeError, "weight is torch.float64; it must be torch.bfloat16 or"),
        ({"bias": normals(1, 40)}, ValueError, r"bias has shape \(1, 40\)"),
        ({"z": normals(2, 40, dtype=BF16)}, ValueError, r"z has shape \(2, 40\), but x has \(3, 40\)"),
        ({"z": normals(3, 40)}, TypeError, "z is torch.float32; with x torch.bfloat16 it must be torch.bfloat16"),
        ({"group_size": 7}, ValueError, "group_size=7 does not divide the 40 columns of x; pass a divisor"),
        ({"group_size": 0}, ValueError, "group_size=0 does not divide"),
        ({"group_size": -8}, ValueError, "group_size=-8 does not divide"),
        ({"activation": "gelu"}, ValueError, "activation: 'gelu' is not one of 'silu', 'sigmoid'"),
        ({"x": x.double()}, TypeError, r"x is torch\.float64"),
        ({"x": torch.tensor(1.0)}, ValueError, "no dimension"),
        ({"x": x[:, :0], "weight": weight[:0]}, UnsupportedCase, "last dimension of x is 0"),
    ]
    for arguments, error, message in refused:
        with pytest.raises(error, match=message):
            call(name)(**{"x": x, "weight": weight, "eps": EPS} | arguments)


def test_stages_and_contracts_that_do_not_exist_are_refused():
    x, weight = normals(3, 40, dtype=BF16), normals(40)
    with pytest.raises(ValueError, match="stages: 'inv_rms' is not one of 'gate'"):
        call(TRITON)(x, weight, eps=EPS, stages=("inv_rms",))
    for name in (STEPWISE, "eager[stepwise]"):
        with pytest.raises(UnsupportedCase, match=r"is_rms_norm=False.*pass is_rms_norm=True"):
            call(name)(x, weight, eps=EPS)


def secondary(one: Kernel) -> dict[str, Tensor]:
    tensors = {"weight": normals(40), "bias": normals(40, seed=1), "z": normals(3, 40, seed=2)}
    return {name: tensor for name, tensor in tensors.items() if name in one.accepts}


@pytest.mark.parametrize("name", [TRITON, STEPWISE])
def test_every_tensor_but_x_is_passed_through_what_moves_it(name, monkeypatch):
    one, x, options = KERNELS[name], normals(3, 40, seed=3), {"eps": EPS, "is_rms_norm": True}
    tensors = secondary(one)
    for moved in tensors:
        doubled = {n: t * 2 if n == moved else t for n, t in tensors.items()}
        expected = one.call(x, **doubled, **options)
        with monkeypatch.context() as patch:
            patch.setitem(one.call.__globals__, "moved", lambda given, device: doubled)  # noqa: B023 (called at once)
            assert_bits(one.call(x, **tensors, **options), expected, moved)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [TRITON, STEPWISE])
def test_tensors_on_another_device_are_moved_with_a_warning(name):
    one, x, options = KERNELS[name], normals(3, 40, seed=3), {"eps": EPS, "is_rms_norm": True}
    tensors = secondary(one)
    expected = one.call(x, **tensors, **options)
    for misplaced in tensors:
        with pytest.warns(UserWarning, match=f"{misplaced} is on cpu"):
            output = one.call(x, **{n: t.cpu() if n == misplaced else t for n, t in tensors.items()}, **options)
        assert_bits(output, expected, misplaced)


def test_depth_is_that_of_the_block_which_covers_the_group():
    depth = KERNELS[TRITON].depth
    assert [depth(n) for n in (1, 5, 128, 129, 8192, 16384, 16385)] == [1, 5, 18, 19, 39, 25, 41]
    assert depth(40000) == 40000, "asked for a case that the kernel declines"
    assert KERNELS[STEPWISE].depth is depth


@pytest.mark.parametrize("name", [TRITON, STEPWISE])
def test_the_cases_reach_every_tile(name):
    """Those of the smallest runs: what the groups draw from, and their examples."""
    one = KERNELS[name]
    tile = one.depth.__globals__["tile"]
    options = rows(one.accepts, norms(one.accepts), _SIZES)
    sizes = {size for each in options for size in each.sizes}
    for group in groups(one.accepts, small=True):
        sizes |= {case.params.get("group_size") or case.tensors[0].shape[-1] for case in group.examples}
    assert {tile(size) for size in sizes} == {tile(2**k) for k in range(16)}
