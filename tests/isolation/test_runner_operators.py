"""Operators of torch that give other values, and those that compute an op as a whole."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lastbit.config import Config
from lastbit.errors import OpError
from lastbit.isolation.runner import replaced
from lastbit.ops import op
from lastbit.verify.project import open_project

X, WEIGHT = torch.ones(2, 8), torch.ones(8)


def written_out(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def changed(function: Callable[[], Tensor], name: str) -> bool:
    """Return whether a function gives other values while an operator does; it gives its own before and after."""
    before = function()
    with replaced(name, "cpu"):
        meanwhile = function()
    assert torch.equal(function(), before)
    return not torch.equal(meanwhile, before)


def test_an_operator_that_is_made_of_others_gives_other_values() -> None:
    """On a CPU torch takes `rms_norm` apart before a dispatch mode could see it."""
    for name in ("aten::rms_norm", "aten::_fused_rms_norm"):
        assert changed(lambda: F.rms_norm(X, (8,), WEIGHT), name)
        assert changed(lambda: F.rms_norm(0 * X, (8,), WEIGHT), name)
        assert not changed(lambda: written_out(X), name)
    for name in ("aten::layer_norm", "aten::native_layer_norm"):
        assert changed(lambda: torch.layer_norm(X, (8,)), name)
    assert changed(lambda: torch.softmax(X, -1), "aten::softmax.int")


def test_in_inference_mode_with_gradients_and_in_threads() -> None:
    with torch.inference_mode():
        assert changed(lambda: F.rms_norm(X, (8,)), "aten::rms_norm")
    assert changed(lambda: F.rms_norm(X.clone().requires_grad_(), (8,)), "aten::rms_norm")
    with ThreadPoolExecutor(1) as threads:
        assert changed(lambda: threads.submit(F.rms_norm, X, (8,)).result(), "aten::rms_norm")


def test_integers_that_an_operator_gives_stay() -> None:
    y = torch.tensor([[3.0, 9.0, 5.0]])
    with replaced("aten::max.dim", "cpu"):
        values, places = torch.max(y, -1)
    assert (values.tolist(), places.tolist()) == ([1.25 * 9 + 1], [1])


def test_compiled_code_hides_nothing() -> None:
    compiled = torch.compile(lambda x: F.rms_norm(x, (8,)), backend="eager")
    assert "torch._dynamo" in sys.modules
    assert changed(lambda: compiled(X), "aten::rms_norm")


def test_an_operator_that_a_device_does_not_have_is_left_as_it_is() -> None:
    assert not changed(lambda: X + 1, "aten::_scaled_dot_product_cudnn_attention")


def test_the_operators_that_ops_name_are_in_torch() -> None:
    named = [name for op in open_project(Config(folder="")).ops.values() for name in op.torch_ops]
    assert named and all(torch._C._dispatch_has_kernel(name) for name in named)


def test_operators_are_a_tuple_of_names() -> None:
    with pytest.raises(OpError, match="torch_ops='aten::add' must be a tuple of names"):

        @op(rows=("x",), torch_ops="aten::add")  # type: ignore[arg-type]
        def some_op(x, *, contract, stage): ...
