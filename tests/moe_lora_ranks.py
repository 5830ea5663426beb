"""What each rank of a process group does with its shard of a MoE-LoRA layer, and what tests then judge.

A rank runs forward, backward, a backward that accumulates, a step of AdamW on its own adapters, forward and backward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from lastbit.kernel import load_kernels
from tests.rms_norm_contract import BF16, FOLDER

LORA = ("gate_lora_a", "gate_lora_b", "up_lora_a", "up_lora_b", "down_lora_a", "down_lora_b")
SAVED = ("saved_gate", "saved_up", "intermediate")
SCALING, LEARNING_RATE = 0.75, 0.05

Record = dict[str, Any]
"""The op that ran, the whole tensors that it took and gave, and its parameters."""


@dataclass(frozen=True)
class Sizes:
    tokens: int = 3
    slots: int = 2
    experts: int = 2
    hidden: int = 8
    width: int = 8
    rank: int = 2
    dtype: torch.dtype = BF16


def problem(sizes: Sizes, device: torch.device) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Tensor]]:
    """Draw inputs, whole parameters, and two gradients of the output: the same on every rank and device.

    Matrices have about unit gain, and some ids are those of no expert.
    """
    generator = torch.Generator().manual_seed(0)

    def normals(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    shapes = {"gate_proj": (sizes.width, sizes.hidden), "up_proj": (sizes.width, sizes.hidden)}
    shapes["down_proj"] = (sizes.hidden, sizes.width)
    for side in ("gate", "up", "down"):
        outputs, inputs = shapes[f"{side}_proj"]
        shapes |= {f"{side}_lora_a": (sizes.rank, inputs), f"{side}_lora_b": (outputs, sizes.rank)}
    weights = {name: (normals(sizes.experts, *s) / s[-1] ** 0.5).to(sizes.dtype) for name, s in shapes.items()}
    rows = {name: normals(sizes.tokens, sizes.hidden).to(sizes.dtype) for name in ("x", "first", "second")}
    ids = torch.randint(0, sizes.experts + 1, (sizes.tokens, sizes.slots), generator=generator)
    inputs = {"x": rows["x"], "expert_ids": ids, "routing_weights": normals(sizes.tokens, sizes.slots).abs()}
    moved = ({name: t.to(device) for name, t in tensors.items()} for tensors in (inputs, weights, rows))
    inputs, weights, rows = moved
    return inputs, weights, [rows["first"], rows["second"]]


def train(api: ModuleType, sizes: Sizes, device: torch.device, *, stale: bool = False) -> list[Record]:
    """Everything that one rank does; `stale` plants a fault: no forward or backward sees the optimizer's step."""
    inputs, whole, (first, second) = problem(sizes, device)
    mine = api.own(whole)
    used = {name: tensor.clone() for name, tensor in mine.items()} if stale else mine
    masters = {name: mine[name].float() for name in LORA}
    optimizer = torch.optim.AdamW(masters.values(), lr=LEARNING_RATE)
    records: list[Record] = []

    def record(op: str, taken: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
        tensors = api.gathered({**inputs, **mine, **taken})
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        records.append({"op": op, "arguments": tensors, "results": api.gathered(given)})

    def forward() -> dict[str, Tensor]:
        results = api.forward(**inputs, **used, scaling=SCALING)
        record("moe_lora", {}, results)
        return {name: results[name] for name in SAVED}

    def backward(taken: dict[str, Tensor]) -> dict[str, Tensor]:
        results = api.backward(**inputs, **used, **taken, scaling=SCALING)
        record("moe_lora_backward", taken, results)
        return {name: results[f"grad_{name}"] for name in LORA}

    saved = forward()
    old = backward({**saved, "grad_output": first})
    sums = backward({**saved, "grad_output": second, **{f"old_{name}": gradient for name, gradient in old.items()}})
    for name, master in masters.items():
        master.grad = sums[name].float()
    optimizer.step()
    for name, master in masters.items():
        mine[name].copy_(master)
    backward({**forward(), "grad_output": first})
    return records


Added = Callable[[str, Tensor, Any], Tensor]


def rounding_first(added: Added) -> Added:
    return lambda name, term, group: added(name, term.bfloat16().float(), group)


def keeping_gradients_apart(added: Added) -> Added:
    return lambda name, term, group: term if name.startswith("grad_") else added(name, term, group)


WAYS_TO_ADD: dict[str, Callable[[Added], Added]] = {
    "correct": lambda added: added,
    "terms are rounded before they are added": rounding_first,
    "gradients are not added": keeping_gradients_apart,
}
STALE = "the step is not seen"


def run(number: int, ranks: int, backend: str, sizes: Sizes, folder: str, faults: bool) -> None:
    """Run as the process of a rank: train in each way to add, and write the records to a file of the folder."""
    load_kernels(FOLDER)
    api = next(module for name, module in reversed(sys.modules.items()) if name.endswith(".moe_lora_distributed"))
    device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", number)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=number, world_size=ranks)
    added, found = api._added, {}
    for way, changed in WAYS_TO_ADD.items():
        if faults or way == "correct":
            api._added = changed(added)
            found[way] = train(api, sizes, device)
    api._added = added
    if faults:
        found[STALE] = train(api, sizes, device, stale=True)
    dist.destroy_process_group()
    torch.save(found, Path(folder) / f"{number}.pt")


def trained(ranks: int, backend: str, sizes: Sizes, folder: Path, *, faults: bool) -> list[dict[str, list[Record]]]:
    """Train on every rank, and return what was recorded, by the way in which terms were added, on one device.

    Raises:
        ProcessRaisedException: a rank has failed.
    """
    start_method = "fork" if backend == "gloo" else "spawn"  # CUDA does not survive a fork; imports do
    mp.start_processes(run, (ranks, backend, sizes, str(folder), faults), nprocs=ranks, start_method=start_method)
    place = "cpu" if backend == "gloo" else "cuda:0"
    return [torch.load(folder / f"{number}.pt", map_location=place) for number in range(ranks)]
