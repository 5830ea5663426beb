"""The references of rotary embeddings and of their chain with RMSNorm, against formulas written another way."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit import assert_contract
from lastbit.errors import UsageError
from lastbit.judging.problem import Problem
from lastbit.references.qk_norm_rope import qk_norm_rope
from lastbit.references.rms_norm import rms_norm
from lastbit.references.rotary import rotary
from lastbit.verify.assertion import ContractViolation

DTYPES = (torch.bfloat16, torch.float16)


def inputs(
    dtype: torch.dtype, width: int = 10, half: int = 4, tables: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    heads = {n: torch.randn(3, h, width, generator=generator).to(dtype) for n, h in (("q", 2), ("k", 1))}
    angles = 6 * torch.rand(7, half, generator=generator)
    positions = torch.tensor([6, 0, 3])
    return {**heads, "cos": angles.cos().to(tables), "sin": angles.sin().to(tables), "positions": positions}


def pairs_of(columns: int, half: int, *, interleaved: bool) -> list[tuple[int, int]]:
    every = range(min(half, columns // 2))
    return [(2 * i, 2 * i + 1) if interleaved else (i, i + half) for i in every]


def exact(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate the heads without any rounding, number by number, then round once by way of fp64."""
    found = x.double()
    for token, position in enumerate(positions.tolist()):
        for head in range(x.shape[1]):
            row = [Fraction(v) for v in x[token, head].tolist()]
            for i, (a, b) in enumerate(pairs_of(x.shape[-1], cos.shape[1], interleaved=interleaved)):
                c, s = Fraction(cos[position, i].item()), Fraction(sin[position, i].item())
                found[token, head, a] = float(row[a] * c - row[b] * s)
                found[token, head, b] = float(row[b] * c + row[a] * s)
    return found


def problem(given: dict[str, Tensor], contract: str = "", **params: Any) -> Problem:
    return Problem(rotary, rotary.contract(contract), given, params)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_exact_part_is_the_rotation(dtype: torch.dtype, interleaved: bool) -> None:
    given = inputs(dtype)
    trace = problem(given, interleaved=interleaved).trace
    for name in ("q", "k"):
        wanted = exact(given[name], given["cos"], given["sin"], given["positions"], interleaved=interleaved)
        torch.testing.assert_close(trace.stages[f"{name}_rotated"].enclosure.exact, wanted, rtol=1e-15, atol=1e-18)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tables_of_the_heads_own_dtype_leave_one_value(dtype: torch.dtype) -> None:
    given = inputs(dtype, tables=dtype)
    wanted = exact(given["q"], given["cos"], given["sin"], given["positions"], interleaved=False).to(dtype)
    found = problem(given).trace.stages["q_rotated"].enclosure
    assert torch.equal(found.lo, found.hi) and torch.equal(found.lo, wanted.double())


def test_every_fused_multiply_add_is_allowed_and_nothing_else() -> None:
    x1, x2, c, s = (torch.tensor([v], dtype=torch.float32) for v in (1.1, 1.3, 0.7, 0.9))
    given = {
        "q": torch.cat([x1, x2]).view(1, 1, 2),
        "cos": c.view(1, 1),
        "sin": s.view(1, 1),
        "positions": torch.tensor([0]),
    }
    legal = {
        (x1 * c - x2 * s).item(),
        (x1.double() * c.double() - (x2 * s).double()).float().item(),
        ((x1 * c).double() - x2.double() * s.double()).float().item(),
    }
    found = problem(given).trace.stages["q_rotated"].enclosure
    assert (found.lo[0, 0, 0].item(), found.hi[0, 0, 0].item()) == (min(legal), max(legal))
    unfused = problem(given, "rounded_products").trace.stages["q_rotated"].enclosure
    assert unfused.lo[0, 0, 0].item() == unfused.hi[0, 0, 0].item() == (x1 * c - x2 * s).item()


def summed(into_sum: tuple[Tensor, Tensor], rounded_first: tuple[Tensor, Tensor], *, contracted: bool = True) -> Tensor:
    """Return a · b + c · d for (a, b) and (c, d), with c · d rounded, and a · b if not `contracted`; exact in fp64."""
    (a, b), (c, d) = into_sum, rounded_first
    one, other = a.double() * b.double(), (c.double() * d.double()).to(c.dtype).double()
    return ((one if contracted else one.to(a.dtype).double()) + other).to(a.dtype)


def turned(x1: Tensor, x2: Tensor, cosine: Tensor, sine: Tensor, products: str) -> tuple[Tensor, Tensor]:
    """Rotate pairs as an option of `products` says, written as the fused multiply-adds that a processor has."""
    if products == "fp32_products":
        x1, x2, cosine, sine = (each.double() for each in (x1, x2, cosine, sine))
        return x1 * cosine - x2 * sine, x2 * cosine + x1 * sine
    first = summed((x1, cosine), (-x2, sine), contracted=products != "rounded_products")
    if products == "contracted_x1_products":
        return first, summed((x1, sine), (x2, cosine))
    return first, summed((x2, cosine), (x1, sine), contracted=products != "rounded_products")


PRODUCTS = ("fp32_products", "rounded_products", "contracted_products", "contracted_x1_products")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kept", PRODUCTS)
def test_each_option_of_products_is_told_from_the_others(kept: str, dtype: torch.dtype, interleaved: bool) -> None:
    given = inputs(dtype, width=64, half=32, tables=dtype)
    cosine, sine = (given[name][given["positions"]].unsqueeze(1) for name in ("cos", "sin"))
    found = {}
    for name in ("q", "k"):
        x = given[name]
        x1, x2 = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
        pair = [y.to(dtype) for y in turned(x1, x2, cosine, sine, kept)]
        found[f"{name}_rotated"] = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    assert_contract("rotary", found, contract=kept, decided=1.0, interleaved=interleaved, **given)
    for other in {*PRODUCTS} - {kept}:
        with pytest.raises(ContractViolation, match="not possible"):
            assert_contract("rotary", found, contract=other, interleaved=interleaved, **given)


def test_a_contracted_product_of_fp32_may_not_be_the_other_one() -> None:
    given = inputs(torch.float32, width=64, half=32)
    del given["k"]
    cosine, sine = (given[name][given["positions"]].unsqueeze(1) for name in ("cos", "sin"))
    x1, x2 = given["q"].chunk(2, -1)
    found = {p: torch.cat(turned(x1, x2, cosine, sine, p), -1) for p in PRODUCTS if p.startswith("contracted")}
    for kept, result in found.items():
        assert_contract("rotary", result, contract=kept, **given)
        for other in {*found} - {kept}:
            with pytest.raises(ContractViolation, match="not possible"):
                assert_contract("rotary", result, contract=other, **given)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"positions": torch.tensor([7, 0, 3])}, "the index of gather reaches from 0 to 7"),
        ({"positions": torch.tensor([0, 3])}, "positions has shape \\(2,\\)"),
        ({"sin": torch.zeros(7, 3)}, "sin has shape \\(7, 3\\)"),
        ({"cos": torch.zeros(7, 6), "sin": torch.zeros(7, 6)}, "cos has shape \\(7, 6\\).*R from 0 to 10"),
        ({"k": torch.zeros(3, 1, 10)}, "k is of fp32; it must be of bf16"),
        ({"k": torch.zeros(3, 1, 8).bfloat16()}, "k has shape \\(3, 1, 8\\)"),
        ({"q": torch.zeros(3, 10).bfloat16()}, "q has shape \\(3, 10\\)"),
    ],
)
def test_what_does_not_fit_is_said(changed: dict[str, Tensor], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        problem({**inputs(torch.bfloat16), **changed}).evaluate()


def normed(given: dict[str, Tensor], weight: Tensor, *, between: bool) -> Tensor:
    """RMSNorm and rotation in fp64, with a rounding between them or without, as one or two kernels would have it."""
    x = given["q"].double()
    y = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    y = y.to(given["q"].dtype).double() if between else y
    cos, sin = (given[name][given["positions"]].double().unsqueeze(1) for name in ("cos", "sin"))
    a, b = y[..., :4], y[..., 4:8]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, y[..., 8:]], -1).to(given["q"].dtype)


@pytest.mark.parametrize(
    ("between", "own", "other"), [(True, "", "+unrounded_output"), (False, "+unrounded_output", "")]
)
def test_a_rounding_between_norm_and_rotation_is_told(between: bool, own: str, other: str) -> None:
    given, weight = inputs(torch.bfloat16), torch.linspace(0.5, 1.5, 10).bfloat16()
    arguments = {name: given[name] for name in ("cos", "sin", "positions")}
    arguments |= {"x": given["q"], "weight": weight, "eps": 1e-6}
    result = normed(given, weight, between=between)
    assert_contract("qk_norm_rope", result, contract=f"fp32_multiply{own}", decided=0.9, **arguments)
    with pytest.raises(ContractViolation, match="not possible"):
        assert_contract("qk_norm_rope", result, contract=f"fp32_multiply{other}", **arguments)


def test_a_chain_whose_rows_are_not_independent_explains_no_rows() -> None:
    assert rms_norm.latent is not None and not rotary.rows
    assert qk_norm_rope.latent is None and not qk_norm_rope.rows


def by_exchange(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    """As 32 lanes with a part of the head each that exchange numbers with the lane of number XOR R / 2 / part."""
    part, half = x.shape[-1] // 32, cos.shape[1]
    columns = torch.arange(2 * half)
    partner = (columns // part ^ half // part) * part + columns % part
    other = torch.where(columns < half, -1.0, 1.0) * x[..., partner].float()
    cosine, sine = (table[positions].float().unsqueeze(1)[..., columns % half] for table in (cos, sin))
    return torch.cat([(x[..., : 2 * half].float() * cosine + other * sine).to(x.dtype), x[..., 2 * half :]], -1)


def test_an_exchange_by_xor_needs_a_power_of_two() -> None:
    """What csrc/fused_qknorm_rope_kernel.cu of vLLM does, where nothing says which R it takes."""
    for half in (32, 64, 16, 48):
        given = inputs(torch.bfloat16, width=128, half=half)
        del given["k"]
        found = by_exchange(given["q"], given["cos"], given["sin"], given["positions"])
        if half != 48:
            assert_contract("rotary", found, contract="fp32_products", decided=0.99, **given)
            continue
        with pytest.raises(ContractViolation, match="not possible"):
            assert_contract("rotary", found, contract="fp32_products", **given)
