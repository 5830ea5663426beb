"""Tensors that share memory with each other, or whose own elements do."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lastbit.inputs import overlap as module
from lastbit.inputs.overlap import is_folded, overlaps


def test_overlaps() -> None:
    buffer = torch.zeros(8, 32)
    left, right = buffer.chunk(2, dim=-1)
    tensors = {
        "left": left,
        "right": right,
        "even": buffer[..., ::2],
        "row": buffer[3],
        "other": torch.zeros(8, 32),
        "bytes": buffer[7].view(torch.uint8)[-1:],
        "none": buffer[:0],
    }
    assert overlaps(tensors) == [
        ("left", "even"),
        ("left", "row"),
        ("right", "even"),
        ("right", "row"),
        ("right", "bytes"),
        ("even", "row"),
    ]


def test_interleaved_tensors_do_not_overlap() -> None:
    buffer = torch.zeros(4, 6, 16, dtype=torch.bfloat16)
    assert overlaps({"even": buffer[..., ::2], "odd": buffer[..., 1::2]}) == []
    assert overlaps({"q": buffer[:, :2], "k": buffer[:, 2:4], "v": buffer[:, 4:]}) == []
    assert overlaps({"a": buffer[:, :, :5].transpose(0, 2), "b": buffer[:, :, 5:]}) == []
    assert overlaps({"wide": buffer[..., 8:].view(torch.int32), "narrow": buffer[..., :8]}) == []
    assert overlaps({"wide": buffer[..., 6:].view(torch.int32), "narrow": buffer[..., :8]}) == [("wide", "narrow")]
    assert overlaps({"expanded": buffer[0, 0].expand(9, 16), "rest": buffer[0, 1:]}) == []


@given(data=st.data())
def test_overlaps_agree_with_sets_of_addresses(data: st.DataObject) -> None:
    buffer = torch.zeros(400)
    sizes, steps = st.integers(1, 4), st.integers(0, 12)
    tensors = {
        name: buffer.as_strided(
            data.draw(st.tuples(sizes, sizes, sizes)),
            data.draw(st.tuples(steps, steps, steps)),
            data.draw(st.integers(0, 40)),
        )
        for name in "ab"
    }
    numbers = torch.arange(400)
    a, b = ({*numbers.as_strided(t.shape, t.stride(), t.storage_offset()).flatten().tolist()} for t in tensors.values())
    assert overlaps(tensors) == ([("a", "b")] if a & b else [])


@given(data=st.data())
def test_elements_that_share_memory_agree_with_sets_of_addresses(data: st.DataObject) -> None:
    sizes, steps = st.integers(0, 4), st.integers(0, 12)
    shape, strides = data.draw(st.tuples(sizes, sizes, sizes)), data.draw(st.tuples(steps, steps, steps))
    numbers = torch.arange(400).as_strided(shape, strides)
    assert is_folded(numbers) == (len({*numbers.flatten().tolist()}) < numbers.numel())


def strided(shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> Tensor:
    return BUFFER.as_strided(shape, strides, offset)


BUFFER = torch.zeros(400, dtype=torch.int16)
BEGIN = BUFFER.data_ptr()


@pytest.mark.parametrize(
    ("tensor", "begin", "end", "run", "steps"),
    [
        (strided((5,), (1,)), 0, 10, 10, ()),
        (strided((5,), (1,), 3), 6, 16, 10, ()),
        (strided((2, 5), (5, 1)), 0, 20, 20, ()),
        (strided((2, 5), (7, 1)), 0, 24, 10, ((14, 2),)),
        (strided((5, 2), (1, 7)), 0, 24, 10, ((14, 2),)),
        (strided((3, 2, 2), (20, 4, 1)), 0, 92, 4, ((8, 2), (40, 3))),
        (strided((3,), (2,)), 0, 10, 2, ((4, 3),)),
        (strided((9, 3), (0, 1)), 0, 6, 6, ()),
        (strided((1, 3), (9, 1)), 0, 6, 6, ()),
        (strided((), ()), 0, 2, 2, ()),
        (strided((2, 2), (1, 1)), 0, 6, 4, ((2, 2),)),
    ],
)
def test_the_addresses_of_a_tensor(
    tensor: Tensor, begin: int, end: int, run: int, steps: tuple[tuple[int, int], ...]
) -> None:
    span = module._span(tensor)
    assert span is not None
    assert (span.begin - BEGIN, span.end - BEGIN, span.run, span.steps) == (begin, end, run, steps)
    assert span.device == tensor.device


def test_what_has_no_memory_shares_none() -> None:
    assert module._span(BUFFER[:0]) is None and module._span(torch.empty(3, device="meta")) is None
    assert overlaps({"a": torch.empty(3, device="meta"), "b": torch.empty(3, device="meta")}) == []
    assert not is_folded(torch.empty(3, device="meta").expand(4, 3))


@pytest.mark.parametrize(
    ("begin", "run", "steps", "disjoint"),
    [
        (4, 4, ((8, 3),), True),
        (8, 4, ((8, 3),), False),
        (3, 4, ((8, 3),), False),
        (5, 4, ((8, 3),), False),
        (4, 5, ((8, 3),), False),
        (4, 3, ((8, 3),), True),
        (12, 4, ((8, 3),), True),
        (4, 4, ((12, 2),), False),  # of a period of 4
        (4, 4, (), True),
        (0, 4, (), False),
    ],
)
def test_runs_that_fall_on_other_addresses_of_a_period(
    begin: int, run: int, steps: tuple[tuple[int, int], ...], disjoint: bool
) -> None:
    cpu = torch.device("cpu")
    a, b = module._Span(cpu, 100, 120, 4, ((8, 3),)), module._Span(cpu, 100 + begin, 160, run, steps)
    assert module._disjoint_residues(a, b) is disjoint


@pytest.mark.parametrize(("begin", "shared"), [(8, False), (7, True), (-6, True), (-7, False), (0, True)])
def test_runs_without_gaps_share_what_both_span(begin: int, shared: bool) -> None:
    cpu = torch.device("cpu")
    a, b = module._Span(cpu, 100, 108, 8, ()), module._Span(cpu, 100 + begin, 107 + begin, 7, ())
    assert module._share(a, b) is shared and module._share(b, a) is shared
    other = module._Span(torch.device("cuda", 0), 100, 108, 8, ())
    assert not module._share(a, other)


def test_over_too_many_addresses_tensors_count_as_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = strided((3, 2), (12, 1)), strided((2, 2), (18, 1), 18)  # 19 times four bytes
    assert overlaps({"a": a, "b": b}) == []
    monkeypatch.setattr(module, "_LARGEST_MAP", 19)
    assert overlaps({"a": a, "b": b}) == []
    monkeypatch.setattr(module, "_LARGEST_MAP", 18)
    assert overlaps({"a": a, "b": b}) == [("a", "b")]


def test_over_too_many_addresses_elements_count_as_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    folded = strided((3, 3), (2, 2))  # 9 elements at 5 of 9 places
    assert is_folded(folded) and not is_folded(strided((3, 2), (2, 3)))
    monkeypatch.setattr(module, "_LARGEST_MAP", 9)
    assert is_folded(folded)
    monkeypatch.setattr(module, "_LARGEST_MAP", 8)
    assert not is_folded(folded)
    assert is_folded(strided((2,), (0,)))
    assert is_folded(strided((9, 2), (0, 1)))  # a stride of 0 needs no map
    assert not is_folded(strided((1,), (0,))) and not is_folded(strided((1, 2), (0, 1)))
