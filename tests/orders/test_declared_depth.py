"""A kernel whose sum is higher than it declares fails in its first case; no other kernel does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit.case import Group, parse_case
from lastbit.config import Config
from lastbit.kernel import Kernel, UnsupportedCase
from lastbit.orders.of_kernel import too_deep
from lastbit.result import Verdict
from lastbit.verify.check import Subject
from lastbit.verify.item_run import CaseFailed, run_item
from lastbit.verify.plan import Item
from lastbit.verify.project import open_project
from tests.recorded import Recorded

CPU = torch.device("cpu")
RMS_NORM = open_project(Config(folder="")).op("rms_norm")
LINES = tuple(f"rms_norm x=fp32[{rows},8] weight=fp32[8] eps=1e-06 seed=1" for rows in (2, 3))


def normalized(x: Tensor, weight: Tensor, eps: float, total: Tensor) -> Tensor:
    return (x.float() * torch.rsqrt(total / x.shape[-1] + eps)[..., None] * weight.float()).to(x.dtype)


def in_a_row(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Add one term after the other."""
    total = torch.zeros(x.shape[:-1])
    for column in x.float().square().unbind(-1):
        total = total + column
    return normalized(x, weight, eps, total)


def in_doubles(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Lose no square, so that no tree shows."""
    return normalized(x, weight, eps, x.double().square().sum(-1).float())


def for_few(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Raise where more than eight columns come, which the declaration excludes."""
    assert x.shape[-1] <= 8
    return in_a_row(x, weight, eps=eps)


def refusing(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    if len(x) > 100:
        raise UnsupportedCase("too many rows")
    return in_a_row(x, weight, eps=eps)


def kernel(call: Callable[..., Any], depth: Callable[[int], int] | None, **declared: Any) -> Kernel:
    return Kernel("mine", "rms_norm", "fp32_multiply", call, depth=depth, **declared)


def test_a_kernel_that_is_deeper_than_it_declares_fails_in_its_first_case() -> None:
    recorded: Any = Recorded(cases=2)
    item = Item(
        Subject(kernel(in_a_row, lambda terms: 12), RMS_NORM, CPU),
        Group("mine", examples=tuple(map(parse_case, LINES))),
    )
    with pytest.raises(CaseFailed) as failed:
        run_item(item, recorded, too_deep)
    (finding,) = failed.value.result.findings
    assert (finding.kind, failed.value.result.case) == ("depth", LINES[0]), "no smaller case shows it better"
    assert [result.verdict for result in recorded.results] == [Verdict.FAILED, Verdict.PASSED]
    assert "no term passes through more than 12 additions; 47 were found in x² of a row (squares)" in finding.sentence
    assert "lastbit order mine --sum squares --columns 48 --rows 512 --dtype fp32" in finding.sentence


def test_so_many_terms_are_asked_that_too_high_a_tree_fits() -> None:
    """A chain of 48 terms is 47 high, and one of 96 is twice as high and more."""
    assert "47 additions; 95 were found" in too_deep(Subject(kernel(in_a_row, lambda terms: 47), RMS_NORM, CPU))


@pytest.mark.parametrize(
    ("call", "depth", "takes"),
    [
        (in_a_row, lambda terms: terms - 1, {}),
        (in_doubles, lambda terms: 2, {}),
        (for_few, lambda terms: 2, {"x columns": range(1, 9)}),
        (refusing, lambda terms: 2, {}),
        (in_a_row, lambda terms: {8: 7}[terms], {}),
    ],
)
def test_others_are_believed(call: Callable[..., Any], depth: Callable[[int], int], takes: dict[str, Any]) -> None:
    assert too_deep(Subject(kernel(call, depth, takes=takes), RMS_NORM, CPU)) == ""
