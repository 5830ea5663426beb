"""Kernels that take NaN for a number at a limit, a cap or the largest code fail, whatever else they take.

`fminf` gives the number of two arguments of which one is NaN. Edges are kept from kernels that lack one of their
parameters, so that each signature below needs a case with a NaN and its limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit.cases._edges import edges
from lastbit.config import Config
from lastbit.kernel import Kernel, load_kernels
from lastbit.result import Verdict
from lastbit.verify.check import Subject, verify_case
from lastbit.verify.project import open_project

CPU = torch.device("cpu")
FOLDER = Path(__file__).resolve().parents[2] / "kernels"
RIGHT = {
    kernel.name: kernel
    for file in ("swiglu_torch.py", "attention_torch.py", "cross_entropy_torch.py", "quantize_torch.py")
    for kernel in load_kernels(FOLDER / file)
}
PROJECT = open_project(Config(folder=""))


def numbers(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), inf, x)


@contextmanager
def tanh_of_numbers(swallows: bool) -> Iterator[None]:
    """Let tanh take its argument to be from -9 to 9, beyond which it is 1 in fp32; and NaN for a number if told."""
    right = torch.tanh
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "tanh", lambda x: right((numbers(x) if swallows else x).clamp(-9.1, 9.1)))
        yield


def two(kernel: Kernel, swallows: bool) -> Callable[..., Any]:
    def limited(x: Tensor, up: Tensor, *, swiglu_limit: float) -> Any:
        return kernel.call(x=numbers(x) if swallows else x, up=up, swiglu_limit=swiglu_limit)

    return limited


def halves(kernel: Kernel, swallows: bool) -> Callable[..., Any]:
    def limited(x: Tensor, *, swiglu_limit: float) -> Any:
        return kernel.call(x=numbers(x) if swallows else x, swiglu_limit=swiglu_limit)

    return limited


def capped_scores(kernel: Kernel, swallows: bool) -> Callable[..., Any]:
    def capped(q: Tensor, k: Tensor, v: Tensor, *, scale: float, cap: float) -> Any:
        with tanh_of_numbers(swallows):
            return kernel.call(q=q, k=k, v=v, scale=scale, cap=cap)

    return capped


def capped_logits(kernel: Kernel, swallows: bool) -> Callable[..., Any]:
    def capped(logits: Tensor, labels: Tensor, *, softcap: float) -> Any:
        with tanh_of_numbers(swallows):
            return kernel.call(logits=logits, labels=labels, softcap=softcap)

    return capped


def static(kernel: Kernel, swallows: bool) -> Callable[..., Any]:
    def quantized(x: Tensor, scale: Tensor, *, dtype: str) -> Any:
        return kernel.call(x=numbers(x) if swallows and dtype == "e4m3" else x, scale=scale, dtype=dtype)

    return quantized


def dynamic(kernel: Kernel, swallows: bool) -> Callable[..., Any]:
    def quantized(x: Tensor, *, dtype: str) -> Any:
        found = kernel.call(x=x, dtype=dtype)
        if swallows and dtype == "e4m3":
            values = found["e4m3_codes"].float()
            found["e4m3_codes"] = torch.where(values.isnan(), 448.0, values).to(found["e4m3_codes"].dtype)
        return found

    return quantized


SIGNATURES = {
    two: "eager[swiglu+fp32_silu]",
    halves: "eager[swiglu+fp32_silu]",
    capped_scores: "eager[attention+flash]",
    capped_logits: "eager[cross_entropy]",
    static: "eager[quotient]",
    dynamic: "eager[quotient]",
}


@pytest.mark.parametrize("of", SIGNATURES, ids=lambda of: of.__name__)
def test_nan_for_a_number_at_a_limit_is_seen(of: Callable[..., Any]) -> None:
    right = RIGHT[SIGNATURES[of]]
    for swallows in (False, True):
        kernel = Kernel("mine", right.op, right.contract, of(right, swallows))
        cases = [c for c in edges(right.op, kernel.accepts, small=True) if kernel.requires <= c.names]
        special = [case for case in cases if any("special" in tensor.regime for tensor in case.tensors)]
        subject = Subject(kernel, PROJECT.op(right.op), CPU)
        verdicts = {verify_case(subject, case, repeat=False, settled=None).verdict for case in special}
        assert (Verdict.FAILED in verdicts) == swallows, special
        assert Verdict.ERRORED not in verdicts
