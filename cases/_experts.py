"""Tensors of mixtures of experts: sizes, routing, and regimes that fit together.

`EXACT` makes nearly every dot exact in fp32 in any order, with all roundings visible: see `harness/inputs/regimes.py`.
`BALANCED` makes every intermediate value of the size of one, the adapters' share included. `ONE_SIGN` does so too, and
the terms of every dot have one sign, so that it is decided at any width: see `harness/inputs/regimes.py`. An
intermediate value has the sign of its gate, which silu keeps, times that of its up.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from lastbit import (
    DRAWN,
    Choices,
    Chosen,
    Option,
    Param,
    TensorSpec,
    chosen_tensor,
    layouts_like,
    least_rows,
    tensor_choices,
    widths,
    widths_with,
)
from lastbit.cases._expert_variants import LayerVariant

SHAPES = tomllib.loads((Path(__file__).parent / "shapes.toml").read_text())["moe_lora"]
PROJECTIONS = ("gate", "up", "down")
REAL_KINDS = ("exact", "one_sign")
"""Kinds of values of real layers, whose dots are too long for random numbers to decide anything."""

_ROUTING_WEIGHTS = ("uniform", "ones", "quarters", "scale_random", "scale_pow2", "normal")
_ACTIVATIONS = ("normal", "rows", "outlier", "sparse", "zero_rows", "tiny", "huge", "special")
_ROWS, _MATRICES = layouts_like(2, 64), layouts_like(2, 64, 64)

Regimes = Mapping[str, tuple[str, ...]]

BALANCED: Regimes = {
    "x": _ACTIVATIONS,
    "routing_weights": (*_ROUTING_WEIGHTS, "special"),
    **{f"{p}_{part}": ("fan_in",) for p in PROJECTIONS for part in ("proj", "lora_a", "lora_b")},
}
EXACT: Regimes = {
    "x": ("few",),
    "routing_weights": _ROUTING_WEIGHTS,
    "gate_proj": ("fractions",),
    "gate_lora_a": ("fractions",),
    "gate_lora_b": ("quarters",),
    "up_proj": ("signs", "integers"),
    "up_lora_a": ("signs", "fractions"),
    "up_lora_b": ("sparse_signs", "quarters"),
    **{f"down_{part}": ("sparse_signs",) for part in ("proj", "lora_a", "lora_b")},
}
LABELS: Mapping[str, str] = {
    "gate_proj": "gate,hidden",
    "gate_lora_a": "rank,hidden",
    "gate_lora_b": "gate,rank",
    "up_proj": "up,hidden",
    "up_lora_a": "rank,hidden",
    "up_lora_b": "up,rank",
    "down_proj": "output,gate*up",
    "down_lora_a": "rank,gate*up",
    "down_lora_b": "output,rank",
}
"""Weight → the signs of its rows and columns, with which all terms of a dot have one sign, forward and backward."""
ONE_SIGN: Regimes = {
    "x": ("one_sign(,hidden)",),
    "routing_weights": ("one_sign", "ones", "quarters", "scale_random", "scale_pow2"),
    **{name: (f"one_sign_fan_in({labels})",) for name, labels in LABELS.items()},
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer: tokens, slots, experts, hidden, intermediate, rank."""

    tokens: int
    slots: int
    experts: int
    hidden: int
    intermediate: int
    rank: int

    @property
    def pairs(self) -> tuple[int, int]:
        return self.tokens, self.slots

    def matrices(self) -> dict[str, tuple[int, int, int]]:
        """Map the base weights to their shapes."""
        up = (self.experts, self.intermediate, self.hidden)
        return {"gate_proj": up, "up_proj": up, "down_proj": (self.experts, self.hidden, self.intermediate)}

    def adapters(self) -> dict[str, tuple[int, int, int]]:
        """Map the adapters to their shapes."""
        shapes: dict[str, tuple[int, int, int]] = {}
        for name, (experts, outputs, inputs) in self.matrices().items():
            shapes[name.replace("proj", "lora_a")] = (experts, self.rank, inputs)
            shapes[name.replace("proj", "lora_b")] = (experts, outputs, self.rank)
        return shapes


@st.composite
def sizes(draw: st.DrawFn, variant: LayerVariant, chosen: Chosen, *, small: bool) -> Sizes:
    """Draw sizes that the shards divide, and with them the groups of codes."""
    hidden, intermediate, rank, tokens, experts = (96, 64, 16, 24, 4) if small else (2048, 1024, 64, 64, 8)
    if variant.kind == "balanced" or variant.scheme:  # of random numbers and codes, longer dots decide nothing
        hidden, intermediate = min(hidden, 256), min(intermediate, 256)
    multiple = (chosen["shards"] or 1) * variant.multiple

    def dimension(most: int) -> int:
        return draw(widths(1, most)) if multiple == 1 else multiple * draw(st.integers(1, most // multiple))

    residue = chosen.get("x columns % 16")
    rows = {choice: option for choice, option in chosen.items() if not choice.partition(" ")[0].endswith("_proj")}
    matrices = {choice: option for choice, option in chosen.items() if choice not in rows}
    fewest_tokens, *fewest_slots = least_rows(rows)
    return Sizes(
        tokens=draw(st.integers(fewest_tokens, tokens)),
        slots=draw(st.integers(max(fewest_slots, default=1), 4 if small else 8)),
        experts=draw(st.integers(least_rows(matrices)[0], experts)),
        hidden=dimension(hidden) if residue is None else draw(widths_with(residue, 1, hidden, 16)),
        intermediate=dimension(intermediate),
        rank=draw(st.integers(1, rank)),
    )


def real_sizes(*, small: bool) -> Iterator[Sizes]:
    """Yield the layers of real models with eight experts at most; `small` takes a 64th of each dimension."""
    for shape in SHAPES:
        cut = 64 if small else 1
        yield Sizes(
            tokens=shape["tokens"] if not small else min(4, shape["tokens"]),
            slots=shape["slots"],
            experts=min(8, shape["experts"]),
            hidden=shape["hidden"] // cut,
            intermediate=shape["intermediate"] // cut,
            rank=shape["rank"],
        )


def choices(
    variant: LayerVariant, regimes: Regimes, scalings: tuple[float, ...], limits: tuple[float, ...] = ()
) -> Choices:
    """Map each tensor and parameter of a layer to its options; `limits` are those of SwiGLU."""
    dtype, codes = variant.dtype, variant.codes
    found: dict[str, tuple[Option, ...]] = {}
    found |= tensor_choices("x", (dtype,), regimes["x"], _ROWS)
    found |= tensor_choices("expert_ids", ("int64", "int32"), ("experts_N", "below_N", "loads_N"), _ROWS)
    found |= tensor_choices("routing_weights", ("fp32",), regimes["routing_weights"], _ROWS)
    for name in PROJECTIONS:
        base = f"{name}_proj"
        if codes is None:
            found |= tensor_choices(base, (dtype,), regimes[base], _MATRICES)
        else:
            found |= tensor_choices(base, (codes.dtype,), ("bits",))
            scales = codes.scales[:1] if (dtype, codes.scale) == ("fp16", "uint8") else codes.scales  # 2¹²⁵ is infinite
            found |= tensor_choices(f"{name}_scale", (codes.scale,), scales)
        for adapter in (f"{name}_lora_a", f"{name}_lora_b") if variant.adapters else ():
            found |= tensor_choices(adapter, (dtype,), regimes[adapter], _MATRICES)
    if variant.multiple == 1 and 1 in variant.shards:
        found |= {"x columns % 16": tuple(range(16))}
    parts = tuple(None if count == 1 else count for count in variant.shards)
    if limits and (variant.kind == "balanced" or 1 not in variant.shards):  # where gates are limited, less is seen
        found |= {"swiglu_limit": (None, *limits)}
    found |= {"scaling": scalings} if variant.adapters else {}
    return {**found, "first_expert": (None, DRAWN), "shards": parts}


@st.composite
def any_of(draw: st.DrawFn, own: Choices) -> Chosen:
    """Draw an option of each choice."""
    return {choice: draw(st.sampled_from(options)) for choice, options in own.items()}


def chosen_params(chosen: Chosen) -> dict[str, Any]:
    """Return scaling, the number of shards if there are several, and the limit of SwiGLU; None leaves one out."""
    return {name: chosen.get(name) for name in ("scaling", "shards", "swiglu_limit")}


def routing(size: Sizes, chosen: Chosen) -> tuple[list[TensorSpec], dict[str, Param]]:
    """Make ids and weights of the experts of each token, and the first expert where it is not number 0.

    Where there is a first expert, as many others come before it, which are elsewhere.
    """
    elsewhere = chosen["first_expert"] == DRAWN
    known = size.experts * (2 if elsewhere else 1)
    names = ("expert_ids", "routing_weights")
    specs = [chosen_tensor(name, chosen, size.pairs, known) for name in names]
    return specs, {"first_expert": size.experts} if elsewhere else {}


@st.composite
def weights(draw: st.DrawFn, size: Sizes, variant: LayerVariant, chosen: Chosen) -> list[TensorSpec]:
    """Draw base weights, as numbers in any layout or as codes; adapters, if any; scales and zero points.

    No shard cuts a group.
    """
    codes, shards = variant.codes, chosen["shards"] or 1
    base, scales = [], []
    for name, shape in size.matrices().items():
        if codes is None:
            base.append(chosen_tensor(name, chosen, shape))
            continue
        *leading, inputs = shape
        base.append(chosen_tensor(name, chosen, (*leading, inputs // codes.per_element)))
        group = draw(st.sampled_from([g for g in codes.groups if inputs % (g * shards) == 0])) if codes.groups else None
        grouped = (*leading, inputs // group) if group else tuple(leading)
        scales.append(chosen_tensor(name.replace("proj", "scale"), chosen, grouped))
        if codes.zero:
            scales.append(TensorSpec(name.replace("proj", "zero"), "int8", grouped, regime="below_16"))
    shapes = size.adapters() if variant.adapters else {}
    adapters = [chosen_tensor(name, chosen, shape) for name, shape in shapes.items()]
    return [*base, *adapters, *scales]


def real_routing(size: Sizes, kind: str) -> Iterator[TensorSpec]:
    """Yield uniform routing of a real layer, with weights in (-1, 1), or of one sign."""
    yield TensorSpec("expert_ids", "int64", size.pairs, regime=f"below_{size.experts}")
    yield TensorSpec("routing_weights", "fp32", size.pairs, regime="one_sign" if kind == "one_sign" else "uniform")


def real_weights(size: Sizes, regimes: Regimes, *, adapters: bool) -> Iterator[TensorSpec]:
    """Yield weights of a real layer, not quantized."""
    for name, shape in (size.matrices() | (size.adapters() if adapters else {})).items():
        yield TensorSpec(name, "bf16", shape, regime=regimes[name][0])
