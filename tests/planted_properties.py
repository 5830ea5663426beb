"""The kernels planted in the folder of this name: all keep their contract, and each one's bits depend on something.

`lastbit verify` passes them; what they depend on shows in pairs of calls alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).with_name("planted_properties")

WIDE = "rms_norm x=fp32[40,2048] weight=fp32[2048]:near_one eps=1e-06 seed=1"
NORM = "rms_norm x=fp32[40,512] weight=fp32[512]:near_one eps=1e-06 seed=1"
ADDED = "rms_norm x=fp32[40,512] residual=fp32[40,512] weight=fp32[512]:near_one eps=1e-06 seed=1"
EXPERTS = (
    "moe_lora x=bf16[64,128] expert_ids=int64[64,2]:below_4 routing_weights=fp32[64,2]:uniform "
    "gate_proj=bf16[4,160,128]:fan_in up_proj=bf16[4,160,128]:fan_in down_proj=bf16[4,128,160]:fan_in"
)
ADAPTED = (
    f"{EXPERTS} gate_lora_a=bf16[4,8,128]:fan_in gate_lora_b=bf16[4,160,8]:fan_in up_lora_a=bf16[4,8,128]:fan_in "
    "up_lora_b=bf16[4,160,8]:fan_in down_lora_a=bf16[4,8,160]:fan_in down_lora_b=bf16[4,128,8]:fan_in scaling=2.0"
)


@dataclass(frozen=True)
class Planted:
    """A planted kernel.

    Attributes:
        name: of the kernel, within `planted[…]`.
        file: in the folder.
        property: the one that must be found broken.
        line: a case on which it shows.
        where: words that must be in what is found of the change; empty where nothing is to be found.
        also: other properties that it breaks, for the same reason.
        cuda: it shows on a CUDA device only.
    """

    name: str
    file: str
    property: str
    line: str
    where: str = ""
    also: tuple[str, ...] = ()
    cuda: bool = False

    @property
    def kernel(self) -> str:
        return f"planted[{self.name}]"

    @property
    def op(self) -> str:
        return self.line.split()[0]

    def __str__(self) -> str:
        return self.name


PLANTED = (
    Planted("block by rows", "block_by_rows.py", "rows", WIDE, "changes between 16 and 17 rows"),
    Planted("split by occupancy", "split_by_occupancy.py", "rows", NORM, "rows"),
    Planted("last tile", "last_tile.py", "rows", NORM, "rows", also=("permutation", "padding")),
    Planted("atomics", "atomic_sum.py", "run to run", NORM),
    Planted("eps when compiled", "eps_when_compiled.py", "compiled", NORM.replace("eps=1e-06", "eps=0.3")),
    Planted("when training", "when_training.py", "grad", NORM),
    Planted("vectors or scalars", "vectors_or_scalars.py", "layout", NORM),
    Planted("by address", "by_address.py", "layout", NORM, also=("graph",)),
    Planted("when captured", "when_captured.py", "graph", NORM, cuda=True),
    Planted("in place", "in_place_order.py", "in place", ADDED),
    Planted("zero adapter", "experts.py", "zero adapter", f"{ADAPTED} seed=1"),
    Planted("other tokens", "experts.py", "other tokens", f"{ADAPTED} seed=1"),
    Planted("relabelling", "experts.py", "relabelling", f"{ADAPTED} seed=1"),
    Planted("place within an expert", "experts.py", "permutation", f"{ADAPTED} seed=1", also=("other tokens",)),
)
"""In the order of the properties."""
