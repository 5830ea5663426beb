"""Answers to questions about a GPU on machines without one: the figures of an H200, and the first configuration.

Code beside kernels asks Triton's driver and `torch.cuda` for the number of multiprocessors, the compute capability and
the like, some of it when it is imported. On a machine without a GPU those questions are errors. Here they are answered;
nothing that would run on a GPU is. `torch.cuda.is_available()` stays false.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.autotuner import Autotuner

CAPABILITY = (9, 0)
MULTIPROCESSORS = 132
_SHARED_BYTES = 232448
_PROPERTIES = {
    "max_shared_mem": _SHARED_BYTES,
    "max_num_regs": 65536,
    "multiprocessor_count": MULTIPROCESSORS,
    "warpSize": 32,
    "sm_clock_rate": 1980000,
    "mem_clock_rate": 3201000,
    "mem_bus_width": 6144,
}
"""As Triton's driver gives them on an H200; rates in kHz, widths in bits."""

_TORCH_PROPERTIES = SimpleNamespace(
    name="NVIDIA H200 (interpreted)",
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    multi_processor_count=MULTIPROCESSORS,
    total_memory=150_109_880_320,
    warp_size=32,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=_SHARED_BYTES,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=62914560,
)


_ANSWERS = {
    "current_device": 0,
    "get_device_capability": CAPABILITY,
    "get_device_properties": _TORCH_PROPERTIES,
    "get_device_name": _TORCH_PROPERTIES.name,
}
"""Functions of `torch.cuda` and what they return, whatever the device."""


class StandIn(DriverBase):  # type: ignore[misc]
    """A Triton driver that answers questions and runs nothing."""

    utils = SimpleNamespace(get_device_properties=lambda device=0: dict(_PROPERTIES))

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("interpreted kernels have no C++ types")

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cpu

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return CAPABILITY

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: Any) -> None:
        """Do nothing: there is only one device."""

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_benchmarker(self) -> Any:
        """Return a benchmarker that times nothing: see `autotune`."""
        return lambda kernel_call, *, quantiles=(0.5,), **_: [0.0 for _ in quantiles]


class AnyDevice(torch.cuda.device):
    """A replacement of `torch.cuda.device` that does nothing, for tensors that are not on a GPU."""

    def __init__(self, device: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None: ...


def stand_in_for_gpu() -> None:
    """Answer, on a machine without a GPU, questions of code beside kernels to Triton's driver and `torch.cuda`."""
    if torch.cuda.device_count():  # is_available() would start the driver, and its thread, of which forks have half
        return
    backends["nvidia"] = replace(backends["nvidia"], driver=StandIn)
    for name, answer in _ANSWERS.items():
        setattr(torch.cuda, name, _answering(getattr(torch.cuda, name), answer))
    torch.cuda.device = AnyDevice  # type: ignore[misc]


def _answering(original: Callable[..., Any], answer: Any) -> Callable[..., Any]:
    """Return a function that answers `answer`, but `original` to torch itself, which decides by it how to compile."""

    @wraps(original)
    def asked(*args: Any, **kwargs: Any) -> Any:
        asking = str(sys._getframe(1).f_globals.get("__name__"))
        return original(*args, **kwargs) if asking.split(".")[0] == "torch" else answer

    return asked


def replace_benchmarks() -> None:
    """Give every configuration the same time, without running it; the choice is then the first, always.

    Pruning functions, pre-hooks and the resetting of arguments stay Triton's.
    """
    Autotuner._bench = lambda self, *args, config, **meta: [0.0, 0.0, 0.0]
