"""The planted kernels keep their contract, so that `lastbit verify` passes them, and two calls of each differ."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from harness.case import parse_case
from harness.config import Config
from harness.inputs import build
from harness.kernel import Kernel, load_kernels
from harness.result import Verdict
from harness.verify.check import Subject, verify_case
from harness.verify.project import Project, open_project
from tests.planted_properties import FOLDER, PLANTED, Planted
from tests.rms_norm_contract import INTERPRETED  # installs the bit-faithful interpreter

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the cases are for the interpreter")

Given = dict[str, Tensor]
CPU = torch.device("cpu")


@functools.cache
def project() -> Project:
    return open_project(Config(folder=""))


@functools.cache
def kernels() -> dict[str, Kernel]:
    return {k.name: k for k in load_kernels(FOLDER)}


def test_the_list_is_of_the_folder() -> None:
    listed = {planted.kernel: (planted.file, planted.op) for planted in PLANTED}
    found = {k.name: (k.source.rpartition("/")[2].partition(":")[0], k.op) for k in kernels().values()}
    assert listed == found


@pytest.mark.parametrize("planted", PLANTED, ids=str)
def test_its_contract_allows_it(planted: Planted) -> None:
    subject = Subject(kernels()[planted.kernel], project().op(planted.op), CPU)
    result = verify_case(subject, parse_case(planted.line))
    assert result.verdict is Verdict.PASSED, result.findings or result.reason


def inputs(line: str) -> tuple[Given, dict[str, float]]:
    case = parse_case(line)
    return dict(build(case, CPU).tensors), dict(case.params)


def output(kernel: Kernel, given: Given, params: dict[str, float]) -> Tensor:
    results = kernel.call(**{name: tensor.clone() for name, tensor in given.items()}, **params)
    if not isinstance(results, dict):
        return results
    return torch.cat([t.flatten(1) for t in results.values()], 1) if "saved_gate" in results else results["output"]


def first_rows(given: Given, count: int) -> Given:
    return {name: tensor if name == "weight" else tensor[:count] for name, tensor in given.items()}


def of_rows(count: int) -> Callable[[Kernel, Given, dict[str, float]], tuple[Tensor, Tensor]]:
    """The first rows in a launch of their own, and those of all rows."""

    def both(kernel: Kernel, given: Given, params: dict[str, float]) -> tuple[Tensor, Tensor]:
        return output(kernel, first_rows(given, count), params), output(kernel, given, params)[:count]

    return both


def twice(kernel: Kernel, given: Given, params: dict[str, float]) -> tuple[Tensor, Tensor]:
    return output(kernel, given, params), output(kernel, given, params)


def at_offsets(first: int, second: int) -> Callable[[Kernel, Given, dict[str, float]], tuple[Tensor, Tensor]]:
    """x at two places in memory, in elements behind an address that 1,024 divides."""

    def both(kernel: Kernel, given: Given, params: dict[str, float]) -> tuple[Tensor, Tensor]:
        room = torch.empty(given["x"].numel() + 1024)
        begin = -(room.data_ptr() // 4) % 256
        found = []
        for offset in (first, second):
            x = room[begin + offset :][: given["x"].numel()].view(given["x"].shape)
            x.copy_(given["x"])
            found.append(kernel.call(x=x, weight=given["weight"], **params))
        return found[0], found[1]

    return both


def compiled(kernel: Kernel, given: Given, params: dict[str, float]) -> tuple[Tensor, Tensor]:
    eager = output(kernel, given, params)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        return eager, output(kernel, given, params)


def in_place(kernel: Kernel, given: Given, params: dict[str, float]) -> tuple[Tensor, Tensor]:
    """The function as it was written, which is told where the results go."""
    function = kernel.call.__wrapped__  # type: ignore[attr-defined]
    x, residual = given["x"].clone(), given["residual"].clone()
    function(x, residual, x, residual, given["weight"], **params)
    return output(kernel, given, params), x


def with_zero_adapters(kernel: Kernel, given: Given, params: dict[str, float]) -> tuple[Tensor, Tensor]:
    plain = {name: tensor for name, tensor in given.items() if "lora" not in name}
    zeros = {name: torch.zeros_like(tensor) for name, tensor in given.items() if "lora" in name}
    return output(kernel, plain, params), output(kernel, plain | zeros, params)


def without_later_tokens(kernel: Kernel, given: Given, params: dict[str, float]) -> tuple[Tensor, Tensor]:
    given_first = {name: t[:20] if name in ("x", "expert_ids", "routing_weights") else t for name, t in given.items()}
    return output(kernel, given_first, params), output(kernel, given, params)[:20]


def relabelled(kernel: Kernel, given: Given, params: dict[str, float]) -> tuple[Tensor, Tensor]:
    others = {n: t.roll(1, 0) for n, t in given.items() if n.split("_")[0] in ("gate", "up", "down")}
    experts = len(given["gate_proj"])
    others["expert_ids"] = (given["expert_ids"] + 1) % experts
    return output(kernel, given, params), output(kernel, given | others, params)


def in_another_order(kernel: Kernel, given: Given, params: dict[str, float]) -> tuple[Tensor, Tensor]:
    others = {name: given[name].flip(0) for name in ("x", "expert_ids", "routing_weights")}
    return output(kernel, given, params), output(kernel, given | others, params).flip(0)


BOTH = {
    "block by rows": of_rows(16),
    "split by occupancy": of_rows(12),
    "last tile": of_rows(15),
    "atomics": twice,
    "eps when compiled": compiled,
    "vectors or scalars": at_offsets(0, 1),
    "by address": at_offsets(0, 8),
    "in place": in_place,
    "zero adapter": with_zero_adapters,
    "other tokens": without_later_tokens,
    "relabelling": relabelled,
    "place within an expert": in_another_order,
}


@pytest.mark.parametrize("planted", [p for p in PLANTED if not p.cuda], ids=str)
def test_two_calls_differ(planted: Planted) -> None:
    first, second = BOTH[planted.name](kernels()[planted.kernel], *inputs(planted.line))
    assert first.shape == second.shape
    assert not torch.equal(first, second)


@pytest.mark.parametrize(("name", "both"), [("block by rows", of_rows(17)), ("split by occupancy", of_rows(13))])
def test_behind_the_threshold_they_are_equal(name: str, both: Callable[..., tuple[Tensor, Tensor]]) -> None:
    planted = next(planted for planted in PLANTED if planted.name == name)
    assert torch.equal(*both(kernels()[planted.kernel], *inputs(planted.line)))
