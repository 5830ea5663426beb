"""A failing case is made as small as the failure allows, and no other failure is taken for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from lastbit.case import Case, Group, parse_case
from lastbit.config import Config
from lastbit.kernel import Kernel
from lastbit.result import BAD, CaseResult, Verdict
from lastbit.verify.item_run import CaseFailed, Stopped, run_item
from lastbit.verify.plan import Item
from lastbit.verify.project import open_project
from lastbit.verify.shrink import in_shapes, shrink
from tests.faults.hunt import subject_of
from tests.recorded import Recorded

PROJECT = open_project(Config(folder=""))


class Imagined:
    """A trial of a kernel that nobody runs, for an op whose reference takes what `fits` says."""

    def __init__(self, wrong: Callable[[Case], bool], fits: Callable[[Case], bool]) -> None:
        self.takes, self._wrong, self.tries = fits, wrong, 0

    def fails(self, case: Case) -> bool:
        self.tries += 1
        return self._wrong(case)


def smallest(
    line: str,
    wrong: Callable[[Case], bool],
    fits: Callable[[Case], bool] = lambda case: True,
    alike: Sequence[str] = (),
    most: int = 60,
) -> str:
    """Shrink from a line on, in at most so many tries; return the case without its op and seed."""
    case = parse_case(line)
    trial = Imagined(wrong, fits)
    found = str(shrink(case, PROJECT.op(case.op), map(parse_case, alike), trial.takes, trial.fails))
    assert trial.tries <= most, trial.tries
    return found.partition(" ")[2].rpartition(" ")[0]


NORM = "rms_norm x=bf16[4,7,5000]@35056,5008,1:rows weight=bf16[5000]:near_one eps=1e-05 weight_offset=1.0 seed=3"


def test_whatever_always_fails_ends_with_one_element() -> None:
    line = NORM.replace(" eps", " residual=bf16[4,7,5000]@35056,5008,1 eps")
    assert smallest(line, lambda case: True, most=4) == "x=bf16[1,1,1] eps=1e-05"
    assert smallest(line, lambda case: case["x"].numel > 30, most=40) == "x=bf16[4,4,2] eps=1e-05"


def test_a_size_ends_where_the_failure_begins() -> None:
    """The weight is needed, and follows x."""

    def tail(case: Case) -> bool:
        return case["x"].shape[-1] > 1024 and "weight" in case.names

    assert smallest(NORM, tail, most=25) == "x=bf16[1,1,1025] weight=bf16[1025] eps=1e-05"


def test_what_has_no_rows_stays_so() -> None:
    line = "completion_mask ids=int64[0,6] eos_ids=int64[2]:counting mask_truncated=True seed=0"
    assert smallest(line, lambda case: True, most=4) == "ids=int64[0,1] eos_ids=int64[1]:counting"


def test_values_and_parameters_stay_where_the_failure_needs_them() -> None:
    def needs_them(case: Case) -> bool:
        return case["x"].regime == "rows" and case.params.get("weight_offset") == 1.0

    assert smallest(NORM, needs_them) == "x=bf16[1,1,1]:rows eps=1e-05 weight_offset=1.0"


@pytest.mark.parametrize(
    ("memory", "found"),
    [("@5008,1", "[2,1]@9,1"), ("@10000,1+5000", "[1,1]@2,1+1"), ("+1", "[1,1]+1"), ("@6144,1", "[2,1]@9,1")],
    ids=["padded", "half", "unaligned", "one without a name"],
)
def test_a_layout_stays_what_it_is_while_sizes_shrink(memory: str, found: str) -> None:
    def flattens(case: Case) -> bool:
        x = case["x"]
        return bool(x.offset) or (x.strides is not None and x.shape[0] > 1)

    assert smallest(f"rms_norm x=bf16[40,5000]{memory} eps=1e-06 seed=0", flattens) == f"x=bf16{found} eps=1e-06"


PACKED = "attention q=bf16[1,6,4,16]@768,128,16,1 k=bf16[1,6,2,16]@768,128,16,1+64&q v=bf16[1,6,2,16]@768,128,16,1+96&q"


@pytest.mark.parametrize(
    ("tensors", "shapes", "found"),
    [
        ("x=bf16[4,64]@128,1 up=bf16[4,64]@128,1+64&x", [(2, 5)] * 2, "x=bf16[2,5]@10,1 up=bf16[2,5]@10,1+5&x"),
        ("x=bf16[4,64]@128,2 up=bf16[4,64]@128,2+1&x", [(2, 5)] * 2, "x=bf16[2,5]@10,2 up=bf16[2,5]@10,2+1&x"),
        ("x=bf16[4,64]+256 up=bf16[4,64]&x", [(2, 5)] * 2, "x=bf16[2,5]+10 up=bf16[2,5]&x"),
        ("x=bf16[4,64]@130,1 up=bf16[4,64]@130,1+66&x", [(2, 5)] * 2, "x=bf16[2,5]@12,1 up=bf16[2,5]@12,1+7&x"),
        (
            "x=bf16[4,64]@1000000000000,1 up=bf16[4,64]@1000000000000,1+64&x",  # of which nobody makes a map
            [(2, 5)] * 2,
            "x=bf16[2,5]@999999999882,1 up=bf16[2,5]@999999999882,1+5&x",
        ),
        ("x=bf16[4,64]@1,8 up=bf16[4,64]@1,8+4&x", [(2, 5)] * 2, "x=bf16[2,5]@1,4 up=bf16[2,5]@1,4+2&x"),
        ("x=bf16[4,64]@0,1 up=bf16[4,64]+64&x", [(2, 5)] * 2, "x=bf16[2,5]@0,1 up=bf16[2,5]+5&x"),
        ("x=bf16[4,64]@128,1 up=bf16[4,64]@128,1+64&x", [(0, 5)] * 2, "x=bf16[0,5]@128,1 up=bf16[0,5]@128,1+64&x"),
        (
            PACKED.partition(" ")[2],
            [(1, 3, 2, 5), (1, 3, 1, 5), (1, 3, 1, 5)],
            "q=bf16[1,3,2,5]@60,20,5,1 k=bf16[1,3,1,5]@60,20,5,1+10&q v=bf16[1,3,1,5]@60,20,5,1+15&q",
        ),
    ],
)
def test_tensors_of_one_storage_stay_beside_each_other(tensors: str, shapes: list[tuple[int, ...]], found: str) -> None:
    case = parse_case(f"op {tensors} seed=1")
    smaller = in_shapes(case, {tensor.name: shape for tensor, shape in zip(case.tensors, shapes, strict=True)})
    assert [(t.name, t.shape, t.offset, t.memory) for t in smaller.tensors] == [
        (t.name, t.shape, t.offset, t.memory) for t in parse_case(f"op {found} seed=1").tensors
    ]
    for own, wanted in zip(smaller.tensors, parse_case(f"op {found} seed=1").tensors, strict=True):
        steps = zip(own.shape, own.element_strides, wanted.element_strides, strict=True)
        assert all(a == b for size, a, b in steps if size > 1)


def test_a_shared_storage_stays_only_where_the_failure_needs_it() -> None:
    line = "swiglu x=bf16[4,64]@128,1 up=bf16[4,64]@128,1+64&x seed=1"
    assert smallest(line, lambda case: case.shares_memory) == "x=bf16[1,1] up=bf16[1,1]+1&x"
    assert smallest(line, lambda case: "up" in case.names) == "x=bf16[1,1] up=bf16[1,1]"
    beside = smallest(line, lambda case: case.shares_memory and case["x"].numel > 40)
    assert beside == "x=bf16[4,11]@22,1 up=bf16[4,11]@22,1+11&x"


def test_a_tensor_keeps_the_values_that_its_line_lists() -> None:
    line = "rms_norm x=bf16[2,2]@3,1:values(1,2,3,4) residual=bf16[2,2]:rows weight=bf16[2] eps=1e-06 seed=0"

    def fits(case: Case) -> bool:
        assert case["x"].shape == (2, 2), "nobody asks for another size"
        return True

    assert smallest(line, lambda case: True, fits) == "x=bf16[2,2]:values(1,2,3,4) eps=1e-06"
    found = smallest(line, lambda case: len(case.tensors) == 3, fits)
    assert found == "x=bf16[2,2]:values(1,2,3,4) residual=bf16[2,2] weight=bf16[2] eps=1e-06"


def test_sizes_that_are_equal_by_chance_are_told_apart_by_other_cases() -> None:
    line = "rms_norm x=bf16[64,64] weight=bf16[64] eps=1e-06 seed=0"
    other = "rms_norm x=bf16[3,8] weight=bf16[8] eps=1e-06 seed=0"

    def wrong(case: Case) -> bool:
        return case["x"].shape[0] >= 5 and "weight" in case.names

    def fits(case: Case) -> bool:
        return "weight" not in case.names or case["weight"].shape == case["x"].shape[-1:]

    assert smallest(line, wrong, fits) == "x=bf16[5,5] weight=bf16[5] eps=1e-06"
    assert smallest(line, wrong, fits, [other]) == "x=bf16[5,1] weight=bf16[1] eps=1e-06"


def test_what_goes_together_is_left_out_together() -> None:
    line = "rms_norm x=bf16[1,8] residual=bf16[1,8] scale=fp32[1]:scale_pow2 eps=1e-06 quant=static seed=0"

    def fits(case: Case) -> bool:
        return ("scale" in case.names) == ("quant" in case.names)

    found = smallest(line, lambda case: "residual" in case.names, fits)
    assert found == "x=bf16[1,1] residual=bf16[1,1] eps=1e-06"


def test_a_tensor_comes_home_from_another_device() -> None:
    line = "rms_norm x=bf16[1,8] weight=bf16[8]~cpu residual=bf16[1,8]~cpu eps=1e-06 seed=0"
    found = smallest(line, lambda case: "residual" in case.displaced)
    assert found == "x=bf16[1,1] residual=bf16[1,1]~cpu eps=1e-06"


CODES = (
    "moe_lora x=bf16[6,96]:few expert_ids=int64[6,2]:experts_3 routing_weights=fp32[6,2] "
    "gate_proj=int32[3,64,12]:bits gate_lora_a=bf16[3,5,96] gate_lora_b=bf16[3,64,5] gate_scale=bf16[3,64,3] "
    "scaling=2.0 seed=0"
)


def test_codes_and_their_scales_follow_the_columns() -> None:
    def fits(case: Case) -> bool:
        """Eight codes in an element, 32 of them with a scale."""
        if not {"gate_lora_a", "gate_lora_b", "gate_scale"} <= case.names:
            return False
        hidden, rank = case["x"].shape[-1], case["gate_lora_a"].shape[1]
        experts, width = case["gate_proj"].shape[:2]
        shapes = {
            "gate_lora_a": (experts, rank, hidden),
            "gate_lora_b": (experts, width, rank),
            "gate_proj": (experts, width, hidden // 8),
            "gate_scale": (experts, width, hidden // 32),
        }
        pairs = case["x"].shape[0], case["expert_ids"].shape[1]
        shapes |= dict.fromkeys(("expert_ids", "routing_weights"), pairs)
        return hidden % 32 == 0 and all(case[name].shape == shape for name, shape in shapes.items())

    def two_experts(case: Case) -> bool:
        return case["gate_proj"].shape[0] >= 2

    other = CODES.replace("3,", "4,").replace("[6", "[7").replace("experts_3", "experts_4")
    assert smallest(CODES, two_experts, fits, [other], most=12) == (
        "x=bf16[1,32] expert_ids=int64[1,1]:experts_2 routing_weights=fp32[1,1] gate_proj=int32[2,1,4]:bits "
        "gate_lora_a=bf16[2,1,32] gate_lora_b=bf16[2,1,1] gate_scale=bf16[2,1,1]"
    )


# Kernels that are run

RIGHT = {k.name: k for k in PROJECT.kernels()}["eager[native_multiply+rounded_sum]"]
Spoil = Callable[[Tensor, dict[str, Any]], None]


def kernel(spoil: Spoil) -> Kernel:
    """Make a right kernel of rms_norm, whose output is spoiled afterwards."""

    def norm(x: Tensor, weight: Any = None, residual: Any = None, *, eps: float) -> Any:
        given = {"x": x, "weight": weight, "residual": residual}
        results = RIGHT.call(**given, eps=eps)
        spoil(results["output"], given)
        return results

    return Kernel("spoiled", "rms_norm", RIGHT.contract, norm)


class Before(Recorded):
    """Is told how much is left before a failure is made small."""

    def tell(self, *event: Any) -> None:
        assert all(result.counted for result in self.results)
        super().tell(*event)


def ran(
    spoil: Spoil,
    *lines: str,
    failures: set[tuple[str, str]] | None = None,
    group: Group | None = None,
    asked: bool = False,
    left: list[int] | None = None,
) -> tuple[list[CaseResult], str]:
    """Run an item; return its results and the case that it ends with, empty if it does not fail."""
    subject = subject_of(kernel(spoil), torch.device("cpu"))
    item = Item(subject, group or Group("mine", examples=tuple(map(parse_case, lines))), asked)
    recorded: Any = Before(cases=2, failures=failures)
    found = ""
    try:
        run_item(item, recorded)
    except CaseFailed as failure:
        found = failure.result.case.removeprefix("rms_norm ").rpartition(" ")[0]
    finally:
        if left is not None:
            left += recorded.told_of("left")
    return recorded.results, found


REAL = "rms_norm x=bf16[3,2,100]:rows weight=bf16[100] residual=bf16[3,2,100] eps=1e-05 seed=1"


def tail(output: Tensor, given: dict[str, Any]) -> None:
    output[..., 64:] = 7.0


def with_residual(output: Tensor, given: dict[str, Any]) -> None:
    if given["residual"] is not None:
        output += 1.0


def strided(output: Tensor, given: dict[str, Any]) -> None:
    if not given["x"].is_contiguous():
        output[-1] = 7.0


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (tail, "x=bf16[1,1,65] eps=1e-05"),
        (with_residual, "x=bf16[1,1,1] residual=bf16[1,1,1] eps=1e-05"),
    ],
)
def test_an_example_that_fails_is_made_small(spoil: Spoil, found: str) -> None:
    results, smallest = ran(spoil, REAL)
    assert smallest == found
    assert [r.counted for r in results] == [True] + [False] * (len(results) - 1)
    assert len(results) <= 30 and {r.group for r in results} == {"mine"}


def test_an_example_that_fails_for_its_strides_keeps_them() -> None:
    assert ran(strided, REAL.replace("100]:rows", "100]@400,200,1:rows"))[1] == "x=bf16[1,2,1]@18,9,1 eps=1e-05"


def test_what_hypothesis_draws_is_made_small_too() -> None:
    group = Group("drawn", strategy=st.integers(80, 100).map(lambda n: parse_case(REAL.replace("100", str(n)))))
    assert ran(tail, group=group)[1] == "x=bf16[1,1,65] eps=1e-05"


def test_another_failure_is_not_taken_for_it() -> None:
    """Nor does it count: the kernel may not be meant for such a case."""

    def spoil(output: Tensor, given: dict[str, Any]) -> None:
        if output.shape[-1] < 30:
            raise ValueError("too narrow")
        output += 1.0

    results, smallest = ran(spoil, REAL)
    assert smallest == "x=bf16[1,1,30] eps=1e-05"
    assert {r.verdict for r in results} == {Verdict.FAILED, Verdict.SKIPPED}
    assert "ERRORED: ValueError: too narrow" in next(r.reason for r in results if r.verdict is Verdict.SKIPPED)


@pytest.mark.parametrize(("other", "width"), [("no tile for {} columns", 1), ("out of registers", 20)])
def test_errors_are_the_same_but_for_their_numbers(other: str, width: int) -> None:
    def spoil(output: Tensor, given: dict[str, Any]) -> None:
        n = output.shape[-1]
        raise ValueError((other if n < 20 else "no tile for {} columns").format(n))

    assert ran(spoil, REAL)[1] == f"x=bf16[1,1,{width}] eps=1e-05"


def test_other_values_are_tried_with_every_smaller_case() -> None:
    """The failure may need them."""
    calls: list[int] = []

    def spoil(output: Tensor, given: dict[str, Any]) -> None:
        calls.append(output.numel())
        output += 1.0

    results, _ = ran(spoil, REAL)
    assert len(calls) == 4 * len(results) == 20


# A kernel that has failed stops


LINES = tuple(REAL.replace("seed=1", f"seed={seed}").replace("3,2,100", f"{seed},100") for seed in (1, 2, 3))


def failing(output: Tensor, given: dict[str, Any]) -> None:
    output += 1.0


def counted(results: Sequence[CaseResult]) -> int:
    return sum(r.counted for r in results)


def test_after_its_smallest_case_is_found_a_kernel_runs_nothing_more() -> None:
    failures = set[tuple[str, str]]()
    left: list[int] = []
    results, found = ran(failing, *LINES, failures=failures, left=left)
    assert (counted(results), found, left) == (1, "x=bf16[1,1] eps=1e-05", [2])
    with pytest.raises(Stopped):
        ran(failing, *LINES, failures=failures, left=left)
    assert left == [2, 3]
    assert failures == {("spoiled", "cpu")}


def test_a_failure_elsewhere_stops_an_item_between_two_cases() -> None:
    def elsewhere(output: Tensor, given: dict[str, Any]) -> None:
        failures.add(("spoiled", "cpu"))

    failures, left = set[tuple[str, str]](), list[int]()
    with pytest.raises(Stopped):
        ran(elsewhere, *LINES, failures=failures, left=left)
    assert left == [2]


def test_who_keeps_going_runs_all_cases_and_shrinks_the_first_that_fails() -> None:
    results, found = ran(failing, *LINES)
    assert (counted(results), found) == (3, "x=bf16[1,1] eps=1e-05")


def test_the_lines_that_a_reader_asked_for_are_all_run_as_they_are() -> None:
    results, found = ran(failing, *LINES, failures={("spoiled", "cpu")}, asked=True)
    assert [r.case for r in results] == list(LINES)
    assert LINES[0].endswith(f"{found} seed=1")
    assert {r.verdict for r in results} <= BAD
