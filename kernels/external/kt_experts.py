"""The SFT classes of kt-kernel 0.7.2 as objects: tensors in, tensors out.

Their arguments, as measured on their binaries (docs/measurements/kt_kernel.py):

* Everything is passed by address: contiguous, row by row, in the CPU's memory; the activations and adapters bf16,
  expert ids int64, routing weights fp32, the number of tokens an int32. Ids outside [0, E) are skipped.
* `lora_alpha` is `scaling` times the rank, and is divided by the rank again in fp32.
* `MXFP4_SFT_MOE` has codes [E, N, K/2] of two E2M1 numbers, the first in the low nibble, and a bf16 scale per 32 of
  them; `AMXInt4_KGroup_SFT_MOE` the same with offset-8 integers; the others take bf16 weights, and all but
  `AMXBF16_SFT_MOE` quantize those by themselves. Base weights are copied when they are loaded.
* A of gate and up is read where it is at every call; of the other four adapters copies are made. An update in place
  is seen as a whole only after `update_lora_weights`.
* A forward that saves leaves what its backward needs in the object. The gradients of adapters are written into the
  caller's tensors; those that the object has not written to before it clears first, whatever `accumulate` says.
* A shard is one worker pool. They split the intermediate dimension.

An exception inside a worker of the AVX2 build ends the process, and shapes that a class cannot do may end it too:
check before the call.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lastbit import UnsupportedCase

PACKAGE = "kt_kernel"
ADAPTERS = ("gate_lora_a", "gate_lora_b", "up_lora_a", "up_lora_b", "down_lora_a", "down_lora_b")
MATRICES = ("gate_proj", "up_proj", "down_proj")
SCALES = ("gate_scale", "up_scale", "down_scale")
GROUPED = ("MXFP4_SFT_MOE", "AMXInt4_KGroup_SFT_MOE")
ADDING = ("AMXInt4_SFT_MOE",)
"""Classes that add to some of the gradients and leave it to the caller to clear them."""
TOKENS_STEP = 32
GROUP_SIZE = 32
NO_LIMIT = 3e38
"""MXFP4_SFT_MOE clamps gate and up, and takes no limit that is not finite; the other classes have none."""


@functools.cache
def package() -> ModuleType:
    """Import kt_kernel, with the build for this CPU or for the one that KT_KERNEL_CPU_VARIANT names.

    Raises:
        UnsupportedCase: it cannot be imported.
    """
    try:
        return importlib.import_module(PACKAGE)
    except (ImportError, OSError, RuntimeError) as error:
        raise UnsupportedCase(f"{PACKAGE} cannot be imported ({error}); pip install kt-kernel==0.7.2") from error


def moe_class(name: str) -> Any:
    """Return the class of the loaded build; raise UnsupportedCase where it has none."""
    found = getattr(package().kt_kernel_ext.moe, name, None)
    if found is None:
        raise UnsupportedCase(f"the {package().__cpu_variant__} build of {PACKAGE}, which this CPU runs, has no {name}")
    return found


@functools.cache
def worker_pool(shards: int, threads: int) -> Any:
    """Start one pool of `threads` workers per shard; they live as long as the process."""
    extension = package().kt_kernel_ext
    config = extension.WorkerPoolConfig()
    config.subpool_count = shards
    config.subpool_numa_map = [0] * shards
    config.subpool_thread_count = [threads] * shards
    return extension.CPUInfer(config)


def alpha(scaling: float, rank: int) -> float:
    """Find the alpha for which alpha / rank is `scaling` in fp32; raise UnsupportedCase where no fp32 number is."""
    wanted, divisor = torch.tensor(scaling), torch.tensor(float(rank))
    nearest = wanted * divisor
    for bound in (nearest, torch.tensor(torch.inf), torch.tensor(-torch.inf)):
        value = torch.nextafter(nearest, bound)
        if value / divisor == wanted:
            return float(value)
    raise UnsupportedCase(f"scaling={scaling} is alpha / {rank} for no alpha in fp32, and kt-kernel takes alpha")


@dataclass(frozen=True)
class KtGradients:
    """The gradients of one backward; `adapters` are the tensors that it was given to write into."""

    grad_input: Tensor
    grad_routing_weights: Tensor
    adapters: Mapping[str, Tensor]


class Experts:
    """One layer of kt-kernel: base weights and adapters, and at most one forward that waits for its backward.

    Args:
        name: the class in kt_kernel_ext.moe.
        base: `gate_proj`, `up_proj`, `down_proj` and where there are any their scales, in the layouts of that class.
        adapters: the six adapters [E, r, K] and [E, N, r], bf16; kept, and read by every call.
        slots: k. tokens: the most that a call will have.
    """

    def __init__(
        self,
        name: str,
        base: Mapping[str, Tensor],
        adapters: Mapping[str, Tensor],
        *,
        slots: int,
        tokens: int,
        scaling: float,
        swiglu_limit: float = NO_LIMIT,
        shards: int = 1,
        threads: int = 1,
        cache_depth: int = 1,
    ) -> None:
        experts, rank, hidden = adapters["gate_lora_a"].shape
        width = adapters["gate_lora_b"].shape[1]
        self.slots, self.adapters, self.adds = slots, adapters, name in ADDING
        self._map = torch.arange(experts)
        self._kept = (*base.values(), *adapters.values())
        config = package().kt_kernel_ext.moe.MOESFTConfig(experts, slots, hidden, width)
        config.max_len = -(-max(tokens, 1) // TOKENS_STEP) * TOKENS_STEP
        config.max_cache_depth = cache_depth
        config.layer_idx = 0
        config.lora_rank, config.lora_alpha = rank, alpha(scaling, rank)
        config.authoritative_optimizer_grads = not self.adds
        config.share_backward_bb = config.share_cache_pool = config.full_weight_grad = False
        config.physical_to_logical_map = self._map.data_ptr()
        for key, tensor in {**base, **adapters}.items():
            setattr(config, key, address(key, tensor))
        if name in GROUPED:
            config.quant_config.bits = 4
            config.quant_config.group_size = GROUP_SIZE
            config.quant_config.zero_point = False
        if name == "MXFP4_SFT_MOE":
            config.swiglu_limit = swiglu_limit
        config.pool = worker_pool(shards, threads).backend_
        self._moe = moe_class(name)(config)
        self._moe.load_weights()

    def forward(self, x: Tensor, expert_ids: Tensor, routing_weights: Tensor, *, save: bool = False) -> Tensor:
        """Return the output [T, H]; with `save`, the object keeps the tensors that `backward` needs."""
        output = torch.empty_like(x)
        count = torch.tensor([len(x)], dtype=torch.int32)
        tensors = {"count": count, "slots": self.slots, "ids": expert_ids, "weights": routing_weights, "x": x}
        arguments = [address(name, t) if isinstance(t, Tensor) else t for name, t in tensors.items()]
        self._moe.forward_sft(*arguments, address("output", output), save)
        return output

    def backward(
        self, grad_output: Tensor, adapters: Mapping[str, Tensor] | None = None, *, accumulate: bool = False
    ) -> KtGradients:
        """Return the gradients of the last forward that saved; those of adapters go into `adapters`, added or not."""
        fresh = torch.zeros_like if self.adds else torch.empty_like
        written = adapters or {name: fresh(self.adapters[name]) for name in ADAPTERS}
        grad_input = torch.empty_like(grad_output)
        grad_weights = torch.empty(len(grad_output), self.slots)
        out = [grad_input, *(written[name] for name in ADAPTERS), grad_weights]
        no_base_gradients = (0, 0, 0)
        self._moe.backward(
            address("grad_output", grad_output),
            *(address("a gradient", t) for t in out),
            *no_base_gradients,
            accumulate,
            1.0,
        )
        return KtGradients(grad_input, grad_weights, written)

    def update_adapters(self) -> None:
        """Let kt-kernel read the adapters again after they were changed in place."""
        self._moe.update_lora_weights(*(address(name, self.adapters[name]) for name in ADAPTERS))


def address(name: str, tensor: Tensor) -> int:
    """Return the address of the tensor; raise ValueError unless its elements are contiguous in the CPU's memory."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is on {tensor.device} with strides {tensor.stride()}; kt-kernel takes contiguous ones"
        )
    return tensor.data_ptr()


def local(expert_ids: Tensor, first_expert: int, experts: int) -> Tensor:
    """Return ids from 0 on, and -1 for pairs that are skipped: subtracting alone could overflow."""
    ids = expert_ids.to(torch.int64)
    inside = (ids >= first_expert) & (ids < first_expert + experts)
    return torch.where(inside, ids, first_expert - 1).sub(first_expert).contiguous()
