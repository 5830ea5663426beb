"""What the gated norms of mamba-ssm and flash-linear-attention share: one interface, and lastbit's in front of it.

Both packages have a forward and a backward function over matrices, and an autograd function that reshapes for them. The
reshaping is done here as it is done there: rows are merged, and copied only where their columns are not contiguous. The
statistics are flat, [G · M], with those of group g and row m at g · M + m.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch import Tensor

from lastbit.kernel import UnsupportedCase

FEATURE_BYTES = 65536
CPU_MULTIPROCESSORS = 2


def forward(
    function: Callable[..., tuple[Tensor, Tensor | None, Tensor]],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None,
    *,
    group_size: int | None,
    stages: tuple[str, ...],
    **options: object,
) -> Tensor | dict[str, Tensor]:
    """Return result and stages of `layer_norm_gated`, from a function that gives the output and flat statistics."""
    check_width(x, group_size)
    with launching_on(x.device):
        output, mean, rstd = function(
            x=as_rows(x), weight=weight.contiguous(), bias=None if bias is None else bias.contiguous(),
            z=None if z is None else as_rows(z), group_size=group_size, **options,
        )  # fmt: skip
    saved = {"mean": mean, "rstd": rstd}
    mapping = {name: per_row(saved[name], x) for name in stages if saved[name] is not None}
    return {"output": output.reshape(x.shape), **mapping} if stages else output.reshape(x.shape)


def backward(
    function: Callable[..., tuple[Tensor | None, ...]],
    x: Tensor,
    dy: Tensor,
    weight: Tensor,
    rstd: Tensor,
    mean: Tensor | None,
    bias: Tensor | None,
    z: Tensor | None,
    *,
    recompute_output: bool,
    **options: object,
) -> dict[str, Tensor]:
    """Return results of `layer_norm_gated_backward` from a function that gives (dx, dw, db, dz), maybe the output."""
    group_size = x.shape[-1] // rstd.shape[-1]
    check_width(x, group_size)
    with launching_on(x.device):
        returned = function(
            dy=as_rows(dy), x=as_rows(x), weight=weight.contiguous(), bias=None if bias is None else bias.contiguous(),
            z=None if z is None else as_rows(z), mean=None if mean is None else flat(mean), rstd=flat(rstd),
            eps=0.0,  # an argument that is not used
            group_size=group_size, is_rms_norm=mean is None, recompute_output=recompute_output, **options,
        )  # fmt: skip
    return named(returned, ("dx", "dw", "db", "dz", "output"), x)


def named(returned: tuple[Tensor | None, ...], names: tuple[str, ...], x: Tensor) -> dict[str, Tensor]:
    """Map names to what was returned and is not None; results with a value per element take the shape of x."""
    present = {name: value for name, value in zip(names, returned, strict=False) if value is not None}
    return {name: value if name in ("dw", "db") else value.reshape(x.shape) for name, value in present.items()}


def check_width(x: Tensor, group_size: int | None) -> None:
    """Refuse what both packages refuse: rows of no elements, and groups of more than 64 KiB."""
    width = x.shape[-1] if group_size is None else group_size
    if not width:
        raise UnsupportedCase("rows of no elements; upstream divides by their number")
    if width * x.element_size() > FEATURE_BYTES:
        raise UnsupportedCase(f"groups of {width} elements exceed 64 KiB; upstream raises RuntimeError")


def as_rows(x: Tensor) -> Tensor:
    """View as [M, N] where torch can, with contiguous columns."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def flat(statistic: Tensor) -> Tensor:
    """Flatten [..., G] to [G · M]."""
    return statistic.reshape(-1, statistic.shape[-1]).t().reshape(-1)


def per_row(statistic: Tensor, x: Tensor) -> Tensor:
    """Reshape [G · M] to [..., G], for the leading dimensions of x."""
    rows = x.shape[:-1].numel()
    return statistic.reshape(-1, rows).t().reshape(*x.shape[:-1], -1)


@contextmanager
def launching_on(device: torch.device) -> Iterator[None]:
    """Launch on that device; on the CPU, replace what upstream asks CUDA: the current device, and its properties.

    The number of multiprocessors decides how many partial sums dw and db have. Two leave more than one of them.
    """
    if device.type != "cpu":
        with torch.cuda.device(device):
            yield
        return
    properties = SimpleNamespace(multi_processor_count=CPU_MULTIPROCESSORS)
    fakes: Mapping[str, Callable[..., object]] = {
        "device": lambda _: nullcontext(),
        "get_device_properties": lambda _: properties,
    }
    with patch.multiple(torch.cuda, **fakes):
        yield
