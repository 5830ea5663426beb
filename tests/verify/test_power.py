"""What a run could have told apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lastbit.case import parse_case
from lastbit.config import Config
from lastbit.judging.problem import Problem
from lastbit.reports.wording import undecided
from lastbit.result import CaseResult, Comparison, StageResult, Verdict
from lastbit.run import DeviceAgreement, Run, Undecidable
from lastbit.verify.power import Separable, _probes, _with_few_columns, agreement_of, power_of, undecidable_of, untold
from lastbit.verify.project import open_project

FP32 = "fp32_multiply+rounded_sum"
CONFIG = Config(folder="")


def result(tensors: str, ruled_out: int = 0, **changes: object) -> CaseResult:
    fields = {"case": f"rms_norm {tensors} eps=1e-06 seed=1", "op": "rms_norm", "kernel": "k", "device": "cpu"}
    fields |= {"contract": "native_multiply+rounded_sum", "dtypes": "bf16", "verdict": Verdict.PASSED}
    return CaseResult(**{**fields, "ruled_out": {FP32: ruled_out}, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tensors", "missing"),
    [
        ("x=bf16[4,64]:zeros weight=bf16[64]:ones", True),
        ("x=bf16[65536,1024] weight=bf16[1024]", True),
        ("x=bf16[4,8,64]@2048,128,1+3:zeros weight=bf16[64]", True),
        ("x=fp32[4,64] weight=fp32[64]", False),
        ("x=bf16[4,64] weight=fp32[64]", False),
    ],
)
def test_a_contract_that_was_never_ruled_out_is_missing_only_if_it_can_be(tensors: str, missing: bool) -> None:
    [power] = power_of([result(tensors)], open_project(CONFIG))
    assert power.missing is missing


@pytest.mark.parametrize(("zeros", "other", "cases"), [(0, 0, 1), (0, 7, 0), (7, 0, 0)])
def test_a_contract_that_no_case_tells_apart_asks_for_one_that_can(zeros: int, other: int, cases: int) -> None:
    """Cases of other dtypes tell nothing; where the contracts are one, as in fp32, nothing is asked for."""
    results = [result("x=bf16[4,64]:zeros weight=bf16[64]:ones", zeros), result("x=bf16[2,8] weight=bf16[8]", other)]
    results.append(result("x=fp32[4,64] weight=fp32[64]", dtypes="fp32"))
    found = list(untold(results, open_project(CONFIG).op("rms_norm"), Separable()))
    assert [str(case.tensors[0]) for case in found] == ["x=bf16[4,64]"] * cases


def test_no_case_of_many_elements_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a layer of a real model could tell is told by few columns, or by another item; asking takes minutes."""
    asked = list[str]()
    monkeypatch.setattr(Separable, "_apart", lambda self, op, one, other, lacking, case: asked.append(str(case)))
    op = open_project(CONFIG).op("rms_norm")
    assert untold([result("x=bf16[2,5000000] weight=bf16[5000000]")], op, Separable()) == []
    assert asked == ["rms_norm x=bf16[64,64] weight=bf16[64] eps=1e-06 seed=1"]


def test_where_no_case_is_small_the_smallest_is_asked_for() -> None:
    """Rows of rotary embeddings share tables and cannot be cut: of two combinations on a GPU all cases are long."""
    tables = "cos=bf16[600,64]:uniform sin=bf16[600,64]:uniform positions=int64[600]:below_600"
    lines = [f"rotary q=bf16[600,{heads},128]:zeros {tables} seed=1" for heads in (8, 4)]
    own, other = "rounded_products+rounded_table", "fp32_products+rounded_table"
    vain = [replace(result(""), op="rotary", contract=own, case=line, ruled_out={other: 0}) for line in lines]
    found = untold(vain, open_project(CONFIG).op("rotary"), Separable())
    assert [case.tensors[0].shape for case in found] == [(600, 4, 128)]


def test_a_case_for_which_a_contract_is_not_defined_tells_nothing_apart() -> None:
    """A weight offset has a meaning where products are in fp32."""
    with_offset = "rms_norm x=bf16[4,64] weight=bf16[64] eps=1e-06 weight_offset=1.0 seed=1"
    never = {"contract": FP32, "ruled_out": {"native_multiply+rounded_sum": 0}}
    claimed = replace(result("x=bf16[4,64]:zeros weight=bf16[64]:ones"), **never)
    larger = replace(claimed, case=with_offset.replace("[4,", "[9,"))
    op = open_project(CONFIG).op("rms_norm")
    assert [case.params for case in untold([claimed, larger], op, Separable())] == [{"eps": 1e-6}]
    assert list(untold([larger], op, Separable())) == []


def test_a_process_evaluates_a_contract_once_for_a_case_and_asks_nothing_that_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    evaluated = []
    evaluate = Problem.evaluate
    following = "lastbit.verify.power._have_one_formula"
    monkeypatch.setattr(following, lambda *_: False)  # which evaluates both on residues, once as well
    monkeypatch.setattr(Problem, "evaluate", lambda self: evaluated.append(str(self.contract)) or evaluate(self))
    op, separable = open_project(CONFIG).op("rms_norm"), Separable()
    others = {FP32: 0, "native_multiply+rounded_sum+divided": 0, "input_multiply+rounded_sum": 0}
    weak = replace(result("x=bf16[4,64]:zeros weight=fp32[64]:ones"), ruled_out=others)
    own = weak.contract
    first = untold([weak], op, separable)
    assert evaluated.count(own) == 1 and len(evaluated) == len(set(evaluated)) > 1
    assert own not in evaluated[1:], "another contract with its computation, in one dtype, is not evaluated"
    known = len(evaluated)
    assert untold([weak], op, Separable(separable.known)) == first and len(evaluated) == known


HEADS = "q=bf16[{0},4,64]{1} cos=bf16[2,32] sin=bf16[2,32] positions=int64[{0}]:below_2 seed=1"


@pytest.mark.parametrize(
    ("sizes", "asked"),
    [
        ((8, 300, 16, 256, 32, 64), [256, 64, 32, 16]),
        ((300, 400), [300]),
    ],
)
def test_only_cases_of_manageable_size_are_asked(sizes: tuple[int, ...], asked: list[int]) -> None:
    """Nobody waits half a minute for a question; gaps between elements may be larger than memory."""
    project = open_project(CONFIG)
    cases = [parse_case("rotary " + HEADS.format(size, "@2147483712,64,1")) for size in sizes]
    probes = list(_probes(cases, project.op("rotary")))
    assert [case.tensors[0].shape[0] for case in probes] == asked
    assert all(tensor.strides is None for case in probes for tensor in case.tensors)


def undecided_result(op: str, case: str, stage: str, dtype: str) -> CaseResult:
    nothing = StageResult(stage, dtype, True, Comparison(numel=1000), Comparison(numel=1000))
    contract = {"attention": "flash", "rms_norm": "fp32_multiply+rounded_sum"}[op]
    return result("", op=op, case=f"{op} {case}", contract=contract, dtypes="bf16", stages=(nothing,))


HEADS_OF_8 = "q=bf16[1,4,2,8] k=bf16[1,{0},1,8] v=bf16[1,{0},1,8] scale=0.35 seed=1"


@pytest.mark.parametrize(
    ("op", "case", "stage", "dtype", "open_always"),
    [
        ("attention", HEADS_OF_8.format(9), "lse", "fp32", True),
        ("attention", HEADS_OF_8.format(9), "output", "bf16", False),
        ("rms_norm", "x=bf16[4,7168] weight=bf16[7168] eps=1e-06 seed=1", "output", "bf16", False),
    ],
)
def test_a_result_that_no_order_of_sums_decides_is_no_gap_of_a_run(
    op: str, case: str, stage: str, dtype: str, open_always: bool
) -> None:
    results = [undecided_result(op, case, stage, dtype)]
    run = Run(tuple(results), undecidable=undecidable_of(results, open_project(CONFIG)))
    assert run.verdict("k", "cpu") is (Verdict.PASSED if open_always else Verdict.INCONCLUSIVE)
    [line] = undecided(run)
    assert ("on any input" in line) is open_always and f"{stage}" in line


@pytest.mark.parametrize(("sharp", "open_always"), [(0, True), (9, True), (10, False), (11, False)])
def test_as_much_as_a_run_must_decide_is_enough(sharp: int, open_always: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two cases with 1,000 elements together."""
    counts = iter([(0, 400), (sharp, 600)])
    monkeypatch.setattr("lastbit.verify.power.decidable", lambda problem: {"output": next(counts), "other": (999, 999)})
    lines = [f"x=bf16[{rows},8] weight=bf16[8] eps=1e-06 seed=1" for rows in (2, 3)]
    results = [undecided_result("rms_norm", line, "output", "bf16") for line in lines]
    found = undecidable_of(results, open_project(CONFIG))
    assert found == ((Undecidable("k", "cpu", "output", "bf16"),) if open_always else ())


def test_threads_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(Separable, "_apart", lambda *_: bool(seen.append(torch.get_num_threads())))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        power_of([result("x=bf16[4,64] weight=bf16[64]")], open_project(CONFIG))
        assert seen == [1] and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


WIDE = (
    "moe_lora x=bf16[3,4096] expert_ids=int64[3,1]:experts_2 routing_weights=fp32[3,1]:uniform "
    "gate_proj=bf16[2,32,4096] up_proj=bf16[2,32,4096] down_proj=bf16[2,4096,32] "
    "gate_lora_a=bf16[2,4,4096] gate_lora_b=bf16[2,32,4] up_lora_a=bf16[2,4,4096] up_lora_b=bf16[2,32,4] "
    "down_lora_a=bf16[2,4,32] down_lora_b=bf16[2,4096,4] scaling=1.0 seed=3"
)


@pytest.mark.parametrize(("alternative", "missing"), [("fused+rounded_gate", True), ("fused+rounded_weighted", False)])
def test_wide_enclosures_hide_no_contract(alternative: str, missing: bool) -> None:
    """The error of long sums covers the rounding of a gate. One slot per token makes the other sum one product."""
    claimed = replace(result(""), case=WIDE, op="moe_lora", contract="fused", ruled_out={alternative: 0})
    [power] = power_of([claimed], open_project(CONFIG))
    assert power.missing is missing


def test_contracts_of_one_formula_are_told_apart_only_where_no_order_of_sums_hides_it() -> None:
    """One element of 1,390 is another number of fp32 if sums are exact; of a kernel that adds in any order, none."""
    line = "cross_entropy_backward logits=fp32[5,278] labels=int64[5]:labels_278 grad_output=fp32[5] seed=13182"
    own = result("", case=line, op="cross_entropy_backward", contract="normalized", dtypes="fp32")
    own = replace(own, ruled_out={"from_log_probs": 0})
    [power] = power_of([own], open_project(CONFIG))
    assert not power.missing
    assert untold([own], open_project(CONFIG).op("cross_entropy_backward"), Separable()) == []


def test_labels_are_those_of_the_fewer_classes() -> None:
    line = "cross_entropy logits=bf16[5,278] labels=int64[5]:labels_278 seed=1"
    case = _with_few_columns(parse_case(line), open_project(CONFIG).op("cross_entropy"))
    assert str(case) == "cross_entropy logits=bf16[64,64] labels=int64[64]:labels_64 seed=1"


def stage_result(stage: str, decided: int, isolated: int = 0, numel: int = 1000, **rest: int) -> StageResult:
    views = (Comparison(numel=numel, decided=count) for count in (decided, isolated))
    return StageResult(stage, "fp32", True, *views, **rest)


@pytest.mark.parametrize(
    ("seen", "verdict"),
    [
        ({"decided": 9}, Verdict.INCONCLUSIVE),
        ({"decided": 10}, Verdict.PASSED),
        ({"decided": 0, "isolated": 10}, Verdict.PASSED),
        ({"decided": 0, "in_rows": 1000}, Verdict.PASSED),
        ({"decided": 0, "numel": 0}, Verdict.PASSED),
        ({"decided": 309, "numel": 1300, "constant": 300}, Verdict.INCONCLUSIVE),
        ({"decided": 310, "numel": 1300, "constant": 300}, Verdict.PASSED),
    ],
)
def test_each_result_must_be_decided(seen: dict[str, int], verdict: Verdict) -> None:
    """One decided element of another result is not enough."""
    stages = stage_result("dx", decided=1000), stage_result("dw", **seen)
    run = Run((result("x=bf16[4,64]", stages=stages),))
    assert run.verdict("k", "cpu") is verdict
    said = "0.9 % of 1,000 elements of dw (fp32) could not have been otherwise, but 1 % must be"
    assert any(said in text for text in undecided(run)) is (verdict is Verdict.INCONCLUSIVE)


def test_shares_add_up_over_a_run() -> None:
    cases = [result("x=bf16[4,64]", stages=(stage_result("dw", decided=n),)) for n in (0, 20)]
    assert Run(tuple(cases)).verdict("k", "cpu") is Verdict.PASSED
    assert Run(tuple(cases[:1])).verdict("k", "cpu") is Verdict.INCONCLUSIVE


def test_one_element_is_enough() -> None:
    weak, strong = result("x=bf16[4,64]:zeros weight=bf16[64]"), result("x=bf16[4,64] weight=bf16[64]", 1)
    [power] = power_of([weak, strong], open_project(CONFIG))
    assert (power.cases, power.ruled_out, power.missing) == (2, 1, False)
    assert Run((weak, strong), (power,)).verdict("k", "cpu") is Verdict.PASSED
    [power] = power_of([weak], open_project(CONFIG))
    assert Run((weak,), (power,)).verdict("k", "cpu") is Verdict.INCONCLUSIVE
    assert Run((weak,), (power,)).exit_code == 1


def test_devices_are_paired_in_one_order() -> None:
    stage = StageResult("output", "bf16", True, Comparison(), Comparison(), "bits")
    one = [result("x=bf16[4,64]", device=d, stages=(stage,), fingerprint="f") for d in ("cuda", "cpu")]
    other = [result("x=bf16[8,64]", device=d, stages=(stage,), fingerprint="g") for d in ("cpu", "cuda")]
    assert agreement_of([*one, *other]) == (DeviceAgreement("k", "output", ("cpu", "cuda"), 2, 2),)


def test_where_a_long_case_told_nothing_one_with_few_columns_follows() -> None:
    """Over 1,983 columns the error of a sum hides whether its terms were rounded, and over 64 it does not."""
    long = "rms_norm x=fp16[8,1983] weight=fp16[1983] residual=fp16[8,1983] eps=1e-06 seed=1"
    never = {"contract": "native_multiply+rounded_sum", "ruled_out": {"native_multiply+rounded_value": 0}}
    vain = replace(result("x=fp16[8,1983] weight=fp16[1983]"), case=long, **never)
    op = open_project(CONFIG).op("rms_norm")
    assert [case.tensors[0].shape for case in untold([vain], op, Separable())] == [(64, 64)]
    assert untold([vain], op, Separable(), lambda case: case.tensors[0].shape[-1] > 64) == []


def test_few_columns_are_asked_before_long_rows() -> None:
    """An item asks three times: with as many long cases in vain, none with few columns would come."""
    never = {"contract": "native_multiply+rounded_sum", "ruled_out": {"native_multiply+rounded_value": 0}}
    line = "x=fp16[8,{0}]:pow2 weight=fp16[{0}] residual=fp16[8,{0}]"
    op = open_project(CONFIG).op("rms_norm")
    wide, narrow = ([replace(result(line.format(n)), **never)] for n in (1981, 32))
    assert [case.tensors[0].shape for case in untold(wide, op, Separable())] == [(64, 64)]
    assert [case.tensors[0].shape for case in untold(narrow, op, Separable())] == [(8, 32)]
    many = replace(result("x=fp16[1360,11]:pow2 weight=fp16[11] residual=fp16[1360,11]"), **never)
    assert [case.tensors[0].shape for case in untold([many], op, Separable())] == [(372, 11)]


def test_few_columns_are_whole_groups() -> None:
    """A group of 96 does not divide 64 columns: there no contract is defined, and nothing would be told apart."""
    line = "rms_norm_quantize x=fp16[2,26880] weight=bf16[26880] residual=fp16[2,26880] eps=1e-05 dtype=int8"
    line += " group_size=96 ue8m0=True least_amax=64.0 seed=5838"
    never = {"op": "rms_norm_quantize", "contract": "per_group", "ruled_out": {"per_group+rounded_sum": 0}}
    vain = replace(result("x=fp16[2,26880]"), case=line, **never)
    found = untold([vain], open_project(CONFIG).op("rms_norm_quantize"), Separable())
    assert [case.tensors[0].shape for case in found] == [(42, 96)]


def test_a_case_whose_line_lists_integers_is_not_cut() -> None:
    """Rows of it are cut elsewhere, for which there would be too many labels."""
    line = "cross_entropy logits=bf16[2,33001] labels=int64[2]:values(33000,32768) seed=1"
    op = open_project(CONFIG).op("cross_entropy")
    other = str(next(op.alternatives(op.contract(""))))
    given = replace(result("x=bf16[4,64]"), op=op.name, case=line, contract="", ruled_out={other: 0})
    assert untold([given], op, Separable()) == []
    assert not power_of([given], open_project(CONFIG))[0].missing
