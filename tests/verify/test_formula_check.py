"""What the formula of a kernel decides, and whose word on it counts."""

import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit.case import Group, parse_case
from lastbit.config import Config
from lastbit.errors import LastbitError
from lastbit.inputs import build
from lastbit.judges.judge_file import contracts_of
from lastbit.judging import formula
from lastbit.judging.formula import compare_formulas
from lastbit.judging.problem import Problem
from lastbit.judging.verdict import judge
from lastbit.kernel import Kernel
from lastbit.numerics.residues import Residues
from lastbit.numerics.residues.field import P
from lastbit.result import OF_FORMULA, CaseResult, Comparison, Judgement, StageResult, Verdict
from lastbit.shadows.following import Followed, follow
from lastbit.verify import formula_check
from lastbit.verify.check import Subject, verify_case
from lastbit.verify.formula_check import Beside, judged_by_formula, with_formula
from lastbit.verify.plan import Item, Plan
from lastbit.verify.project import open_project
from lastbit.verify.worker import Workplace
from tests.rms_norm_contract import LOADED

RMS_NORM, ALL_REDUCE = map(open_project(Config(folder="")).op, ("rms_norm", "all_reduce"))


@pytest.fixture(scope="module")
def judged() -> tuple[Problem, Judgement]:
    """Give a right result that enclosures leave open, as it is said to be."""
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    problem = Problem(RMS_NORM, RMS_NORM.contract("fp32_multiply"), {"x": x}, {"eps": 1e-3})
    output = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3)
    found = judge(problem, {"output": output})
    return problem, replace(found, verdict=Verdict.INCONCLUSIVE, reason="nothing is decided")


class InProcess(Beside):
    """Follows kernels in this process, and not in one beside it."""

    def __init__(self, *kernels: Kernel) -> None:
        items = (Item(Subject(kernel, RMS_NORM, torch.device("cpu")), Group("")) for kernel in kernels)
        config = Config(folder="")
        super().__init__(config)
        self.place = Workplace(config, open_project(config), Plan(tuple(items), (), 0))

    def open(self) -> None:
        """Do nothing: the place is there."""

    @property
    def worker(self) -> Any:  # type: ignore[override]
        return self

    def do(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return work(self.place, *args, **kwargs)


def judged_on_a_gpu(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Tensor], line: str) -> CaseResult:
    """Judge a kernel that nothing has decided on a GPU, which the CPU stands for, by its formula."""
    monkeypatch.setattr(formula_check, "build", lambda case, device: build(case, torch.device("cpu")))
    monkeypatch.setattr(formula_check, "made_current", lambda device: nullcontext())
    kernel = Kernel("mine", "rms_norm", "fp32_multiply", function)
    case = parse_case(line)
    here = Subject(kernel, RMS_NORM, torch.device("cpu"))
    result = replace(verify_case(here, case, repeat=False), device="cuda:0")
    result = replace(result, verdict=Verdict.INCONCLUSIVE, reason="nothing is decided")
    beside = InProcess(kernel)
    return with_formula(replace(here, device=torch.device("cuda:0"), beside=beside), case, result)


def right(x: Tensor, *, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


CASE = "rms_norm x=fp32[2,515] eps=1e-06 seed=1"


def test_a_kernel_of_a_gpu_is_decided_by_its_formula_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    found = judged_on_a_gpu(monkeypatch, right, CASE)
    assert found.verdict is Verdict.PASSED and found.stages[-1].equal == 1030 and found.device == "cuda:0"


def test_another_formula_on_the_cpu_fails_on_a_gpu_and_says_where_it_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(x: Tensor, *, eps: float) -> Tensor:
        return right(x, eps=2 * eps)

    found = judged_on_a_gpu(monkeypatch, wrong, CASE)
    assert found.verdict is Verdict.FAILED and found.findings[0].sentence.endswith(
        "It was followed on the CPU, where it performs the same operations and programs."
    )


@pytest.mark.parametrize("factor", [1, 2])
def test_a_kernel_that_takes_another_branch_on_the_cpu_is_not_judged_by_it(
    monkeypatch: pytest.MonkeyPatch, factor: int
) -> None:
    """Neither decided by a fallback that is right, nor failed by one that is wrong."""
    calls = itertools.count()

    def falling_back(x: Tensor, *, eps: float) -> Tensor:
        on_gpu = next(calls) < 3  # the calls that are judged, and the one that is looked at there
        return right(x, eps=eps).clone() if on_gpu else right(x, eps=factor * eps)

    found = judged_on_a_gpu(monkeypatch, falling_back, CASE)
    assert found.verdict is Verdict.INCONCLUSIVE and not found.stages[-1].equal and not found.findings
    assert found.reason.startswith("nothing is decided; residues, on the CPU, say nothing: the kernel performs ")


def test_a_kernel_that_fills_a_cache_in_its_first_call_is_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()

    def caching(x: Tensor, *, eps: float) -> Tensor:
        return right(x, eps=eps) if next(calls) != 3 else right(x.clone(), eps=eps)

    assert judged_on_a_gpu(monkeypatch, caching, CASE).verdict is Verdict.PASSED


def test_no_inputs_are_made_of_cases_that_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs whose rows lie far apart take gigabytes, and may not fit again."""
    monkeypatch.setattr(formula_check, "build", lambda case, device: pytest.fail("inputs were made"))
    kernel = Kernel("mine", "rms_norm", "fp32_multiply", lambda x, *, eps: x)
    case = parse_case("rms_norm x=bf16[2,515]@2147483712,1 eps=1e-06 seed=1")
    beside = InProcess(kernel)
    one = Subject(kernel, RMS_NORM, torch.device("cuda:0"), beside=beside)
    result = one.outcome(Verdict.PASSED, str(case), case.dtypes)
    assert with_formula(one, case, result) is result
    found = with_formula(one, case, replace(result, verdict=Verdict.INCONCLUSIVE, reason="nothing is decided"))
    assert found.reason == "nothing is decided; residues, on the CPU, say nothing: the case is too large for that"


@pytest.mark.parametrize(("long", "asked"), [(-1.0, ["a", "c"]), (0.5, ["a", "b", "c"])])
def test_what_took_too_long_is_not_followed_again_in_another_contract_of_the_function(
    monkeypatch: pytest.MonkeyPatch, long: float, asked: list[str]
) -> None:
    """Four contracts of one attention took all of their time in the same case, one after another."""
    monkeypatch.setattr(formula_check, "build", lambda case, device: build(case, torch.device("cpu")))
    monkeypatch.setattr(formula_check, "made_current", lambda device: nullcontext())
    monkeypatch.setattr(formula_check, "_LONG", long)
    seen = list[str]()

    def followed(place: Workplace, kernel: str, *_: object, **__: object) -> CaseResult:
        seen.append(kernel)
        raise LastbitError("it took too long")

    monkeypatch.setattr(formula_check, "follow_beside", followed)
    one = Kernel("a", "rms_norm", "fp32_multiply", right, source="mine.py:7")
    kernels = one, replace(one, name="b"), replace(one, name="c", source="mine.py:70")
    beside, case = InProcess(*kernels), parse_case(CASE)
    for kernel in kernels:
        subject = Subject(kernel, RMS_NORM, torch.device("cuda:0"), beside=beside)
        result = replace(subject.outcome(Verdict.INCONCLUSIVE, str(case), case.dtypes), reason="open")
        reason = "it took too long" if kernel.name in asked else "the same function took too long there"
        found = with_formula(subject, case, result)
        assert found.reason == f"open; residues, on the CPU, say nothing: {reason}"
    assert seen == asked


def test_equal_residues_decide(judged: tuple[Problem, Judgement]) -> None:
    problem, judgement = judged
    found = judged_by_formula(judgement, problem, Followed(problem.residues, ()))
    assert found.verdict is Verdict.PASSED and found.stages[0].equal == 24


def test_equal_residues_that_the_kernels_own_process_told_decide_nothing(judged: tuple[Problem, Judgement]) -> None:
    """A hostile kernel can read lastbit, and tell the residues of the reference."""
    problem, judgement = judged
    found = judged_by_formula(judgement, problem, Followed(problem.residues, (), told=True))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert found.stages == judgement.stages and found.ruled_out == judgement.ruled_out
    assert (
        found.reason
        == "nothing is decided; its own process says that every element follows from the formula of the contract"
    )


@pytest.mark.parametrize("told", [False, True])
def test_other_residues_fail_whoever_tells_them(judged: tuple[Problem, Judgement], told: bool) -> None:
    problem, judgement = judged
    other = {name: residues + residues for name, residues in problem.residues.items()}
    found = judged_by_formula(judgement, problem, Followed(other, (), told=told))
    assert found.verdict is Verdict.FAILED and not found.reason
    assert found.findings[0].kind == OF_FORMULA and not found.explained_by


def test_contracts_of_one_computation_are_asked_once(
    judged: tuple[Problem, Judgement], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a norm in fp32 without weight and residual 27 contracts make two: with a product and with a quotient."""
    problem, judgement = judged
    asked: list[str] = []

    def counted(problem: Problem, *args: Any) -> Any:
        asked.append(str(problem.contract))
        return compare_formulas(problem, *args)

    monkeypatch.setattr(formula, "compare_formulas", counted)
    other = {name: residues + residues for name, residues in problem.residues.items()}
    assert not judged_by_formula(judgement, problem, Followed(other, ()), alternatives=False).explained_by
    assert not asked
    judged_by_formula(judgement, problem, Followed(other, ()))
    assert asked == ["native_multiply+rounded_sum", "native_multiply+rounded_sum+divided"]


def test_a_kernel_of_another_formula_keeps_no_contract(judged: tuple[Problem, Judgement]) -> None:
    problem, judgement = judged
    other = {name: residues + residues for name, residues in problem.residues.items()}
    failed = judged_by_formula(judgement, problem, Followed(other, (), told=True))
    fields = {"case": "", "op": "rms_norm", "kernel": "mine", "contract": "", "device": "cpu", "dtypes": ""}
    result = CaseResult(Verdict.PASSED, **fields).judged(failed)
    found = contracts_of([result], Verdict.FAILED, str(problem.contract))
    assert not found.keeps and str(problem.contract) in found.ruled_out


def test_what_are_no_residues() -> None:
    sound = Residues.of(torch.tensor([0.1, 3.0])).numbers
    assert Residues(sound).is_sound
    for row, number in ((0, P), (1, -1), (2, -2), (3, 128)):
        other = sound.clone()
        other[row, 0] = number
        assert not Residues(other).is_sound
    assert not Residues(sound.double()).is_sound and not Residues(sound[:3]).is_sound


def test_a_sum_of_ranks_is_rounded_after_each_hop_or_once() -> None:
    """A right order of hops is equal to the reference; what rounds once is not, and other orders are left open."""
    ranks = torch.randn(4, 3, 40, generator=torch.Generator().manual_seed(1)).bfloat16().unbind()
    tensors = dict(zip(("x", "peer_1", "peer_2", "peer_3"), ranks, strict=True))
    problem = Problem(ALL_REDUCE, ALL_REDUCE.contract("rounded_hops"), tensors, {})

    def compared(function: Callable[[Sequence[Tensor]], Tensor]) -> tuple[int, int]:
        kernel = Kernel("mine", "all_reduce", "", lambda **given: function(list(given.values())))
        own = compare_formulas(problem, follow(kernel, tensors, {}, ["reduced"], ()).results)["reduced"]
        return own.equal, own.differs

    assert compared(lambda terms: functools.reduce(torch.add, terms)) == (120, 0)
    equal, differs = compared(lambda terms: torch.stack(terms).float().sum(0).bfloat16())
    assert equal < 60 and not differs  # of some terms every sum is a number of bf16


# What can be followed


@pytest.mark.parametrize(("elements", "small"), [(8191, True), (8192, True), (8193, False)])
def test_a_small_case_has_few_elements_in_all_tensors(elements: int, small: bool) -> None:
    assert (
        formula_check.is_small(parse_case(f"rms_norm x=fp32[{elements - 92}] weight=fp32[92] eps=1e-06 seed=1"))
        is small
    )


def test_numbers_on_the_cpu_are_followed_if_there_are_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    x, integers = torch.zeros(6), torch.zeros(4, dtype=torch.int64)
    follows = formula_check.follows
    assert follows({"x": x}) and follows({"x": x, "index": integers})
    assert not follows({"index": integers}) and not follows({})
    assert not follows({"x": x, "there": torch.zeros(1, device="meta")})
    monkeypatch.setattr(formula_check, "_LARGEST", 11)
    assert follows({"x": x, "index": integers})
    monkeypatch.setattr(formula_check, "_LARGEST", 10)
    assert not follows({"x": x, "index": integers})


def test_a_kernel_elsewhere_is_not_followed_anew_and_a_displaced_case_never(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel("mine", "rms_norm", "fp32_multiply", right)
    here, case = Subject(kernel, RMS_NORM, torch.device("cpu")), parse_case(CASE)
    problem, followed = formula_check.followed_anew(here, case, ("output",)) or pytest.fail("not followed")
    assert problem.main.shape == (2, 515) and set(followed.results) == {"output"}
    assert formula_check.followed_anew(replace(here, device=torch.device("cuda:0")), case, ("output",)) is None
    inputs, displaced = build(case, "cpu"), parse_case(CASE.replace("515]", "515]~peer"))
    assert formula_check.followed_in(here, case, inputs, ("output",)) is not None
    assert formula_check.followed_in(here, displaced, inputs, ("output",)) is None
    monkeypatch.setattr(formula_check, "_LARGEST", 2 * 515)
    assert formula_check.followed_anew(here, case, ("output",)) is None


def test_what_has_a_verdict_already_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel("mine", "rms_norm", "fp32_multiply", right)
    one, case = Subject(kernel, RMS_NORM, torch.device("cpu")), parse_case(CASE)
    result = verify_case(one, case, repeat=False)
    with monkeypatch.context() as patch:
        patch.setattr(formula_check, "followed_anew", lambda *_: pytest.fail("it was followed"))
        for verdict in set(Verdict) - {Verdict.PASSED, Verdict.INCONCLUSIVE}:
            other = replace(result, verdict=verdict)
            assert formula_check.by_formula(one, case, other) == (other, None)
    judged, found = formula_check.by_formula(one, case, replace(result, seconds=5.0), alternatives=False)
    assert found is not None and judged.seconds > 5 and judged.stages[-1].equal == 1030
    monkeypatch.setattr(formula_check, "followed_anew", lambda *_: None)
    assert formula_check.by_formula(one, case, result) == (result, None)

    def ended(*_: object) -> None:
        raise LastbitError("the process of the kernel has ended")

    monkeypatch.setattr(formula_check, "followed_anew", ended)
    judged, found = formula_check.by_formula(one, case, result)
    assert judged.verdict is Verdict.ERRORED and "has ended" in judged.reason and found is None


def test_without_a_process_beside_it_nothing_is_said_of_a_kernel_elsewhere() -> None:
    kernel = Kernel("mine", "rms_norm", "fp32_multiply", right)
    one = Subject(kernel, RMS_NORM, torch.device("cuda:0"))
    result = one.outcome(Verdict.INCONCLUSIVE, CASE, "fp32", reason="nothing is decided")
    assert with_formula(one, parse_case(CASE), result) is result


@pytest.mark.parametrize(
    ("tensor", "span"),
    [
        ("x=bf16[4,6]", 24),
        ("x=bf16[4,6]+5", 29),
        ("x=bf16[4,6]@8,1+3", 33),
        ("x=bf16[4,6]@0,1", 24),
        ("x=bf16[0,6]", 0),
    ],
)
def test_memory_that_a_tensor_spans(tensor: str, span: int) -> None:
    assert formula_check._span(parse_case(f"op {tensor} seed=0")["x"]) == span


@pytest.mark.parametrize(
    ("numel", "decided", "constant", "scarce"),
    [(1000, 9, 0, True), (1000, 10, 0, False), (1300, 309, 300, True), (1300, 310, 300, False)],
)
def test_less_than_a_hundredth_is_scarce(numel: int, decided: int, constant: int, scarce: bool) -> None:
    seen = Comparison(numel=numel, decided=decided)
    assert formula_check._is_scarce(StageResult("output", "fp32", True, seen, seen, constant=constant)) is scarce


def test_only_what_is_open_gets_a_reason() -> None:
    one = Subject(Kernel("mine", "rms_norm", "fp32_multiply", right), RMS_NORM, torch.device("cpu"))
    passed = one.outcome(Verdict.PASSED, CASE, "fp32")
    assert formula_check._undecided(passed, "why") is passed
    left_open = one.outcome(Verdict.INCONCLUSIVE, CASE, "fp32", reason="nothing is decided")
    wanted = "nothing is decided; residues, on the CPU, say nothing: why"
    assert formula_check._undecided(left_open, "why").reason == wanted


def test_a_case_on_another_device_must_fit_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory between its rows counts, and what the kernel needs of it for each element."""
    kernel = Kernel("mine", "rms_norm", "fp32_multiply", right)
    one = Subject(kernel, RMS_NORM, torch.device("cuda:0"), beside=InProcess(kernel))
    case = parse_case(CASE)  # of 1,030 elements
    result = one.outcome(Verdict.INCONCLUSIVE, CASE, "fp32", reason="nothing is decided")

    def why(largest: int, available: int) -> str:
        monkeypatch.setattr(formula_check, "_LARGEST_BESIDE", largest)
        monkeypatch.setattr(formula_check, "available_bytes", lambda: available)
        monkeypatch.setattr(formula_check, "made_current", lambda device: nullcontext())
        monkeypatch.setattr(formula_check, "build", lambda case, device: 1 // 0)
        return with_formula(one, case, result).reason.partition("say nothing: ")[2]

    assert why(1030, 10**9) == why(2000, 1030 * 3000 - 1) == "the case is too large for that"
    assert (
        why(1031, 1030 * 3000)
        == "called once more here, the kernel raised ZeroDivisionError: integer division or modulo by zero"
    )


def test_seconds_of_following_are_added(judged: tuple[Problem, Judgement], monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel("mine", "rms_norm", "fp32_multiply", right)
    one, case = Subject(kernel, RMS_NORM, torch.device("cpu")), parse_case(CASE)
    result = replace(one.outcome(Verdict.INCONCLUSIVE, CASE, "fp32", reason="open"), seconds=1.0)
    clock = iter([10.0, 12.5])
    monkeypatch.setattr(formula_check.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(formula_check, "followed_anew", lambda *_: (judged[0], None))
    monkeypatch.setattr(formula_check, "judged_by_formula", lambda given, *_, **__: replace(given, reason="looked at"))
    found, _ = formula_check.by_formula(one, case, result)
    assert (found.seconds, found.reason) == (3.5, "looked at")


@pytest.mark.parametrize(
    ("verdict", "equal", "said"),
    [
        (Verdict.INCONCLUSIVE, True, True),
        (Verdict.INCONCLUSIVE, False, False),
        (Verdict.PASSED, True, False),
    ],
)
def test_what_a_process_told_is_said_where_nothing_else_decides(
    verdict: Verdict, equal: bool, said: bool, judged: tuple[Problem, Judgement], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, judgement = judged
    followed = Followed({}, opaque=(), told=True)
    compared = {"output": formula.Compared(24, 24 if equal else 23, 0)}
    monkeypatch.setattr(formula_check, "compare_formulas", lambda *_: compared)
    found = judged_by_formula(replace(judgement, verdict=verdict, reason="open"), problem, followed)
    assert (found.verdict, found.reason.startswith("open;")) == (verdict, said)
    monkeypatch.setattr(formula_check, "compare_formulas", lambda *_: {})
    assert judged_by_formula(replace(judgement, reason="open"), problem, followed).reason == "open"


GRADIENTS = (
    "moe_lora_backward x=bf16[2,64] expert_ids=int64[2,2]:below_2 routing_weights=fp32[2,2] "
    "gate_proj=bf16[2,32,64]:fan_in up_proj=bf16[2,32,64]:fan_in down_proj=bf16[2,64,32]:fan_in "
    "gate_lora_a=bf16[2,4,64]:fan_in gate_lora_b=bf16[2,32,4]:fan_in up_lora_a=bf16[2,4,64]:fan_in "
    "up_lora_b=bf16[2,32,4]:fan_in down_lora_a=bf16[2,4,32]:fan_in down_lora_b=bf16[2,64,4]:fan_in "
    "grad_output=bf16[2,64] saved_gate=bf16[2,2,32] saved_up=bf16[2,2,32] intermediate=bf16[2,2,32] "
    "scaling=0.7 seed=1"
)
OF_HIDDEN_UNITS = {"grad_gate_lora_a", "grad_up_lora_a", "grad_input"}
"""Results that add something of every hidden unit."""


@pytest.mark.parametrize("gate", [None, -80.0, -89.0])
def test_gradients_are_decided_unless_the_exponential_of_a_gate_overflows(gate: float | None) -> None:
    """exp(89) is beyond fp32: the sigmoid of -89 is 0 in one right kernel and 2e-39 in another."""
    kernel = next(k for k in LOADED if k.name == "eager[moe_lora_backward+fused]")
    op = open_project(Config(folder="")).op(kernel.op)
    case = parse_case(GRADIENTS)
    tensors = build(case, torch.device("cpu")).tensors
    if gate is not None:
        tensors["saved_gate"][0, 0, 0] = gate
    problem = Problem(op, op.contract(kernel.contract), tensors, case.params)
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    seen = follow(kernel, copies, case.params, tuple(problem.results), problem.constants)
    found = compare_formulas(problem, seen.results)
    assert len(found) == 8 and not any(one.differs for one in found.values())
    undecided = {name for name, one in found.items() if one.equal < one.numel}
    assert undecided >= OF_HIDDEN_UNITS if gate == -89.0 else not undecided
