"""Fixed facts of groups of cases of experts: dtype, kind of values, shards, scheme of base weights, adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lastbit import DRAWN, Chosen, Option, combinations


@dataclass(frozen=True)
class Codes:
    """The storage of base weights as codes.

    Attributes:
        dtype, per_element: of the codes, and how many share an element.
        scale, scales: dtype and regimes of the scales.
        groups: inputs that may share a scale; a whole row shares one where there are none.
        zero: codes have a zero point.
    """

    dtype: str
    per_element: int
    scale: str
    scales: tuple[str, ...] = ("scale_random", "scale_pow2")
    groups: tuple[int, ...] = ()
    zero: bool = False


QUANTIZED: Mapping[str, Codes] = {
    "int8": Codes("int8", 1, "fp32"),
    "int4_asymmetric": Codes("int32", 8, "fp16", groups=(8, 16, 32), zero=True),
    "int4_symmetric": Codes("int32", 8, "bf16", groups=(8, 16, 32)),
    "mxfp4": Codes("uint8", 2, "uint8", scales=("around_125", "around_252"), groups=(32,)),
    "mxfp4_bf16": Codes("uint8", 2, "bf16", groups=(32,)),
}


@dataclass(frozen=True)
class LayerVariant:
    """The fixed facts of a group: dtype of the activations, kind of values, ways to shard, scheme of base weights.

    Without adapters a layer is a plain mixture of experts.
    """

    dtype: str
    kind: str
    shards: tuple[int, ...] = (1,)
    scheme: str = ""
    adapters: bool = True
    row: Chosen = field(default_factory=dict, compare=False)

    @property
    def codes(self) -> Codes | None:
        return QUANTIZED[self.scheme] if self.scheme else None

    @property
    def multiple(self) -> int:
        """The divisor that the hidden and intermediate dimensions must have."""
        return min(self.codes.groups, default=1) if self.codes else 1

    def __str__(self) -> str:
        return "-".join(filter(None, (self.dtype, self.scheme or self.kind, "shards" if 1 not in self.shards else "")))


def has_adapters(accepts: frozenset[str]) -> bool:
    """Check whether a kernel with these parameters takes adapters."""
    return "gate_lora_a" in accepts


def variants(accepts: frozenset[str]) -> Iterator[LayerVariant]:
    """Yield the variants for a kernel with these parameters, with adapters if it takes them."""
    for variant in _variants(accepts):
        yield replace(variant, adapters=has_adapters(accepts))


def plain_variants(accepts: frozenset[str]) -> list[LayerVariant]:
    """List the variants without adapters; nothing for a kernel that takes no adapters anyway."""
    return [replace(v, adapters=False) for v in _variants(accepts)] if has_adapters(accepts) else []


def _variants(accepts: frozenset[str]) -> Iterator[LayerVariant]:
    """Yield rows of options in which every two meet that a kernel with these parameters takes."""
    several = (1, 2, 4) if "shards" in accepts else (1,)
    kinds = {"exact": (1,), "exact in shards": (2, 4), "balanced": several, "one_sign": several}
    kinds |= dict.fromkeys(QUANTIZED, several[:2])
    axes: dict[str, Sequence[Option]] = {"kind": tuple(kinds), "dtype": ("bf16", "fp16")}

    def means(row: Mapping[str, Any]) -> dict[str, Any]:
        shards, scale = "shards" in row["kind"] or None, row["kind"] in QUANTIZED or None
        return {"x dtype": row["dtype"], "shards": DRAWN if shards else None} | ({"gate_scale": True} if scale else {})

    for row in combinations(axes, accepts=accepts, means=means):
        kind, scheme = row["kind"], row["kind"] if row["kind"] in QUANTIZED else ""
        value = "exact" if scheme else kind.partition(" ")[0]
        yield LayerVariant(row["dtype"], value, kinds[kind], scheme, row=row)
