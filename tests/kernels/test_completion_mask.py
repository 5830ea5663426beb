"""Completion masks: the kernels and the reference against a loop over Python integers, in every layout and size."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lastbit.case import Case, parse_case
from lastbit.devices import machine
from lastbit.errors import UnsupportedCase, UsageError
from lastbit.inputs import build
from lastbit.judging.problem import Problem
from lastbit.kernel import Kernel, load_file
from lastbit.placement import PlacementWarning
from lastbit.result import Verdict
from lastbit.verify.check import Subject, verify_case
from lastbit.verify.drawing import free
from tests.rms_norm_contract import DEVICE, FOLDER, LOADED, needs_device  # installs the bit-faithful interpreter

pytestmark = needs_device

OP = load_file(FOLDER.parent / "references" / "completion_mask.py").completion_mask
CASES = load_file(FOLDER.parent / "cases" / "completion_mask.py")
KERNELS = {k.name.partition("[")[0]: k for k in LOADED if k.op == OP.name}
STAGES = ("is_eos", "eos_index")
ACCEPTS = frozenset({"ids", "eos_ids", "mask_truncated"})
BOTH = pytest.mark.parametrize("family", ["triton", "eager"])


def expected(ids: Tensor, eos_ids: Tensor, *, mask_truncated: bool = False) -> dict[str, Tensor]:
    """Every stage, one row at a time, in Python."""
    length, ends = ids.shape[-1], set(eos_ids.tolist())
    found = [[token in ends for token in row] for row in ids.reshape(math.prod(ids.shape[:-1]), length).tolist()]
    first = [row.index(True) if True in row else length for row in found]
    last = [-1 if index == length and mask_truncated else index for index in first]
    mask = [[int(column <= index) for column in range(length)] for index in last]
    shapes = {"is_eos": ids.shape, "eos_index": (*ids.shape[:-1], 1), "mask": ids.shape}
    dtypes = {"is_eos": torch.bool, "eos_index": torch.int64, "mask": torch.int32}
    lists: dict[str, Any] = {"is_eos": found, "eos_index": first, "mask": mask}
    return {n: torch.tensor(lists[n], dtype=dtypes[n], device=ids.device).reshape(shapes[n]) for n in lists}


def ids_of(*rows: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(rows, dtype=dtype, device=DEVICE)


def check(family: str, ids: Tensor, eos_ids: Tensor, **params: Any) -> Tensor:
    """Run the kernel and compare its mask."""
    mask = KERNELS[family].call(ids, eos_ids, **params)
    wanted = expected(ids, eos_ids, **params)["mask"]
    assert (mask.shape, mask.dtype, mask.is_contiguous()) == (ids.shape, torch.int32, True)
    assert torch.equal(mask, wanted), (ids, eos_ids, params, mask)
    return mask


def random_ids(*shape: int, seed: int = 0, dtype: torch.dtype = torch.int64, ordinary: int = 40) -> Tensor:
    """Ids from 0 to `ordinary` - 1."""
    return torch.randint(ordinary, shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def all_groups() -> list[Any]:
    return list(CASES.groups(ACCEPTS, small=True))


ANY_CASE = st.one_of([free(group) for group in all_groups() if group.strategy is not None])
EXAMPLES = [case for group in all_groups() for case in group.examples]

ROWS = [
    ([7, 8, 2, 9], [1, 1, 1, 0]),
    ([2, 8, 7, 9], [1, 0, 0, 0]),
    ([7, 8, 9, 2], [1, 1, 1, 1]),
    ([7, 2, 8, 2], [1, 1, 0, 0]),
    ([2, 2, 2, 2], [1, 0, 0, 0]),
    ([7, 3, 2, 9], [1, 1, 0, 0]),
    ([7, 2, 2, 2], [1, 1, 0, 0]),  # padded with the end id
    ([7, -2, 2 + 2**32, 2 - 2**32], [1, 1, 1, 1]),
]


@BOTH
def test_rows_of_every_kind(family: str) -> None:
    ids, wanted = ids_of(*(row for row, _ in ROWS)), [mask for _, mask in ROWS]
    eos_ids = torch.tensor([2, 3], device=DEVICE)
    assert KERNELS[family].call(ids, eos_ids).tolist() == wanted
    wanted[-1] = [0, 0, 0, 0]
    assert KERNELS[family].call(ids, eos_ids, mask_truncated=True).tolist() == wanted


@BOTH
def test_ids_of_int32_match_no_end_beyond_32_bits(family: str) -> None:
    ids = ids_of([5, 6, 7], dtype=torch.int32)
    mask = KERNELS[family].call(ids, torch.tensor([2**32 + 5, 6], device=DEVICE))
    assert mask.tolist() == [[1, 1, 0]]


@BOTH
@settings(max_examples=60)
@given(case=ANY_CASE)
def test_generated_cases(family: str, case: Case) -> None:
    check(family, **build(case, DEVICE).tensors, **case.params)


@BOTH
@pytest.mark.parametrize("case", EXAMPLES, ids=str)
def test_examples(family: str, case: Case) -> None:
    check(family, **build(case, DEVICE).tensors, **case.params)


@BOTH
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 256, 257, 1023, 1024, 1025, 2050])
@pytest.mark.parametrize("rows", [1, 2, 5, 17])
def test_sizes_around_blocks(family: str, rows: int, length: int) -> None:
    ids = random_ids(rows, length, ordinary=max(2, length // 2))
    check(family, ids, torch.tensor([1], device=DEVICE), mask_truncated=True)
    ids[:, -1] = -1
    check(family, ids, torch.tensor([-1], device=DEVICE))


LAYOUTS = {
    "columns first": ((5, 70), (1, 5), 0),
    "every second column": ((5, 70), (140, 2), 1),
    "rows of a wider buffer": ((6, 40), (100, 1), 60),
    "expanded": ((4, 30), (0, 1), 0),
    "one value per row": ((4, 30), (1, 0), 0),
    "vector": ((90,), (3,), 2),
    "three dimensions": ((3, 4, 20), (80, 20, 1), 0),
    "three that cannot be merged": ((3, 4, 20), (200, 30, 1), 5),
    "first two exchanged": ((3, 4, 20), (20, 60, 1), 0),
}


@BOTH
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_layouts(family: str, dtype: torch.dtype, layout: str) -> None:
    shape, strides, offset = LAYOUTS[layout]
    ids = random_ids(2000, dtype=dtype).as_strided(shape, strides, offset)
    eos_ids = random_ids(9, seed=1, dtype=dtype)[1::3]
    check(family, ids, eos_ids)
    check(family, ids, eos_ids, mask_truncated=True)


@BOTH
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (0,), (2, 0, 3), (2, 3, 0)])
def test_no_ids(family: str, shape: tuple[int, ...]) -> None:
    ids = torch.empty(shape, dtype=torch.int64, device=DEVICE)
    mask = KERNELS[family].call(ids, torch.tensor([2], device=DEVICE), mask_truncated=True)
    assert (tuple(mask.shape), mask.dtype) == (shape, torch.int32)


@pytest.mark.parametrize("mask_truncated", [False, True])
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (7, 40), (2, 3, 300), (3, 2050)])
def test_stages_are_stored_and_change_nothing(shape: tuple[int, ...], mask_truncated: bool) -> None:
    ids, eos_ids = random_ids(*shape), torch.tensor([1, 3], device=DEVICE)
    params = {"mask_truncated": mask_truncated}
    stored = KERNELS["triton"].call(ids, eos_ids, **params, stages=STAGES)
    for name, wanted in expected(ids, eos_ids, **params).items():
        assert stored[name].shape == wanted.shape
        assert torch.equal(stored[name].to(wanted.dtype), wanted), name
    assert torch.equal(stored["mask"], KERNELS["triton"].call(ids, eos_ids, **params))
    assert KERNELS["triton"].call(ids, eos_ids, stages=("eos_index",)).keys() == {"eos_index", "mask"}


@BOTH
def test_arguments_that_have_no_mask_are_refused(family: str) -> None:
    ids, eos_ids = random_ids(3, 4), torch.tensor([2], device=DEVICE)
    refused: list[tuple[Tensor, Tensor, type[Exception], str]] = [
        (ids.float(), eos_ids, TypeError, "ids is torch.float32; token ids are torch.int64 or torch.int32"),
        (ids, eos_ids.to(torch.int16), TypeError, "eos_ids is torch.int16"),
        (ids, eos_ids[:0], ValueError, r"eos_ids has shape \(0,\); it must be \[K\]"),
        (ids, eos_ids[0], ValueError, r"eos_ids has shape \(\)"),
        (ids[0, 0], eos_ids, ValueError, r"ids has shape \(\)"),
    ]
    for one, other, error, message in refused:
        with pytest.raises(error, match=message):
            KERNELS[family].call(one, other)
    long = torch.empty(1, 2**30 + 1, dtype=torch.int64, device="meta")
    with pytest.raises(UnsupportedCase, match="last dimension of ids is 1073741825"):
        KERNELS[family].call(long, eos_ids.to("meta"))


def test_the_eager_kernel_refuses_end_ids_on_another_device() -> None:
    with pytest.raises(ValueError, match=f"eos_ids is on meta, but ids is on {DEVICE}"):
        KERNELS["eager"].call(random_ids(3, 4), torch.empty(1, dtype=torch.int64, device="meta"))


def test_the_triton_kernel_moves_end_ids_from_another_device() -> None:
    """To the device of the ids: one without memory, where no rows are all that a kernel can mask."""
    ids = torch.empty(0, 4, dtype=torch.int64, device="meta")
    with pytest.warns(PlacementWarning, match="eos_ids is on .*, but the kernel runs on meta"):
        mask = KERNELS["triton"].call(ids, torch.tensor([2], device=DEVICE))
    assert (tuple(mask.shape), mask.device.type) == ((0, 4), "meta")
    assert {name: kernel.placement for name, kernel in KERNELS.items()} == {"triton": "moves", "eager": "refuses"}


def test_an_unknown_stage_is_refused() -> None:
    with pytest.raises(ValueError, match="stages: 'eos' is not one of 'is_eos', 'eos_index'"):
        KERNELS["triton"].call(random_ids(3, 4), torch.tensor([2], device=DEVICE), stages=("eos",))


# The reference


def reference(tensors: dict[str, Tensor], params: dict[str, Any], given: dict[str, Tensor] | None = None) -> Any:
    return Problem(OP, OP.contract(), tensors, params).evaluate(given)


@settings(max_examples=60)
@given(case=ANY_CASE)
def test_reference(case: Case) -> None:
    tensors = build(case, DEVICE).tensors
    trace = reference(tensors, dict(case.params))
    assert trace.results == ["mask"]
    for name, wanted in expected(**tensors, **case.params).items():
        assert trace.stages[name].value.dtype == wanted.dtype
        assert torch.equal(trace.stages[name].value, wanted), name


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool], ids=str)
def test_reference_goes_on_from_the_stages_of_a_kernel(dtype: torch.dtype) -> None:
    tensors = {"ids": torch.zeros(3, 6, dtype=torch.int64), "eos_ids": torch.tensor([1])}
    found = torch.tensor([[0, 1, 0, 1, 0, 0], [0] * 6, [1] * 6]).to(dtype)
    trace = reference(tensors, {"mask_truncated": True}, {"is_eos": found})
    assert trace.stages["eos_index"].value.tolist() == [[1], [6], [0]]
    trace = reference(tensors, {"mask_truncated": True}, {"is_eos": found, "eos_index": torch.tensor([[2], [0], [6]])})
    assert trace.stages["mask"].value.tolist() == [[1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0], [0] * 6]


def test_reference_matches_no_end_beyond_32_bits() -> None:
    tensors = {"ids": torch.tensor([[5, 6]], dtype=torch.int32), "eos_ids": torch.tensor([2**32 + 5])}
    assert reference(tensors, {}).stages["is_eos"].value.tolist() == [[False, False]]


def test_reference_refuses_no_end_ids() -> None:
    ids = torch.zeros(2, 3, dtype=torch.int64)
    for eos_ids, message in ((ids[0, :0], r"eos_ids has shape \(0,\)"), (ids, r"eos_ids has shape \(2, 3\)")):
        with pytest.raises(UsageError, match=message):
            reference({"ids": ids, "eos_ids": eos_ids}, {})


# The cases


def test_cases_leave_out_what_a_kernel_does_not_take() -> None:
    groups = list(CASES.groups(ACCEPTS - {"mask_truncated"}, small=True))
    assert all(not case.params for group in groups for case in group.examples)


def test_example_cases_hold_every_kind_of_row() -> None:
    kinds: set[str] = set()
    for case in EXAMPLES:
        tensors = build(case, "cpu").tensors
        length = tensors["ids"].shape[-1]
        for first in expected(**tensors)["eos_index"].flatten().tolist() if length > 1 else ():
            kinds.add({0: "first", length - 1: "last", length: "none"}.get(first, "between"))
    assert kinds == {"first", "last", "none", "between"}


# Two devices


def mask_with_helpers(device: str) -> Kernel:
    """Compute as trainers had it: helper tensors on one device, whichever one the ids are on."""

    def mask(ids: Tensor, eos_ids: Tensor) -> Tensor:
        is_eos = torch.isin(ids, eos_ids)
        last = torch.full((len(ids),), ids.shape[-1], device=device)
        last[is_eos.any(1)] = is_eos.int().argmax(1)[is_eos.any(1)]
        return (torch.arange(ids.shape[-1], device=last.device) <= last[:, None]).int()

    return Kernel("helpers", OP.name, "", mask)


@pytest.mark.gpu
def test_helper_tensors_on_a_fixed_device_are_seen_on_another_one() -> None:
    if not (others := machine().accelerators[1:]):
        pytest.skip("one accelerator alone has no other device")
    case = parse_case("completion_mask ids=int64[8,256]:sequences_2 eos_ids=int64[2]:counting seed=0")
    first, *_ = machine().accelerators
    verdicts = [
        verify_case(Subject(mask_with_helpers(first), OP, torch.device(d)), case).verdict for d in (first, *others)
    ]
    assert verdicts == [Verdict.PASSED, *[Verdict.ERRORED] * len(others)]
