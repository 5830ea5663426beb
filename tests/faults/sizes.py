"""Kernels that are wrong from a length on, or behind a comparison of a size with a number of their own.

They wrap kernels of this repository, and spoil what these return.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch

from lastbit.case import Case
from lastbit.kernel import Kernel
from tests.faults.plant import without_faults


@dataclass(frozen=True)
class TooLong:
    """A kernel whose result is wrong where a dimension of a tensor is longer than `right`."""

    kernel: str
    tensor: str
    place: int
    right: int

    def __str__(self) -> str:
        return f"{self.kernel}: {self.tensor}.shape[{self.place}] above {self.right}"

    @property
    def base(self) -> Kernel:
        """The kernel without the fault."""
        return next(kernel for kernel in without_faults().kernels if kernel.name == self.kernel)

    def applies(self, case: Case) -> bool:
        """Return whether the result is wrong in a case."""
        given = next((tensor for tensor in case.tensors if tensor.name == self.tensor), None)
        return (
            given is not None
            and -len(given.shape) <= self.place < len(given.shape)
            and given.shape[self.place] > self.right
        )

    def planted(self) -> Kernel:
        """Return the kernel with the fault; it shows no stages."""
        base = self.base

        @wraps(base.call)
        def faulty(**given: Any) -> Any:
            results, tensor = base.call(**given), given.get(self.tensor)
            long = tensor is not None and tensor.ndim > max(self.place, -self.place - 1)
            return spoiled(results) if long and tensor.shape[self.place] > self.right else results

        return replace(base, call=faulty, stages=())


def spoiled(results: Any) -> Any:
    """Change the first of some results, one or several in a tuple or mapping."""
    first = results
    if isinstance(results, dict | tuple):
        first = next(iter(results.values() if isinstance(results, dict) else results))
    if first.element_size() == 1:
        first.view(torch.uint8).bitwise_xor_(1)
    else:
        first += first + 1
    return results


LONG = (
    TooLong("eager[fp32_multiply+rounded_sum]", "x", 0, 2000),
    TooLong("eager[fp32_multiply+rounded_sum]", "x", 1, 35000),
    TooLong("eager[all_reduce]", "x", 0, 2000),
    TooLong("eager[all_reduce]", "x", 1, 35000),
    TooLong("eager[all_reduce_rms_norm]", "x", 0, 2000),
    TooLong("eager[all_reduce_rms_norm]", "x", 1, 35000),
    TooLong("eager[rms_norm_quantize+per_group]", "x", 0, 2000),
    TooLong("eager[rms_norm_quantize+per_group]", "x", 1, 35000),
    TooLong("eager[quotient]", "x", 0, 2000),
    TooLong("eager[quotient]", "x", 1, 35000),
    TooLong("eager[rounded_scores]", "x", 0, 2000),
    TooLong("eager[rounded_scores]", "x", 1, 35000),
    TooLong("eager[swiglu+fp32_silu]", "x", 0, 2000),
    TooLong("eager[swiglu+fp32_silu]", "x", 1, 35000),
    TooLong("eager[swiglu_backward+fp32_silu]", "x", 0, 2000),
    TooLong("eager[swiglu_backward+fp32_silu]", "x", 1, 35000),
    TooLong("eager[completion_mask]", "ids", 0, 2000),
    TooLong("eager[completion_mask]", "ids", 1, 35000),
    TooLong("eager[completion_mask]", "eos_ids", 0, 90),
    TooLong("eager[cross_entropy]", "logits", 0, 2000),
    TooLong("eager[cross_entropy]", "logits", 1, 35000),
    TooLong("eager[cross_entropy_backward]", "logits", 0, 2000),
    TooLong("eager[cross_entropy_backward]", "logits", 1, 35000),
    TooLong("eager[single_rounding]", "x", 0, 2000),
    TooLong("eager[single_rounding]", "x", 1, 32000),
    TooLong("eager[gated_backward]", "x", 0, 2000),
    TooLong("eager[gated_backward]", "x", 1, 32000),
    TooLong("eager[gated_backward]", "rstd", 1, 260),
    TooLong("eager[fp32_products]", "q", 0, 1000),
    TooLong("eager[fp32_products]", "q", -2, 120),
    TooLong("eager[fp32_products]", "k", -2, 60),
    TooLong("eager[fp32_products]", "q", -1, 500),
    TooLong("eager[fp32_products]", "cos", 0, 4500),
    TooLong("eager[qk_norm_rope]", "x", 0, 1000),
    TooLong("eager[qk_norm_rope]", "x", 1, 120),
    TooLong("eager[qk_norm_rope]", "x", 2, 500),
    TooLong("eager[qk_norm_rope]", "cos", 0, 4500),
    TooLong("eager[attention+flash]", "q", 0, 60),
    TooLong("eager[attention+flash]", "q", 1, 120),
    TooLong("eager[attention+flash]", "k", 1, 380),
    TooLong("eager[attention+flash]", "k", 2, 16),
    TooLong("eager[attention+flash]", "q", 2, 30),
    TooLong("eager[attention+flash]", "q", 3, 250),
    TooLong("eager[attention+flash]", "v", 3, 250),
    TooLong("eager[moe_lora+fused]", "x", 0, 120),
    TooLong("eager[moe_lora+fused]", "x", 1, 1000),
    TooLong("eager[moe_lora+fused]", "expert_ids", 1, 17),
    TooLong("eager[moe_lora+fused]", "gate_proj", 0, 128),
    TooLong("eager[moe_lora+fused]", "gate_proj", 1, 500),
    TooLong("eager[moe_lora+fused]", "gate_lora_a", 1, 120),
    TooLong("eager[moe_lora_backward+fused]", "x", 0, 120),
    TooLong("eager[moe_lora_backward+fused]", "x", 1, 1000),
    TooLong("eager[moe_lora_backward+fused]", "gate_proj", 0, 128),
    TooLong("eager[moe_lora_backward+fused]", "saved_gate", 1, 17),
    TooLong("eager[moe_lora_backward+fused]", "saved_gate", 2, 500),
    TooLong("eager[moe_lora_backward+fused]", "gate_lora_a", 1, 120),
)
"""One for each dimension that a kernel may take to be short."""

LAST = tuple({fault.kernel: fault for fault in LONG}.values())
"""The last one of each op."""


@dataclass(frozen=True)
class Branch:
    """A kernel that goes another way where a condition on sizes holds, which is `numbers` and `when`, in its source."""

    op: str
    kernel: str
    signature: str
    when: str
    numbers: str = ""

    def __str__(self) -> str:
        return f"{self.op}: {self.when}"

    def text(self, second: str = "results") -> str:
        """Return the source of the kernel; `second` is what it returns the other way: as it should be, or spoiled."""
        names = [part.split("=")[0].strip() for part in self.signature.replace("*, ", "").split(",")]
        base = next(kernel for kernel in without_faults().kernels if kernel.name == self.kernel)
        file = base.source.rpartition(":")[0].rpartition("/")[2]
        given = ", ".join(f"{name}={name}" for name in names)
        return _TEXT.format(
            file=file, base=self.kernel, contract=base.contract, op=self.op,
            signature=self.signature, given=given, when=self.when, second=second, numbers=self.numbers,
        )  # fmt: skip


_TEXT = """\
from lastbit import kernel
from lastbit.files import KERNELS
from lastbit.kernel import load_kernels

RIGHT = {{one.name: one.call for one in load_kernels(KERNELS / "{file}")}}
{numbers}


def spoiled(results):
    first = results
    if isinstance(results, dict | tuple):
        first = next(iter(results.values() if isinstance(results, dict) else results))
    first += first + 1
    return results


@kernel("{op}", contract="{contract}", name="branching")
def branching({signature}):
    results = RIGHT["{base}"]({given})
    if {when}:
        return {second}
    return results
"""

_ATTENTION = "q, k, v, *, scale, causal=False"
_EXPERTS = "x, expert_ids, routing_weights, gate_proj, up_proj, down_proj"

BRANCHES = (
    Branch("rms_norm", "F.rms_norm", "x, weight=None, *, eps", "x.numel() // x.shape[-1] > 640"),
    Branch("rms_norm", "F.rms_norm", "x, weight=None, *, eps", "x.shape[-1] > WIDE", "WIDE = 1 << 14"),
    Branch("rms_norm", "F.rms_norm", "x, weight=None, *, eps", "x.shape[0] >= 48 and x.shape[0] % 48 == 0"),
    Branch("softmax", "eager[rounded_scores]", "x, mask=None, *, scale=1.0", "x.numel() > 100_000"),
    Branch("swiglu", "eager[swiglu+fp32_silu]", "x, up=None", "x.shape[0] in (500, 768, 1000)"),
    Branch(
        "completion_mask", "eager[completion_mask]", "ids, eos_ids, *, mask_truncated=False",
        "len(eos_ids) > len(TABLE)", f"TABLE = {tuple(range(40))}",
    ),
    Branch(
        "cross_entropy", "eager[cross_entropy]", "logits, labels, *, softcap=None",
        "softcap and logits.shape[1] > 1024",
    ),
    Branch("attention", "eager[attention+flash]", _ATTENTION, "k.shape[1] > 96"),
    Branch("attention", "eager[attention+flash]", _ATTENTION, "q.shape[1] >= 50"),
    Branch("moe_lora", "eager[moe_lora+fused]", _EXPERTS, "gate_proj.shape[0] >= 12"),
    Branch("rotary", "eager[fp32_products]", "q, cos, sin, positions", "min(q.shape[-2], 24) == 24"),
)  # fmt: skip
"""Kernels that branch on numbers of their own."""
