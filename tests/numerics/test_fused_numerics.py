"""The kernels for CUDA give what the definitions give: here by Triton's interpreter, on a GPU compiled."""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lastbit import trust
from lastbit.interpret import install
from lastbit.numerics import dots, fused, parts, primitives, sums
from lastbit.numerics.formats import BF16, E4M3, E5M2, FP16, FP32, FP64, WIDE_FP32, Format
from lastbit.numerics.fused import cuda_sums, elements, equivalence, operation_launch
from lastbit.numerics.fused.operation_launch import layout_of, run

CPU = torch.device("cpu")
Operation = Callable[..., Tensor]


@pytest.fixture(autouse=True, scope="module")
def faithful_interpreter() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        install()


def operations() -> Iterator[tuple[str, Operation, int, int, Format | None]]:
    """Every operation that is one kernel on CUDA: name, definition, operands, numbers, format."""
    for module in (parts, primitives, sums, dots):
        for name, operation in vars(module).items():
            if hasattr(operation, "__wrapped__") and operation.__module__ == module.__name__:
                kinds = [p.annotation for p in inspect.signature(operation).parameters.values()]
                if "Tensor" not in kinds:
                    continue  # of enclosures
                counts = {"hull": (3,), "product_in_any_order": (3, 4)}.get(name, (kinds.count("Tensor"),))
                formats = (FP32, WIDE_FP32)[: 1 + (name == "added")] if "Format" in kinds else (None,)
                formats = (FP32, BF16, FP16, E4M3, E5M2, FP64, WIDE_FP32) if name == "rounded" else formats
                for count, fmt in itertools.product(counts, formats):
                    yield name, operation, count, kinds.count("float"), fmt


OPERATIONS = list(operations())
ELEMENTWISE = [
    o for o in OPERATIONS if o[0] not in {"logistic", "unknown_if", *cuda_sums.OPERATIONS, *equivalence.OF_DOTS}
]
each_operation = pytest.mark.parametrize(
    ("name", "definition", "operands", "numbers", "fmt"),
    OPERATIONS,
    ids=[f"{name}-{count}-{fmt.name.replace(' ', '_') if fmt else ''}" for name, _, count, _, fmt in OPERATIONS],
)


def difference(name: str, definition: Operation, given: list[Tensor], numbers: int, fmt: Format | None) -> str:
    """Of the kernel that serves all operands, and of the one for operands like these."""
    kinds = (False,) if name in cuda_sums.OPERATIONS else (False, True)
    kernels = (equivalence.compared(name, definition, given, numbers, fmt, CPU, large) for large in kinds)
    return next(filter(None, kernels), "")


def test_all_operations_are_found() -> None:
    names = {name for name, *_ in OPERATIONS}
    assert {"added", "hull", "rounded", "multiply_add", "approximate_quotient", "logistic", "facts_of_rows"} <= names
    elementwise = names - cuda_sums.OPERATIONS
    assert names - elementwise == cuda_sums.OPERATIONS
    assert all(hasattr(elements, name) for name in elementwise)


@each_operation
def test_kernels_give_what_the_definitions_give(
    name: str, definition: Operation, operands: int, numbers: int, fmt: Format | None
) -> None:
    """On special and random numbers, for one example of every number of parts, in changing shapes."""
    every = 3 if name in cuda_sums.OPERATIONS else 1
    for example in itertools.islice(equivalence.examples(name, operands), 0, None, every):
        assert not difference(name, definition, example, numbers, fmt)


special = st.sampled_from(sorted(set(equivalence.special_numbers().nan_to_num(1.25).tolist())))
numbers_of_fp32 = st.floats(width=32, allow_nan=True)


@st.composite
def elements_of(draw: st.DrawFn, parts: int) -> list[float]:
    """Draw the parts of one element: ends in order, NaN at both or neither."""
    exact, value, *ends = (draw(special | numbers_of_fp32) for _ in range(4))
    if ends[0] != ends[0] or ends[1] != ends[1]:
        ends = [float("nan")] * 2
    return [exact, value, *sorted(ends)][:parts]


@settings(max_examples=100)
@given(data=st.data(), operation=st.sampled_from(ELEMENTWISE))
def test_kernels_give_what_the_definitions_give_for_any_number(
    data: st.DataObject, operation: tuple[str, Operation, int, int, Format | None]
) -> None:
    name, definition, operands, numbers, fmt = operation
    counts = [data.draw(st.sampled_from((1, 2, 4))) for _ in range(operands)]
    if name in equivalence.FUNCTIONS:
        counts = counts[:1] * operands
    given = [torch.tensor([data.draw(elements_of(count)) for _ in range(3)], dtype=torch.float64).T for count in counts]
    assert not difference(name, definition, given, numbers, fmt)


@each_operation
def test_quick_ways_give_what_the_long_ways_give(
    name: str, definition: Operation, operands: int, numbers: int, fmt: Format | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where everything is finite, what is unknown is not looked for."""
    count = 10 if name == "bounded" else 4
    given = [torch.randn(count, 8, 8, dtype=torch.float64).abs() + 0.1 for _ in range(operands)]
    given = [torch.cat([x[:2], x[2:].sort(0).values]) for x in given]
    if name == "logistic":
        given[2] = given[2][:2]
    arguments = (*given, *(0.25, 0.5, 0.0, 0.0, 8.0)[:numbers], *([] if fmt is None else [fmt]))
    arguments, options = (arguments[:-1], {"fmt": fmt}) if fmt else (arguments, {})
    quick = definition(*arguments, **options)
    for module in (parts, primitives, sums):
        monkeypatch.setattr(module, "all_finite", lambda ends: False)
    assert torch.equal(quick, definition(*arguments, **options))


# Layouts


@pytest.mark.parametrize(
    ("shapes", "flat", "sizes"),
    [
        ([(4, 6, 8)], True, (1, 48)),
        ([(4, 6, 8), (1, 6, 8)], True, (1, 48)),
        ([(4, 6, 8), (1, 8)], False, (6, 8)),
        ([(4, 6, 8), (1, 6, 1)], False, (6, 8)),
        ([(4, 2, 3, 8), (2, 3, 1)], False, (3, 8)),
        ([(4, 2, 3, 8), (1, 1)], True, (1, 48)),
        ([(4, 0, 8), (1, 8)], False, (0, 8)),
        ([(2,)], True, (1, 1)),
    ],
)
def test_dimensions_collapse(shapes: list[tuple[int, ...]], flat: bool, sizes: tuple[int, int]) -> None:
    layout = layout_of(tuple((shape, torch.empty(shape).stride()) for shape in shapes))
    assert layout is not None
    assert layout.shape == torch.broadcast_shapes(*(shape[1:] for shape in shapes))
    assert (layout.flat, layout.arguments[1:3]) == (flat, sizes)


def test_operands_that_no_kernel_takes() -> None:
    """Four dimensions that do not collapse, and more elements than are counted in 32 bits."""
    apart = (4, 3, 5, 7, 9), (4, 3, 1, 7, 1)
    assert layout_of(tuple((shape, torch.empty(shape).stride()) for shape in apart)) is None
    assert layout_of((((1, 1 << 16, 1 << 16), (0, 0, 0)),)) is None
    x, y = (equivalence.operand(*(shape[0], shape[1:]), seed=1) for shape in apart)
    assert run("multiplied", (x, y), (), FP32, large=True) is None


def test_operands_need_not_be_contiguous() -> None:
    x, y = equivalence.operand(4, (6, 10), 1), equivalence.operand(4, (5, 3), 2)
    assert not difference("added", parts.added, [x[:, ::2, 1:6].mT, y], 0, FP32)
    assert not difference("rounded", parts.rounded, [x.mT], 0, BF16)
    assert not difference("facts_of_columns", sums.facts_of_columns, [x[2:].mT], 0, None)


def test_a_result_without_elements() -> None:
    result = run("added", (torch.empty(4, 0, 8).double(), torch.empty(1, 8).double()), (), FP32, large=False)
    assert result is not None
    assert result.shape == (4, 0, 8)


# Trust


@pytest.fixture
def untested(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel tested yet, and tensors of the CPU are for kernels, too."""
    monkeypatch.setattr(trust, "_trusted", {})
    monkeypatch.setattr(fused, "fuses", lambda tensor: True)


@pytest.mark.usefixtures("untested")
def test_a_kernel_that_differs_is_not_used() -> None:
    @fused.one_kernel_on_cuda
    def multiplied(x: Tensor, y: Tensor, fmt: Format) -> Tensor:
        return wrong * parts.multiplied.__wrapped__(x, y, fmt)  # type: ignore[attr-defined]

    wrong = 1 + 2.0**-52
    one = torch.ones(1, 4, dtype=torch.float64)
    with pytest.warns(RuntimeWarning, match=r"multiplied on cpu: on operands .* it gives .* and not "):
        assert torch.equal(multiplied(one, one, FP32), (wrong * one).expand(2, -1))


@pytest.mark.usefixtures("untested")
def test_a_kernel_that_agrees_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    x = equivalence.operand(4, (8,), seed=1)
    expected = parts.negated.__wrapped__(x)  # type: ignore[attr-defined]
    monkeypatch.setattr(equivalence, "difference", lambda *_: "")
    monkeypatch.setattr(operation_launch, "run", lambda *what, large: -run(*what, large=large))
    assert torch.equal(parts.negated(x).nan_to_num(), -expected.nan_to_num())


@pytest.mark.usefixtures("untested")
def test_large_operands_have_kernels_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(fused, "LARGE", 16)
    monkeypatch.setattr(equivalence, "difference", lambda *_: "")
    monkeypatch.setattr(operation_launch, "run", lambda *what, large: asked.append(large) or run(*what, large=large))
    for width in (15, 16):
        parts.negated(equivalence.operand(4, (width,), seed=1))
    assert asked == [False, True]
    assert len(trust._trusted) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@each_operation
def test_compiled_kernels_give_what_the_definitions_give(
    name: str, definition: Operation, operands: int, numbers: int, fmt: Format | None, large: bool
) -> None:
    assert not equivalence.difference(name, definition, operands, numbers, fmt, torch.device("cuda", 0), large)
