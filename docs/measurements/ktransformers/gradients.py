"""The gradients of kt-kernel on the cases of the forward pass, from the state that its own forward leaves.

`python docs/measurements/ktransformers/gradients.py KERNEL COUNT` takes COUNT cases of each group that `lastbit verify`
has for the kernel, and prints a line of JSON: of every result how many elements no kernel could give that rounds at the
points of `ROUNDS`, and how many could have been no other. ../kt_kernel.py runs it.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from problem import ROOT
from rounding import contract_of, final
from torch import Tensor

from lastbit.case import Case
from lastbit.config import Config
from lastbit.errors import UnsupportedCase
from lastbit.inputs import build
from lastbit.judging import problem as verified
from lastbit.judging.torch_compare import outside_mask
from lastbit.kernel import Kernel, load_kernels
from lastbit.references.moe_lora_backward import moe_lora_backward
from lastbit.verify.drawing import draw
from lastbit.verify.project import open_project

ROUNDS: Mapping[str, tuple[str, ...]] = {
    "avx2": ("expert_output",),
    "avx512_bf16": (
        *("grad_expert_output", "grad_intermediate_base", "grad_intermediate", "grad_gate", "grad_up"),
        *("grad_gate_mid", "grad_up_mid", "down_base", "expert_output"),
    ),
}
"""Where the builds round, as rounding.py finds it."""


def cases(kernel: Kernel, count: int) -> Iterator[Case]:
    """Draw the first cases of each group, and keep those whose x is bf16, and which the kernel's signature takes."""
    for group in open_project(Config(folder="")).groups(kernel.op, kernel.accepts, small=True):
        drawn = () if group.strategy is None else draw(replace(group, examples=()), count, 0)
        yield from (c for c in drawn if c["x"].dtype == "bf16" and c.names <= kernel.accepts)


def gradients(forward: Kernel, backward: Kernel, case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return what the backward of a case takes, and what it gives."""
    tensors = build(case, torch.device("cpu")).hand_out()
    state = forward.call(**tensors, **case.params, stages=forward.stages)
    output = state.pop("output")
    noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(case.seed))
    given = {**tensors, **state, "grad_output": noise.to(output.dtype)}
    return given, backward.call(**given, **case.params)


def report(name: str, count: int) -> dict[str, object]:
    """Count for each result, of one shard and of several: elements, those outside and decided; cases, those failed."""
    kernels = {k.name: k for k in load_kernels(ROOT / "kernels" / "external")}
    forward, backward = kernels[name], kernels[f"{name}_backward"]
    build_name = name.rpartition(",")[2].strip("]")
    rounds = final(moe_lora_backward) | dict.fromkeys(ROUNDS[build_name], "x")
    contract = contract_of(moe_lora_backward, rounds)
    found: dict[str, Counter[str]] = {}
    refused: Counter[str] = Counter()
    for case in cases(forward, count):
        try:
            given, actual = gradients(forward, backward, case)
        except UnsupportedCase as error:
            refused[str(error)] += 1
            continue
        trace = verified.Problem(moe_lora_backward, contract, given, case.params).evaluate()
        for result, tensor in actual.items():
            enclosure = trace.enclosure(result)
            outside = int(outside_mask(tensor.double(), enclosure).sum())
            decided = int((enclosure.lo == enclosure.hi).sum())
            counts = {"elements": tensor.numel(), "outside": outside, "decided": decided, "cases": 1}
            where = result if case.params.get("shards", 1) == 1 else f"{result} of shards"
            found.setdefault(where, Counter()).update(counts | {"failed": int(outside > 0)})
    return {"results": found, "refused": refused}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"\nseen: {json.dumps(report(sys.argv[1], int(sys.argv[2])))}", flush=True)
