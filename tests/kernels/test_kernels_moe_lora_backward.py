"""The MoE-LoRA gradients against automatic differentiation in fp64 bit for bit, and against the contract."""

from __future__ import annotations

import math
from inspect import unwrap
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lastbit.cases.moe_lora_backward import groups
from lastbit.errors import UnsupportedCase
from lastbit.numerics.formats import cast
from lastbit.result import Verdict
from tests.judged import assert_kept, judged
from tests.moe_lora_exact import limited
from tests.rms_norm_contract import BF16, DEVICE, FLOAT, FP16, LOADED, assert_bits, needs_device, normals

pytestmark = needs_device

KERNELS = {k.name: k for k in LOADED if k.op == "moe_lora_backward"}
TRITON = KERNELS["triton[moe_lora_backward+fused]"]
BY_NAME = unwrap(TRITON.call).__globals__
CONTRACTS = ("fused", "eager")
LORA = ("gate_lora_a", "gate_lora_b", "up_lora_a", "up_lora_b", "down_lora_a", "down_lora_b")
RESULTS = ("grad_input", *(f"grad_{name}" for name in LORA), "grad_routing_weights")
SAVED = ("saved_gate", "saved_up", "intermediate")
H, W, R, E, K = 24, 40, 4, 5, 3  # hidden, intermediate, rank, experts, slots
NAN = float("nan")
every_kernel = pytest.mark.parametrize("name", sorted(KERNELS))
every_triton = pytest.mark.parametrize("name", [f"triton[moe_lora_backward+{c}]" for c in CONTRACTS])


def small(*shape: int, most: int = 1, least: int | None = None, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    """Integers of at most `most` in magnitude, or from `least` on."""
    generator = torch.Generator().manual_seed(seed)
    low = -most if least is None else least
    return torch.randint(low, most + 1, shape, generator=generator).to(dtype).to(DEVICE)


def shapes(tokens: int) -> dict[str, tuple[int, ...]]:
    rows = {"x": (tokens, H), "grad_output": (tokens, H), **dict.fromkeys(SAVED, (tokens, K, W))}
    base = {"gate_proj": (E, W, H), "up_proj": (E, W, H), "down_proj": (E, H, W)}
    into = {f"{n}_lora_{p}": (E, *s) for n in ("gate", "up") for p, s in (("a", (R, H)), ("b", (W, R)))}
    return rows | base | into | {"down_lora_a": (E, R, W), "down_lora_b": (E, H, R)}


def routing(tokens: int, *, first: int = 0) -> dict[str, Any]:
    """Ids of which a part is not held, and none is that of the last expert."""
    ids = small(tokens, K, least=-1, most=E, dtype=torch.int64, seed=2)
    ids = torch.where(ids == E - 1, 0, ids) + first
    weights = 2.0 ** small(tokens, K, least=-1, most=0, dtype=FLOAT, seed=3)
    return {"expert_ids": ids, "routing_weights": weights, "scaling": 0.5, "first_expert": first}


def lattice(tokens: int, dtype: torch.dtype, *, first: int = 7) -> dict[str, Any]:
    """Arguments with which every value before the last rounding is exact: gates are 0, or so large that σ is 1.

    Adapters of gate and up read few columns, so that their middles are small numbers in every shard.
    """
    tensors = {n: small(*s, dtype=dtype, seed=i) for i, (n, s) in enumerate(shapes(tokens).items())}
    tensors["saved_gate"] = 64 * tensors["saved_gate"].abs()
    few = (torch.arange(W, device=DEVICE) % 20 == 3)[:, None]
    sparse = {name: tensors[name] * few for name in ("gate_lora_b", "up_lora_b")}
    return tensors | sparse | routing(tokens, first=first)


def random(tokens: int, dtype: torch.dtype = BF16) -> dict[str, Any]:
    tensors = {n: normals(*s, dtype=dtype, seed=i) for i, (n, s) in enumerate(shapes(tokens).items())}
    return tensors | routing(tokens) | {"routing_weights": normals(tokens, K, seed=50), "scaling": 0.3}


def old_gradients(case: dict[str, Any]) -> dict[str, Tensor]:
    return {f"old_{n}": small(*case[n].shape, most=9, dtype=case[n].dtype, seed=60 + i) for i, n in enumerate(LORA)}


def by_autograd(case: dict[str, Any], limit: float = math.inf) -> dict[str, Tensor]:
    """Compute the gradients of the exact forward in fp64; where it has saved a value, go on with this one."""
    numbers = {n: t for n, t in case.items() if isinstance(t, Tensor) and n != "expert_ids"}
    leaves = {n: t.double().requires_grad_() for n, t in numbers.items()}
    local = case["expert_ids"] - case.get("first_expert", 0)
    token, slot = ((local >= 0) & (local < E)).nonzero(as_tuple=True)
    expert = local[token, slot]

    def linear(rows: Tensor, name: str) -> Tensor:
        w, a, b = (leaves[f"{name}_{part}"][expert] for part in ("proj", "lora_a", "lora_b"))
        return torch.einsum("pk,pnk->pn", rows, w + case["scaling"] * (b @ a))

    def saved(name: str, value: Tensor) -> Tensor:
        return leaves[name][token, slot].detach() + value - value.detach()

    gate, up = (saved(f"saved_{name}", linear(leaves["x"][token], name)) for name in ("gate", "up"))
    activated = F.silu(limited(gate, -math.inf, limit)) * limited(up, -limit, limit)
    outputs = linear(saved("intermediate", activated), "down")
    weighted = leaves["routing_weights"][token, slot, None] * outputs
    torch.zeros_like(leaves["x"]).index_add(0, token, weighted).backward(case["grad_output"].double())
    names = {"grad_input": "x", **{f"grad_{name}": name for name in (*LORA, "routing_weights")}}
    gradients = {result: leaves[name].grad for result, name in names.items()}
    return {result: torch.zeros_like(leaves[names[result]]) if g is None else g for result, g in gradients.items()}


def check_lattice(name: str, case: dict[str, Any], **more: Any) -> None:
    """Check that the results are those of `by_autograd`, plus old gradients, rounded once."""
    results = KERNELS[name].call(**case, **more)
    assert results.keys() == set(RESULTS)
    for result, exact in by_autograd(case, more.get("swiglu_limit", math.inf)).items():
        old = more.get(result.replace("grad_", "old_", 1))
        total = exact if old is None else exact + old.double()
        dtype = FLOAT if result == "grad_routing_weights" else case["x"].dtype
        assert_bits(results[result] + 0.0, cast(total, dtype) + 0.0, result)


def test_every_contract_is_registered_and_says_what_it_takes():
    assert len(KERNELS) == 4
    for contract in CONTRACTS:
        one, eager = KERNELS[f"triton[moe_lora_backward+{contract}]"], KERNELS[f"eager[moe_lora_backward+{contract}]"]
        assert one.contract == eager.contract == contract
        assert one.accepts == eager.accepts
        assert one.requires == eager.requires
        names = {"shards", "first_expert", "swiglu_limit", "old_up_lora_b", "scaling", "gate_lora_a", "gate_scale"}
        assert names == (one.accepts - one.requires) & {*names, "intermediate", "gate_proj"}
        assert "grad_expert_input" in one.stages


# Under eager in fp16 alone: with eleven bits what is rounded in between is exact.
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(("contract", "dtype"), [("fused", BF16), ("fused", FP16), ("eager", FP16)], ids=str)
@pytest.mark.parametrize("source", ["triton", "eager"])
def test_bit_for_bit_on_a_lattice(source, contract, dtype, shards):
    case, name = lattice(5, dtype), f"{source}[moe_lora_backward+{contract}]"
    check_lattice(name, case, shards=shards)
    check_lattice(name, case | {"expert_ids": case["expert_ids"].int()}, shards=shards, **old_gradients(case))


@pytest.mark.parametrize("shards", [1, 4])
@every_triton
def test_random_values_keep_the_contract_at_every_stage(name, shards):
    case, one = random(4), KERNELS[name]
    for more in ({}, old_gradients(case)):
        results = one.call(**case, **more, shards=shards, stages=one.stages)
        assert results.keys() == {*RESULTS, *one.stages}
        assert_kept("moe_lora_backward", results, contract=one.contract, **case, **more, shards=shards)
    other = next(c for c in CONTRACTS if c != one.contract)
    failed = judged("moe_lora_backward", results, contract=other, **case, **more, shards=shards)
    assert failed.verdict is Verdict.FAILED


@pytest.mark.parametrize("limit", [48.0, 64.0])
@every_kernel
def test_limits_bit_for_bit_on_a_lattice(name, limit):
    """At the limit the whole gradient goes through, as through torch.clamp."""
    check_lattice(name, lattice(5, FP16), swiglu_limit=limit, shards=2)


@every_kernel
def test_random_values_beyond_a_limit_keep_the_contract(name):
    case = random(4) | {"swiglu_limit": 0.5}
    results = KERNELS[name].call(**case)
    assert_kept("moe_lora_backward", results, contract=KERNELS[name].contract, **case)


@pytest.mark.parametrize("contract", CONTRACTS)
def test_pytorch_keeps_the_contract(contract):
    case = random(4)
    results = KERNELS[f"eager[moe_lora_backward+{contract}]"].call(**case, shards=2)
    assert_kept("moe_lora_backward", results, contract=contract, **case, shards=2)


@every_kernel
@pytest.mark.parametrize("shards", [1, 2])
def test_experts_without_pairs_have_a_gradient_of_exactly_zero(name, shards):
    case = random(5)
    results = KERNELS[name].call(**case | {"scaling": -1.0}, shards=shards)
    for adapter in LORA:
        empty = results[f"grad_{adapter}"][E - 1]
        assert_bits(empty, torch.zeros_like(empty), adapter)


@every_kernel
@pytest.mark.parametrize("shards", [1, 2])
def test_experts_without_pairs_keep_the_old_gradient_bit_for_bit(name, shards):
    case = random(5)
    odd = torch.tensor([-0.0, float("inf"), 3e38, -1e-40], device=DEVICE).to(BF16)
    old = {n: odd.repeat(t.numel() // 4).view(t.shape) for n, t in old_gradients(case).items()}
    results = KERNELS[name].call(**case, **old, shards=shards)
    for adapter in LORA:
        assert_bits(results[f"grad_{adapter}"][E - 1], old[f"old_{adapter}"][E - 1], adapter)
        assert not torch.equal(results[f"grad_{adapter}"], old[f"old_{adapter}"])


@every_kernel
def test_skipped_pairs_count_for_nothing_whatever_they_hold(name):
    case = random(6)
    case["expert_ids"][2] = 1000  # a token of which no slot is taken
    skipped = (case["expert_ids"] < 0) | (case["expert_ids"] >= E)
    assert skipped.any(1).sum() > 1
    clean = {n: t.clone() if isinstance(t, Tensor) else t for n, t in case.items()}
    for tensor in ("x", "grad_output"):
        case[tensor][2], clean[tensor][2] = NAN, 0
    for tensor in ("routing_weights", *SAVED):
        case[tensor][skipped], clean[tensor][skipped] = NAN, 0
    stages = {"stages": KERNELS[name].stages} if KERNELS[name].stages else {}
    results, wanted = (KERNELS[name].call(**c, **stages) for c in (case, clean))
    for result, actual in results.items():
        assert actual.isfinite().all(), result
        assert_bits(actual, wanted[result], result)
        if actual.shape[:2] == skipped.shape:
            assert_bits(actual[skipped], torch.zeros_like(actual[skipped]), result)


@every_kernel
def test_an_id_that_occurs_twice_counts_twice(name):
    case = lattice(3, FP16)
    case["expert_ids"][1] = case["expert_ids"][1, 0].clamp(7, 7 + E - 1)
    check_lattice(name, case)


@every_kernel
def test_no_tokens(name):
    case = random(0)
    results = KERNELS[name].call(**case)
    assert {n: tuple(t.shape) for n, t in results.items()} == {
        "grad_input": (0, H),
        **{f"grad_{n}": tuple(case[n].shape) for n in LORA},
        "grad_routing_weights": (0, K),
    }
    assert not any(t.any() for t in results.values())
    old = old_gradients(case)
    for adapter in LORA:
        assert_bits(KERNELS[name].call(**case, **old)[f"grad_{adapter}"], old[f"old_{adapter}"], adapter)


def spread(tensor: Tensor) -> Tensor:
    """Swap the last two dimensions of the values in memory, with gaps."""
    wide = torch.full((*tensor.shape[:-2], tensor.shape[-1] + 1, 2 * tensor.shape[-2]), 99, dtype=tensor.dtype)
    view = wide.to(tensor.device).transpose(-1, -2)[..., ::2, 1:]
    return view.copy_(tensor)


@every_triton
def test_strides_change_no_bit(name):
    case = random(5)
    case |= old_gradients(case)
    spaced = {n: spread(t) if isinstance(t, Tensor) else t for n, t in case.items()}
    assert not any(t.is_contiguous() for t in spaced.values() if isinstance(t, Tensor))
    expanded = {"grad_output": case["grad_output"][:1].expand(5, H)}
    for change in ({}, expanded):
        wanted = KERNELS[name].call(**case | {n: t.contiguous() for n, t in change.items()}, shards=2)
        for result, actual in KERNELS[name].call(**spaced | change, shards=2).items():
            assert_bits(actual, wanted[result], result)


def test_an_outer_product_over_many_pairs_and_tiles():
    tokens, rows, columns = 200, 130, 70
    route, outer = BY_NAME["route"], BY_NAME["grouped_outer"]
    ids = small(tokens, 2, least=0, most=3, dtype=torch.int64)
    left, right = small(tokens, 2, rows, most=3, seed=1), small(tokens, columns, most=3, seed=2)
    lefts = [left, left.flip(0)]
    results = outer(lefts, right, route(ids, 3, 1), scaling=0.25, out_dtype=FLOAT)
    for e in range(3):
        token, slot = (ids == e + 1).nonzero(as_tuple=True)
        assert len(token) > 65
        for rows, actual in zip(lefts, results, strict=True):
            exact = rows[token, slot].double().t() @ right[token].double() / 4
            assert_bits(actual[e], exact.float(), f"expert {e}")


@pytest.mark.parametrize("small", [True, False])
def test_examples_reach_every_size_of_tiles_and_blocks(small):
    outer, weigh = (BY_NAME[name].__globals__ for name in ("grouped_outer", "weigh"))
    sizes = [
        {spec.name: spec.shape for spec in case.tensors}
        for group in groups(TRITON.accepts, small=small)
        for case in group.examples
    ]
    tiles, blocks = set(), set()
    for shape in sizes:
        hidden, width = shape["x"][1], shape["saved_gate"][2]
        rank = shape["gate_lora_a"][1] if "gate_lora_a" in shape else None
        pairs = [] if rank is None else [(rank, hidden), (width, rank), (rank, width)]
        tiles |= {tuple(map(outer["tile_of"], pair)) for pair in pairs}
        blocks |= {weigh["block_of"](hidden)}
    assert tiles >= set(product(outer["TILES"], repeat=2))
    assert blocks == set(weigh["BLOCKS"])


def test_depth_is_never_more_than_any_order_needs():
    assert all(1 <= TRITON.depth(n) <= n for n in (1, 2, 5, 31, 33, 1000, 7168, 50000))
    assert TRITON.depth(7168) < 5000


@every_kernel
def test_arguments_that_do_not_fit_are_refused(name):
    case = random(3)
    old = old_gradients(case)
    refused = [
        ({"grad_output": case["grad_output"][:2]}, ValueError, r"grad_output has shape \(2, 24\)"),
        ({"grad_output": case["grad_output"].float()}, TypeError, r"grad_output is torch\.float32"),
        ({"saved_up": case["saved_up"][:, :2]}, ValueError, r"saved_up has shape \(3, 2, 40\)"),
        ({"intermediate": case["intermediate"].to("meta")}, ValueError, "intermediate is on meta, but x is on"),
        ({"old_up_lora_a": old["old_up_lora_a"]}, ValueError, "old_up_lora_a given, but not old_gate_lora_a"),
        (old | {"old_down_lora_b": old["old_down_lora_a"]}, ValueError, "old_down_lora_b has shape"),
        ({"down_lora_b": case["down_lora_a"]}, ValueError, "down_lora_b has shape"),
        ({"shards": 3}, ValueError, "shards=3 does not divide"),
        ({"scaling": NAN}, ValueError, "scaling=nan"),
        ({"x": case["x"].float()}, TypeError, r"x is torch\.float32"),
    ]
    for change, error, message in refused:
        with pytest.raises(error, match=message):
            KERNELS[name].call(**case | change)
    many = torch.zeros(3, 65, dtype=torch.int64, device=DEVICE)
    with pytest.raises(UnsupportedCase, match="65 slots"):
        KERNELS[name].call(**case | {"expert_ids": many, "routing_weights": many.float()})
