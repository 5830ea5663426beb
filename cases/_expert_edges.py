"""Edges of mixtures of experts, forward and backward: fixed cases for what a kernel may branch on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from lastbit import LAYOUTS, Case, Param, TensorSpec
from lastbit.cases._expert_variants import QUANTIZED
from lastbit.cases._experts import Regimes, Sizes


@dataclass(frozen=True)
class LayerEdge:
    """A case of a layer, and what is not usual about it.

    Attributes:
        size: of the layer.
        ids: regime of the expert ids.
        params: parameters besides a scaling of 2, where there are adapters.
        kind: `exact` or `balanced`: which regimes the other tensors have.
        dtype: of the activations.
        ids_dtype: of the expert ids.
        scheme: of the base weights.
        regimes: name → regime of tensors that have another one.
        layouts: name → layout of tensors that are not contiguous.
        strides: name → strides that no layout has.
        fused: gate and up, and what is A of their adapters, are halves of one tensor of each expert.
        old: there are gradients to add to.
        adapters: there are some; the rank is nothing without.
    """

    size: Sizes
    ids: str
    params: Mapping[str, Param] = field(default_factory=dict)
    kind: str = "exact"
    dtype: str = "bf16"
    ids_dtype: str = "int64"
    scheme: str = ""
    regimes: Mapping[str, str] = field(default_factory=dict)
    layouts: Mapping[str, str] = field(default_factory=dict)
    strides: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    fused: bool = False
    old: bool = False
    adapters: bool = True

    def pairs(self) -> Iterator[TensorSpec]:
        """Yield ids and weights of the experts of each token."""
        yield TensorSpec("expert_ids", self.ids_dtype, self.size.pairs, regime=self.ids)
        yield TensorSpec("routing_weights", "fp32", self.size.pairs, regime="quarters")

    def weights(self, regimes: Regimes) -> Iterator[TensorSpec]:
        """Yield base weights, as numbers or as codes with their scales, and adapters if there are any."""
        for name, shape in self.size.matrices().items():
            if not self.scheme:
                yield TensorSpec(name, self.dtype, shape, regime=regimes[name][0])
            else:
                yield from self._codes(name, shape)
        for name, shape in self.size.adapters().items() if self.adapters else ():
            yield TensorSpec(name, self.dtype, shape, regime=regimes[name][0])

    def _codes(self, name: str, shape: tuple[int, int, int]) -> Iterator[TensorSpec]:
        codes = QUANTIZED[self.scheme]
        *leading, inputs = shape
        grouped = (*leading, inputs // codes.groups[0]) if codes.groups else tuple(leading)
        yield TensorSpec(name, codes.dtype, (*leading, inputs // codes.per_element), regime="bits")
        yield TensorSpec(name.replace("proj", "scale"), codes.scale, grouped, regime=codes.scales[0])
        if codes.zero:
            yield TensorSpec(name.replace("proj", "zero"), "int8", grouped, regime="below_16")

    def case(self, op: str, tensors: list[TensorSpec], seed: int) -> Case:
        """Make the case of these tensors, and change what the edge changes."""
        scaling: dict[str, Param] = {"scaling": 2.0} if self.adapters else {}
        return Case(op, tuple(map(self._changed, tensors)), {**scaling, **self.params}, seed)

    def _changed(self, spec: TensorSpec) -> TensorSpec:
        spec = replace(spec, regime=self.regimes.get(spec.name, spec.regime))
        if spec.name in self.strides:
            return replace(spec, strides=self.strides[spec.name])
        if self.fused and spec.name in _FUSED:
            _, rows, columns = spec.shape
            offset = rows * columns if spec.name.startswith("up") else 0
            strides = (2 * rows * columns, columns, 1)
            return replace(spec, strides=strides, offset=offset, memory=spec.name.replace("up", "gate"))
        layout = LAYOUTS[self.layouts.get(spec.name, "contiguous")](spec.shape, spec.dtype)
        if layout is None:
            raise ValueError(f"layout {self.layouts[spec.name]!r} does not apply to {spec}")
        return replace(spec, strides=layout.strides, offset=layout.offset)


_WEIGHTS = tuple(f"{p}_{part}" for p in ("gate", "up", "down") for part in ("proj", "lora_a", "lora_b"))
_FUSED = ("gate_proj", "up_proj", "gate_lora_a", "up_lora_a")
_SCALES = ("gate_scale", "up_scale", "down_scale")
_ROWS = ("x", "expert_ids", "routing_weights", "grad_output", "saved_gate", "saved_up", "intermediate")
_OLD = tuple(f"old_{name}" for name in _WEIGHTS if "lora" in name)

EDGES = (
    # Experts with 0, 1, 16, 17, 32 and, of 64, what is left: in blocks of 16.
    LayerEdge(Sizes(64, 2, 8, 24, 16, 1), "loads_8", dtype="fp16", ids_dtype="int32"),
    # Experts with 0, 1, 16, 17, 32, 64, 128 and the rest: in blocks of 64; no share of the adapters.
    LayerEdge(
        Sizes(70, 4, 8, 16, 16, 2), "loads_8", {"scaling": 0.0}, kind="balanced",
        regimes={"gate_lora_b": "special", "up_lora_b": "special"},
    ),
    # One expert of four has all pairs; every tensor has columns with a stride; as many of everything as of the rest.
    LayerEdge(
        Sizes(16, 16, 4, 16, 16, 16), "ones", {"scaling": -0.75}, old=True,
        layouts=dict.fromkeys((*_ROWS, *_WEIGHTS, *_OLD), "columns_first"),
    ),
    # No expert has any pair: all are elsewhere.
    LayerEdge(
        Sizes(5, 3, 2, 24, 16, 4), "zeros", {"first_expert": 2}, regimes={"routing_weights": "special"}, old=True
    ),
    # No tokens.
    LayerEdge(Sizes(0, 2, 3, 16, 16, 4), "zeros", old=True),
    # One of each.
    LayerEdge(Sizes(1, 1, 1, 1, 1, 1), "zeros", dtype="fp16"),
    # Wider than any block; every second element of every tensor.
    LayerEdge(
        Sizes(1, 2, 2, 1030, 4, 2), "below_2", {"shards": 2},
        layouts=dict.fromkeys((*_ROWS, *_WEIGHTS, *_OLD), "every_second"),
    ),
    # As many slots as are added one after the other; ids beyond 32 bits, all to be skipped or not.
    LayerEdge(Sizes(3, 64, 5, 16, 16, 4), "experts_5", kind="balanced", regimes={"routing_weights": "uniform"}),
    # One token for all, one slot for all, and the same weights for all experts; a rank above any block.
    LayerEdge(
        Sizes(20, 3, 3, 24, 16, 70), "below_3", layouts=dict.fromkeys((*_ROWS, *_WEIGHTS), "expanded"),
        strides={"routing_weights": (1, 0)},
    ),
    # NaN and infinities in weights, adapters and routing weights; sums that overflow.
    LayerEdge(
        Sizes(20, 2, 4, 24, 40, 4), "below_4", kind="balanced",
        regimes=dict.fromkeys(("gate_proj", "up_lora_b", "down_lora_a", "routing_weights"), "special"),
    ),
    LayerEdge(
        Sizes(9, 2, 2, 24, 16, 4), "below_2", kind="balanced", dtype="fp16", old=True,
        regimes=dict.fromkeys(("up_proj", "down_proj", "grad_output", *_OLD), "largest"),
    ),
    # Codes: scales and zero points with strides of their own, and scales that are zero, infinite or NaN.
    LayerEdge(
        Sizes(4, 2, 2, 64, 32, 4), "below_2", scheme="int8",
        layouts={"gate_proj": "columns_first", "up_proj": "every_second", "up_scale": "columns_first"},
        regimes={"gate_scale": "special_columns", "down_scale": "zeros"},
    ),
    LayerEdge(
        Sizes(4, 2, 3, 32, 64, 4), "below_3", scheme="int4_asymmetric",
        layouts={"gate_scale": "columns_first", "up_zero": "every_second", "down_proj": "padded", "down_zero": "half"},
    ),
    LayerEdge(
        Sizes(4, 2, 2, 64, 64, 4), "below_2", scheme="mxfp4", dtype="fp16",
        layouts=dict.fromkeys(_SCALES, "every_second"), regimes={"gate_scale": "around_3", "down_scale": "around_127"},
    ),
    # No adapters: numbers, with a limit that cuts, in shards; and codes.
    LayerEdge(
        Sizes(19, 3, 3, 24, 40, 1), "below_4", {"swiglu_limit": 0.5, "shards": 2}, kind="balanced", adapters=False,
        layouts={"up_proj": "columns_first", "down_proj": "padded"},
    ),
    LayerEdge(
        Sizes(6, 2, 3, 64, 32, 1), "below_4", {"first_expert": 1}, scheme="int4_asymmetric", dtype="fp16",
        adapters=False, layouts={"gate_proj": "columns_first", "up_scale": "every_second"},
    ),
    # More than 64 pairs per expert, in blocks of 128: one of two has all, and columns beyond a tile; nothing in
    # vectors; weights whose rows are contiguous along the other dimension; codes.
    LayerEdge(Sizes(140, 1, 2, 136, 16, 8), "ones"),
    LayerEdge(Sizes(130, 1, 1, 133, 17, 5), "zeros", dtype="fp16"),
    LayerEdge(
        Sizes(66, 1, 1, 16, 136, 8), "zeros",
        layouts=dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "columns_first"),
    ),
    LayerEdge(
        Sizes(4, 2, 2, 16, 24, 8), "below_2",
        layouts=dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "columns_first"),
    ),
    LayerEdge(Sizes(70, 1, 1, 32, 64, 4), "zeros", scheme="int4_asymmetric"),
    # What tells contracts of codes with scales in bf16 apart: routing weights that are no powers of two.
    LayerEdge(
        Sizes(9, 3, 3, 32, 32, 4), "below_3", scheme="mxfp4_bf16", dtype="fp16", regimes={"routing_weights": "uniform"},
    ),
    # More than eight experts, of which some have no pair; gate and up in one tensor. One token with a limit that cuts.
    LayerEdge(Sizes(9, 2, 11, 16, 16, 4), "below_11", kind="balanced", fused=True),
    LayerEdge(Sizes(1, 2, 3, 24, 16, 4), "below_3", {"swiglu_limit": 0.5}, kind="balanced"),
)  # fmt: skip
"""For every device."""

LARGE_EDGES = (
    # More tokens than 16 bits count.
    LayerEdge(Sizes(65537, 1, 4, 32, 16, 4), "below_4"),
    # Experts whose weights, and tokens whose rows, start more than 2**31 elements after the first.
    LayerEdge(Sizes(70, 2, 3, 64, 32, 8), "below_3", strides={"gate_proj": (1073741888, 64, 1)}),
    LayerEdge(Sizes(3, 2, 3, 64, 32, 8), "below_3", strides={"x": (1073741888, 1)}),
    LayerEdge(Sizes(9, 2, 2, 64, 32, 8), "below_2", strides={"down_lora_b": (2147483712, 8, 1)}),
)
"""For accelerators alone."""


PROPERTIES = (
    LayerEdge(Sizes(24, 3, 5, 48, 40, 4), "below_4", kind="balanced"),
    LayerEdge(Sizes(9, 2, 4, 24, 32, 4), "experts_6", {"first_expert": 1}, kind="balanced", dtype="fp16"),
)
"""With which it is looked at what the bits of a kernel depend on, where a CPU takes part. Expert 4 has no tokens."""

LARGE_PROPERTIES = (
    LayerEdge(Sizes(600, 3, 9, 512, 384, 16), "below_8", kind="balanced"),
    LayerEdge(Sizes(300, 2, 8, 520, 256, 8), "experts_10", {"first_expert": 1}, kind="balanced", dtype="fp16"),
)
"""Edges for accelerators: pairs enough for every tile."""


def properties(*, small: bool) -> tuple[LayerEdge, ...]:
    """Return the cases for properties on a CPU, or on an accelerator."""
    return PROPERTIES if small else LARGE_PROPERTIES


def edges(*, small: bool) -> tuple[LayerEdge, ...]:
    """Return the edges for a CPU, or all."""
    return EDGES if small else (*EDGES, *LARGE_EDGES)
