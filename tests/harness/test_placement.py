"""What moves tensors from another device, what finds them in a module, and the cases that have such tensors."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from elsewhere import CPU, Elsewhere
from hypothesis import find, given
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample
from torch import Tensor

from lastbit.case import PEER, Case, Group, parse_case
from lastbit.config import Config
from lastbit.devices import DevicePlan, Machine, machine
from lastbit.errors import UnsupportedCase, UsageError
from lastbit.inputs import build
from lastbit.inputs.of_case import device_of
from lastbit.numerics import Premises
from lastbit.placement import Misplaced, PlacementWarning, check, moved
from lastbit.verify import plan as plans
from lastbit.verify import run_groups
from lastbit.verify.notes import NO_ACCELERATOR
from lastbit.verify.plan import Plan, make_plan
from lastbit.verify.run_groups import displaced_cases

# moved


def as_kernel(x: Tensor, **tensors: Tensor | None) -> dict[str, Tensor | None]:
    return moved(tensors, x.device)


def test_a_tensor_elsewhere_is_copied_after_one_warning() -> None:
    weight, bias = torch.ones(3), torch.ones(3, device="meta")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = as_kernel(torch.ones(1, device="meta"), weight=weight, bias=bias, scale=None)
    assert found["weight"] is not weight
    assert found["weight"].device.type == "meta"  # type: ignore[union-attr]
    assert (found["bias"], found["scale"]) == (bias, None)
    [warning] = caught
    assert issubclass(warning.category, PlacementWarning)
    for word in ("weight", "cpu", "meta", "upstream bug"):
        assert word in str(warning.message)


def test_nothing_happens_where_devices_agree() -> None:
    weight = torch.ones(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert as_kernel(torch.ones(1), weight=weight)["weight"] is weight


def test_a_device_without_index_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    weight = torch.ones(3).as_subclass(Elsewhere)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert moved({"weight": weight}, "cuda")["weight"] is weight


def test_the_warning_points_to_the_caller_of_the_kernel() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        as_kernel(torch.ones(1, device="meta"), weight=torch.ones(3))
    line = test_the_warning_points_to_the_caller_of_the_kernel.__code__.co_firstlineno + 3
    assert (caught[0].filename, caught[0].lineno) == (__file__, line)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_a_copy_has_the_same_bits(dtype: torch.dtype) -> None:
    source = torch.arange(256, dtype=torch.uint8).repeat(8).view(torch.uint8)
    source = source.view(dtype) if dtype is not torch.bool else source % 2 == 0
    with pytest.warns(PlacementWarning):
        copy = moved({"weight": source.as_subclass(Elsewhere)}, CPU)["weight"]
    assert copy is not None
    assert torch.equal(copy.view(torch.uint8), source.view(torch.uint8))


# check


def test_check_names_what_a_module_has_elsewhere() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    assert check(module, "cpu") == ()
    module[0].bias = torch.nn.Parameter(torch.ones(2, device="meta"))
    module[1].register_buffer("running_mean", torch.ones(2, device="meta"))
    found = check(module, "cpu")
    meta = torch.device("meta")
    assert found == (
        Misplaced("0.bias", "parameter", meta, CPU),
        Misplaced("1.running_mean", "buffer", meta, CPU),
    )
    assert str(found[0]) == "parameter 0.bias is on meta, not on cpu"


def test_check_of_another_device() -> None:
    assert len(check(torch.nn.Linear(2, 2), "meta")) == 2


# Cases with tensors elsewhere


def test_a_peer_is_the_next_device() -> None:
    spec = parse_case("op x=fp32[4]~peer")["x"]
    three = Machine("cuda", 3)
    assert device_of(spec, torch.device("cuda", 0), three) == torch.device("cuda", 1)
    assert device_of(spec, torch.device("cuda", 2), three) == torch.device("cuda", 0)
    with pytest.raises(UnsupportedCase, match="x belongs on a peer of xpu:0, but this machine has cpu and xpu:0"):
        device_of(spec, torch.device("xpu", 0), Machine("xpu", 1))


def test_a_tensor_on_a_device_that_is_not_here() -> None:
    spec = parse_case("op x=fp32[4]~cuda:2")["x"]
    assert device_of(spec, CPU, Machine("cuda", 3)) == torch.device("cuda", 2)
    with pytest.raises(UsageError, match="device 'cuda:2' was asked for, but this machine has only cpu"):
        device_of(spec, CPU, Machine())
    with pytest.raises(UsageError, match="device 'hpu:2' was asked for"):
        build(parse_case("op x=fp32[4]~hpu:2"), CPU)
    with pytest.raises(UnsupportedCase, match="peer of cpu"):
        build(parse_case("op x=fp32[4]~peer"), CPU)


def test_a_device_changes_no_value() -> None:
    case = parse_case("op x=fp32[4,8] weight=bf16[8]~cpu:near_one seed=5")
    assert build(case, CPU).fingerprint == build(case.gathered(), CPU).fingerprint


GROUPS = (
    Group("drawn", strategy=st.integers(0, 9).map(lambda n: parse_case(f"op x=fp32[4] w=fp32[4] b=fp32[4] seed={n}"))),
    Group("examples", examples=(parse_case("op x=fp32[2] w=fp32[2]"), parse_case("op x=fp32[3]"))),
    Group("empty"),
)


@given(displaced_cases(GROUPS, "x", ("cpu", PEER)))
def test_placement_cases(case: Case) -> None:
    assert case["x"].device == ""
    assert bool(case.displaced) is (len(case.tensors) > 1)
    assert {case[name].device for name in case.displaced} <= {"cpu", PEER}
    examples = [*GROUPS[1].examples, parse_case(f"op x=fp32[4] w=fp32[4] b=fp32[4] seed={case.seed}")]
    assert case.gathered() in examples


@pytest.mark.parametrize("displaced", [("w",), ("b",), ("w", "b")])
@pytest.mark.parametrize("place", ["cpu", PEER])
def test_every_combination_is_drawn(displaced: tuple[str, ...], place: str) -> None:
    def wanted(case: Case) -> bool:
        return case.displaced == displaced and case[displaced[0]].device == place

    assert wanted(find(displaced_cases(GROUPS, "x", ("cpu", PEER)), wanted))


def test_without_a_peer_none_is_drawn() -> None:
    with pytest.raises(NoSuchExample):
        find(displaced_cases(GROUPS, "x", ("cpu",)), lambda case: any(t.device == PEER for t in case.tensors))


PROJECT = {
    "references/scale.py": """\
from lastbit.ops import op


@op(rows=("x",), rounds={"y": "x"})
def scale(x, weight=None, *, contract, stage):
    stage("y", x if weight is None else x * weight, result=True)
""",
    "cases/scale.py": """\
from lastbit.case import Case, Group, TensorSpec


def groups(accepts, *, small):
    tensors = TensorSpec("x", "fp32", (2 if small else 4096, 8)), TensorSpec("weight", "fp32", (8,))
    yield Group("all", examples=(Case("scale", tuple(t for t in tensors if t.name in accepts)),))
""",
    "kernels/scale.py": """\
from lastbit.kernel import kernel


@kernel("scale")
def one(x):
    return x.clone()


@kernel("scale")
def two(x, weight):
    return x * weight
""",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, source in PROJECT.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(source)
    return tmp_path


def planned(project: Path, device: str, **settings: Any) -> Plan:
    folders = {"folder": "", "projects": (str(project),), "kernel_folders": (str(project / "kernels"),)}
    config = Config(**{**folders, **settings}, device_plan=DevicePlan((device,), ("",)))
    return make_plan(config, device.partition(":")[0])


@pytest.mark.parametrize(("count", "places"), [(1, {"cpu"}), (2, {"cpu", PEER})])
def test_the_plan_adds_placement_cases_on_an_accelerator(
    project: Path, monkeypatch: pytest.MonkeyPatch, count: int, places: set[str]
) -> None:
    monkeypatch.setattr(run_groups, "machine", lambda: Machine("cuda", count))
    monkeypatch.setattr(plans, "load_premises", lambda device: Premises())
    plan = planned(project, "cuda:0")
    assert [item.id for item in plan.items] == [
        "scale-one-cuda:0-all",
        "scale-two-cuda:0-all",
        "scale-two-cuda:0-placement",
    ]
    assert plan.not_run == ()
    strategy = plan.items[-1].group.strategy
    for place in places:
        case = find(strategy, lambda case, place=place: case["weight"].device == place)
        assert case["x"].shape == (2, 8), "small"
    with pytest.raises(NoSuchExample):
        find(strategy, lambda case: case["weight"].device not in places)


def test_the_plan_has_none_on_the_cpu_and_says_so_once(project: Path) -> None:
    plan = planned(project, "cpu")
    assert [item.group.name for item in plan.items] == ["all", "all"]
    [missing] = plan.not_run
    assert missing.what == "cases with a tensor on another device"
    here = torch.accelerator.is_available()
    assert ("no other device" if here else NO_ACCELERATOR) in missing.reason
    assert planned(project, "cpu", kernels=("one",)).not_run == ()


def test_case_lines_are_all_that_runs(project: Path) -> None:
    plan = planned(project, "cpu", lines=("scale x=fp32[2,8] weight=fp32[8]~cpu",))
    assert [item.group.name for item in plan.items] == ["lines", "lines"]
    assert plan.not_run == ()


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["cpu", "peer"])
def test_a_place_changes_no_bit(place: str) -> None:
    case = parse_case(f"op x=fp32[4,8] weight=bf16[8]~{place}:near_one seed=5")
    device = torch.device(machine().accelerator, 0)
    try:
        built = build(case, device)
    except UnsupportedCase as error:
        pytest.skip(str(error))
    assert built.tensors["x"].device == device
    assert built.tensors["weight"].device != device
    assert built.fingerprint == build(case.gathered(), CPU).fingerprint
