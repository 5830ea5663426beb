"""Shards of MoE-LoRA: what is cut and made whole again is what it was, and the harness finds who does it wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import unwrap
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from lastbit.config import Config
from lastbit.judging.problem import Problem
from lastbit.numerics.formats import BF16 as BF16_FORMAT
from lastbit.numerics.formats import cast
from lastbit.numerics.quantized import dequantized
from lastbit.result import Verdict
from lastbit.verify.project import open_project
from tests.judged import assert_kept, judged
from tests.quantized_weights import every_storage, stored
from tests.rms_norm_contract import BF16, DEVICE, FLOAT, LOADED, assert_bits, needs_device, normals

pytestmark = needs_device

KERNELS = {k.name: k for k in LOADED if k.op in ("moe_lora", "moe_lora_backward")}
OPS = {op: KERNELS[f"triton[{op}+fused]"] for op in ("moe_lora", "moe_lora_backward")}
BY_NAME = unwrap(OPS["moe_lora"].call).__globals__
shard, merge, LayerWeights = (BY_NAME[name] for name in ("shard", "merge", "LayerWeights"))
add, ShardPart, PARTS, DIMS = (merge.__globals__[name] for name in ("add", "ShardPart", "PARTS", "DIMS"))
WHOLE = [name for name, part in PARTS.items() if part is not ShardPart.ADDED]
SUMS = [name for name, part in PARTS.items() if part is ShardPart.ADDED]
TOKENS, SLOTS, EXPERTS, HIDDEN, WIDTH, RANK = 3, 2, 3, 8, 12, 2

sizes = st.integers(1, 4)


def numbered(*shape: int) -> Tensor:
    """Every element is another number."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)


@st.composite
def whole_tensors(draw: st.DrawFn) -> tuple[str, Tensor, int]:
    """Draw the name of a tensor, a value of it with any strides, and a number of shards that divides it."""
    name, parts = draw(st.sampled_from(WHOLE)), draw(sizes)
    shape = [draw(sizes) for _ in range(3)]
    if PARTS[name] is ShardPart.OWN and parts > 1:
        shape.append(parts)
    if PARTS[name] in DIMS:
        shape[DIMS[PARTS[name]]] *= parts
    order = draw(st.permutations(range(len(shape))))
    moved = numbered(*(shape[dim] for dim in order))
    return name, moved.permute(*(order.index(dim) for dim in range(len(shape)))), parts


def pieces(name: str, tensor: Tensor, parts: int) -> list[dict[str, Tensor]]:
    return [shard({name: tensor}, part, parts) for part in range(parts)]


@given(whole_tensors())
def test_merged_shards_are_what_they_were_cut_from(drawn):
    name, tensor, parts = drawn
    assert torch.equal(merge(pieces(name, tensor, parts))[name], tensor)


@given(whole_tensors())
def test_shards_are_views_and_no_two_have_an_element(drawn):
    name, tensor, parts = drawn
    for part, piece in enumerate(pieces(name, tensor, parts)):
        piece[name].fill_(-1 - part)
    counts = [int((tensor == -1 - part).sum()) for part in range(parts)]
    shared = PARTS[name] is ShardPart.SAME
    assert counts == ([0] * (parts - 1) + [tensor.numel()] if shared else [tensor.numel() // parts] * parts)


@pytest.mark.parametrize("name", [n for n in PARTS if PARTS[n] in DIMS])
def test_rows_are_blocks_and_columns_are_slices_of_every_row(name):
    second = shard({name: numbered(2, 6, 6)}, 1, 3)[name][1]
    by_kind = {ShardPart.ROWS: ((2, 6), [48, 49, 50]), ShardPart.COLUMNS: ((6, 2), [38, 39, 44])}
    assert (second.shape, second.flatten()[:3].tolist()) == by_kind[PARTS[name]]


@given(st.sampled_from(SUMS), st.lists(st.lists(st.integers(-64, 64), min_size=3, max_size=3), min_size=1, max_size=5))
def test_terms_are_added_in_fp32_and_rounded_once(name, terms):
    """Sixteenths around 200, which bf16 does not hold."""
    values = [torch.tensor(term, dtype=FLOAT) / 16 + 200 for term in terms]
    exact = torch.stack(values).double().sum(0)
    assert_bits(merge([{name: v} for v in values], {name: BF16})[name], cast(exact, BF16), name)
    assert_bits(merge([{name: v} for v in values])[name], exact.float(), name)


@given(st.lists(st.sampled_from([0.0, -0.0, 1.5, float("inf"), float("nan")]), min_size=2, max_size=2))
def test_adding_a_zero_changes_not_even_the_sign_of_a_zero(values):
    total, term = (torch.tensor([v]) for v in values)
    assert_bits(add(total, term), total if values[1] == 0 else total + term, "sum")


@every_storage
def test_a_shard_of_codes_stands_for_the_slice_of_the_weights(storage):
    """Codes, scales and zero points that are cut one by one, and a weight that is cut as one."""
    raw, values = {}, {}
    for seed, (side, shape) in enumerate({"gate": (128, 64), "up": (128, 64), "down": (64, 128)}.items()):
        found = stored(storage, torch.randn(2, *shape, generator=torch.Generator().manual_seed(seed)))
        raw |= {f"{side}_{n}": t for n, t in zip(("proj", "scale", "zero"), found, strict=True) if t is not None}
        values[f"{side}_proj"] = dequantized(*found, fmt=BF16_FORMAT).value
    whole, cut = weights_of(raw, 64), [shard(raw, part, 2) for part in range(2)]
    for part in range(2):
        one_by_one, as_one = weights_of(cut[part], 64), shard(whole, part, 2)
        for name, value in shard(values, part, 2).items():
            for weight in (one_by_one[name], as_one[name]):
                assert weight.shape == value.shape
                assert all(torch.equal(weight[e].double(), value[e]) for e in range(2)), name
    for name, tensor in merge(cut).items():
        assert torch.equal(tensor, raw[name]), name


def weights_of(raw: Mapping[str, Tensor], hidden: int) -> dict[str, Any]:
    """Return the base weights of raw codes, as kernels read them."""
    x = torch.zeros(1, hidden, dtype=BF16)
    return LayerWeights(**raw).operands(x)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("gate_lora_b", numbered(2, 10, 3), "gate_lora_b has 10 rows in dimension 1, which 4 shards do not divide"),
        ("intermediate", torch.ones(2, 2, 10), "intermediate has 10 columns in dimension 2"),
        ("down_proj", numbered(2, 3, 6), "down_proj has 6 words of codes in dimension 2, which 4 shards"),
        ("down_scale", torch.ones(2, 3, 2), "down_scale has 2 groups of columns in dimension 2"),
        ("output", torch.ones(3, 4), "output is a sum over the shards, of which there are no parts"),
        ("weights", torch.ones(3, 4), "'weights' is no tensor of moe_lora or moe_lora_backward; known are gate_proj"),
    ],
)
def test_what_cannot_be_cut_is_refused(name, tensor, message):
    with pytest.raises(ValueError, match=message):
        shard({name: tensor}, 0, 4)


def test_what_cannot_be_merged_is_refused():
    with pytest.raises(ValueError, match="part=2 of parts=2 does not exist"):
        shard({}, 2, 2)
    with pytest.raises(ValueError, match="shard 1 has saved_up, but shard 0 has output"):
        merge([{"output": torch.ones(1)}, {"saved_up": torch.ones(1)}])
    with pytest.raises(TypeError, match=r"output of a shard is torch\.bfloat16; terms must stay in fp32"):
        merge([{"output": torch.ones(1)}, {"output": torch.ones(1, dtype=BF16)}], {"output": BF16})


# The table is that of the reference


def problem(op: str, dtype: torch.dtype = BF16) -> dict[str, Any]:
    """Ordinary arguments of either op, with matrices of about unit gain and a pair that no expert takes."""
    shapes = {"x": (TOKENS, HIDDEN), "gate_proj": (EXPERTS, WIDTH, HIDDEN), "up_proj": (EXPERTS, WIDTH, HIDDEN)}
    shapes["down_proj"] = (EXPERTS, HIDDEN, WIDTH)
    for name in ("gate", "up", "down"):
        outputs, inputs = shapes[f"{name}_proj"][1:]
        shapes |= {f"{name}_lora_a": (EXPERTS, RANK, inputs), f"{name}_lora_b": (EXPERTS, outputs, RANK)}
    if op == "moe_lora_backward":
        saved = dict.fromkeys(("saved_gate", "saved_up", "intermediate"), (TOKENS, SLOTS, WIDTH))
        shapes |= {"grad_output": (TOKENS, HIDDEN), **saved}
    made = {name: normals(*s, seed=seed) / s[-1] ** (len(s) / 2 - 1) for seed, (name, s) in enumerate(shapes.items())}
    ids = torch.tensor([[0, 1], [2, 2], [1, -1]], device=DEVICE)
    weights = normals(TOKENS, SLOTS, seed=99)
    return {n: t.to(dtype) for n, t in made.items()} | {"expert_ids": ids, "routing_weights": weights, "scaling": 0.75}


@pytest.mark.parametrize("op", OPS)
def test_the_reference_has_the_shards_where_the_table_has_them(op):
    """A stage that each shard has of its own has a dimension more; all others have the shapes of one shard."""
    reference, case = open_project(Config(folder="")).op(op), problem(op)
    params = {"scaling": case.pop("scaling")}
    one, three = (
        {
            name: tuple(stage.shape)
            for name, stage in Problem(reference, contract, case, params | more).evaluate().stages.items()
        }
        for contract, more in ((reference.contract("fused"), {"shards": n}) for n in (1, 3))
    )
    known = {name: PARTS[name] for name in one.keys() & PARTS.keys()}
    assert known.keys() >= set(OPS[op].stages)
    assert {n for n in known if three[n] == (*one[n], 3)} == {n for n, part in known.items() if part is ShardPart.OWN}
    assert {n for n in known if three[n] == one[n]} == {n for n, part in known.items() if part is not ShardPart.OWN}


# Planted faults, with the numbers of the list of known bugs: each is found at the stage that it spoils

Cut = Callable[[Tensor, int, int, Tensor], Tensor]
Made = Callable[[list[Tensor], Tensor], Tensor]


def cut_as_contiguous_rows(whole: Tensor, part: int, parts: int, right: Tensor) -> Tensor:
    return whole.reshape(len(whole), parts, -1)[:, part].reshape(right.shape)


def cut_at_offsets_of_a_shard(whole: Tensor, part: int, parts: int, right: Tensor) -> Tensor:
    """Expert e starts e · I/P rows after the first, not e · I."""
    rows = whole.shape[1] // parts
    return whole.flatten(0, 1)[part * rows :][: len(whole) * rows].reshape(right.shape)


def not_cut(whole: Tensor, part: int, parts: int, right: Tensor) -> Tensor:
    return whole


def first_part(parts: list[Tensor], right: Tensor) -> Tensor:
    return parts[0].to(right.dtype)


def last_part(parts: list[Tensor], right: Tensor) -> Tensor:
    return parts[-1].to(right.dtype)


def in_the_wrong_order(parts: list[Tensor], right: Tensor) -> Tensor:
    dim = next(dim for dim, size in enumerate(right.shape) if parts[0].shape[dim] != size)
    return torch.cat(parts[::-1], dim)


def at_offsets_of_a_shard(parts: list[Tensor], right: Tensor) -> Tensor:
    """Let the experts of a shard follow one another, as in a buffer of its own, from where its first one belongs."""
    buffer = torch.zeros_like(right).flatten(0, 1)
    for number, part in enumerate(parts):
        buffer[number * part.shape[1] :][: part.shape[0] * part.shape[1]] = part.flatten(0, 1)
    return buffer.reshape(right.shape)


@dataclass(frozen=True)
class Fault:
    """What is done wrong with some tensors of an op, and the stages that are wrong given what they were made from."""

    name: str
    op: str
    tensors: tuple[str, ...]
    found: tuple[str, ...]
    cut: Cut | None = None
    made: Made | None = None

    def shard(self, tensors: Mapping[str, Any], part: int, parts: int) -> dict[str, Any]:
        own = shard(tensors, part, parts)
        return own | {n: self.cut(tensors[n], part, parts, own[n]) for n in self.tensors if self.cut and n in own}

    def merge(self, shards: list[Mapping[str, Tensor]], dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        whole = merge(shards, dtypes)
        made = {n: [one[n] for one in shards] for n in self.tensors if self.made and n in whole}
        return whole | {n: self.made(parts, whole[n]) for n, parts in made.items()}

    def __str__(self) -> str:
        return f"{self.name} {self.tensors[0]}: {self.op}"


FORWARD, BACKWARD = OPS
ADDED = tuple(n for n in SUMS if n.startswith("grad"))
CUT = tuple(n for n, part in PARTS.items() if part in DIMS)
MIDDLE, OUTPUT, GRAD = "down_lora_mid", "expert_output", "grad_intermediate"
FAULTS = [
    Fault("M2", FORWARD, CUT, (MIDDLE, OUTPUT), cut=not_cut, made=first_part),
    Fault("M15", FORWARD, ("gate_lora_b",), ("gate",), cut=cut_at_offsets_of_a_shard),
    Fault("M15", BACKWARD, ("up_lora_b",), ("grad_up_mid",), cut=cut_at_offsets_of_a_shard),
    Fault("M17", BACKWARD, ("grad_up_lora_b",), ("grad_up_lora_b",), made=at_offsets_of_a_shard),
    Fault("M41", BACKWARD, ADDED, ADDED, made=last_part),
    Fault("M50", FORWARD, ("output",), ("output",), made=first_part),
    Fault("M51", FORWARD, ("down_proj",), (OUTPUT,), cut=cut_as_contiguous_rows),
    Fault("M51", BACKWARD, ("down_proj",), (GRAD, OUTPUT), cut=cut_as_contiguous_rows),
    Fault("M51", FORWARD, ("down_lora_a",), (MIDDLE,), cut=cut_as_contiguous_rows),
    Fault("M51", BACKWARD, ("down_lora_a",), (GRAD, MIDDLE), cut=cut_as_contiguous_rows),
    Fault("M52", BACKWARD, ("grad_gate_lora_b",), ("grad_gate_lora_b",), made=in_the_wrong_order),
    Fault("M52", BACKWARD, ("grad_down_lora_a",), ("grad_down_lora_a",), made=in_the_wrong_order),
]


def plant(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    places = [unwrap(OPS[fault.op].call).__globals__]
    if fault.op == BACKWARD:
        places.append(places[0]["shards_of"].__globals__)
    for place in places:
        for name in {"shard", "merge"} & place.keys():
            monkeypatch.setitem(place, name, getattr(fault, name))


@pytest.mark.parametrize("op", OPS)
def test_shards_keep_the_contract(op):
    case, one = problem(op), OPS[op]
    assert_kept(op, one.call(**case, shards=2, stages=one.stages), contract="fused", **case, shards=2)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_faults_are_found_at_the_stage_that_they_spoil(fault, monkeypatch):
    plant(fault, monkeypatch)
    case, one = problem(fault.op), OPS[fault.op]
    actual = one.call(**case, shards=2, stages=one.stages)
    judgement = judged(fault.op, actual, contract="fused", **case, shards=2)
    assert judgement.verdict is Verdict.FAILED
    stages = judgement.stages
    assert {stage.name for stage in stages if stage.isolated and stage.isolated.outside} == set(fault.found)
    assert any(stage.result and stage.cumulative.outside for stage in stages)  # so that results alone show it
