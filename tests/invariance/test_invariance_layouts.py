"""Planted: kernels whose bits depend on strides, on alignment, or on the memory of their result."""

from lastbit.case import parse_case
from lastbit.errors import UnsupportedCase
from lastbit.kernel import kernel
from lastbit.property_result import PropertyOutcome
from lastbit.verify.check import Subject
from lastbit.verify.property_checks import properties_on
from tests.property_kernels import CPU, PROJECT, ahead, found_in, rms_norm


def by_stride(x, weight, *, eps):
    output = rms_norm(x, weight, eps=eps)
    return output if x.stride(-1) == 1 and x.data_ptr() % 16 == 0 else ahead(output)


def test_layouts_that_change_nothing_hold():
    few, all_of_them = (found_in(rms_norm, "2,3,16", "layout", thorough=thorough) for thorough in (False, True))
    assert few.outcome is all_of_them.outcome is PropertyOutcome.HOLDS and few.pairs < all_of_them.pairs
    assert not few.reason


def test_what_changes_is_named_with_its_tensor():
    found = found_in(by_stride, 12, "layout", thorough=False)
    assert found.where == "changes with the layout: columns_first (x), every_second (x), unaligned (x)"
    assert found.elements == found.numel == 12 * 16


def test_pairs_are_case_lines():
    found = found_in(by_stride, 12, "layout")
    assert found.first == "rms_norm x=fp32[12,16] weight=fp32[16] eps=1e-06 seed=3"
    assert found.second == "rms_norm x=fp32[12,16]@1,12 weight=fp32[16] eps=1e-06 seed=3"
    assert parse_case(found.second)["x"].strides == (1, 12)


def test_the_layout_of_a_case_is_compared_with_contiguous_copies():
    found = found_in(by_stride, 12, "layout", layout="@32,1+17")
    assert found.where.startswith("changes with the layout: the layouts of the case, ")
    assert found.first == "rms_norm x=fp32[12,16] weight=fp32[16] eps=1e-06 seed=3"
    assert found.second == "rms_norm x=fp32[12,16]@32,1+17 weight=fp32[16] eps=1e-06 seed=3"


def test_repeated_elements_are_compared_with_copies_of_them():
    def repeated(x, weight, *, eps):
        output = rms_norm(x, weight, eps=eps)
        return ahead(output) if 0 in x.stride() else output

    found = found_in(repeated, 12, "layout")
    assert found.where == "changes with the layout: expanded (x)"
    assert found.first == "rms_norm x=fp32[12,16]@0,1 weight=fp32[16]@0 eps=1e-06 seed=3"
    assert found.second == "contiguous copies of its tensors"


def test_layouts_that_the_kernel_does_not_take_are_told():
    def contiguous_only(x, weight, *, eps):
        if not x.is_contiguous() or not weight.is_contiguous():
            raise UnsupportedCase("contiguous tensors only")
        return rms_norm(x, weight, eps=eps)

    found = found_in(contiguous_only, 12, "layout", thorough=False)
    assert found.outcome is PropertyOutcome.HOLDS and found.pairs == 1
    assert found.reason == "not tried: x packed_qkv: contiguous tensors only"


def test_what_a_kernel_overwrites_is_not_repeated():
    def overwrites(x, weight, *, eps):
        return x.copy_(rms_norm(x, weight, eps=eps))

    assert found_in(overwrites, 12, "layout", mutates=("x",)).outcome is PropertyOutcome.HOLDS


def test_an_empty_tensor_has_one_layout():
    found = found_in(rms_norm, "0", "layout", width=0)
    assert found.outcome is PropertyOutcome.NOT_APPLICABLE


def in_place(function, invariant=("in place",), **declared):
    kernel("rms_norm", contract="fp32_multiply", invariant=invariant, **declared)(function)
    case = parse_case("rms_norm x=fp32[12,16] weight=fp32[16] eps=1e-06 seed=3")
    [found] = properties_on(Subject(function.lastbit_kernels[-1], PROJECT.op("rms_norm"), CPU), case, ["in place"])
    return found


def test_a_result_over_its_input_is_told_from_one_elsewhere():
    def two_passes(out, x, weight, *, eps):
        out[:, :8] = rms_norm(x, weight, eps=eps)[:, :8]
        out[:, 8:] = rms_norm(x, weight, eps=eps)[:, 8:]

    found = in_place(two_passes, out={"out": "output"})
    assert found.outcome is PropertyOutcome.BROKEN and found.elements > 12 * 7 and not found.legal
    assert found.where == "changes where the result lies in the memory of x"
    assert found.second == "the result output in the memory of x"


def test_one_pass_gives_the_same_over_its_input():
    def one_pass(out, x, weight, *, eps):
        out.copy_(rms_norm(x, weight, eps=eps))

    found = in_place(one_pass, out={"out": "output"})
    assert found.outcome is PropertyOutcome.HOLDS and found.pairs == 1
    found = in_place(one_pass, (), out={"out": "output"})
    assert found.outcome is PropertyOutcome.NOT_APPLICABLE and "says of no input" in found.reason
    assert in_place(one_pass, (), out={"out": "output"}, mutates=("x",)).outcome is PropertyOutcome.HOLDS


def test_a_kernel_without_memory_for_results_has_one_place():
    def returns(x, weight, *, eps):
        return rms_norm(x, weight, eps=eps)

    assert in_place(returns).outcome is PropertyOutcome.NOT_APPLICABLE
