"""The device plan: what is asked for, what is there, and what launchers leave in the environment."""

from __future__ import annotations

import pytest
import torch

from lastbit.devices import DevicePlan, Machine, indexed, machine, made_current, parse_device, plan_devices
from lastbit.errors import UsageError

BARE = Machine()
ONE = Machine("xpu", 1)
TWO = Machine("cuda", 2)
THREE = Machine("gcu", 3, current=1)


def plan(text: str, here: Machine, **environ: str) -> DevicePlan:
    return plan_devices(text, environ, here)


# What is asked for


@pytest.mark.parametrize(
    ("text", "here", "devices"),
    [
        ("cpu", BARE, ("cpu",)),
        ("cpu:0", TWO, ("cpu",)),
        ("cuda", TWO, ("cuda:0",)),
        ("cuda:1", TWO, ("cuda:1",)),
        ("cuda:0,cuda:1", TWO, ("cuda:0", "cuda:1")),
        ("cuda:1,cpu,cuda:0", TWO, ("cuda:1", "cpu", "cuda:0")),
        ("xpu", ONE, ("xpu:0",)),
        ("gcu", THREE, ("gcu:1",)),
        ("npu:7", Machine("npu", 8), ("npu:7",)),
        ("mps", Machine("mps", 1), ("mps:0",)),
    ],
)
def test_devices_that_are_there(text: str, here: Machine, devices: tuple[str, ...]) -> None:
    assert plan(text, here).devices == devices


@pytest.mark.parametrize(
    ("text", "here", "message"),
    [
        ("cuda", BARE, "device 'cuda' was asked for, but this machine has only cpu"),
        ("cuda", ONE, "device 'cuda' was asked for, but this machine has cpu and xpu:0"),
        ("cuda:2", TWO, "device 'cuda:2' was asked for, but this machine has cpu, cuda:0 and cuda:1"),
        ("cpu,cuda:2", TWO, "device 'cuda:2' was asked for"),
        ("cpu:1", TWO, "device 'cpu:1' was asked for"),
        ("meta", TWO, "device 'meta' was asked for"),
        ("cuad", TWO, "unknown device 'cuad'; this machine has cpu, cuda:0 and cuda:1"),
        ("npu", TWO, "unknown device 'npu'; this machine has"),
        ("cuda:", TWO, "unknown device 'cuda:'"),
        ("cuda:01", TWO, "unknown device 'cuda:01'"),
        ("cuda:-1", TWO, "unknown device 'cuda:-1'"),
        ("cpu,", TWO, "unknown device ''"),
        ("cpu, cuda", TWO, "unknown device ' cuda'"),
        ("auto,cpu", TWO, "--device 'auto,cpu': auto chooses by itself"),
    ],
)
def test_devices_that_are_not(text: str, here: Machine, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan(text, here)
    assert message in str(caught.value)


def test_an_absent_device_says_what_may_hide_it() -> None:
    here = machine({"CUDA_VISIBLE_DEVICES": "", "ZE_AFFINITY_MASK": "0", "PATH": "/bin"})
    assert here.hidden_by == ("CUDA_VISIBLE_DEVICES=", "ZE_AFFINITY_MASK=0")
    with pytest.raises(UsageError, match=r"\(CUDA_VISIBLE_DEVICES= is set, which may hide others\)"):
        plan("hpu", here)


def test_a_device_that_is_named_twice_runs_once() -> None:
    assert plan("cuda,cpu,cuda:0", TWO) == DevicePlan(
        ("cuda:0", "cpu"), ("from --device cuda,cuda:0, the same device, which runs once", "from --device cpu")
    )


@pytest.mark.parametrize(
    ("here", "printed"),
    [
        (BARE, "device cpu: from --device auto: torch finds no accelerator; this machine has only cpu"),
        (ONE, "device xpu:0: from --device auto: the current accelerator"),
        (
            THREE,
            "device gcu:1: from --device auto: the current accelerator; also here, for cases with a tensor "
            "on another device: gcu:2, gcu:0",
        ),
    ],
)
def test_auto_says_what_it_chose_and_why(here: Machine, printed: str) -> None:
    assert str(plan("auto", here)) == printed


def test_the_default_is_what_the_command_line_plans() -> None:
    assert plan("cpu", BARE) == DevicePlan()


def test_types_come_once() -> None:
    assert plan("cuda:1,cpu,cuda:0", TWO).types == ("cuda", "cpu")


# What launchers leave behind


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost"},
        {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        {"RANKS": "3", "WORLD": "8"},
    ],
)
def test_variables_that_agree_are_not_reported(environ: dict[str, str]) -> None:
    assert plan("cuda:0", TWO, **environ).leftovers == ()
    assert plan("cpu", BARE, **environ).leftovers == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WORLD_SIZE", "8"),
        ("WORLD_SIZE", ""),
        ("LOCAL_WORLD_SIZE", "2"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("SLURM_NTASKS", "4"),
        ("RANK", "1"),
        ("SLURM_PROCID", "3"),
        ("LOCAL_RANK", "1"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
        ("MASTER_ADDR", "localhost"),
        ("MASTER_PORT", "29500"),
    ],
)
def test_a_variable_that_contradicts_is_reported_with_its_value_and_the_fix(name: str, value: str) -> None:
    [sentence] = plan("cuda:0", TWO, **{name: value}).leftovers
    assert sentence.startswith(f"{name}={value} ")
    assert sentence.endswith(f"ignores it: unset {name}")
    assert sentence in str(plan("cuda:0", TWO, **{name: value}))


def test_a_local_rank_is_compared_with_the_planned_devices() -> None:
    assert plan("cuda:1", TWO, LOCAL_RANK="1").leftovers == ()
    assert plan("cuda:0,cuda:1", TWO, LOCAL_RANK="1").leftovers == ()
    [sentence] = plan("cuda:1", TWO, LOCAL_RANK="0").leftovers
    assert sentence.startswith("LOCAL_RANK=0 is not on cuda:1; ")
    assert len(plan("cpu", TWO, LOCAL_RANK="1").leftovers) == 1


# Devices with and without an index


def test_a_device_is_named_as_tensors_name_it() -> None:
    assert indexed("cpu") == torch.zeros(1).device
    assert indexed("cpu:0") == torch.zeros(1).device
    assert indexed("meta") == torch.zeros(1, device="meta").device
    assert indexed("xpu:1") == torch.device("xpu", 1)


def test_an_index_that_is_left_out_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    assert indexed("xpu") == torch.device("xpu", 3)
    assert machine({}) == Machine("xpu", 4, 3)
    assert parse_device("xpu") == torch.device("xpu", 3)


def test_peers_begin_with_the_next_device() -> None:
    assert THREE.peers("gcu:1") == ("gcu:2", "gcu:0")
    assert THREE.peers("gcu:2") == ("gcu:0", "gcu:1")
    assert ONE.peers("xpu:0") == ()
    assert TWO.peers("cpu") == ()


def test_the_cpu_needs_not_be_made_current() -> None:
    with made_current("cpu"):
        assert torch.zeros(1).device.type == "cpu"


@pytest.mark.gpu
def test_the_accelerator_of_this_machine() -> None:
    here = machine()
    assert plan_devices("auto").devices == (here.accelerators[here.current],)
    assert torch.zeros(1, device=here.accelerator).device == indexed(here.accelerator)
    for index, device in enumerate(here.accelerators):
        with made_current(device):
            assert torch.accelerator.current_device_index() == index
            assert torch.zeros(1, device=here.accelerator).device == torch.device(device)
    assert torch.accelerator.current_device_index() == here.current
