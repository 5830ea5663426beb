"""The devices of a run: what this machine has, what was asked for, and which leftover variables say otherwise.

torch knows one type of accelerator per process: cuda, xpu, npu, mps, gcu and the like are names here, nothing more.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lastbit.errors import UsageError

if TYPE_CHECKING:
    import torch

AUTO = "auto"

_NAME = re.compile(r"(?P<type>[a-z]\w*)(:(?P<index>0|[1-9]\d*))?")
_WITHOUT_INDEX = ("cpu", "meta")
_ALWAYS_HERE = frozenset({"cpu", "cpu:0"})  # torch, which takes a second to import, need not be asked
_HIDES_DEVICES = ("VISIBLE_DEVICES", "AFFINITY_MASK")

# What launchers set: torchrun, Open MPI, PMI and Slurm.
_SIZES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Machine:
    """The devices of this machine, as torch sees them.

    Attributes:
        accelerator: type of the accelerator, empty if there is none.
        count: how many there are.
        current: index of the one that the type alone stands for.
        hidden_by: `VARIABLE=value` of each variable that may hide devices.
    """

    accelerator: str = ""
    count: int = 0
    current: int = 0
    hidden_by: tuple[str, ...] = ()

    @property
    def accelerators(self) -> tuple[str, ...]:
        return tuple(f"{self.accelerator}:{index}" for index in range(self.count))

    def peers(self, device: str) -> tuple[str, ...]:
        """Return the other devices of the same type, the next one first."""
        if device not in self.accelerators:
            return ()
        here = self.accelerators.index(device)
        return self.accelerators[here + 1 :] + self.accelerators[:here]

    def __str__(self) -> str:
        *most, last = "cpu", *self.accelerators
        names = f"{', '.join(most)} and {last}" if most else f"only {last}"
        return names + "".join(f" ({variable} is set, which may hide others)" for variable in self.hidden_by)


def machine(environ: Mapping[str, str] = os.environ) -> Machine:
    """Describe this machine, as torch sees it now."""
    hidden_by = tuple(f"{n}={v}" for n, v in sorted(environ.items()) if n.endswith(_HIDES_DEVICES))
    if not (accelerator := _accelerator()):
        return Machine(hidden_by=hidden_by)
    import torch

    count, current = torch.accelerator.device_count(), torch.accelerator.current_device_index()
    return Machine(accelerator, count, current, hidden_by)


def _accelerator() -> str:
    """Return the type of the accelerator that is here; empty if there is none."""
    import torch

    here: torch.device | None = torch.accelerator.current_accelerator(check_available=True)
    return here.type if here else ""


def indexed(device: torch.device | str) -> torch.device:
    """Name a device as its tensors do: an accelerator with an index (by default the current one), the cpu without."""
    import torch

    device = torch.device(device)
    if device.type in _WITHOUT_INDEX:
        return torch.device(device.type)
    if ":" in str(device):
        return device
    is_here = device.type == _accelerator()
    return torch.device(device.type, torch.accelerator.current_device_index() if is_here else 0)


def made_current(device: torch.device | str) -> AbstractContextManager[None]:
    """Make an accelerator the current one, on which Triton launches, for the duration; nothing for the cpu."""
    import torch

    index = str(indexed(device)).partition(":")[2]
    return torch.accelerator.device_index(int(index)) if index else nullcontext()


def usable_cores() -> int:
    """Return how many cores this process may use: under `taskset`, or in a cpuset, not all that the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on the CPU in one thread: several wait for each other after every operation on few elements."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def parse_device(name: str, here: Machine | None = None) -> torch.device:
    """Return the torch device of that name, with its index: `cuda` is `cuda:0` where 0 is the current one.

    Raises:
        UsageError: there is no such device on this machine; the message says what there is.
    """
    import torch

    return torch.device(_resolved(name, here or machine()))


def _resolved(name: str, here: Machine) -> str:
    match = _NAME.fullmatch(name)
    known = match is not None and match["type"] in ("cpu", here.accelerator)
    if match is not None and not known:  # torch learns plugins' types when they are installed
        import torch

        with suppress(RuntimeError):
            torch.device(match["type"])
            known = True
    if match is None or not known:
        raise UsageError(f"unknown device {name!r}; this machine has {here}")
    index = here.current if match["index"] is None else int(match["index"])
    if match["type"] == "cpu" and not int(match["index"] or 0):
        return "cpu"
    if match["type"] != here.accelerator or index >= here.count:
        raise UsageError(f"device {name!r} was asked for, but this machine has {here}")
    return f"{here.accelerator}:{index}"


@dataclass(frozen=True)
class DevicePlan:
    """The devices that a run uses: what is printed, saved and run on is this one object.

    Attributes:
        devices: torch devices in order, accelerators with their index.
        why: for each device, how it was chosen.
        leftovers: a sentence for each environment variable that says otherwise.
    """

    devices: tuple[str, ...] = ("cpu",)
    why: tuple[str, ...] = ("from --device cpu",)
    leftovers: tuple[str, ...] = ()

    @property
    def types(self) -> tuple[str, ...]:
        """The types of the devices, each once."""
        return tuple(dict.fromkeys(device.partition(":")[0] for device in self.devices))

    def __str__(self) -> str:
        chosen = [
            f"device {device}" if why == f"from --device {device}" else f"device {device}: {why}"
            for device, why in zip(self.devices, self.why, strict=True)
        ]
        return "\n".join([*chosen, *self.leftovers])


def plan_devices(text: str, environ: Mapping[str, str] = os.environ, here: Machine | None = None) -> DevicePlan:
    """Make the plan for `text`: device names joined by commas, or `auto` for the current accelerator, else the cpu.

    A device that is named twice runs once, and the plan says so.

    Raises:
        UsageError: a device is unknown or not there, or `auto` does not stand alone.
    """
    names = text.split(",")
    here = here or (Machine() if set(names) <= _ALWAYS_HERE else machine(environ))
    if AUTO in names and names != [AUTO]:
        raise UsageError(f"--device {text!r}: auto chooses by itself; write auto alone, or the names of devices")
    if names != [AUTO]:
        chosen = _given(names, here)
    elif not here.accelerator:
        chosen = {"cpu": f"from --device auto: torch finds no accelerator; this machine has {here}"}
    else:
        peers = here.peers(device := f"{here.accelerator}:{here.current}")
        others = f"; also here, for cases with a tensor on another device: {', '.join(peers)}" if peers else ""
        chosen = {device: f"from --device auto: the current accelerator{others}"}
    return DevicePlan(tuple(chosen), tuple(chosen.values()), tuple(_leftovers(tuple(chosen), environ)))


def _given(names: list[str], here: Machine) -> dict[str, str]:
    aliases: dict[str, list[str]] = {}
    for name in names:
        aliases.setdefault(_resolved(name, here), []).append(name)
    return {
        device: f"from --device {','.join(given)}" + (", the same device, which runs once" if len(given) > 1 else "")
        for device, given in aliases.items()
    }


def _leftovers(devices: tuple[str, ...], environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each launcher variable that contradicts a run on these devices without process group."""

    def ignored(name: str, meaning: str) -> str:
        return f"{name}={environ[name]} {meaning}; lastbit joins no process group and ignores it: unset {name}"

    indices = [device.partition(":")[2] or "0" for device in devices]
    names = ", ".join(devices)
    yield from (ignored(n, "counts several processes") for n in _SIZES if environ.get(n, "1") != "1")
    yield from (ignored(n, "is one process of several") for n in _RANKS if environ.get(n, "0") != "0")
    yield from (ignored(n, f"is not on {names}") for n in _LOCAL_RANKS if environ.get(n, indices[0]) not in indices)
    if environ.get("WORLD_SIZE") != "1":
        yield from (ignored(n, "is where a process group meets") for n in _RENDEZVOUS if n in environ)
