"""Operators of torch that a kernel calls, and those that compute an op as a whole."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from harness.calling.operators import operators_called
from harness.config import Config
from harness.errors import OpError
from harness.ops import op
from harness.verify.project import open_project

X, WEIGHT = torch.ones(2, 8), torch.ones(8)


def written_out(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def test_an_operator_that_is_made_of_others_is_seen_by_its_name() -> None:
    """On a CPU torch takes `rms_norm` apart before a dispatch mode could see it."""
    assert operators_called(lambda: F.rms_norm(X, (8,), WEIGHT)) >= {"aten::rms_norm", "aten::mul"}
    assert operators_called(lambda: torch.layer_norm(X, (8,))) >= {"aten::layer_norm", "aten::native_layer_norm"}


def test_what_is_written_out_is_none_of_it() -> None:
    assert operators_called(lambda: written_out(X)).isdisjoint({"aten::rms_norm", "aten::_fused_rms_norm"})


def test_in_inference_mode_and_with_gradients() -> None:
    with torch.inference_mode():
        assert "aten::rms_norm" in operators_called(lambda: F.rms_norm(X, (8,)))
    x = X.clone().requires_grad_()
    assert "aten::rms_norm" in operators_called(lambda: F.rms_norm(x, (8,)).sum().backward())


def test_compiled_code_hides_nothing() -> None:
    compiled = torch.compile(lambda x: F.rms_norm(x, (8,)), backend="eager")
    assert "torch._dynamo" in sys.modules
    assert "aten::rms_norm" in operators_called(lambda: compiled(X))


def test_what_the_function_raises_is_nobodys() -> None:
    def function() -> None:
        F.rms_norm(X, (8,))
        raise SystemError("no")

    assert "aten::rms_norm" in operators_called(function)


def test_the_operators_that_ops_name_are_in_torch() -> None:
    named = [name for op in open_project(Config(folder="")).ops.values() for name in op.torch_ops]
    assert named and all(torch._C._dispatch_has_kernel(name) for name in named)


def test_operators_are_a_tuple_of_names() -> None:
    with pytest.raises(OpError, match="torch_ops='aten::add' must be a tuple of names"):

        @op(rows=("x",), torch_ops="aten::add")  # type: ignore[arg-type]
        def some_op(x, *, contract, stage): ...
