"""Where kt-kernel rounds: every subset of the rounding points, and what each leaves unexplained.

`python docs/measurements/ktransformers/rounding.py CLASS KERNEL` prints a line of JSON. ../kt_kernel.py runs it.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from problem import ROOT, KtProblem, both, errors, expected, problem
from torch import Tensor

from lastbit.judging import problem as verified
from lastbit.judging.torch_compare import outside_mask
from lastbit.kernel import Kernel, load_kernels
from lastbit.ops import Contract, Op
from lastbit.references.moe_lora import moe_lora
from lastbit.references.moe_lora_backward import moe_lora_backward

STATE = ("saved_gate", "saved_up", "intermediate")
PRESETS = ("fused", "eager", "per_matrix")
Points = Mapping[str, tuple[str, ...]]
"""Label → the stages that are rounded together."""


def adapted(name: str, base: str, label: str = "") -> dict[str, tuple[str, ...]]:
    """Return the rounding points of one map with an adapter: its base and what the adapter adds."""
    return {f"{label}base": (base,), f"{label}adapter": (f"{name}_lora", f"{name}_scaled")}


def gate_or_up(name: str) -> Points:
    return {**adapted(name, f"{name}_base"), "middle": (f"{name}_lora_mid",), "sum": (name,)}


def merged(*several: Points) -> Points:
    """Join the points of one label."""
    return {label: tuple(s for points in several for s in points.get(label, ())) for label in several[0]}


DOWN = {**adapted("down", "down_base"), "middle": ("down_lora_mid",), "expert_output": ("expert_output",)}
GRADIENT = {
    "grad_expert_output": ("grad_expert_output",), "grad_down_mid": ("grad_down_mid",),
    **adapted("grad_intermediate", "grad_intermediate_base", "grad_intermediate's "),
    "grad_intermediate": ("grad_intermediate",), "grad_gate, grad_up": ("grad_gate", "grad_up"),
}  # fmt: skip
FORWARD: Mapping[str, Points] = {
    "saved_gate": gate_or_up("gate"),
    "saved_up": gate_or_up("up"),
    "intermediate": {**merged(gate_or_up("gate"), gate_or_up("up")), "silu": ("silu",)},
    "output": {**DOWN, "weighted": ("weighted",)},
}
BACKWARD: Mapping[str, Points] = {
    "grad_routing_weights": DOWN,
    "grad_down_lora_b": {"grad_expert_output": ("grad_expert_output",), "down_lora_mid": ("down_lora_mid",)},
    "grad_down_lora_a": {"grad_expert_output": ("grad_expert_output",), "grad_down_mid": ("grad_down_mid",)},
    "grad_gate_lora_b": {**GRADIENT, "gate_lora_mid": ("gate_lora_mid",)},
    "grad_up_lora_b": {**GRADIENT, "up_lora_mid": ("up_lora_mid",)},
    "grad_gate_lora_a": {**GRADIENT, "grad_gate_mid": ("grad_gate_mid",)},
    "grad_up_lora_a": {**GRADIENT, "grad_up_mid": ("grad_up_mid",)},
}
PARTS = merged(*(adapted(f"grad_input_{n}", f"grad_input_{n}_base") for n in ("gate", "up")))
GRAD_INPUT: Points = {"middles": ("grad_gate_mid", "grad_up_mid"), **PARTS, "expert's": ("grad_expert_input",)}


class KtAnswer:
    """One problem, what kt-kernel gave for it, and what explains it."""

    def __init__(self, p: KtProblem, forward: Kernel, backward: Kernel, shards: int = 1) -> None:
        self.params = {"scaling": p.scaling, "shards": shards}
        results = forward.call(**p.tensors, **self.params, stages=forward.stages)
        state = {key: results[key] for key in STATE}
        self.tensors = {**p.tensors, "grad_output": p.grad_output, **state}
        self.actual = {**results, **backward.call(**self.tensors, **self.params)}
        self.given = {"intermediate": results["intermediate"]}

    def outside(self, op: Op, contract: Contract, results: Iterable[str]) -> dict[str, int]:
        """Count elements of each result that the contract cannot give; the output is seen from the own intermediate."""
        tensors = {key: t for key, t in self.tensors.items() if key in op.inputs}
        trace = verified.KtProblem(op, contract, tensors, self.params).evaluate(self.given if op is moe_lora else None)
        return {key: int(outside_mask(self.actual[key].double(), trace.enclosure(key)).sum()) for key in results}

    def best(self, op: Op, result: str, points: Points, always: Mapping[str, str]) -> tuple[int, list[str]]:
        """Find the subset of the points that leaves the fewest elements of a result, of several the smallest."""
        found = []
        for chosen in subsets(tuple(points)):
            rounds = dict(always) | {stage: "x" for label in chosen for stage in points[label]}
            found.append((self.outside(op, contract_of(op, rounds), [result])[result], len(chosen), list(chosen)))
            if not found[-1][0]:
                break
        count, _, labels = min(found)
        return count, labels


def subsets(labels: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """List all subsets, small ones first."""
    for size in range(len(labels) + 1):
        yield from itertools.combinations(labels, size)


def contract_of(op: Op, rounds: Mapping[str, str]) -> Contract:
    """Make a contract that rounds just there, with the options under which the reference has those stages."""
    options = [option for axis in op.axes.values() for option, stages in axis.items() if set(stages) & set(rounds)]
    return Contract(tuple(options), dict(rounds))


def final(op: Op) -> dict[str, str]:
    """Return the rounding of results, which no subset can change."""
    stages = {"saved_gate", "saved_up", "intermediate", "output", "grad_input"}
    return {stage: to for stage, to in op.rounds.items() if stage in stages or "lora" in stage}


def identified(subject: KtAnswer) -> dict[str, tuple[int, list[str]]]:
    """Return the rounding points of each result."""
    found = {result: subject.best(moe_lora, result, points, final(moe_lora)) for result, points in FORWARD.items()}
    for result, points in BACKWARD.items():
        found[result] = subject.best(moe_lora_backward, result, points, final(moe_lora_backward))
    shared = {s: "x" for label in found["grad_up_lora_b"][1] for s in BACKWARD["grad_up_lora_b"][label]}
    count, labels = subject.best(moe_lora_backward, "grad_input", GRAD_INPUT, {**final(moe_lora_backward), **shared})
    return {**found, "grad_input": (count, labels)}


def one_after_the_other(subject: KtAnswer, p: KtProblem, points: Points, labels: Iterable[str]) -> list[int]:
    """Count elements of grad_input that are no sum in bf16: base of gate, of up, adapter of gate, of up, slot by slot.

    Each of the 4k terms is rounded, then added, and the sum is rounded. Of the middle products, nothing is. Second, how
    many elements there are: tokens whose gradients of gate and up are not certain are left out.
    """
    rounds = final(moe_lora_backward) | {stage: "x" for label in labels for stage in points[label]}
    trace = verified.KtProblem(
        moe_lora_backward, contract_of(moe_lora_backward, rounds), subject.tensors, subject.params
    ).evaluate()
    enclosures = [trace.enclosure(f"grad_{name}") for name in ("gate", "up")]
    certain = torch.stack([(e.lo == e.hi).all(-1).all(-1) for e in enclosures]).all(0)
    terms: tuple[list[Tensor], list[Tensor]] = ([], [])
    for name, enclosure in zip(("gate", "up"), enclosures, strict=True):
        a, b = (p.adapters[f"{name}_lora_{part}"].double()[p.ids] for part in "ab")
        terms[0].append(torch.einsum("tki,tkih->kth", enclosure.value, p.dense[name][p.ids]))
        terms[1].append(p.scaling * torch.einsum("tki,tkir,tkrh->kth", enclosure.value, b, a))
    total = torch.zeros_like(p.x).double()
    for term in (t for parts in terms for slots in parts for t in slots):
        total = (total + term.bfloat16().double()).bfloat16().double()
    return [int((total != subject.actual["grad_input"].double())[certain].sum()), int(certain.sum()) * p.x.shape[1]]


def half(p: KtProblem, part: int) -> KtProblem:
    """Build the layer of one of two shards: half of the intermediate dimension."""

    def along(tensor: Tensor, dim: int) -> Tensor:
        return tensor.chunk(2, dim)[part].contiguous()

    base = {key: along(t, 2 if key.startswith("down") else 1) for key, t in p.base.items()}
    split = {"gate_lora_b": 1, "up_lora_b": 1, "down_lora_a": 2}
    adapters = {key: along(t, split[key]) if key in split else t for key, t in p.adapters.items()}
    return replace(p, base=base, adapters=adapters)


def shards_rounded(p: KtProblem) -> list[int]:
    """Count elements of grad_input of two shards that differ from the sum of two bf16 halves; and from one shard."""
    whole = both(p.layer(shards=2), p)["grad_input"]
    parts = [both(half(p, part).layer(), half(p, part))["grad_input"].float() for part in (0, 1)]
    single = both(p.layer(), p)["grad_input"]
    return [int((whole != sum(parts).bfloat16()).sum()), int((whole != single).sum()), whole.numel()]


def report(name: str, kernel: str) -> dict[str, Any]:
    """Report everything about one class, as numbers and lists."""
    kernels = {k.name: k for k in load_kernels(ROOT / "kernels" / "external")}
    forward, backward = kernels[kernel], kernels[f"{kernel}_backward"]
    problems = {"exact sums": problem(name, exact=True), "random": problem(name)}
    subjects = {kind: KtAnswer(p, forward, backward) for kind, p in problems.items()}
    table: dict[str, Any] = {}
    for kind, subject in subjects.items():
        found = identified(subject)
        for op, results in ((moe_lora, FORWARD), (moe_lora_backward, [*BACKWARD, "grad_input"])):
            presets = {preset: subject.outside(op, op.contract(preset), results) for preset in PRESETS}
            for result in results:
                row = {"numel": subject.actual[result].numel(), "found": found[result]}
                table.setdefault(result, {})[kind] = {**row, **{p: presets[p][result] for p in PRESETS}}
    exact = subjects["exact sums"]
    labels = table["grad_up_lora_b"]["exact sums"]["found"][1]
    sequential = one_after_the_other(exact, problems["exact sums"], BACKWARD["grad_up_lora_b"], labels)
    split = KtAnswer(problems["random"], forward, backward, shards=2)
    return {
        "table": table,
        "sequential": sequential,
        "forward in shards": split.outside(moe_lora, moe_lora.contract(forward.contract), FORWARD),
        "grad_input of shards": shards_rounded(problems["random"]),
        "errors": errors(subjects["random"].actual, expected(problems["random"])),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"\nseen: {json.dumps(report(*sys.argv[1:]))}", flush=True)
