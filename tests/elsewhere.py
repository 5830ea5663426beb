"""A tensor that imitates another device, for machines that have none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CPU, OTHER = torch.device("cpu"), torch.device("cuda", 1)


class Elsewhere(Tensor):
    """A tensor that says that it is on another device; operations read its values nevertheless."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return OTHER

    def to(self, *_: Any, **__: Any) -> Tensor:  # type: ignore[override]
        return self.as_subclass(Tensor).clone()
