"""Canaries around inputs and allocations, unwritten elements, shared memory."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lastbit.case import parse_case
from lastbit.dtypes import DTYPES
from lastbit.errors import UsageError
from lastbit.inputs import (
    Inputs,
    Poison,
    build,
    differences,
    guarded_allocations,
    poison,
    unwritten,
    written,
)
from lastbit.inputs.bits import bits_of, numbers
from lastbit.inputs.guards import MANTISSA_BITS, canary, extent, guard, integer_of, separates, word_of
from lastbit.result import Finding

EVERY_DTYPE = sorted(DTYPES)


def inputs_of(*tensors: str) -> Inputs:
    return build(parse_case(f"op {' '.join(tensors)} seed=1"), "cpu")


def near(tensor: Tensor, offset: int, count: int = 1) -> Tensor:
    """Return the `count` elements of the tensor's storage from `offset` elements after its first one."""
    return tensor.as_strided((count,), (1,), tensor.storage_offset() + offset)


def overwrite(tensor: Tensor) -> None:
    """Flip the lowest bit of every element."""
    bits_of(tensor).bitwise_xor_(1)


# Inputs


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
@pytest.mark.parametrize(
    ("offset", "count", "kind", "sentence"),
    [
        (-3, 3, "wrote_outside", "wrote 3 elements before the start of x (first at element -3 counted from its start)"),
        (
            -1000,
            1,
            "wrote_outside",
            "wrote 1 element before the start of x (first at element -1000 counted from its start)",
        ),
        (28, 2, "wrote_outside", "wrote 2 elements past the end of x (first at element 28 counted from its start)"),
        (2000, 1, "wrote_outside", "wrote 1 element past the end of x (first at element 2000 counted from its start)"),
        (9, 1, "wrote_outside", "wrote 1 element between the rows of x (first after x[0, 7])"),
        (18, 2, "wrote_outside", "wrote 2 elements between the rows of x (first after x[1, 7])"),
        (11, 3, "mutated_input", "changed 3 elements of the input x (first x[1, 1])"),
    ],
)
def test_input_violation(dtype: str, offset: int, count: int, kind: str, sentence: str) -> None:
    inputs = inputs_of(f"x={dtype}[3,8]@10,1", "y=fp32[4]")
    assert inputs.violations() == []
    overwrite(near(inputs.hand_out()["x"], offset, count))
    assert inputs.violations() == [Finding(kind, "x", sentence)]
    inputs.restore()
    assert inputs.violations() == []


@given(
    dims=st.permutations([0, 1, 2]),
    shape=st.tuples(*[st.integers(1, 5)] * 3),
    padding=st.integers(0, 3),
    data=st.data(),
)
def test_index_of_a_changed_element(dims: list[int], shape: tuple[int, ...], padding: int, data: st.DataObject) -> None:
    """Whatever the order and padding of the strides, the reported index is that of the element."""
    strides, step = [0, 0, 0], 1
    for dim in dims:
        strides[dim] = step
        step = step * shape[dim] + padding
    text = f"x=fp32[{','.join(map(str, shape))}]@{','.join(map(str, strides))}"
    index = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    inputs = inputs_of(text)
    inputs.hand_out()["x"][index] = 100.0
    [violation] = inputs.violations()
    assert violation.sentence == f"changed 1 element of the input x (first x{list(index)})"


def test_expected_inputs_may_change_inside_only() -> None:
    inputs = inputs_of("x=bf16[3,8]@10,1", "residual=bf16[3,8]")
    inputs.hand_out()["x"].zero_()
    assert inputs.violations(expect=("x",)) == []
    assert [v.kind for v in inputs.violations()] == ["mutated_input"]
    near(inputs.hand_out()["x"], 8).zero_()
    near(inputs.hand_out()["x"], 28).zero_()
    said = [v.sentence for v in inputs.violations(expect={"x": torch.zeros(1)})]
    assert ["between the rows" in said[0], "past the end" in said[1]] == [True, True] and len(said) == 2
    with pytest.raises(UsageError, match="unknown input 'y'"):
        inputs.violations(expect=("y",))


def test_mutation_that_keeps_the_value_but_not_the_bits() -> None:
    inputs = inputs_of("x=fp32[4]:zeros")
    inputs.hand_out()["x"].neg_()
    [violation] = inputs.violations()
    assert violation.sentence == "changed 4 elements of the input x (first x[0])"


@pytest.mark.parametrize("changed", [False, True])
def test_a_device_is_waited_for_once(changed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many tensors there are, as long as nothing was changed; then, only for those that were."""
    waits = []
    monkeypatch.setattr(written, "numbers", lambda flags: waits.append(len(flags)) or numbers(flags))
    looked_at = []
    look = written.AllocationCheck.violations
    monkeypatch.setattr(
        written.AllocationCheck, "violations", lambda check: looked_at.append(check.guards[0].name) or look(check)
    )
    inputs = build(parse_case("op a=fp32[4,8] b=bf16[4,8]@16,1 c=int8[3] seed=0"), "cpu")
    if changed:
        inputs.hand_out()["b"][1, 2] = 99
    violations = inputs.violations(["c"])
    assert [violation.stage for violation in violations] == looked_at == ["b"] * changed
    assert waits == [4]


def test_sentences() -> None:
    inputs = inputs_of("x=bf16[3,8]@10,1")
    overwrite(near(inputs.hand_out()["x"], -1, 30))
    assert [v.sentence for v in inputs.violations()] == [
        "wrote 1 element before the start of x (first at element -1 counted from its start)",
        "wrote 4 elements between the rows of x (first after x[0, 7])",
        "changed 24 elements of the input x (first x[0, 0])",
        "wrote 1 element past the end of x (first at element 28 counted from its start)",
    ]


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16", "fp16", "e4m3", "e5m2"])
def test_reading_outside_gives_nan(dtype: str) -> None:
    x = inputs_of(f"x={dtype}[3,8]@10,1").hand_out()["x"]
    for offset in (-1, 8, 28):
        assert near(x, offset).to(torch.float32).isnan().all()


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp64", "fp16"])
def test_writing_an_ordinary_nan_is_noticed(dtype: str) -> None:
    inputs = inputs_of(f"x={dtype}[8]", f"y={dtype}[8]")
    for tensor in inputs.hand_out().values():
        near(tensor, 8).fill_(math.nan)
    assert [v.stage for v in inputs.violations()] == ["x", "y"]


def test_copying_what_lies_beyond_one_input_beyond_another_is_noticed() -> None:
    inputs = inputs_of("x=bf16[8]", "y=bf16[8]")
    x, y = inputs.hand_out().values()
    bits_of(near(y, 8, 4)).copy_(bits_of(near(x, 8, 4)))
    [violation] = inputs.violations()
    assert violation.sentence.startswith("wrote 4 elements past the end of y")


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
def test_an_element_that_equals_the_canary(dtype: str) -> None:
    """Elements are compared with what they were, so that one with the canary's bits is like any other."""
    inputs = inputs_of(f"x={dtype}[8]")
    x = inputs.hand_out()["x"]
    bits_of(x)[3] = bits_of(near(x, 8))[0]
    [violation] = inputs.violations()
    assert violation.sentence == "changed 1 element of the input x (first x[3])"


def test_guarded_inputs_are_no_views() -> None:
    x = inputs_of("x=fp32[3,8]@10,1").hand_out()["x"]
    assert x._base is None
    x.requires_grad_()
    (x * 2).sum().backward()
    assert x.grad is not None


# Allocations

ALLOCATE: dict[str, Callable[[Tensor], Tensor]] = {
    "empty": lambda x: torch.empty(x.shape, dtype=x.dtype),
    "empty_of_sizes": lambda x: torch.empty(*x.shape, dtype=x.dtype, device=x.device),
    "empty_like": lambda x: torch.empty_like(x),
    "empty_strided": lambda x: torch.empty_strided((3, 8), (10, 1), dtype=x.dtype),
    "FloatTensor": lambda x: torch.FloatTensor(*x.shape),
    "new_empty": lambda x: x.new_empty(x.shape),
    "new_empty_strided": lambda x: x.new_empty_strided((3, 8), (1, 3)),
}


def poison_mask(tensor: Tensor, poison: int) -> Tensor:
    """Return the elements that hold the bits that a first allocation gets with this poison."""
    return Poison(own=poison).masks(tensor)[0]


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
@pytest.mark.parametrize("poison", [0, 1])
@pytest.mark.parametrize("how", ALLOCATE)
def test_allocation_is_what_torch_returns_but_poisoned(how: str, poison: int, dtype: str) -> None:
    x = torch.zeros(3, 8, dtype=DTYPES[dtype])
    expected = ALLOCATE[how](x)
    with guarded_allocations(poison) as allocations:
        actual = ALLOCATE[how](x)
    assert len(allocations) == 1
    assert (actual.shape, actual.stride(), actual.dtype) == (expected.shape, expected.stride(), expected.dtype)
    assert type(actual) is Tensor
    assert actual._base is None
    assert actual.data_ptr() % 256 == 0
    assert poison_mask(actual, poison).all()
    assert not poison_mask(actual, 1 - poison).any()
    bits_of(actual).zero_()
    assert allocations.violations() == []


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
@pytest.mark.parametrize(
    ("offset", "place"),
    [
        (-1, "before the start of {} (first at element -1 counted from its start)"),
        (-100, "before the start of {} (first at element -100 counted from its start)"),
        (28, "past the end of {} (first at element 28 counted from its start)"),
        (99, "past the end of {} (first at element 99 counted from its start)"),
        (8, "between the rows of {0} (first after {0}[0, 7])"),
    ],
)
def test_write_outside_an_allocation(dtype: str, offset: int, place: str) -> None:
    with guarded_allocations(0) as allocations:
        torch.empty(3, dtype=torch.float32)
        out = torch.empty_strided((3, 8), (10, 1), dtype=DTYPES[dtype])
    overwrite(near(out, offset))
    [violation] = allocations.violations()
    assert violation.stage.startswith("allocation 1 (")
    assert violation.sentence == f"wrote 1 element {place.format(violation.stage)}"
    assert [v.stage for v in allocations.violations({"y": out.flatten()[:0], "output": out})] == ["output"]


def test_originals_return() -> None:
    before = torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided
    own = "new_empty" in vars(Tensor)
    with pytest.raises(ZeroDivisionError), guarded_allocations(0):
        assert torch.empty is not before[0]
        raise ZeroDivisionError
    after = torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided
    assert before == after
    assert ("new_empty" in vars(Tensor)) is own


def test_arguments_are_honoured() -> None:
    image = torch.zeros(2, 3, 4, 5)
    with guarded_allocations(1) as allocations:
        last = torch.empty(2, 3, 4, 5, memory_format=torch.channels_last)
        like = torch.empty_like(image, memory_format=torch.channels_last, dtype=torch.int8)
        grad = torch.empty(3, requires_grad=True)
        size = torch.empty(size=(2, 2))
        with torch.device("meta"):
            nowhere = torch.empty(3)
        parameter = torch.empty_like(torch.nn.Parameter(torch.zeros(3)))
        kept = torch.empty_like(image.transpose(0, 1))
    assert len(allocations) == 6
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert like.is_contiguous(memory_format=torch.channels_last)
    assert grad.requires_grad
    assert grad.is_leaf
    assert size.shape == (2, 2)
    assert nowhere.device.type == "meta"
    assert not parameter.requires_grad
    assert kept.stride() == torch.empty_like(image.transpose(0, 1)).stride()


def test_unusual_calls_pass_and_are_listed() -> None:
    class Sub(Tensor):
        pass

    target = torch.zeros(3)
    with guarded_allocations(0) as allocations:
        assert torch.empty(3, out=target) is target
        assert type(torch.empty_like(torch.zeros(3).as_subclass(Sub))) is Sub
        assert torch.empty(2, 2, layout=torch.sparse_coo).is_sparse
        assert torch.empty(2, dtype=torch.complex128).shape == (2,)
        assert torch.empty(0).numel() == 0
    assert len(allocations) == 0
    assert allocations.unguarded == [
        "empty was not guarded: it was given out=",
        "empty_like was not guarded: its argument is a Sub",
        "empty was not guarded: it returns a Tensor of layout torch.sparse_coo",
        "empty was not guarded: it returns torch.complex128",
    ]


def test_errors_of_torch_are_those_of_torch() -> None:
    with guarded_allocations(0), pytest.raises(RuntimeError, match="negative"):
        torch.empty(-1)


def test_other_devices_are_left_alone() -> None:
    with guarded_allocations(0, device="cuda:0") as allocations:
        torch.empty(3)
    assert len(allocations) == 0


def test_guards_can_be_nested() -> None:
    with guarded_allocations(0) as outer:
        with guarded_allocations(1) as inner:
            assert poison_mask(torch.empty(3), 1).all()
        assert poison_mask(torch.empty(3), 0).all()
    assert (len(outer), len(inner)) == (1, 1)


def test_there_are_two_poisons() -> None:
    with pytest.raises(UsageError, match="poison=2 must be 0 or 1"), guarded_allocations(2):
        pass


def test_compiled_functions_stay_compiled() -> None:
    """A graph of torch.compile must be neither broken by the guards nor silently run without compilation."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    def double(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        out.copy_(x * 2)
        return out

    compiled = torch.compile(double, backend=backend, fullgraph=True)
    with guarded_allocations(0):
        assert compiled(torch.ones(3)).tolist() == [2, 2, 2]
    assert len(graphs) == 1
    assert torch.empty_like in {node.target for node in graphs[0].graph.nodes}


# Unwritten elements


def twice(kernel: Callable[[Tensor], object], dtype: torch.dtype) -> Tensor:
    """Return the mask of unwritten elements after two runs of a kernel that fills what it is given."""
    results, held = [], []
    for number in (0, 1):
        with guarded_allocations(number) as allocations:
            out = torch.empty(4, 6, dtype=dtype)
        kernel(out)
        results.append(out)
        held.append(allocations.poison_of(out))
    blank, stale = unwritten(*results, *held)
    assert not stale.any()
    found = differences(*results, *held)
    assert (found.unwritten, found.uninitialised) == (int(blank.sum()), 0)
    return blank


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
@pytest.mark.parametrize("value", [0, 1])
def test_unwritten_elements_are_found(dtype: str, value: int) -> None:
    mask = twice(lambda out: out[:3, :5].copy_(torch.full((3, 5), value)), DTYPES[dtype])
    expected = torch.ones(4, 6, dtype=torch.bool)
    expected[:3, :5] = False
    assert torch.equal(mask, expected)


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
@pytest.mark.parametrize("poison", [0, 1])
def test_writing_the_poison_itself_counts_as_writing(dtype: str, poison: int) -> None:
    """One run alone is fooled (for bool by every second value), two are not."""
    size = DTYPES[dtype].itemsize
    bits = poison if dtype == "bool" else integer_of(canary(DTYPES[dtype], poison), size)
    written = torch.zeros(4, 6, dtype=DTYPES[dtype])
    bits_of(written).fill_(bits)
    assert poison_mask(written, poison).all()
    assert not twice(lambda out: bits_of(out).fill_(bits), DTYPES[dtype]).any()


def test_poison_mask_of_a_view_and_of_complex() -> None:
    with guarded_allocations(0):
        x = torch.empty(4, 6)
    with guarded_allocations(0):
        z = torch.empty(3, dtype=torch.complex64)
    x[1, 2] = 0
    z[0] = 1
    assert (~poison_mask(x.T, 0)).nonzero().tolist() == [[2, 1]]
    assert poison_mask(z, 0).tolist() == [False, True, True]


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "fp16", "bf16"])
@pytest.mark.parametrize("first", ["result", "scratch"])
def test_elements_that_come_from_unwritten_scratch_were_written(dtype: str, first: str) -> None:
    """Loaded and stored, or added to a number: one element of the result is left out, two are poison of the scratch."""
    results, copies = [], []
    for number in (0, 1):
        with guarded_allocations(number) as allocations:
            names = (first, *({"result", "scratch"} - {first}))
            both = {name: torch.empty(4, dtype=DTYPES[dtype]) for name in names}
        result, scratch = both["result"], both["scratch"]
        result[0], result[1] = 1, scratch[1]
        result[2] = scratch[2] + 1 if dtype != "bf16" else scratch[2]  # torch adds bf16 with one NaN for all
        copy = scratch.clone()
        results.append((result, allocations.poison_of(result)))
        copies.append((copy, allocations.poison_of(copy)))
    (a, b), held = zip(*results, strict=True)
    own, other = unwritten(a, b, *held)
    assert own.tolist() == [False, False, False, True]
    assert other.tolist() == [False, True, True, False]
    found = differences(a, b, *held)
    assert (found.unwritten, found.uninitialised, found.changed) == (1, 2, 3)
    (a, b), held = zip(*copies, strict=True)
    own, other = unwritten(a, b, *held)
    assert (own.any(), other.all()) == (False, True), "its own memory is no guarded allocation"


@pytest.mark.parametrize("dtype", [*(t for t in DTYPES.values() if t is not torch.bool), torch.complex64])
def test_poison_of_two_runs_always_differs(dtype: torch.dtype) -> None:
    """So that a result whose bits are the same in both holds none."""
    even, odd = ({canary(dtype, number) for number in range(start, 64, 2)} for start in (0, 1))
    assert even.isdisjoint(odd)
    assert dtype not in MANTISSA_BITS or len(even) == len(odd) == 32


def test_differences_are_counted_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poison, "_AT_ONCE", 5)
    a = torch.arange(24.0).reshape(2, 3, 4).transpose(0, 2)
    b = a.clone()
    b[3, 1, 0], b[0, 2, 1] = -1.0, -1.0
    assert differences(a, b, Poison(), Poison()).changed == 2
    assert differences(a[0, 0, 0], b[0, 0, 0], Poison(), Poison()).changed == 0
    assert differences(a[:0], b[:0], Poison(), Poison()).changed == 0


def test_what_was_never_written_is_known_of_elements_wider_than_a_byte() -> None:
    with guarded_allocations(0) as allocations:
        wide, narrow = torch.empty(3, dtype=torch.int16), torch.empty(3, dtype=torch.int8)
    assert allocations.blank(wide) == int(wide[0]) % 2**16
    assert allocations.blank(narrow) is None  # its canary may be a value


@pytest.mark.parametrize(
    ("dtype", "codes"),
    [
        (torch.float32, [0x7FC0002B, 0xFFC0002B, 0x7FC00056, 0xFFC00056]),
        (torch.bfloat16, [0x7FC0 + 43, 0xFFC0 + 43, 0x7FC0 + 86 - 63, 0xFFC0 + 86 - 63]),
        (torch.float16, [0x7E00 + 43, 0xFE00 + 43, 0x7E00 + 86, 0xFE00 + 86]),
        (torch.float64, [0x7FF800000000002B, 0xFFF800000000002B, 0x7FF8000000000056, 0xFFF8000000000056]),
        (torch.complex64, [0x7FC0002B7FC0002B, 0xFFC0002BFFC0002B, 0x7FC000567FC00056, 0xFFC00056FFC00056]),
        (torch.float8_e4m3fn, [0x7F, 0xFF, 0x7F, 0xFF]),
        (torch.float8_e5m2, [0x7D, 0xFD, 0x7D, 0xFD]),
        (torch.uint8, [0x5A, 0xA5, 0x5B, 0xA4]),
        (torch.int32, [0x5A5A5A5A, 0xA5A5A5A5, 0x5B5B5B5B, 0xA4A4A4A4]),
    ],
)
def test_the_bits_of_the_first_canaries(dtype: torch.dtype, codes: list[int]) -> None:
    """NaNs of a payload of 43, 86 and so on, of either sign; of integers, bytes that begin as 0x5A and 0xA5."""
    assert [canary(dtype, number) for number in range(4)] == codes
    assert canary(torch.uint8, 32) == codes[0] or dtype is not torch.uint8


def test_words_of_canaries() -> None:
    assert word_of(0x7FC1, 2) == 0x7FC17FC17FC17FC1 and word_of(0xFF, 1) == -1
    assert word_of(0x80000001, 4) == 0x8000000180000001 - 2**64 and word_of(5, 8) == 5
    assert (integer_of(0xFF, 1), integer_of(0xFFFF, 2), integer_of(0x7FFF, 2)) == (255, -1, 32767)
    assert (integer_of(0x80000000, 4), integer_of(2**63, 8)) == (-(2**31), -(2**63))


@pytest.mark.parametrize(
    ("shape", "strides", "end", "separate"),
    [
        ((), (), 1, True), ((0, 4), (4, 1), 0, True), ((3, 4), (4, 1), 12, True), ((3, 4), (3, 1), 10, False),
        ((3, 4), (5, 1), 14, True), ((3, 4), (0, 1), 4, True), ((3, 4), (1, 3), 12, True), ((3, 4), (1, 2), 9, False),
        ((1, 4), (0, 1), 4, True), ((2, 1, 2), (2, 0, 1), 4, True), ((2, 2), (2, 2), 5, False),
        ((2, 3), (1, 1), 4, False), ((2,), (7,), 8, True),
    ],
)  # fmt: skip
def test_what_strides_reach(shape: tuple[int, ...], strides: tuple[int, ...], end: int, separate: bool) -> None:
    assert (extent(shape, strides), separates(shape, strides)) == (end, separate)


@pytest.mark.parametrize(
    ("shape", "dtype", "offset", "margin"),
    [
        ((4,), torch.float32, 0, 64 << 10),
        ((4, 16 << 10), torch.uint8, 3, 64 << 10),
        ((1, 16 << 10), torch.float32, 0, 256 << 10),
        ((1, 1 << 20), torch.float32, 5, 4 << 20),
        ((), torch.float64, 0, 64 << 10),
    ],
)
def test_room_around_a_tensor(shape: tuple[int, ...], dtype: torch.dtype, offset: int, margin: int) -> None:
    """Four rows on either side, from 64 KiB to 4 MiB; the tensor begins `offset` elements after a round address."""
    strides = torch.empty(shape, device="meta").stride()
    made = guard("x", shape, strides=strides, offset=offset, dtype=dtype, device=torch.device("cpu"), number=2)
    size, begin = dtype.itemsize, made.start * dtype.itemsize - offset * dtype.itemsize
    assert made.tensor.data_ptr() % 256 == offset * size % 256 and tuple(made.tensor.shape) == shape
    assert margin <= begin < margin + 256
    after = made.words.numel() * 8 - begin - (offset + extent(shape, strides)) * size
    assert margin <= after < margin + 256 + 8
    assert (made.words == word_of(canary(dtype, 2), size)).all()
    assert not made.tensor._is_view()
