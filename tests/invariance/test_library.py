"""Which operation of torch breaks a property."""

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from lastbit.case import parse_case
from lastbit.config import Config
from lastbit.invariance import library
from lastbit.kernel import Kernel
from lastbit.property_result import PropertyOutcome, PropertyResult
from lastbit.verify.check import Subject
from lastbit.verify.project import open_project
from lastbit.verify.property_checks import properties_on, sentence_of

CASE = parse_case("rms_norm x=bf16[9,16] weight=bf16[16] eps=1e-06 seed=1")


def found(function: Callable[..., torch.Tensor]) -> PropertyResult:
    kernel = Kernel("planted", "rms_norm", "fp32_multiply", function, invariant=("padding",))
    subject = Subject(kernel, open_project(Config(folder="")).op("rms_norm"), torch.device("cpu"))
    [one] = properties_on(subject, CASE, ["padding"])
    assert one.outcome is PropertyOutcome.BROKEN and one.fails
    return one


@pytest.fixture
def mm_that_leaks() -> Iterator[None]:
    """Multiply bf16 as torch 2.11 does on a CPU with AMX: the row before the first with a NaN is NaN, too."""

    def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        made = (a.float()[:, :, None] * b.float()[None]).sum(1).to(a.dtype)
        unknown = a.isnan().any(1)
        first = int(unknown.int().argmax())
        if unknown.any() and first:
            made[first - 1] = torch.nan
        return made

    override = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells that its own product is replaced
        override.impl("mm", mm, "CPU")
    yield
    override._destroy()


def by_mm(x, weight, *, eps):
    """RMSNorm whose rows go through a product with the identity."""
    x = torch.mm(x.reshape(-1, x.shape[-1]), torch.eye(x.shape[-1], dtype=x.dtype)).reshape(x.shape).float()
    total = sum((column * column for column in x.unbind(-1)), start=torch.zeros(x.shape[:-1]))
    return (x * torch.rsqrt(total / x.shape[-1] + eps)[..., None] * weight.float()).to(weight.dtype)


def leaks_by_itself(x, weight, *, eps):
    """NaN in the row before one with a NaN, by what the kernel does beside the product."""
    made = by_mm(x, weight, eps=eps)
    made[:-1][made.isnan().any(-1)[1:]] = torch.nan
    return made


def test_a_product_that_spoils_the_row_before_is_named(mm_that_leaks):
    one = found(by_mm)
    assert one.library == (
        "torch.ops.aten.mm breaks it: of the same operands it makes numbers in one call (row 8 of bf16 [9, 16], bf16 "
        "[16, 16]) and NaN in another (row 8 of bf16 [10, 16], bf16 [16, 16]); with the first in both, the property "
        "holds."
    )
    assert sentence_of(one).endswith(f". {one.library}")


def test_an_operation_that_does_not_explain_all_is_not_named(mm_that_leaks):
    assert found(leaks_by_itself).library == ""


def test_no_operation_is_named_for_a_fault_of_the_kernel():
    assert found(leaks_by_itself).library == ""


def test_a_kernel_that_computes_otherwise_while_it_is_watched_is_not_explained(mm_that_leaks):
    def kernel(x, weight, *, eps):
        made = by_mm(x, weight, eps=eps)
        return made if _get_current_dispatch_mode() is None else made.nan_to_num()

    assert found(kernel).library == ""


def test_where_there_is_too_much_to_compare_no_operation_is_named(mm_that_leaks, monkeypatch):
    monkeypatch.setattr(library, "ROWS", 100)
    assert found(by_mm).library == ""


ATEN = torch.ops.aten


@pytest.mark.parametrize(
    ("func", "given", "shapes", "made", "rows"),
    [
        (ATEN.sum.dim_IntList, {"dim": [1]}, {"self 0": (3, 4)}, (3,), ["self 0"]),
        (ATEN.sum.dim_IntList, {"dim": [-1]}, {"self 0": (3, 4)}, (3,), ["self 0"]),
        (ATEN.sum.dim_IntList, {"dim": [0]}, {"self 0": (3, 3)}, (3,), []),
        (ATEN.sum.dim_IntList, {"dim": [-2]}, {"self 0": (3, 3)}, (3,), []),
        (ATEN.sum.dim_IntList, {"dim": [-1, -2]}, {"self 0": (3, 4, 5)}, (3,), ["self 0"]),
        (ATEN.sum.dim_IntList, {"dim": [1, 0]}, {"self 0": (3, 3, 3)}, (3,), []),
        (ATEN.sum.dim_IntList, {"dim": None}, {"self 0": (3, 4)}, (), []),
        (ATEN.sum.dim_IntList, {"dim": []}, {"self 0": (3, 4)}, (), []),
        (ATEN._softmax.default, {"dim": 1, "half_to_float": False}, {"self 0": (3, 4)}, (3, 4), ["self 0"]),
        (ATEN._softmax.default, {"dim": -2, "half_to_float": False}, {"self 0": (3, 4)}, (3, 4), []),
        (ATEN.add.Tensor, {}, {"self 0": (3, 4), "other 0": (3, 4)}, (3, 4), ["self 0", "other 0"]),
        (ATEN.add.Tensor, {}, {"self 0": (3, 4), "other 0": (4,)}, (3, 4), ["self 0"]),
        (ATEN.add.Tensor, {}, {"self 0": (3, 4), "other 0": (1, 4)}, (3, 4), ["self 0"]),
        (ATEN.add.Tensor, {}, {"self 0": (), "other 0": ()}, (), []),
        (ATEN.mm.default, {}, {"self 0": (3, 4), "mat2 0": (4, 3)}, (3, 3), ["self 0"]),
        (ATEN.bmm.default, {}, {"self 0": (3, 4, 5), "mat2 0": (3, 5, 4)}, (3, 4, 4), ["self 0", "mat2 0"]),
        (ATEN.native_layer_norm.default, {"normalized_shape": [4]}, {"input 0": (3, 4)}, (3, 4), ["input 0"]),
        (ATEN.native_layer_norm.default, {"normalized_shape": [3, 4]}, {"input 0": (3, 4)}, (3, 4), []),
        (
            ATEN.native_layer_norm_backward.default,
            {"normalized_shape": [4], "grad_out": None},
            {"grad_out 0": (3, 4), "input 0": (3, 4)},
            (3, 4),
            [],
        ),
        (ATEN.cumsum.default, {"dim": 1}, {"self 0": (3, 4)}, (3, 4), []),
    ],
)
def test_which_rows_decide_a_row(func, given, shapes, made, rows):
    operands = {name: library._Operand(torch.zeros(shape)) for name, shape in shapes.items()}
    assert library._by_row(func, given, operands, torch.zeros(made)) == rows


def test_nothing_decides_without_operands():
    assert library._by_row(ATEN.ones.default, {}, {}, torch.zeros(3)) == []
