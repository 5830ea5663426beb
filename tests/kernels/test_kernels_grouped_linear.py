"""Linear layers by expert, and sums over the slots of a token, bit for bit on integers."""

from __future__ import annotations

from inspect import unwrap

import pytest
import torch
from torch import Tensor

from tests.moe_lora_formula import NAN, TRITON, E, K, small, some_ids
from tests.rms_norm_contract import BF16, DEVICE, FLOAT, assert_bits, needs_device, normals

pytestmark = needs_device

grouped_linear, route, combine = (unwrap(TRITON.call).__globals__[n] for n in ("grouped_linear", "route", "combine"))


def made_factors(tokens: int, n: int, k: int, *, seed: int, by_pair: bool, transposed: bool) -> tuple[Tensor, Tensor]:
    rows = small(*((tokens, K) if by_pair else (tokens,)), k, most=15, seed=seed)
    weight = small(E, *((k, n) if transposed else (n, k)), most=15, seed=seed + 1)
    return rows, weight.transpose(1, 2) if transposed else weight


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("tokens", "n", "k", "rank"), [(4, 17, 33, 1), (4, 136, 72, 64), (40, 8, 16, 8), (120, 3, 130, 5)]
)
def test_sums_of_two_products_and_two_adapters(tokens, n, k, rank, transposed, rounds):
    made = {"tokens": tokens, "n": n, "transposed": transposed}
    operands = (made_factors(k=k, seed=1, by_pair=False, **made), made_factors(k=k, seed=3, by_pair=True, **made))
    lora = tuple(made_factors(k=rank, seed=s, by_pair=True, **made) for s in (5, 7))
    ids = some_ids(tokens)
    base = torch.full((tokens, K, n), NAN, device=DEVICE)
    options = {"out_dtype": FLOAT, "round_base": rounds, "round_lora": rounds, "base_out": base}
    actual = grouped_linear(operands, route(ids, E, 0), lora=lora, scaling=0.375, **options)

    def rounded(v: Tensor) -> Tensor:
        return v.to(BF16).double() if rounds else v

    held = (ids >= 0) & (ids < E)
    parts = []
    for rows, weight in (*operands, *lora):
        own = weight.double()[torch.where(held, ids, 0)]
        of_pair = rows.double().reshape(tokens, -1, 1, rows.shape[-1])
        parts.append(torch.where(held[..., None], rounded((own * of_pair).sum(-1)), 0.0))
    scaled = [rounded(0.375 * product) for product in parts[2:]]
    assert_bits(base, (parts[0] + parts[1]).float(), "base")
    assert_bits(actual, sum(scaled, parts[0] + parts[1]).float(), "sum")


def test_combine():
    ids, values = some_ids(5), small(5, K, 70, most=9, seed=3)
    held = ((ids >= 0) & (ids < E))[..., None]
    values = torch.where(held, values, NAN)
    weights = normals(5, K, seed=4)
    for given, rounds in ((None, False), (weights, False), (weights, True)):
        total = torch.zeros(5, 70, device=DEVICE)
        for j in range(K):
            product = values[:, j].float() * (1.0 if given is None else given[:, j, None])
            product = product.to(BF16).float() if rounds else product
            total = total + torch.where(held[:, j], product, 0.0)
        assert_bits(combine(values, given, route(ids, E, 0), FLOAT, round_weighted=rounds), total, "sum")


@pytest.mark.parametrize(("tokens", "first"), [(1, 0), (9, 3), (200, -1)])
def test_blocks_hold_every_pair_once_and_those_of_one_expert(tokens, first):
    ids = some_ids(tokens)
    routing = route(ids, E, first)
    expected = [e - first if 0 <= e - first < E else E for e in ids.flatten().tolist()]
    assert routing.local_experts.tolist() == expected
    assert routing.order.tolist() == sorted(range(tokens * K), key=lambda pair: expected[pair])
    assert routing.offsets.tolist() == [sum(e < limit for e in expected) for limit in range(E + 2)]
    seen = []
    for expert, start in zip(routing.block_experts.tolist(), routing.block_starts.tolist(), strict=True):
        end = min(start + routing.block_rows, routing.offsets[expert + 1].item())
        seen += [(position, expert) for position in range(start, end)] if expert >= 0 else []
    assert [position for position, _ in sorted(seen)] == list(range(tokens * K))
    assert all(expected[routing.order[position]] == expert for position, expert in seen)


def test_weights_beyond_the_reach_of_32_bit_offsets():
    try:
        memory = torch.empty(2**31 + 64, dtype=BF16, device=DEVICE)
    except RuntimeError as error:
        pytest.skip(f"no 4 GiB of addresses: {error}")
    far = memory.as_strided((2, 4, 8), (2**31, 8, 1))
    near = small(2, 4, 8, seed=1)
    far.copy_(near)
    rows, routing = small(3, 8), route(torch.tensor([[0], [1], [1]], device=DEVICE), 2, 0)
    actual, expected = (grouped_linear(((rows, w),), routing, out_dtype=FLOAT) for w in (far, near))
    assert_bits(actual, expected, "sum")
