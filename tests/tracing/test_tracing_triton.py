"""What a trace says of interpreted Triton programs: every operation, its values and line, and what led to elements."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import traced_kernels as kernels
import triton
from torch import Tensor

from lastbit.interpret import install
from lastbit.tracing import Event, Log, Path, TraceLimit, follow, traced
from lastbit.tracing.of_torch import addresses_of
from tests.interpret_wild import BLOCK_POINTERS

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="TRITON_INTERPRET=1 was not set")

FIRST = (0, (0, 0, 0))

if triton.knobs.runtime.interpret:
    install()


def back(log: Log, tensor: Tensor, number: int) -> Path:
    """Return what led to an element of a tensor."""
    [(write, _, lanes)] = log.last(addresses_of(tensor)(np.array([number])), log.next())
    assert write.event is not None
    return follow(log, write.event, lanes)


def read_from(path: Path, name: str) -> list[int]:
    """Return the elements of an input that the path begins with."""
    found = [visit.all.tolist() for visit in path.visits if visit.event.name == f"input {name}"]
    return sorted(found[0]) if found else []


def texts(path: Path) -> list[str]:
    return list(dict.fromkeys(visit.event.place.text for visit in path.visits if visit.event.places))


def test_a_norm_from_the_store_to_the_inputs() -> None:
    x, w = torch.randn(3, 5).bfloat16(), torch.randn(5).bfloat16()
    expected = kernels.norm(x, w)
    with traced({"x": x, "w": w}, {(0, (1, 0, 0))}) as log:
        y = kernels.norm(x, w)
    assert torch.equal(y, expected)
    path = back(log, y, 7)
    assert read_from(path, "x") == [5, 6, 7, 8, 9]
    assert read_from(path, "w") == [2]
    assert path.unknown == 0 and not path.untraced
    assert texts(path) == [
        "tl.load(x_ptr + row * n + cols, mask=mask, other=0.0)",
        "tl.load(x_ptr + row * n + cols, mask=mask, other=0.0).to(tl.float32)",
        "x * x",
        "tl.sum(x * x, axis=0)",
        "tl.sum(x * x, axis=0) / n",
        "tl.sum(x * x, axis=0) / n + eps",
        "tl.rsqrt(tl.sum(x * x, axis=0) / n + eps)",
        "tl.load(w_ptr + cols, mask=mask, other=0.0)",
        "tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)",
        "x * rstd",
        "x * rstd * w",
        "(x * rstd * w).to(y_ptr.dtype.element_ty)",
        "tl.store(y_ptr + row * n + cols, (x * rstd * w).to(y_ptr.dtype.element_ty), mask=mask)",
    ]
    stored = path.visits[-1]
    assert stored.event.at(stored.direct).astype(np.float32) == y[1, 2].item()
    assert (stored.event.dtype, stored.event.program) == ("bf16", (0, (1, 0, 0)))
    reduced = next(visit for visit in path.visits if visit.event.name == "reduce")
    assert len(reduced.direct) == 1 and reduced.event.shape == (1,)


def test_of_programs_that_are_not_wanted_only_writes_are_kept() -> None:
    x, w = torch.randn(3, 5), torch.randn(5)
    with traced({"x": x, "w": w}, {(0, (1, 0, 0))}) as log:
        y = kernels.norm(x, w)
    assert {event.program for event in log.events if event.launch} == {(0, (1, 0, 0))}
    [(write, _, _)] = log.last(addresses_of(y)(np.array([0])), log.next())
    assert (write.event, write.program, write.places[0].line) == (None, (0, (0, 0, 0)), 19)
    assert [launch.name for launch in log.launches] == ["norm_kernel"]


def _lanes(x: Tensor, run: Callable[[Tensor, Tensor], object], out: Tensor) -> list[list[int]]:
    """For each element of a result, the elements of the input that it came from."""
    with traced({"x": x}, {FIRST}) as log:
        run(x, out)
    return [read_from(back(log, out, number), "x") for number in range(out.numel())]


def test_what_only_moves_elements() -> None:
    x, gathered = torch.arange(8.0), torch.empty(8)
    y = torch.empty(16)
    lanes = _lanes(x, lambda x, y: kernels.moving_kernel[(1,)](x, y, gathered), y)
    assert [x[lane].item() for [lane] in lanes] == y.tolist()
    assert len({lane for [lane] in lanes}) == 8
    lanes = _lanes(x, lambda x, z: kernels.moving_kernel[(1,)](x, y, z), gathered)
    assert lanes == [[7 - i] for i in range(8)]


def test_a_dot_has_a_row_and_a_column() -> None:
    a, b, c = torch.randn(16, 32), torch.randn(32, 16), torch.empty(16, 16)
    with traced({"a": a, "b": b}, {FIRST}) as log:
        kernels.dot_kernel[(1,)](a, b, c, 16, 32, 16)
    path = back(log, c, 5 * 16 + 3)
    assert read_from(path, "a") == list(range(5 * 32, 6 * 32))
    assert read_from(path, "b") == [k * 16 + 3 for k in range(32)]


def _norm_of(x: Tensor, out: Tensor) -> None:
    kernels.norm_kernel[(1,)](x, torch.ones(8) * 1.3, out, 8, 1e-6, BLOCK=8)


def _dot_of(x: Tensor, out: Tensor) -> None:
    kernels.dot_kernel[(1,)](x, torch.linspace(0.3, 1.1, 8), out, 2, 4, 2)


EVERY_KIND: dict[str, tuple[Callable[[Tensor, Tensor], object], int]] = {
    "norm": (_norm_of, 8),
    "dot": (_dot_of, 4),
    "scan": (lambda x, out: kernels.running_kernel[(1,)](x, out, torch.empty(1, dtype=torch.int32)), 8),
    "choice": (lambda x, out: kernels.choosing_kernel[(1,)](x, out, 6), 8),
    "moves": (lambda x, out: kernels.moving_kernel[(1,)](x, out, torch.empty(8)), 16),
    "loop": (lambda x, out: kernels.looping_kernel[(1,)](x, out, 5), 1),
    "standard library": (lambda x, out: kernels.standard_kernel[(1,)](x, out), 8),
    "functions": (lambda x, out: kernels.lines_kernel[(1,)](x, out, 3), 1),
}


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_elements_of_inputs_are_those_that_matter(kind: str) -> None:
    run, size = EVERY_KIND[kind]
    x, plain, other = torch.linspace(-1.3, 2.2, 8), torch.empty(size), torch.empty(size)
    found = _lanes(x, run, plain)
    needed: list[set[int]] = [set() for _ in range(size)]
    for number in range(8):
        changed = x.clone()
        changed[number] += 0.375
        run(changed, other)
        for i in (other != plain).nonzero()[:, 0].tolist():
            needed[i].add(number)
    if kind in ("norm", "standard library"):  # not every change of an element shows
        assert all(one <= set(other) for one, other in zip(needed, found, strict=True))
    else:
        assert [sorted(one) for one in needed] == found


def test_scans_and_reductions_of_pairs_are_one_operation() -> None:
    x, y, index = torch.tensor([3.0, 1, 4, 1, 5, 9, 2, 6]), torch.empty(8), torch.empty(1, dtype=torch.int32)
    lanes = _lanes(x, lambda x, y: kernels.running_kernel[(1,)](x, y, index), y)
    assert lanes == [list(range(i + 1)) for i in range(8)]
    with traced({"x": x}, {FIRST}) as log:
        kernels.running_kernel[(1,)](x, y, index)
    assert [event.name for event in log.events if event.place.text == "tl.cumsum(x, axis=0)"] == ["associative_scan"]
    path = back(log, index, 0)
    assert read_from(path, "x") == list(range(8))
    assert [v.event.name for v in path.visits if v.event.place.text == "tl.argmax(x, axis=0)"] == ["reduce"]


def test_rounds_of_a_loop_are_occurrences_of_one_expression() -> None:
    x, y = torch.randn(6), torch.empty(1)
    with traced({"x": x}, {FIRST}) as log:
        kernels.looping_kernel[(1,)](x, y, 6)
    path = back(log, y, 0)
    sums = [visit.event for visit in path.visits if visit.event.place.text == "total += tl.load(x_ptr + i)"]
    assert len({event.occurrence for event in sums}) == 6
    assert read_from(path, "x") == list(range(6))


def test_only_what_was_chosen_is_followed() -> None:
    x, y = torch.randn(8), torch.empty(8)
    with traced({"x": x}, {FIRST}) as log:
        kernels.choosing_kernel[(1,)](x, y, 6)
    assert "x + 1.0" not in texts(back(log, y, 1))
    assert "x + 1.0" in texts(back(log, y, 2))
    assert read_from(back(log, y, 5), "x") == [5]
    assert read_from(back(log, y, 6), "x") == []  # masked: 5.0


def test_atomic_additions_of_several_programs() -> None:
    x, total = torch.randn(4), torch.zeros(1)
    every = {(0, (i, 0, 0)) for i in range(4)}
    for wanted, elements in ((every, [0, 1, 2, 3]), ({(0, (3, 0, 0)), (0, (1, 0, 0))}, [1, 3])):
        total.zero_()
        with traced({"x": x, "total": total}, wanted) as log:
            kernels.adding_kernel[(4,)](x, total)
        path = back(log, total, 0)
        assert read_from(path, "x") == elements
        assert read_from(path, "total") == [0]
        assert {write.program for write in path.untraced} == every - wanted
        last = path.visits[-1].event
        assert last.name == "atomic fadd" and last.values.item() == total.item()


def test_memory_that_an_earlier_launch_wrote() -> None:
    x, between, y = torch.randn(4), torch.empty(4), torch.empty(4)
    wanted = {(0, (2, 0, 0)), (1, (2, 0, 0))}
    with traced({"x": x}, wanted) as log:
        kernels.doubling_kernel[(4,)](x, between)
        between += 1.0
        kernels.doubling_kernel[(4,)](between, y)
    path = back(log, y, 2)
    assert read_from(path, "x") == [2]
    names = [visit.event.name for visit in path.visits]
    assert names == ["input x", "load", "fmul", "store", "aten.add_", "load", "fmul", "store"]


@pytest.mark.skipif(not BLOCK_POINTERS, reason="Triton 3.8 removed block pointers")
def test_block_pointers() -> None:
    x, y = torch.randn(4, 8), torch.empty(4, 4)
    with traced({"x": x}, {FIRST}) as log:
        kernels.block_pointer_kernel[(1,)](x, y)
    path = back(log, y, 6)
    assert read_from(path, "x") == [1 * 8 + 4 + 2]
    assert texts(path) == ["tl.load(tl.advance(x, (0, 4)))", "tl.load(tl.advance(x, (0, 4))) * 3.0", texts(path)[-1]]


def test_too_many_values_are_refused_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(3, 500), torch.randn(500)
    monkeypatch.setattr("lastbit.tracing.events.LIMIT", 20_000)
    with pytest.raises(TraceLimit, match="0 MiB are the limit"), traced({"x": x}, {FIRST}) as log:
        kernels.norm(x, w)
    assert len(log.launches) == 1  # the kernel has ended


def test_nothing_is_watched_afterwards() -> None:
    x, w = torch.randn(3, 5), torch.randn(5)
    with traced({"x": x, "w": w}, {FIRST}) as log:
        y = kernels.norm(x, w)
    seen = len(log.events)
    assert torch.equal(kernels.norm(x, w), y)
    assert len(log.events) == seen


# Where it stands


def _events(kernel: object, *args: object) -> list[Event]:
    with traced({}, {FIRST}) as log:
        kernel[(1,)](*args)  # type: ignore[index]
    return [event for event in log.events if event.launch]


def test_expressions_of_every_kind() -> None:
    events = _events(kernels.lines_kernel, torch.ones(1), torch.empty(1), 3)
    by_text = {event.place.text: event for event in events}
    assert "tl.load(x_ptr)" in by_text
    assert "smooth(x) + tl.exp( x, )" in by_text
    several = by_text["smooth(x) + tl.exp( x, )"].place
    assert several.end_line == several.line + 3
    assert "größe - 0.25" in by_text  # columns are characters, not bytes
    assert {"0 < n", "n < 9", "n == 5", "y += 1.0"} <= set(by_text)
    assert not any("__lastbit" in text or "lambda" in text for text in by_text)


def test_functions_show_their_own_lines_and_who_called_them() -> None:
    events = _events(kernels.lines_kernel, torch.ones(1), torch.empty(1), 3)
    halves = [event for event in events if event.place.text == "x / 2.0" and event.name == "fdiv"]
    assert [place.function for place in halves[0].places] == ["half", "smooth", "lines_kernel"]
    assert [event.places[1].text for event in halves] == ["half(x)", "half(x * x)"]
    assert {event.places[2].text for event in halves} == {"smooth(x)"}
    assert len({event.occurrence for event in halves}) == 2


def test_indented_kernels_keep_their_columns() -> None:
    events = _events(kernels.indented(), torch.ones(1), torch.empty(1))
    assert {"tl.load(x_ptr)", "x * x", "tl.store(y_ptr, x * x)"} <= {event.place.text for event in events}
    product = next(event.place for event in events if event.name == "fmul")
    assert (product.column, product.end_column) == (32, 37)
