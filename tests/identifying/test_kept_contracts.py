"""Identification: every contract is found in a kernel that keeps it, roundings that no contract has, too, and nothing
is said that the cases do not show."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit.case import Group, parse_case
from lastbit.config import Config
from lastbit.dtypes import DTYPES
from lastbit.errors import UnsupportedCase
from lastbit.identifying.kept_contracts import identify, identify_kernel, observe
from lastbit.identifying.trials import Rounding, subsets
from lastbit.kernel import Kernel
from lastbit.numerics import Enclosure
from lastbit.ops import Contract, StageRecorder, op
from lastbit.reports.identification import Candidate, Identification, answer, elements, name, remarks
from lastbit.verify.check import Subject
from lastbit.verify.plan import Item, Plan
from lastbit.verify.project import Project, open_project
from lastbit.verify.worker import Workplace
from tests.faults.hunt import clean_kernels

BF16 = "rms_norm x=bf16[24,96] weight=bf16[96] eps=1e-06 seed=1"
FP16 = "rms_norm x=fp16[24,96] weight=fp16[96] eps=1e-06 seed=2"
FP32 = "rms_norm x=fp32[24,96] weight=fp32[96] eps=1e-06 seed=3"
MIXED = "rms_norm x=bf16[24,96] weight=fp32[96] eps=1e-06 seed=4"
RESIDUAL = "rms_norm x=bf16[24,96] residual=bf16[24,96] weight=bf16[96] eps=1e-06 seed=5"
OFFSET = "rms_norm x=bf16[24,96] weight=bf16[96] eps=1e-06 weight_offset=1.0 seed=6"
CONTRACTS = tuple(
    f"{weight}+{residual}"
    for weight in ("native_multiply", "fp32_multiply")
    for residual in ("rounded_sum", "unrounded_sum", "rounded_value")
)


@functools.cache
def project() -> Project:
    return open_project(Config(folder=""))


def subject(call: Callable[..., Any], contract: str = "") -> Subject:
    return Subject(Kernel("mine", "rms_norm", contract, call), project().op("rms_norm"), torch.device("cpu"))


def identified(call: Callable[..., Any], *lines: str, contract: str = "", most: int = 1000) -> Identification:
    return identify(subject(call, contract), map(parse_case, lines), most=most)


def own(name_: str) -> Kernel:
    return next(k for k in clean_kernels() if k.name == name_)


def names(candidates: tuple[Candidate, ...]) -> list[str]:
    return [name(candidate) for candidate in candidates]


NATIVE = "native_multiply or input_multiply"


def plain(candidates: tuple[Candidate, ...]) -> list[str]:
    """Name those that do not divide by the root: whoever multiplies by its inverse could do that as well."""
    return [shown for shown in names(candidates) if "divided" not in shown]


def base_of(contract: str) -> str:
    """Name one of the contracts that are one computation where the weight has the dtype of x, or deviate from it."""
    weight, residual, *_ = contract.replace("input", "native").split("+")
    return f"{weight}+{residual}"


def base(candidate: Candidate) -> str:
    return base_of(candidate.contracts[0])


def normalized(x: Tensor, eps: float) -> Tensor:
    return x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)


def in_fp32(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Keep fp32_multiply."""
    return (normalized(x, eps) * weight.float()).to(x.dtype)


def natively(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Round to x's dtype before the product, which native_multiply does only where the weight has it."""
    return (normalized(x, eps).to(x.dtype).float() * weight.float()).to(x.dtype)


# Contracts of the op


@pytest.mark.parametrize("contract", CONTRACTS)
def test_the_contract_that_a_kernel_keeps(contract: str) -> None:
    kernel = own(f"eager[{contract}]").call
    claim = "native_multiply" if contract.startswith("fp32") else "fp32_multiply"
    found = identified(kernel, BF16, FP16, RESIDUAL, contract=claim)
    assert contract in found.kept[0].contracts
    assert {base(candidate) for candidate in found.kept} == {base_of(contract)}
    others = [candidate.total for candidate in found.candidates if base(candidate) != base_of(contract)]
    assert len(others) == 3 * 5 and all(other.outside > 0 and other.against > 0 for other in others)
    assert not found.keeps_claim and found.exit_code == 1
    assert "is wrong" in answer(found)


def test_every_contract_sees_every_case() -> None:
    found = identified(in_fp32, BF16, FP16, contract="fp32_multiply")
    assert [candidate.total.cases for candidate in found.candidates] == [2] * 6
    assert found.exit_code == 0
    assert answer(found) == "keeps fp32_multiply, as it claims."


def test_axes_that_make_no_difference_are_named() -> None:
    found = identified(in_fp32, BF16)
    assert found.candidates[0].fixed == "fp32_multiply"
    assert found.candidates[0].free == ("residual_rule",)
    assert len(found.candidates[0].contracts) == 3


def test_contracts_that_coincide_for_a_dtype() -> None:
    found = identified(own("eager[native_multiply+rounded_sum]").call, BF16, FP32)
    assert plain(found.kept) == [f"{NATIVE}"]
    assert all(not names(one.fits)[1:] or "divided" in names(one.fits)[1] for one in found.answers), (
        "as fp32 is not told"
    )
    evidence, alike, nearest = remarks(found)
    assert evidence.endswith("residual_rule of a contract makes no difference in them.")
    assert alike == "These options fit all of them as well: divided."
    assert nearest.startswith("Nearest other: ") and nearest.endswith(" of 4,608 elements lie.")


def test_contracts_that_these_cases_do_not_tell_apart() -> None:
    """Rows of ones, on which both contracts allow the same; other inputs of this dtype tell them apart."""
    found = identified(in_fp32, "rms_norm x=bf16[4,64]:ones weight=bf16[64] eps=1e-12 seed=0")
    assert min(plain(found.kept)) == "fp32_multiply"
    assert any(shown.startswith(NATIVE) for shown in names(found.rivals))
    assert "these cases do not tell them apart, but rms_norm x=bf16[4,64] weight=bf16[64]" in answer(found)
    assert found.exit_code == 1


@pytest.mark.parametrize(("lines", "settled"), [((), True), ((BF16,), False)])
def test_cases_are_added_until_contracts_are_told(
    lines: tuple[str, ...], settled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the user gave the lines: then the answer has one that can."""
    ones = "rms_norm x=bf16[4,64]:ones weight=bf16[64] eps=1e-12 seed=0"
    monkeypatch.setattr("lastbit.identifying.kept_contracts.cases_of", lambda *_, **__: [parse_case(ones)])
    config, mine = Config(folder="", lines=lines), subject(in_fp32, "fp32_multiply")
    place = Workplace(config, project(), Plan((Item(mine, Group("all")),), (), ()))
    found = identify_kernel(place, "mine", most=0)
    assert (found.settled, found.cases > 1) == (settled, settled)


@pytest.mark.parametrize("claim", ["fp32_multiply", "native_multiply"])
def test_of_contracts_that_fit_alike_the_claim_comes_first(claim: str) -> None:
    found = identified(in_fp32, "rms_norm x=fp32[1,1] weight=fp32[1] eps=1e-06 seed=8", contract=claim)
    assert name(found.kept[0]).startswith(claim)


def test_a_kernel_that_gives_other_bits_the_second_time_keeps_nothing() -> None:
    calls = iter(range(100))

    def flaky(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        return in_fp32(x, weight, eps=eps) * (1 + next(calls) % 2)

    found = identified(flaky, BF16, contract="fp32_multiply")
    assert any("differ between two calls" in sentence for sentence in found.beside)
    assert found.exit_code == 1


def test_a_contract_without_meaning_is_not_kept() -> None:
    found = identified(own("eager[fp32_multiply+rounded_sum]").call, OFFSET, contract="fp32_multiply")
    assert plain(found.kept) == ["fp32_multiply"]
    undefined = [candidate.total for candidate in found.candidates if "fp32" not in name(candidate)]
    assert {(total.undefined, elements(total)) for total in undefined} == {(1, "no meaning in 1 case")}
    other = replace(found, candidates=(found.candidates[0], *(c for c in found.candidates if c.total.undefined)))
    assert list(remarks(other))[-1].endswith(", which has no meaning in 1 case.")


def test_one_contract_per_dtype() -> None:
    def both(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        return in_fp32(x, weight, eps=eps) if x.dtype is torch.float16 else natively(x, weight, eps=eps)

    found = identified(both, BF16, FP16)
    assert found.kept == () and found.search.tried == 0
    assert {one.dtypes: plain(one.fits) for one in found.answers} == {
        "bf16": [f"{NATIVE}"],
        "fp16": ["fp32_multiply"],
    }
    assert all(names(one.fits)[:1] == plain(one.fits)[:1] for one in found.answers), "what deviates comes last"
    assert "keeps no contract throughout" in answer(found)


def test_rows_decide_where_elements_do_not() -> None:
    """Both halves of a row are possible, but not with one inverse rms: the last bit of fp32."""

    def torn(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        exact = 1 / (x.double().square().mean(-1, keepdim=True) + eps).sqrt()
        first = exact.float()
        left, right = torch.nextafter(first, torch.zeros(())), torch.nextafter(first, torch.full((), torch.inf))
        halves = torch.arange(x.shape[-1]) < x.shape[-1] // 2
        return x * torch.where(halves, left, right) * weight

    found = identified(torn, FP32)
    assert plain(found.kept) == []
    torn_apart = [c.total for c in found.candidates if "divided" not in name(c)]
    assert {(total.outside, total.unexplained > 0) for total in torn_apart} == {(0, True)}


@op(
    rows=("x",),
    axes={f"axis{n}": {f"plain{n}": {}, f"rounded{n}": {f"stage{n}": "x"}} for n in range(5)},
    rounds={"output": "x"},
)
def chain(x: Enclosure, *, contract: Contract, stage: StageRecorder) -> None:
    """x · 1.1⁵, each product rounded or not: 32 contracts."""
    value = x
    for n in range(5):
        value = stage(f"stage{n}", value * 1.1)
    stage("output", value, result=True)


def test_many_contracts_are_left_once_they_are_ruled_out() -> None:
    def call(x: Tensor) -> Tensor:
        factor = torch.tensor(1.1)
        return ((((x.float() * factor * factor).to(x.dtype).float() * factor) * factor) * factor).to(x.dtype)

    lines = (f"chain x=bf16[16,64] seed={n}" for n in range(5))
    mine = Subject(Kernel("mine", "chain", "plain0+rounded1", call), chain, torch.device("cpu"))
    found = identify(mine, map(parse_case, lines), most=0)
    assert found.keeps_claim and found.contracts == 32
    assert "plain0+rounded1+plain2+plain3+plain4" in found.kept[0].contracts
    ruled_out = [c.total for c in found.candidates if c.total.against]
    assert {(total.against, total.untried) for total in ruled_out} == {(3, 2)}


def rounding(*stages: int) -> Callable[[Tensor], Tensor]:
    """Return a kernel of `chain` that rounds these stages."""

    def call(x: Tensor) -> Tensor:
        value = x.float()
        for n in range(5):
            value = value * torch.tensor(1.1)
            value = value.to(x.dtype).float() if n in stages else value
        return value.to(x.dtype)

    return call


def identified_chain(call: Callable[[Tensor], Tensor], *dtypes: str) -> Identification:
    lines = (f"chain x={dtype}[16,64] seed={n}" for n in range(5) for dtype in dtypes)
    mine = Subject(Kernel("mine", "chain", "", call), chain, torch.device("cpu"))
    return identify(mine, map(parse_case, lines), most=0)


def test_of_many_contracts_those_that_one_dtype_rules_out_are_not_tried_in_another() -> None:
    found = identified_chain(rounding(1), "bf16", "fp32")
    assert found.kept[0].fixed == "plain0+rounded1+plain2+plain3+plain4"
    others = [c.tallies["fp32"] for c in found.candidates if not c.total.fits]
    assert {(tally.cases, tally.untried) for tally in others} == {(0, 5)}


def test_many_contracts_of_a_kernel_that_keeps_others_in_another_dtype() -> None:
    found = identified_chain(lambda x: rounding(1 if x.dtype is torch.bfloat16 else 2)(x), "bf16", "fp16")
    assert not found.kept
    assert {one.dtypes: names(one.fits)[0] for one in found.answers} == {
        "bf16": "plain0+rounded1+plain2+plain3+plain4",
        "fp16": "plain0+plain1+rounded2+plain3+plain4",
    }


# Roundings that no contract of the op has


def test_a_weight_of_another_dtype_tells_input_multiply_from_native_multiply() -> None:
    found = identified(natively, BF16, MIXED)
    assert plain(found.kept) == ["input_multiply"]
    assert not found.keeps_claim
    assert found.search.tried == 0


def test_a_rounding_that_no_contract_has() -> None:
    def rounded_variance(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        variance = x.float().square().mean(-1, keepdim=True).to(x.dtype).float()
        return (x.float() * torch.rsqrt(variance + eps) * weight.float()).to(x.dtype)

    found = identified(rounded_variance, BF16.replace("[24,", "[200,"), FP16.replace("[24,", "[200,"))
    assert names(found.kept)[0] == "fp32_multiply, variance rounded to x"
    assert found.search.points == 1 and found.search.tried > 0


@pytest.mark.parametrize("target", ["bf16", "fp16"])
def test_a_rounding_to_a_format_whatever_x_has(target: str) -> None:
    """As torchnorm rounds the sum with the residual to bf16."""

    def to_one_format(x: Tensor, weight: Tensor, residual: Tensor, *, eps: float) -> dict[str, Tensor]:
        total = (x.float() + residual.float()).to(DTYPES[target]).float()
        return {"output": in_fp32(total, weight, eps=eps).to(x.dtype), "residual_sum": total.to(x.dtype)}

    found = identified(to_one_format, *(RESIDUAL.replace("bf16", dtype) for dtype in ("bf16", "fp16", "fp32")))
    assert plain(found.kept) == [f"fp32_multiply+rounded_sum, residual_sum rounded to {target}"]


def test_a_rounding_that_is_left_out() -> None:
    """It only shows in the codes; an output that is stored is rounded in any case."""

    def before_the_codes(x: Tensor, weight: Tensor, *, eps: float, quant: str = "") -> dict[str, Tensor]:
        y = normalized(x, eps) * weight.float()
        if not quant:
            return {"output": y.to(x.dtype)}
        scale = (y.abs().amax(-1, keepdim=True) / torch.full((), 448.0)).clamp(min=1 / (448.0 * 512.0))
        return {"quantized": (y / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), "scale": scale}

    line = "rms_norm x=bf16[24,96] weight=bf16[96] eps=1e-06 quant=dynamic seed=7"
    found = identified(before_the_codes, BF16, line, contract="fp32_multiply")
    assert "fp32_multiply, output unrounded" in names(found.kept)


def test_a_rounding_beside_an_option() -> None:
    def twice(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        variance = x.float().square().mean(-1, keepdim=True).to(x.dtype).float()
        inverse = torch.rsqrt(variance + eps).to(x.dtype).float()
        return (x.float() * inverse * weight.float()).to(x.dtype)

    found = identified(twice, BF16.replace("[24,", "[400,"), FP16.replace("[24,", "[400,"))
    assert found.search.points == 1
    assert plain(found.kept) == ["fp32_multiply+rounded_inverse, variance rounded to x"]


def test_a_stage_is_changed_in_one_way_at_a_time() -> None:
    ways = Rounding("a", None), Rounding("a", "x"), Rounding("b", None)
    assert list(subsets(ways, 2)) == [(ways[0], ways[2]), (ways[1], ways[2])]


def test_nothing_fits() -> None:
    def wrong(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        return in_fp32(x, weight, eps=eps) * 1.5

    found = identified(wrong, BF16)
    assert found.kept == () and found.exit_code == 1 and found.search.left == 0
    assert found.search.points == 5  # all stages but those that a change of the others hides
    assert answer(found).startswith("keeps none of the 27 contracts of rms_norm; nearest is ")


def test_too_many_combinations_are_not_tried() -> None:
    def wrong(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        return in_fp32(x, weight, eps=eps) * 1.5

    found = identified(wrong, MIXED, most=3)
    assert found.kept == () and found.search.tried == 0 and found.search.left > 3
    assert any("--combinations" in remark for remark in remarks(found))


def test_codes_that_are_integers_are_compared_by_formula() -> None:
    """They have no format that they are rounded to."""
    line = "quantize x=bf16[4,96] dtype=int8 seed=5"
    kernel = own("eager[inverted+scaled_amax]")
    found = identify(Subject(kernel, project().op("quantize"), torch.device("cpu")), [parse_case(line)], most=0)
    assert found.keeps_claim and found.kept[0].total.equal == 4 * 96 + 4


# What cannot be identified


def test_a_kernel_that_raises() -> None:
    def broken(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        if x.dtype is torch.float16:
            raise RuntimeError("no half")
        return in_fp32(x, weight, eps=eps)

    found = identified(broken, BF16, FP16)
    assert found.errors == (f"RuntimeError: no half in {FP16}",)
    assert found.cases == 1 and found.exit_code == 2


def test_cases_that_are_refused() -> None:
    def refusing(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        raise UnsupportedCase("not today")

    found = identified(refusing, BF16, FP16)
    assert found.unsupported == {"not today": 2}
    assert (found.candidates, found.exit_code) == ((), 3)


def test_cases_without_elements_say_nothing() -> None:
    assert identified(in_fp32, "rms_norm x=bf16[0,16] weight=bf16[16] eps=1e-06 seed=0").exit_code == 3


# By formula


WIDE = "rms_norm x=fp32[4,4096] weight=fp32[4096] eps=0.001 seed=7"


def with_another_eps(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Lies within fp32_multiply, whose sums of 4,096 terms allow it, and is another formula."""
    return in_fp32(x, weight, eps=1.001 * eps)


def test_a_formula_of_no_contract() -> None:
    found = identified(with_another_eps, WIDE, contract="fp32_multiply")
    assert not found.kept and found.exit_code == 1
    assert found.claimed is not None and found.claimed.total.of_another_formula
    said = answer(found)
    assert said.startswith("follows from no contract of rms_norm; nearest is ")
    assert "from which 0 of 16,384 elements follow" in said
    assert said.endswith("16,384 of 16,384 elements follow from another formula.")


def test_a_formula_that_was_followed_is_said() -> None:
    found = identified(in_fp32, WIDE, contract="fp32_multiply")
    assert found.keeps_claim and found.followed == 1
    assert next(remarks(found)).startswith("1 case; in 1, 16,384 of 16,384 elements follow from its formula;")


def test_contracts_that_enclosures_leave_possible_differ_by_formula() -> None:
    """Three elements, which happen to be what four contracts give."""
    few = "rms_norm x=bf16[1,3] weight=bf16[3] eps=1e-06 seed=5"
    found = identified(in_fp32, few, contract="fp32_multiply")
    assert plain(found.kept) == ["fp32_multiply"]
    alone = [candidate for candidate in found.candidates if candidate.total.of_another_formula]
    assert len(plain(tuple(alone))) == 3
    assert "Nearest other: native_multiply or input_multiply, from which 0 of 3 elements follow." in remarks(found)


def test_a_kernel_that_cannot_be_followed_is_judged_by_enclosures() -> None:
    def by_numpy(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        return torch.from_numpy(with_another_eps(x, weight, eps=eps).numpy() * 1)

    found = identified(by_numpy, WIDE, contract="fp32_multiply")
    assert found.keeps_claim
    assert list(remarks(found))[-1].startswith("Not followed by formula: ")


def test_a_case_that_needs_another_contract_leaves_the_next_one_its_own() -> None:
    def any_offset(x: Tensor, weight: Tensor, *, eps: float, weight_offset: float = 0.0) -> Tensor:
        return in_fp32(x, weight + weight_offset, eps=eps)

    observed = observe(subject(any_offset), map(parse_case, (OFFSET, BF16)))
    found = {str(sample.case): str(sample.problem.contract) for sample in observed.samples}
    assert found[OFFSET].startswith("fp32_multiply") and found[BF16] == str(subject(any_offset).contract)
