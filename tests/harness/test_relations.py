"""What ops promise of two calls: a kernel for each relation that breaks it and keeps its contract, and right ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit.case import Case, parse_case
from lastbit.config import Config
from lastbit.errors import OpError
from lastbit.invariance.properties import properties_of
from lastbit.invariance.rows import worded
from lastbit.kernel import Kernel
from lastbit.ops import op
from lastbit.property_result import PropertyOutcome, PropertyResult
from lastbit.relations import Independent, NotApplicable, extended, shuffled
from lastbit.verify.check import Subject
from lastbit.verify.project import Project, open_project
from lastbit.verify.property_checks import properties_on

CPU = torch.device("cpu")
OF_EXPERTS = (
    *("tokens", "permutation", "token order", "padding", "other tokens"),
    *("relabelling", "zero adapter", "capacity", "shards", "scaling"),
)
ADAPTERS = "".join(
    f" {p}_lora_{part}=fp32[5,{shape}]"
    for p, shapes in {"gate": ("4,24", "16,4"), "up": ("4,24", "16,4"), "down": ("4,16", "24,4")}.items()
    for part, shape in zip("ab", shapes, strict=True)
)
LAYER = parse_case(
    "moe_lora x=fp32[8,24] expert_ids=int64[8,2]:below_4 routing_weights=fp32[8,2]:uniform "
    f"gate_proj=fp32[5,16,24] up_proj=fp32[5,16,24] down_proj=fp32[5,24,16]{ADAPTERS} seed=1"
)
THRESHOLD = 6

Halves = Callable[..., bool]
"""From what a kernel of a layer was given, and the token, slot and expert at hand: whether it sums in two halves."""


@pytest.fixture(scope="module")
def project() -> Project:
    return open_project(Config(folder=""))


def dot(matrix: Tensor, row: Tensor, *, halves: bool) -> Tensor:
    products = matrix.float() * row.float()
    return products[:, ::2].sum(-1) + products[:, 1::2].sum(-1) if halves else products.sum(-1)


def adapted(given: dict[str, Tensor], name: str, expert: int, row: Tensor, scaling: float, *, halves: bool) -> Tensor:
    base = dot(given[f"{name}_proj"][expert], row, halves=halves)
    if f"{name}_lora_a" not in given:
        return base
    middle = dot(given[f"{name}_lora_a"][expert], row, halves=False)
    return base + scaling * dot(given[f"{name}_lora_b"][expert], middle, halves=False)


def layer(
    x, expert_ids, routing_weights, gate_proj, up_proj, down_proj, gate_lora_a=None, gate_lora_b=None, up_lora_a=None,
    up_lora_b=None, down_lora_a=None, down_lora_b=None, *, scaling=1.0, first_expert=0, shards=1, swiglu_limit=math.inf,
    halves: Halves,
):  # fmt: skip
    """Compute pair by pair, each dot of its own; every dot of the gate in two halves where `halves` says so."""
    given = {name: t for name, t in locals().items() if isinstance(t, Tensor)}
    experts, width = gate_proj.shape[:2]
    output, gates = torch.zeros_like(x), x.new_zeros(*expert_ids.shape, width)
    for token, slot in torch.cartesian_prod(*map(torch.arange, expert_ids.shape)).tolist():
        if not 0 <= (e := int(expert_ids[token, slot]) - first_expert) < experts:
            continue
        two = halves(given, token, slot, e, shards)
        gate = gates[token, slot] = adapted(given, "gate", e, x[token], scaling, halves=two)
        up = adapted(given, "up", e, x[token], scaling, halves=False)
        down = adapted(given, "down", e, gate * torch.sigmoid(gate) * up, scaling, halves=False)
        output[token] += routing_weights[token, slot] * down
    return {"output": output, "saved_gate": gates}


def found_of(function: Callable[..., Any], case: Case, project: Project, *names: str) -> dict[str, PropertyResult]:
    planted = Kernel("planted", case.op, "", function)
    subject = Subject(planted, project.op(case.op), CPU)
    return {one.name: one for one in properties_on(subject, case, names)}


def spoilt(given: dict[str, Tensor]) -> bool:
    """Return whether a token that has an expert holds NaN."""
    ids = given["expert_ids"]
    return bool((given["x"].isnan().any(-1) & ((ids >= 0) & (ids < 5)).any(-1)).any())


FAULTS: dict[str, tuple[Halves, set[str]]] = {
    "few tokens are summed otherwise": (lambda g, *_: len(g["x"]) < THRESHOLD, {"tokens"}),
    "more tokens are": (lambda g, *_: len(g["x"]) > 8, {"padding"}),
    "every second token is": (lambda g, token, *_: token % 2 == 1, {"tokens", "permutation"}),
    "the second slot is": (lambda g, token, slot, *_: slot == 1, {"token order"}),
    "NaN in any token shows in all": (lambda g, *_: spoilt(g), {"other tokens"}),
    "expert 0 is": (lambda g, token, slot, expert, shards: expert == 0, {"relabelling", "shards"}),
    "a layer without adapters is": (lambda g, *_: "gate_lora_a" not in g, {"zero adapter"}),
    "more experts are": (lambda g, *_: len(g["gate_proj"]) > 5, {"capacity"}),
    "NaN in any weight shows": (lambda g, *_: bool(g["gate_proj"].isnan().any()), {"capacity"}),
    "two shards are": (lambda g, token, slot, expert, shards: shards == 2, {"shards"}),
    "narrow layers are": (lambda g, *_: g["gate_proj"].shape[1] < 16, {"shards"}),
    "large routing weights are": (lambda g, *_: bool((g["routing_weights"] > 1).any()), {"scaling"}),
}


def test_a_right_layer_holds_every_relation(project: Project) -> None:
    found = found_of(partial(layer, halves=lambda *_: False), LAYER, project, *OF_EXPERTS)
    assert {*found} == {*OF_EXPERTS}
    assert {one.outcome for one in found.values()} == {PropertyOutcome.HOLDS}
    assert found["shards"].pairs == 5 and found["tokens"].pairs > 10 and found["zero adapter"].pairs == 2


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_breaks_what_it_breaks_and_nothing_else(fault: str, project: Project) -> None:
    halves, expected = FAULTS[fault]
    found = found_of(partial(layer, halves=halves), LAYER, project, *OF_EXPERTS)
    assert {name for name, one in found.items() if one.outcome is PropertyOutcome.BROKEN} == expected
    assert all(found[name].legal for name in expected if name not in ("capacity", "other tokens"))


def test_thresholds_of_tokens_are_found(project: Project) -> None:
    few, _ = FAULTS["few tokens are summed otherwise"]
    found = found_of(partial(layer, halves=few), LAYER, project, "tokens")["tokens"]
    assert found.where == f"changes between {THRESHOLD - 1} and {THRESHOLD} tokens"
    assert found.second.startswith(f"moe_lora x=fp32[{THRESHOLD - 1},24] ")


def test_a_kernel_is_not_asked_for_what_it_does_not_take(project: Project) -> None:
    def without_first_expert(x, expert_ids, routing_weights, gate_proj, up_proj, down_proj):
        return layer(x, expert_ids, routing_weights, gate_proj, up_proj, down_proj, halves=lambda *_: False)

    plain = parse_case(str(LAYER).replace(ADAPTERS, ""))
    found = found_of(without_first_expert, plain, project, "relabelling", "zero adapter")
    assert found["relabelling"].outcome is PropertyOutcome.HOLDS and found["relabelling"].pairs == 1
    assert "the kernel does not take first_expert" in found["relabelling"].reason
    assert found["zero adapter"].outcome is PropertyOutcome.NOT_APPLICABLE


def test_numbers_of_fp16_are_not_scaled(project: Project) -> None:
    scaling = next(one for one in project.op("moe_lora").relations if one.name == "scaling")
    tensors = {"routing_weights": torch.ones(1), "x": torch.ones(1, dtype=torch.float16)}
    with pytest.raises(NotApplicable, match="fp16"):
        list(scaling.related(tensors, {}, Random(1)))


def test_adapters_of_zero_beside_infinities_are_not_asked_about(project: Project) -> None:
    special = parse_case(str(LAYER).replace("gate_lora_a=fp32[5,4,24]", "gate_lora_a=fp32[5,4,24]:special"))
    found = found_of(partial(layer, halves=lambda *_: False), special, project, "zero adapter")["zero adapter"]
    assert found.outcome is PropertyOutcome.NOT_APPLICABLE and "gate_lora_a holds numbers beyond" in found.reason


MASK = parse_case("completion_mask ids=int64[20,40]:sequences_3 eos_ids=int64[3]:counting mask_truncated=True seed=1")


def mask(ids, eos_ids, *, mask_truncated=False):
    found = torch.isin(ids, eos_ids)
    kept = (found.cumsum(-1) - found.int()) == 0
    return (kept & found.any(-1, keepdim=True) if mask_truncated else kept).int()


def mask_to_the_last_column(ids, eos_ids, *, mask_truncated=False):
    """Take the last column for the end of a row that was not cut off."""
    found = mask(ids, eos_ids, mask_truncated=mask_truncated)
    return found | (ids[:, -1:] == eos_ids[0]).int() if ids.shape[1] > 40 else found


def mask_of_sorted_ends(ids, eos_ids, *, mask_truncated=False):
    return mask(ids, eos_ids if bool((eos_ids.diff() > 0).all()) else eos_ids[:1], mask_truncated=mask_truncated)


@pytest.mark.parametrize(
    ("function", "broken"), [(mask, ""), (mask_to_the_last_column, "padding"), (mask_of_sorted_ends, "permutation")]
)
def test_relations_of_masks(function: Callable[..., Tensor], broken: str, project: Project) -> None:
    found = found_of(function, MASK, project, "padding", "permutation")
    assert {name for name, one in found.items() if one.outcome is PropertyOutcome.BROKEN} == {*filter(None, [broken])}
    assert not broken or found[broken].legal is False


GROUPED = parse_case("layer_norm_gated x=fp32[9,96] weight=fp32[96] eps=1e-06 group_size=32 is_rms_norm=True seed=1")


def norm(x, weight, *, eps, group_size=None, is_rms_norm=False, halves=lambda *_: False):
    grouped = x.unflatten(-1, (-1, group_size or x.shape[-1]))
    squares = grouped.square()
    total = squares[..., ::2].sum(-1) + squares[..., 1::2].sum(-1) if halves(x, weight) else squares.sum(-1)
    return (grouped * torch.rsqrt(total / grouped.shape[-1] + eps)[..., None]).flatten(-2) * weight


@pytest.mark.parametrize(
    ("halves", "broken"),
    [
        (lambda x, weight: False, set()),
        (lambda x, weight: x.shape[-1] < 96, {"shards"}),
        (lambda x, weight: bool(weight.abs().max() > 4), {"scaling"}),
    ],
)
def test_relations_of_norms_over_groups(halves: Callable[..., bool], broken: set[str], project: Project) -> None:
    found = found_of(partial(norm, halves=halves), GROUPED, project, "shards", "scaling")
    assert {name for name, one in found.items() if one.outcome is PropertyOutcome.BROKEN} == broken
    assert all(found[name].legal for name in broken)


def test_properties_of_one_name_are_one(project: Project) -> None:
    names = [*properties_of(project.op("completion_mask"))]
    assert len({*names}) == len(names) and {"rows", "padding", "permutation"} <= {*names}


def test_independent_things_are_inputs() -> None:
    things = Independent("tokens", "", ("x", "y"), ("output",))
    with pytest.raises(OpError, match="'y'"):

        @op(rows=(), relations=(things,))
        def misnamed(x, *, contract, stage) -> None: ...


def test_what_relations_are_made_of() -> None:
    assert all(shuffled(n, Random(seed)) != [*range(n)] for n in (2, 3, 8) for seed in range(20))
    ids = extended(torch.zeros(2, 3, dtype=torch.int32), 1, dim=1)
    assert ids.tolist() == [[0, 0, 0, -1]] * 2
    assert extended(torch.zeros(1), 2).isnan().tolist() == [False, True, True]


def declared(project: Project) -> list[tuple[Kernel, Case]]:
    """Return the kernels in PyTorch, each with its first case for properties."""
    found = []
    for kernel in project.kernels():
        groups = [g for g in project.groups(kernel.op, kernel.accepts, small=True) if g.properties]
        if kernel.name.startswith("eager"):
            found += [(kernel, group.examples[0]) for group in groups]
    return found


def test_kernels_in_pytorch_hold_what_they_declare(project: Project) -> None:
    pairs = declared(project)
    assert len(pairs) > 10
    for kernel, case in pairs:
        names = [name for name in kernel.invariant if name in properties_of(project.op(kernel.op))]
        found = properties_on(Subject(kernel, project.op(kernel.op), CPU), case, names)
        assert not [one for one in found if one.outcome is PropertyOutcome.BROKEN], kernel.name
        assert any(one.outcome is PropertyOutcome.HOLDS for one in found), kernel.name


def test_words_of_rows_are_those_of_tokens() -> None:
    said = "rows 3 to 5 in a launch of their own; x=bf16[4,8]:rows changes between 2 and 3 rows; row 1 alone"
    named = "tokens 3 to 5 in a launch of their own; x=bf16[4,8]:rows changes between 2 and 3 tokens; token 1 alone"
    assert worded(said, "tokens") == named
