"""Where the rows of strided tensors lie: merging, copying, alignment."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

import torch
from torch import Tensor

from lastbit.siblings import siblings
from tests.rms_norm_contract import BF16, FOLDER, LAYOUTS, needs_device, strided

pytestmark = needs_device

with siblings(FOLDER):
    described = importlib.import_module("described").described


def row_layout_module() -> Any:
    spec = importlib.util.spec_from_file_location("row_layout_under_test", FOLDER / "row_layout.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    with siblings(FOLDER):
        spec.loader.exec_module(module)
    return module


def layout_of(module: Any, *tensors: Tensor) -> Any:
    return module.layout_of([described(t) for t in tensors], dims=3)


def test_strided_rows_are_not_copied():
    module = row_layout_module()
    for layout in ("packed heads", "transposed heads", "three outer dims", "expanded", "one column"):
        x = strided(*LAYOUTS[layout], BF16)
        found = layout_of(module, x, x.contiguous())
        assert not found.copied
        assert found.rows == x.shape[:-1].numel()


def test_a_layout_that_does_not_fit_is_copied():
    module = row_layout_module()
    for layout in ("four outer dims", "last dim strided"):
        x = strided(*LAYOUTS[layout], BF16)
        found = layout_of(module, x)
        assert found.copied
        assert found.sizes == (1, 1, found.rows)


def test_dims_are_merged_only_where_every_tensor_allows():
    merged = row_layout_module().merged_dims
    assert merged((2, 3, 4), (120, 40, 10)) == [(24, 10)]
    assert merged((2, 1, 4), (40, 7, 10)) == [(8, 10)]
    assert merged((2, 3), (0, 0)) == [(6, 0)]
    assert merged((2, 3), (30, 10), (10, 20)) == [(2, 30, 10), (3, 10, 20)]
    assert merged((1, 1), (5, 6)) == []
    assert merged((0, 3), (30, 10)) == [(0, 10)]


def test_vectors_only_where_every_row_starts_on_16_bytes():
    module = row_layout_module()

    def allowed(*tensors: Tensor) -> bool:
        given = [described(t) for t in tensors]
        return module.whole_vectors(tensors[0].shape[-1], given, layout_of(module, *tensors))

    assert allowed(torch.empty(4, 64, dtype=BF16))
    assert not allowed(torch.empty(4, 72, dtype=BF16))
    assert not allowed(torch.empty(4, 68, dtype=BF16)[:, :64])
    assert allowed(torch.empty(4, 68)[:, :64])
    assert not allowed(torch.empty(4 * 64 + 1, dtype=BF16)[1:].view(4, 64))
    shifted, turned = torch.empty(4 * 64 + 1, dtype=BF16)[1:].view(4, 64), torch.empty(64, 4, dtype=BF16).t()
    assert layout_of(module, shifted, turned).copied
    assert not allowed(shifted, turned)  # a contiguous tensor is its own contiguous copy
