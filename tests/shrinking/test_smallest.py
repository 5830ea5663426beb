"""The smallest tensors: parts of the case's own, and plainer numbers, on which the same finding stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit.case import Case, parse_case
from lastbit.config import Config
from lastbit.inputs import bits_of, build
from lastbit.kernel import Kernel
from lastbit.result import Verdict
from lastbit.shrinking.drafts import Draft, plainer_elements, plainer_tensors
from lastbit.shrinking.smallest import MOST_TRIES, smallest
from lastbit.verify.check import Subject, verify_case
from lastbit.verify.project import open_project

PROJECT = open_project(Config(folder=""))
CPU = torch.device("cpu")
LINE = "rms_norm x=bf16[3,4,40]@192,48,1:rows weight=bf16[40]:near_one eps=1e-05 weight_offset=0.0 seed=3"


def subject(call: Callable[..., Any]) -> Subject:
    kernel = Kernel("norm", "rms_norm", "native_multiply", call)
    return Subject(kernel, PROJECT.op("rms_norm"), CPU)


def normalized(x: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)


def right(x: Tensor, weight: Tensor | None = None, *, eps: float, weight_offset: float = 0.0) -> Tensor:
    y = normalized(x, eps).to(x.dtype)
    return y if weight is None else y * weight


def multiplies_in_fp32(x: Tensor, weight: Tensor | None = None, *, eps: float, weight_offset: float = 0.0) -> Tensor:
    y = normalized(x, eps)
    return (y if weight is None else y * weight.float()).to(x.dtype)


def forgets_the_last(x: Tensor, weight: Tensor | None = None, *, eps: float, weight_offset: float = 0.0) -> Tensor:
    """Forget the last of at least six columns in the mean."""
    wide = x.float()
    seen = wide[..., :-1] if x.shape[-1] >= 6 else wide
    y = (wide * torch.rsqrt((seen * seen).sum(-1, keepdim=True) / x.shape[-1] + eps)).to(x.dtype)
    return y if weight is None else y * weight


def raises(x: Tensor, weight: Tensor | None = None, *, eps: float, weight_offset: float = 0.0) -> Tensor:
    if x.shape[-1] > 2:
        raise IndexError(f"column 2 of {x.shape[-1]}")
    return right(x, weight, eps=eps)


def found(call: Callable[..., Any], line: str = LINE, seconds: float = 60.0) -> Case:
    small = smallest(subject(call), parse_case(line), seconds=seconds)
    assert small is not None
    assert verify_case(subject(call), parse_case(str(small))).verdict in (Verdict.FAILED, Verdict.ERRORED)
    assert verify_case(subject(right), small).verdict not in (Verdict.FAILED, Verdict.ERRORED)
    return small


def test_a_fault_of_elements_needs_few_columns() -> None:
    small = found(multiplies_in_fp32)
    columns = small["x"].numel
    assert columns <= 2 and small["x"].shape == (1, 1, columns) and small["weight"].shape == (columns,)
    assert small["x"].strides is None and "weight_offset" not in small.params and small.seed == 0
    assert all(tensor.regime.startswith("values(") for tensor in small.tensors)
    assert len(str(small)) < 110


def test_a_fault_of_a_sum_needs_its_columns() -> None:
    small = found(forgets_the_last)
    assert small["x"].shape == (1, 1, 6)
    assert "weight" not in small.names


def test_an_error_stays_the_same_error() -> None:
    assert found(raises)["x"].shape == (1, 1, 3)


def test_nothing_is_found_where_nothing_fails() -> None:
    assert smallest(subject(right), parse_case(LINE), seconds=60.0) is None


def test_it_ends_when_the_time_is_over_and_with_the_tries() -> None:
    tries = 0

    @contextmanager
    def counted(case: object) -> Iterator[None]:
        nonlocal tries
        tries += 1
        yield

    assert smallest(subject(multiplies_in_fp32), parse_case(LINE), watch=counted, seconds=0.0) is None
    assert tries == 1
    smallest(subject(lambda x, *, eps: torch.zeros_like(x)), parse_case(LINE), watch=counted, seconds=60.0)
    assert tries <= MOST_TRIES + 3


def test_other_programs_on_the_machine_take_no_time_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    hours = count(step=3600)
    monkeypatch.setattr("time.monotonic", lambda: next(hours))
    assert found(raises, seconds=30.0)["x"].shape == (1, 1, 3)


# What is left of a case

CODES = (
    "op x=bf16[2,64] ids=int64[2,2]:experts_3 codes=uint8[3,4,32]:bits scale=bf16[3,4,2] big=fp32[5000] first=3 seed=1"
)


def test_what_is_kept_is_kept_bit_for_bit() -> None:
    draft = Draft.of(parse_case(CODES))
    places = frozenset({("x", -1), ("codes", -1), ("scale", -1)})
    small = draft.cut(places, 2, [1])
    assert small is not None
    before, after = (build(parse_case(str(d.case)), "cpu").tensors for d in (draft, small))
    for name, kept in (("x", slice(32, 64)), ("codes", slice(16, 32)), ("scale", slice(1, 2))):
        assert torch.equal(bits_of(after[name]), bits_of(before[name][..., kept].contiguous()))
    assert (small.case["big"], small.case.seed) == (draft.case["big"], 1)  # a line does not hold as many


def test_numbers_of_what_is_left_out_become_others() -> None:
    draft = Draft.of(parse_case(CODES)).with_values({"ids": torch.tensor([[0, 2], [-1, 1]])})
    assert draft is not None
    places = frozenset({("ids", 1), ("codes", 0 - 3), ("scale", -3), ("first", 0)})
    small = draft.cut(places, 3, [2])
    assert small is not None
    assert small.values["ids"].tolist() == [[0, 0], [-1, 0]]
    assert small.case["codes"].shape == (1, 4, 32)
    assert small.case.params == {"first": 1}


def test_too_many_values_are_no_draft() -> None:
    draft = Draft.of(parse_case(CODES))
    assert draft.cut(frozenset({("big", -1)}), 5000, range(4999)) is None
    assert draft.cut(frozenset({("big", -1)}), 5000, range(4096)) is not None


def test_plainer_numbers() -> None:
    x = torch.tensor([[-1.3359375, 3.0]], dtype=torch.bfloat16)
    whole = [t.tolist() for t in plainer_tensors(x)]
    assert whole[:4] == [[[1, 1]], [[0, 0]], [[-1, 4]], [[-1.5, 3]]]
    first = [t[0, 0].item() for t in plainer_elements(x, 0)]
    assert first == [1, 0, -1, -1.5, -1.25, -1.375, -1.34375, 1.3359375]
    assert [t[0, 1].item() for t in plainer_elements(x, 1)] == [1, 0, 4]
    assert [t.tolist() for t in plainer_elements(torch.tensor([9, 7]), 0)] == [[1, 7], [0, 7], [2, 7], [4, 7]]
    assert not list(plainer_elements(torch.tensor([1.0]), 0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.float8_e4m3fn, torch.bool])
def test_plainer_numbers_are_numbers_of_the_dtype(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, float("nan"), 0.001953125] if dtype is not torch.bool else [1, 0, 1]).to(dtype)
    for other in (*plainer_tensors(x), *(t for place in range(3) for t in plainer_elements(x, place))):
        assert (other.dtype, other.shape) == (x.dtype, x.shape)
