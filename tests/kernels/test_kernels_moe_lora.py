"""MoE-LoRA against its formula in fp64, and bit for bit where it leaves one legal value."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.torch_version import TorchVersion

from lastbit.errors import UnsupportedCase
from lastbit.numerics.formats import cast
from tests.moe_lora_formula import (
    KERNELS,
    NAN,
    RESULTS,
    TRITON,
    E,
    H,
    K,
    W,
    assert_results,
    every_stage,
    formula,
    lattice,
    ordinary,
)
from tests.rms_norm_contract import BF16, DEVICE, FP16, assert_bits, needs_device, normals

pytestmark = needs_device

CONTRACTS = ("fused", "eager")
CODES = ("gate_scale", "up_scale", "down_scale", "gate_zero", "up_zero", "down_zero")
OPTIONS = ("first_expert", "shards", "swiglu_limit")
every_kernel = pytest.mark.parametrize("name", sorted(KERNELS))


def test_every_kernel_is_registered_and_says_what_it_takes():
    assert len(KERNELS) == 4
    for contract in CONTRACTS:
        kernels = [KERNELS[f"{family}[moe_lora+{contract}]"] for family in ("triton", "eager")]
        assert kernels[0].accepts == kernels[1].accepts == {*lattice(1), *CODES, *OPTIONS}
        for one in kernels:
            assert (one.contract, one.placement) == (contract, "refuses")


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@every_kernel
def test_bit_for_bit(name, dtype):
    one, arguments = KERNELS[name], lattice(6, dtype)
    expected = formula(one.contract, **arguments)
    plain = one.call(**arguments)
    assert plain.keys() == set(RESULTS)
    assert_results(plain, expected, dtype)
    if one.stages:
        returned = one.call(**arguments, stages=one.stages)
        assert returned.keys() == {*RESULTS, *one.stages}
        assert_results(returned, expected, dtype)


def test_the_contracts_differ():
    results = [formula(contract, **lattice(6)) for contract in CONTRACTS]
    for name in ("output", "intermediate", "expert_output", "gate", "gate_base", "saved_up"):
        assert not torch.equal(*(each[name] for each in results)), name


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@every_kernel
def test_ordinary_values(name, dtype):
    """All but few elements are those of exact sums: an error of a sum in fp32 seldom changes a rounding."""
    one, arguments = KERNELS[name], ordinary(20, dtype)
    expected = formula(one.contract, **arguments, fp32=lambda v: v)
    for stage, actual in one.call(**arguments, **every_stage(one)).items():
        error = (actual.double() - expected[stage]).abs()
        spread = 2.0**-6 if dtype == BF16 else 2.0**-9
        assert error.max() <= spread * expected[stage].abs().max(), stage
        differ = (error > 2.0**-18 * expected[stage].abs()).double().mean()
        shows_all = stage == "expert_output" and one.contract == "fused"  # in fp32, whatever went another way before
        assert differ <= (0.1 if shows_all else 0.02), f"{stage}: {differ:.1%} differ"


@every_kernel
def test_skipped_pairs_are_zero_whatever_they_hold(name):
    """Ids below and above those held, tokens and weights that are NaN, an expert that is NaN and takes no pair."""
    first = 7
    ids = torch.tensor([[6, 12, -1], [7, 7, 2**40], [8, 6, 10], [-(2**63), 2**63 - 1, 0]], device=DEVICE)
    arguments = lattice(4, ids=ids) | {"first_expert": first}
    skipped = (ids < first) | (ids >= first + E)
    arguments["x"][skipped.all(1)] = NAN
    arguments["routing_weights"][skipped] = NAN
    for parameter in (p for p in arguments.values() if isinstance(p, Tensor) and p.dim() == 3):
        parameter[4] = NAN
    one = KERNELS[name]
    returned = one.call(**arguments, **every_stage(one))
    assert_results(returned, formula(one.contract, **arguments), BF16)
    for stage, value in returned.items():
        rows = skipped.all(1) if stage == "output" else skipped
        assert not value[rows].any(), stage
        assert value[~rows].isfinite().all() and value[~rows].any(), stage


@every_kernel
def test_ids_may_repeat_and_be_32_bit(name):
    ids = torch.tensor([[1, 1, 1], [3, 0, 3]], dtype=torch.int32, device=DEVICE)
    arguments = lattice(2, ids=ids)
    assert_results(KERNELS[name].call(**arguments), formula(KERNELS[name].contract, **arguments), BF16)


def test_onednn_multiplies_only_where_it_spoils_no_row(monkeypatch):
    """On CPUs with AMX, oneDNN of torch 2.11 makes the row before a NaN row NaN; here torch only names that version."""
    seen = []
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda *a: (seen.append(torch.backends.mkldnn.enabled), linear(*a))[1])
    for version, onednn in (("2.11.0+cu130", False), ("2.13.0", True)):
        monkeypatch.setattr(torch, "__version__", TorchVersion(version))
        KERNELS["eager[moe_lora+eager]"].call(**lattice(6))
        assert set(seen) == {onednn}, version
        assert torch.backends.mkldnn.enabled, "as it was before the call"
        seen.clear()


def test_one_expert_takes_all():
    tokens = 30  # more than one block of 64 pairs
    arguments = lattice(tokens, ids=torch.full((tokens, K), 3, device=DEVICE))
    alone = {n: p[3:4] if isinstance(p, Tensor) and p.dim() == 3 else p for n, p in arguments.items()}
    output = TRITON.call(**alone, first_expert=3)["output"]
    assert_bits(output, cast(formula("fused", **arguments)["output"], BF16), "output")
    assert_bits(TRITON.call(**arguments)["output"], output, "others without pairs")


@every_kernel
def test_no_tokens(name):
    one = KERNELS[name]
    for shards in (1, 2):
        returned = one.call(**lattice(0), shards=shards, **every_stage(one))
        shapes = {n: tuple(t.shape) for n, t in returned.items() if n in RESULTS}
        assert shapes == {"output": (0, H), **dict.fromkeys(RESULTS[1:], (0, K, W))}


@every_kernel
def test_strides_change_nothing(name):
    arguments = lattice(4)
    expected = KERNELS[name].call(**arguments)
    moved = {n: t.transpose(0, -1).contiguous().transpose(0, -1) for n, t in arguments.items() if isinstance(t, Tensor)}
    padded = {n: torch.stack([t, t], -1)[..., 1] for n, t in arguments.items() if isinstance(t, Tensor)}
    for other in (moved, padded):
        for result, value in KERNELS[name].call(**arguments | other).items():
            assert_bits(value, expected[result], result)
    arguments["x"] = arguments["x"][:1].expand(4, -1)
    assert_results(KERNELS[name].call(**arguments), formula(KERNELS[name].contract, **arguments), BF16)


@pytest.mark.parametrize("limit", [64.0, 288.0])
@every_kernel
def test_limits_bit_for_bit(name, limit):
    one, arguments = KERNELS[name], lattice(6)
    arguments["up_proj"] *= 32
    expected = formula(one.contract, **arguments, swiglu_limit=limit)
    cut = (expected["gate"] > limit).any(), (expected["up"].abs() > limit).any()
    assert cut == (True, limit == 64)
    assert_results(one.call(**arguments, swiglu_limit=limit, **every_stage(one)), expected, BF16)


@every_kernel
def test_a_limit_keeps_nan(name):
    arguments = lattice(4, ids=torch.zeros(4, 3, dtype=torch.int64, device=DEVICE))
    arguments["x"][1, 5] = float("nan")
    found = KERNELS[name].call(**arguments, swiglu_limit=7.0)
    assert found["intermediate"][1].isnan().all() and not found["intermediate"][0].isnan().any()


@pytest.mark.parametrize("limit", [0.0, -7.0, 7.1, float("nan"), 2.0**200])
@every_kernel
def test_a_limit_must_be_a_positive_number_of_the_dtype(name, limit):
    with pytest.raises(ValueError, match=r"swiglu_limit=.* must be positive and a number of torch\.float16"):
        KERNELS[name].call(**lattice(2, FP16), swiglu_limit=limit)


@pytest.mark.parametrize("shards", [2, 5])
def test_shards_change_nothing_where_sums_are_exact(shards):
    arguments = lattice(4)
    for name in ("triton[moe_lora+fused]", "eager[moe_lora+fused]"):
        one = KERNELS[name]
        whole, parts = (one.call(**arguments, shards=p, **every_stage(one)) for p in (1, shards))
        for stage, value in parts.items():
            if stage in ("down_lora_mid", "expert_output"):
                assert value.shape == (*whole[stage].shape, shards)
                value = value.double().sum(-1).to(value.dtype)
            assert_bits(value, whole[stage], f"{name} {stage}")


def test_partial_outputs_of_shards_are_not_rounded():
    """Two partial outputs that bf16 cannot hold, but their sum."""
    arguments = lattice(1, ids=torch.zeros(1, K, dtype=torch.int64, device=DEVICE))
    intermediate = TRITON.call(**arguments)["intermediate"][0, 0]
    arguments["down_lora_b"][:] = 0
    arguments["down_proj"][0] = (intermediate != 0) * torch.where(torch.arange(W, device=DEVICE) < W // 2, 3, -3)
    halves = formula("fused", **arguments)
    assert_results(TRITON.call(**arguments, shards=2), halves, BF16)


@every_kernel
def test_arguments_that_do_not_fit_are_refused(name):
    good = lattice(3)
    refused = [
        ({"x": good["x"].float()}, TypeError, "x is torch.float32; it must be torch.bfloat16 or torch.float16"),
        ({"x": good["x"][0]}, ValueError, r"x has shape \(24,\); it must be \[T, H\]"),
        ({"expert_ids": good["expert_ids"].float()}, TypeError, "expert_ids is torch.float32"),
        ({"routing_weights": good["routing_weights"].half()}, TypeError, "routing_weights is torch.float16"),
        ({"routing_weights": good["routing_weights"][:, 1:]}, ValueError, r"routing_weights has shape \(3, 2\)"),
        ({"down_proj": good["gate_proj"]}, ValueError, r"down_proj has shape \(5, 40, 24\).* must be \(5, 24, 40\)"),
        ({"up_lora_b": good["up_lora_b"].half()}, TypeError, "up_lora_b is torch.float16; it must be torch.bfloat16"),
        ({"gate_lora_a": good["gate_lora_a"][:, :0]}, ValueError, r"gate_lora_a has shape \(5, 0, 24\)"),
        ({"scaling": NAN}, ValueError, "scaling=nan is not finite"),
        ({"first_expert": -1}, ValueError, "first_expert=-1 is negative"),
        ({"shards": 3}, ValueError, "shards=3 does not divide the intermediate dimension, which is 40"),
        ({"shards": 0}, ValueError, "shards=0"),
        ({"expert_ids": good["expert_ids"].to("meta")}, ValueError, f"expert_ids is on meta, but x is on {DEVICE}"),
    ]
    for arguments, error, message in refused:
        with pytest.raises(error, match=message):
            KERNELS[name].call(**good | arguments)
    many = {"expert_ids": torch.zeros(3, 65, dtype=torch.int64, device=DEVICE), "routing_weights": normals(3, 65)}
    with pytest.raises(UnsupportedCase, match="65 slots and 1 shards; up to 64"):
        KERNELS[name].call(**good | many)


def test_stages_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="stages: 'silu' is not one of 'gate_base'"):
        TRITON.call(**lattice(1), stages=("silu",))
