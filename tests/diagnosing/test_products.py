"""A product of matrices that torch gets wrong is named where a kernel fails."""

import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from lastbit.case import parse_case
from lastbit.config import Config
from lastbit.diagnosing.diagnoses import wrong_product
from lastbit.diagnosing.explainer import explain_case
from lastbit.kernel import Kernel
from lastbit.verify.check import Subject
from lastbit.verify.project import open_project

CASE = parse_case("rms_norm x=bf16[9,16] weight=bf16[16] eps=1e-06 seed=1")


def by_product(x, weight, *, eps):
    """RMSNorm whose rows go through a product with the identity."""
    x = (x.reshape(-1, x.shape[-1]) @ torch.eye(x.shape[-1], dtype=x.dtype)).reshape(x.shape).float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()).to(weight.dtype)


def doubled(x, weight, *, eps):
    return 2 * by_product(x, weight, eps=eps)


def subject_of(function) -> Subject:
    kernel = Kernel("planted", "rms_norm", "fp32_multiply", function)
    return Subject(kernel, open_project(Config(folder="")).op("rms_norm"), torch.device("cpu"))


@pytest.fixture
def mm_with_a_wrong_row() -> Iterator[None]:
    """Spoil row 7 of a bf16 product, as torch 2.11 makes that before a row of NaN on a CPU with AMX."""

    def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(a.dtype, torch.float32)
        made = (a.to(wide)[:, :, None] * b.to(wide)[None]).sum(1).to(a.dtype)
        if a.dtype is torch.bfloat16:
            made[7:8] = torch.nan
        return made

    override = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells that its own product is replaced
        override.impl("mm", mm, "CPU")
    yield
    override._destroy()


def test_a_product_with_a_wrong_row_is_named(mm_with_a_wrong_row):
    found = explain_case(subject_of(by_product), CASE)
    assert found.diagnoses[0].startswith(
        "torch.ops.aten.mm gives nan at [7, 0] of the product of bf16 [9, 16] and bf16 [16, 16], where a sum in fp32 "
    )
    assert found.diagnoses[0].endswith("in any order: that is torch, not the kernel.")


def test_a_fault_of_the_kernel_names_no_product():
    found = explain_case(subject_of(doubled), CASE)
    assert found.worst is not None and not any("torch.ops" in said for said in found.diagnoses)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scale", [1.0, 1e-18, 1e18, 1e38])
def test_products_of_torch_are_not_named(dtype, scale):
    """Of random, tiny, huge and infinite terms, as matrices and as stacks of them, whatever computes them.

    No row of bf16 is NaN: torch 2.11 makes other rows NaN as well then, on a CPU with AMX, and is named for that.
    """

    def products(x, weight, *, eps):
        for rows, terms, columns in ((1, 300, 1), (17, 48, 8), (33, 257, 65)):
            a, b = (torch.randn(2, *shape) for shape in ((rows, terms), (columns, terms)))
            if dtype is not torch.bfloat16:
                a[:, rows // 2] = torch.nan
            a, b = (scale * a).to(dtype), b.to(dtype).mT
            _, _, _ = a @ b, a[0] @ b[0], F.linear(a, b[0].mT.contiguous())
        return x

    torch.manual_seed(0)
    assert wrong_product(subject_of(products), CASE) == ""
