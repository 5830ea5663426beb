"""The gradients of the gated LayerNorm against automatic differentiation in fp64, and bit for bit on integers."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit.cases.layer_norm_gated_backward import groups
from lastbit.errors import UnsupportedCase
from lastbit.numerics.formats import cast
from tests.layer_norm_gated_formula import (
    KERNELS,
    OPTIONS,
    assert_near,
    call,
    forward,
    gradients,
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

TREE, ATOMIC, EAGER = "triton[gated_backward]", "triton[gated_backward+atomic]", "eager[gated_backward]"
MODULE = call(TREE).__globals__
LAUNCH = MODULE["depth"].__globals__
INPUTS = ("x", "dy", "weight", "rstd", "mean", "bias", "z")
with_kernels = pytest.mark.parametrize("name", [TREE, ATOMIC, EAGER])
with_options = pytest.mark.parametrize("options", OPTIONS, ids=option_id)


def without_norm(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that the gradient takes: it learns the norm from the statistics."""
    return {name: value for name, value in options.items() if name != "is_rms_norm"}


def saved(x: Tensor, z: Tensor | None, *, groups: int, eps: float = 1e-3, **options: Any) -> dict[str, Tensor]:
    """rstd and, for LayerNorm, the mean, as the forward pass would save them."""
    size = x.shape[-1] // groups
    stages = forward(x, torch.ones(x.shape[-1], device=x.device), None, z, eps=eps, group_size=size, **options)
    return {name: stages[name].float() for name in ("rstd", "mean") if name in stages}


def by_autograd(tensors: dict[str, Tensor], dy: Tensor, **options: Any) -> dict[str, Tensor]:
    """dx, dw, db and dz in fp64, through mean and rstd."""
    leaves = {name: t.double().requires_grad_() for name, t in tensors.items() if t is not None}
    forward(**leaves, eps=1e-3, **options)["output"].backward(dy.double())
    names = {"x": "dx", "weight": "dw", "bias": "db", "z": "dz"}
    return {names[name]: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def integer_case(dtype: torch.dtype, weight_dtype: torch.dtype, *, rows: int, mean: bool) -> dict[str, Tensor]:
    """Tensors with which every sum is exact: small integers, rstd of a power of two, gates of 0 or above 17."""
    statistics = {"rstd": 2.0 ** integers(rows, 3, seed=3).sign()}
    statistics |= {"mean": integers(rows, 3, seed=4, most=2) * 8} if mean else {}
    signs = torch.where(integers(96, seed=5) < 0, -1.0, 1.0).to(weight_dtype)
    return {
        "x": (integers(rows, 96) * 8).to(dtype),
        "dy": (integers(rows, 96, most=2, seed=1) * 8).to(dtype),
        "weight": signs,
        **statistics,
        "bias": (integers(96, seed=6) * 8).to(weight_dtype),
        "z": saturated(rows, 96, dtype=dtype, seed=2),
    }


def test_every_kernel_is_registered_and_says_what_it_takes():
    for name in (TREE, ATOMIC, EAGER):
        one = KERNELS[name]
        assert one.accepts == {*INPUTS, "norm_before_gate", "activation", "recompute_output"}
        assert one.requires == {"x", "dy", "weight", "rstd"}
        assert one.unordered == (("dw", "db") if name == ATOMIC else ())
        assert one.placement == ("refuses" if name == EAGER else "moves")


@pytest.mark.parametrize("groups", [1, 3])
@with_options
@with_kernels
def test_gradients_are_those_of_automatic_differentiation(name, options, groups):
    x, dy = scaled_groups(40, 72, groups=3), normals(40, 72, seed=4)
    weight, bias, z = normals(72, seed=1), normals(72, seed=2), normals(40, 72, seed=3)
    for gate, shift in ((z, bias), (z, None), (None, bias), (None, None)):
        tensors = {"x": x, "weight": weight, "bias": shift, "z": gate}
        expected = by_autograd(tensors, dy, group_size=72 // groups, **options)
        statistics = saved(x, gate, groups=groups, **options)
        results = call(name)(**tensors, dy=dy, **statistics, **without_norm(options))
        assert results.keys() == expected.keys()
        for result, actual in results.items():
            assert_near(actual, expected[result], result, relative=2.0**-19)


@pytest.mark.parametrize("recompute", [False, True])
@with_options
@pytest.mark.parametrize("name", [TREE, ATOMIC])
def test_stages_are_the_formula_and_change_no_bit(name, options, recompute):
    x, dy, z = scaled_groups(40, 72, groups=3), normals(40, 72, seed=4), normals(40, 72, seed=3)
    one = KERNELS[name]
    for gate, bias in ((z, normals(72, seed=2)), (None, None)):
        tensors = {"x": x, "dy": dy, "weight": normals(72, seed=1), **saved(x, gate, groups=3, **options)}
        arguments = {**tensors, "bias": bias, "z": gate, **without_norm(options), "recompute_output": recompute}
        expected, returned = gradients(**arguments), one.call(**arguments, stages=one.stages)
        assert returned.keys() == expected.keys()
        for stage, actual in returned.items():
            assert_near(actual, expected[stage], stage, relative=2.0**-19)
        for result, actual in one.call(**arguments).items():
            if name == TREE or result not in one.unordered:
                assert_bits(actual, returned[result], result)


@pytest.mark.parametrize("gate", ["none", "after", "before"])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("weight_dtype", [FLOAT, FP16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_integers_bit_for_bit_in_every_order(dtype, weight_dtype, mean, gate):
    case = integer_case(dtype, weight_dtype, rows=37, mean=mean)
    case["x"], case["dy"] = (case[name] / (8 if gate == "before" else 1) for name in ("x", "dy"))
    if gate == "none":
        case["z"] = None
    options = {"norm_before_gate": gate != "before", "recompute_output": True}
    expected = gradients(**case, **options, fp32=rounded)
    sources = {"dx": "x", "dw": "weight", "db": "bias", "dz": "z", "output": "x"}
    for name in (TREE, ATOMIC):
        for result, actual in call(name)(**case, **options).items():
            assert_bits(actual, cast(expected[result], case[sources[result]].dtype), f"{result} of {name}")


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 31, 32, 33, 100, 300])
@pytest.mark.parametrize("n", [40, 300, 700])
def test_rows_are_summed_once_each(n, rows):
    """Over tiles of 8, 2 and 1 rows, and over one and several parts."""
    x, dy = integers(rows, n, most=3), integers(rows, n, most=3, seed=1)
    ones, statistic = torch.ones(n, device=DEVICE), torch.ones(rows, 1, device=DEVICE)
    expected = {"dw": (x * dy).sum(0), "db": dy.sum(0)}
    for name in (TREE, ATOMIC):
        results = call(name)(x, dy, ones, statistic, bias=ones)
        for result, wanted in expected.items():
            assert_bits(results[result], wanted, f"{result} of {name}")


@pytest.mark.parametrize("rows_per_tile", [1, 2, 8])
def test_parts_cover_all_rows_and_are_a_power_of_two(rows_per_tile):
    for rows in (0, 1, 5, 31, 33, 1000, 8191, 8193, 10**6):
        parts, tiles = LAUNCH["parts_of"](rows, rows_per_tile)
        assert parts & (parts - 1) == 0 and 1 <= parts <= 256
        assert rows <= parts * tiles * rows_per_tile < rows + 4 * parts * rows_per_tile + rows_per_tile
    assert LAUNCH["parts_of"](33 * rows_per_tile, rows_per_tile) == (16, 3)


@pytest.mark.parametrize("levels", [3, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_are_added_in_a_tree_and_rounded_once(dtype, levels):
    """Half an ulp at a time, one by one, would be lost; parts that are not there are not read."""
    parts, dw, db = torch.full((2, 8, 3), 2.0**-24, device=DEVICE), *torch.empty(2, 3, dtype=dtype, device=DEVICE)
    parts[0, 0], parts[1] = 1.0, 0.1
    LAUNCH["totals_kernel"][(1,)](*parts, dw, db, 8, 3, levels, LAUNCH["COLUMNS"])
    # 1 + u is a tie that goes to 1; u + u and 2u + 2u are exact: ((1 + u) + 2u) + 4u
    assert_bits(dw, torch.full((3,), 1.0 + 6 * 2.0**-24, device=DEVICE).to(dtype), "dw")
    assert_bits(db, (8 * parts[1, 0]).to(dtype), "db")


def test_every_block_is_that_of_a_case():
    sizes = []
    for group in groups(KERNELS[TREE].accepts, small=True):
        sizes += [int(re.search(r"to(\d+)$", group.name)[1])] if group.strategy else []
        shapes = [{spec.name: spec.shape for spec in case.tensors} for case in group.examples]
        sizes += [shape["x"][-1] // shape["rstd"][-1] for shape in shapes]
    assert {LAUNCH["tile"](size)[1] for size in sizes} == set(LAUNCH["TILES"])


def test_a_plan_has_the_parameters_of_the_kernels_in_their_order():
    x, statistic, weight = normals(3, 40), torch.ones(3, 1, device=DEVICE), normals(40)
    tensors = tuple(map(MODULE["described"], (x, x, weight, statistic, None, None, x)))
    plan = MODULE["_plan"](tensors, MODULE["GradientParameters"](True, "silu", False, False), ())
    pointers = [f"{name}_ptr" for name in MODULE["POINTERS"]]
    assert plan.gradients.kernel.arg_names == pointers + list(plan.gradients.parameters)
    assert plan.totals.kernel.arg_names[4:] == list(plan.totals.parameters)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_x_dy_and_z(layout):
    shape, strides = LAYOUTS[layout]
    odd, plain = strided(shape, strides, BF16, offset=3), normals(*shape, dtype=BF16)
    weight, bias = strided((shape[-1],), (3,), BF16), normals(shape[-1])
    for tensors in ((odd, plain, plain), (plain, odd, plain), (plain, plain, odd), (odd, odd, odd)):
        x, dy, z = tensors
        statistics = saved(x, z, groups=1)
        results = call(TREE)(x, dy, weight, **statistics, bias=bias, z=z)
        x, dy, z = (t.clone(memory_format=torch.contiguous_format) for t in tensors)
        expected = call(TREE)(x, dy, weight.contiguous(), **statistics, bias=bias, z=z)
        exact = gradients(x, dy, weight, **statistics, bias=bias, z=z)
        for result, actual in results.items():
            assert actual.is_contiguous()
            assert_bits(actual, expected[result], result)
            assert_near(actual, exact[result], result, relative=2.0**-7)


def test_the_gradient_of_a_sum_is_an_expanded_tensor():
    x, weight = normals(5, 6, 40), normals(40, seed=1)
    dy = torch.ones((), device=DEVICE).expand(5, 6, 40)
    statistics = saved(x, None, groups=2)
    for name in (TREE, ATOMIC, EAGER):
        for result, actual in call(name)(x, dy, weight, **statistics).items():
            assert_near(actual, gradients(x, dy, weight, **statistics)[result], result, relative=2.0**-19)


def test_statistics_may_lie_in_any_way():
    """As the forward pass saves them, number g · M + m, as [M, G] or with gaps, and with other leading dimensions."""
    x, dy, weight = scaled_groups(2, 5, 72, groups=3), normals(2, 5, 72, seed=1), normals(72)
    stages = call("triton[single_rounding]")(x, weight, eps=1e-3, group_size=24, stages=("mean", "rstd"))
    statistics = {name: stages[name] for name in ("rstd", "mean")}
    assert not statistics["rstd"].is_contiguous()
    expected = gradients(x, dy, weight, **statistics)
    ways = (
        lambda t: t,
        lambda t: t.contiguous(),
        lambda t: t.reshape(10, 3),
        lambda t: torch.stack([t, t], -1)[..., 0],
    )
    for name in (TREE, ATOMIC, EAGER):
        for way in ways:
            results = call(name)(x, dy, weight, **{n: way(t) for n, t in statistics.items()})
            for result, actual in results.items():
                assert_near(actual, expected[result], result, relative=2.0**-19)


@with_kernels
def test_dy_and_z_may_have_other_leading_dimensions(name):
    x, dy, weight = normals(20, 64, dtype=BF16), normals(4, 5, 64, dtype=BF16, seed=1), normals(64)
    z = strided((5, 4, 64), (1000, 130, 1), BF16)
    statistics = saved(x, z.reshape(20, 64), groups=2)
    results = call(name)(x, dy, weight, **statistics, z=z)
    assert {n: tuple(t.shape) for n, t in results.items()} == {"dx": (20, 64), "dz": (5, 4, 64), "dw": (64,)}
    expected = call(TREE)(x, dy.view(20, 64), weight, **statistics, z=z.reshape(20, 64))
    for result in ("dx", "dz"):
        assert_near(results[result].view(20, 64), expected[result].double(), result, relative=2.0**-8)


@with_kernels
def test_a_recomputed_output_is_the_one_of_the_forward_pass(name):
    """Gated where the gate comes after; where it comes before, the affine value is the output."""
    x, weight, bias, z = (normals(*s, dtype=BF16, seed=i) for i, s in enumerate([(9, 72), (72,), (72,), (9, 72)]))
    stages = ("mean", "variance", "rstd")
    for gate in (z, None):
        for first in (True, False):
            options = {"z": gate, "bias": bias, "norm_before_gate": first}
            known = call("triton[single_rounding]")(x, weight, eps=EPS, stages=stages, **options)
            returned = call(name)(x, x, weight, known["rstd"], known["mean"], **options, recompute_output=True)
            assert_near(
                returned["output"], known["output"].double(), "output", relative=2.0**-8 if name == EAGER else 0
            )
            assert "output" not in call(name)(x, x, weight, known["rstd"], known["mean"], **options)


def test_infinite_statistics_stay_in_their_row():
    """Lanes beyond the group, which hold zeros, must not turn them into NaN for the others."""
    x, dy, weight, rstd = normals(9, 40), normals(9, 40, seed=1), normals(40), torch.ones(9, 1, device=DEVICE)
    rstd[3] = float("inf")
    x[3] = x[3].abs() + 1
    dy[3], weight = dy[3].abs() + 1, weight.abs() + 1
    returned = call(TREE)(x, dy, weight, rstd, stages=("c1",))
    assert returned["c1"][3].item() == float("inf")
    others = torch.arange(9, device=DEVICE) != 3
    assert returned["dx"][others].isfinite().all()
    assert (returned["dw"] == float("inf")).all()


@pytest.mark.parametrize("shape", [(0, 40), (3, 0, 40)])
@with_kernels
def test_no_rows(name, shape):
    x, weight = torch.empty(shape, dtype=BF16, device=DEVICE), normals(40, dtype=FP16)
    statistic = torch.empty(*shape[:-1], 2, device=DEVICE)
    results = call(name)(x, x, weight, statistic, statistic, bias=weight, z=x)
    assert results["dx"].shape == results["dz"].shape == shape
    for result in ("dw", "db"):
        assert_bits(results[result], torch.zeros(40, dtype=FP16, device=DEVICE), result)


@pytest.mark.parametrize(("dtype", "largest"), [(BF16, 32768), (FLOAT, 16384)], ids=str)
def test_the_largest_group_is_64_kib(dtype, largest):
    x, dy, weight = (integers(*s, dtype=dtype, most=3) for s in ((1, largest), (1, largest), (largest,)))
    rstd = torch.ones(1, 1, device=DEVICE)
    expected = gradients(x, dy, weight, rstd)
    for result, actual in call(TREE)(x, dy, weight, rstd).items():
        assert_near(actual, expected[result], result, relative=2.0**-8 if dtype == BF16 else 2.0**-21)
    x = torch.empty(1, largest + 1, dtype=dtype, device="meta")
    with pytest.raises(UnsupportedCase, match=f"group_size={largest + 1} of {dtype} takes .* at most 65536 bytes"):
        call(TREE)(x, x, x[0], rstd.to("meta"))


@with_kernels
def test_arguments_that_do_not_fit_are_refused(name):
    x, weight, rstd = normals(3, 40, dtype=BF16), normals(40), normals(3, 2)
    refused = [
        ({"dy": normals(3, 40)}, TypeError, r"dy is torch\.float32; with x torch\.bfloat16"),
        ({"dy": x[:2]}, ValueError, r"dy has shape \(2, 40\), but x has \(3, 40\)"),
        ({"z": x[:, :20]}, ValueError, r"z has shape \(3, 20\), but x has \(3, 40\)"),
        ({"weight": weight[1:]}, ValueError, r"weight has shape \(39,\)"),
        ({"rstd": rstd[:2]}, ValueError, r"rstd has shape \(2, 2\).*it must be \[\.\.\., groups\], 3 rows"),
        ({"rstd": normals(3, 7)}, ValueError, "rstd has 7 groups, which do not divide the 40 columns"),
        ({"rstd": rstd[:, :0]}, ValueError, r"rstd has shape \(3, 0\)"),
        ({"rstd": rstd.to(BF16)}, TypeError, r"rstd is torch\.bfloat16; it must be torch\.float32"),
        ({"mean": rstd[:, :1]}, ValueError, r"mean has shape \(3, 1\), but rstd has \(3, 2\); they must agree"),
        ({"activation": "swish"}, ValueError, "activation: 'swish' is not one of 'silu', 'sigmoid'"),
    ]
    for arguments, error, message in refused:
        with pytest.raises(error, match=message):
            call(name)(**{"x": x, "dy": x, "weight": weight, "rstd": rstd} | arguments)


@pytest.mark.parametrize("name", [TREE, ATOMIC])
def test_every_tensor_but_x_is_passed_through_what_moves_it(name, monkeypatch):
    case, one = integer_case(FLOAT, FLOAT, rows=9, mean=True), KERNELS[name]
    x = case.pop("x")
    for moved in case:
        doubled = {n: t * 2 if n == moved else t for n, t in case.items()}
        expected = one.call(x, **doubled)
        with monkeypatch.context() as patch:
            patch.setitem(one.call.__globals__, "moved", lambda given, device: doubled)  # noqa: B023 (called at once)
            for result, actual in one.call(x, **case).items():
                assert_bits(actual, expected[result], f"{result} after {moved}")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [TREE, ATOMIC])
def test_tensors_on_another_device_are_moved_with_a_warning(name):
    case = integer_case(FLOAT, FLOAT, rows=9, mean=True)
    expected = call(name)(**case)
    for misplaced in set(case) - {"x"}:
        with pytest.warns(UserWarning, match=f"{misplaced} is on cpu"):
            results = call(name)(**{n: t.cpu() if n == misplaced else t for n, t in case.items()})
        for result, actual in results.items():
            assert_bits(actual, expected[result], result)


def test_depth_is_that_of_the_longer_sum():
    tree, atomic = KERNELS[TREE].depth, KERNELS[ATOMIC].depth
    assert [tree(n) for n in (1, 8, 128, 1000, 16384, 16385)] == [1, 8, 18, 21, 71, 72]
    assert [atomic(n) for n in (1, 128, 1000, 16384)] == [1, 35, 259, 319]
