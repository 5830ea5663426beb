"""What a trace says of PyTorch: operations with the kernel's own lines, and what led to an element, through memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lastbit.tracing import Log, Path, follow, traced
from lastbit.tracing.of_torch import addresses_of, array_of


def back(log: Log, tensor: Tensor, number: int) -> Path:
    [(write, _, lanes)] = log.last(addresses_of(tensor)(np.array([number])), log.next())
    assert write.event is not None
    return follow(log, write.event, lanes)


def sources(run: Callable[[Tensor], Tensor], x: Tensor) -> list[list[int]]:
    """For each element of a result, the elements of x that it came from; read by perturbation in the tests below."""
    with traced({"x": x}) as log:
        result = run(x)
    found = []
    for number in range(result.numel()):
        visits = back(log, result, number).visits
        found.append(sorted(visits[0].all.tolist()) if visits[0].event.name == "input x" else [])
    return found


def dependence(run: Callable[[Tensor], Tensor], x: Tensor) -> list[list[int]]:
    """Try which elements of the result are others when an element of x is."""
    plain = run(x.clone()).reshape(-1).double()
    depends: list[list[int]] = [[] for _ in range(plain.numel())]
    for number in range(x.numel()):
        other = x.clone()
        other.reshape(-1)[number] += 0.375
        changed = run(other).reshape(-1).double() != plain
        for i in changed.nonzero()[:, 0].tolist():
            depends[i].append(number)
    return depends


INDEX = torch.tensor([2, 0, 1, 2])
WEIGHT = torch.arange(12.0).reshape(4, 3) / 7 + 0.3


def _put(x: Tensor) -> Tensor:
    y = torch.zeros(5, 4)
    y[INDEX[:3]] = x
    return y


def _in_place(x: Tensor) -> Tensor:
    y = x * 2
    y[:, 1:3].add_(1)
    y.t()[0].copy_(x[:, 3])
    return y


EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "pointwise": lambda x: (x * x + 1).exp(),
    "broadcast": lambda x: x[:, :1] * torch.ones(4),
    "views": lambda x: x.t().reshape(2, 6)[:, 1::2].float() * 2,
    "sum of rows": lambda x: x.sum(-1),
    "sum of columns": lambda x: x.sum(0, keepdim=True),
    "sum of all": lambda x: x.sum(),
    "mean": lambda x: x.double().mean(1),
    "largest": lambda x: x.logsumexp(1),
    "variance": lambda x: torch.var_mean(x, dim=1)[1],
    "softmax": lambda x: torch.softmax(x, -1),
    "matrix": lambda x: x @ WEIGHT,
    "other side": lambda x: torch.ones(2, 3) @ x,
    "batch": lambda x: torch.bmm(x.reshape(3, 2, 2), torch.ones(3, 2, 2)),
    "linear": lambda x: F.linear(x, WEIGHT.t().contiguous(), torch.ones(3)),
    "chosen": lambda x: x[INDEX],
    "chosen columns": lambda x: x.index_select(1, INDEX),
    "gathered": lambda x: x.gather(1, INDEX[None, :3].expand(3, 3)),
    "joined": lambda x: torch.cat([x[:, 2:], x[:, :2] * 3], dim=1),
    "stacked": lambda x: torch.stack([x[0], x[2]]),
    "padded": lambda x: F.pad(x, (1, 2)),
    "rolled": lambda x: x.roll(1, 0).flip(1),
    "embedding": lambda x: F.embedding(INDEX, x),
    "lower triangle": lambda x: x.tril(),
    "copied": lambda x: x.t().contiguous().clone(),
    "put": _put,
    "in place": _in_place,
    "cast": lambda x: x.bfloat16().float() * 64,
}


@pytest.mark.parametrize("name", EXACT)
def test_elements_of_operands_are_those_that_matter(name: str) -> None:
    x = torch.linspace(-1.3, 2.1, 12).reshape(3, 4) * 1.7
    assert sources(EXACT[name], x) == dependence(EXACT[name], x)


@pytest.mark.parametrize("name", ["cumsum", "layer norm", "sorted", "normed"])
def test_nothing_that_matters_is_left_out(name: str) -> None:
    run: dict[str, Callable[[Tensor], Tensor]] = {
        "cumsum": lambda x: x.cumsum(1),
        "layer norm": lambda x: F.layer_norm(x, (4,)),
        "sorted": lambda x: x.sort(dim=1).values,
        "normed": lambda x: F.rms_norm(x, (4,)),
    }
    x = torch.linspace(-1.3, 2.1, 12).reshape(3, 4) * 1.7
    for found, needed in zip(sources(run[name], x), dependence(run[name], x), strict=True):
        assert set(needed) <= set(found)
        assert len({number // 4 for number in found}) == 1  # of one row


def test_lines_are_those_of_the_kernel() -> None:
    def helper(x: Tensor) -> Tensor:
        return x.float() * 2

    x = torch.randn(2, 3).bfloat16()
    with traced({"x": x}) as log:
        y = F.relu(helper(x)) + (
            x.sum(-1, keepdim=True)
        )  # fmt: skip
    path = back(log, y, 1)
    assert [v.event.place.text for v in path.visits if v.event.places] == [
        "x.float()",
        "x.float() * 2",
        "F.relu(helper(x))",
        "x.sum(-1, keepdim=True)",
        "F.relu(helper(x)) + ( x.sum(-1, keepdim=True) )",
    ]
    assert [place.function for place in path.visits[1].event.places][:2] == ["helper", log.events[-1].place.function]
    assert path.visits[-1].event.dtype == "fp32"


def test_values_are_those_of_the_time() -> None:
    x = torch.ones(3)
    with traced({"x": x}) as log:
        y = x + 1
        z = y * 5
        y.mul_(7)
    assert back(log, z, 0).visits[-2].event.values.tolist() == [2, 2, 2]
    assert back(log, y, 0).visits[-1].event.values.tolist() == [14, 14, 14]
    assert x.tolist() == [1, 1, 1]


def test_memory_that_nothing_wrote() -> None:
    with traced({}) as log:
        y = torch.empty(4)
        z = y + 1
    path = back(log, z, 2)
    assert path.visits[0].event.name == "aten.empty"
    unseen = torch.ones(3)
    with traced({}) as log:
        z = unseen + 1
    assert back(log, z, 0).unknown == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool])
def test_values_of_all_formats(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, 1.0, 1.5, -2.0]).to(dtype)
    assert array_of(x[::2]).astype(np.float64).tolist() == x[::2].double().tolist()
