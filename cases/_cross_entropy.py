"""Cases of cross entropy and of its gradient: what logits, labels and parameters choose from, and real vocabularies."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from lastbit import (
    DRAWN,
    Chosen,
    Option,
    TensorSpec,
    chosen_tensor,
    layouts_like,
    least_rows,
    residues,
    tensor_choices,
    widths_with,
)

_SHAPES = tomllib.loads((Path(__file__).parent / "shapes.toml").read_text())["cross_entropy"]

_ALL = (
    *("normal", "gates", "rows", "outlier", "outlier_last", "offset", "lattice", "zero_rows", "constant", "pow2"),
    *("subnormal", "huge", "largest", "special", "masked_classes", "sparse"),
)
_LOGITS = {
    "bf16": _ALL,
    "fp16": (
        *("normal", "gates", "rows", "outlier", "zero_rows", "subnormal", "huge", "largest", "special"),
        "masked_classes",
    ),
    "fp32": ("normal", "gates", "outlier_last", "offset", "lattice", "huge", "special", "masked_classes"),
}
"""Regimes of logits by their dtype: what a kernel computes with is fp32 whatever that is."""
_LABELS = ("labels_N", "below_N")
_LOGIT_SCALES = (0.5, 2.0, 0.3)
_SOFTCAPS = (30.0, 1.0)
_Z_LOSSES = (1e-4, 0.1)

SMALL_ELEMENTS = 1 << 11  # of logits where a CPU takes part
LARGE_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class LogitsVariant:
    """The fixed facts of a group: dtype of the logits, and the range of V, which chooses the block of a kernel."""

    dtype: str
    narrow: int
    wide: int

    def __str__(self) -> str:
        return f"{self.dtype}-V{self.narrow}to{self.wide}"


VARIANTS = (
    LogitsVariant("bf16", 1, 64),
    LogitsVariant("bf16", 257, 500),
    LogitsVariant("fp16", 65, 256),
    LogitsVariant("fp32", 200, 300),
)


def choices(variant: LogitsVariant, accepts: frozenset[str], most: int) -> dict[str, tuple[Option, ...]]:
    """Map each tensor and parameter that a kernel accepts to its options, where logits may have `most` elements."""
    layouts = layouts_like(min(most // variant.wide, 2), 64)
    found: dict[str, tuple[Option, ...]] = tensor_choices("logits", (variant.dtype,), _LOGITS[variant.dtype], layouts)
    found |= tensor_choices("labels", ("int64", "int32"), _LABELS, layouts_like(64))
    found |= {"logits columns % 16": residues(variant.narrow, variant.wide, 16)}
    own: dict[str, tuple[Option, ...]] = {
        "label_smoothing": (None, 0.1, 0.5),
        "logit_scale": (None, *_LOGIT_SCALES),
        "softcap": (None, *_SOFTCAPS),
        "z_loss": (None, *_Z_LOSSES),
        "count": (None, DRAWN),
    }
    return found | {name: options for name, options in own.items() if name in accepts}


@st.composite
def drawn(
    draw: st.DrawFn, variant: LogitsVariant, most: int, chosen: Chosen
) -> tuple[list[TensorSpec], dict[str, Any]]:
    """Draw logits and labels, and return them with the parameters that were chosen."""
    classes = draw(widths_with(chosen["logits columns % 16"], variant.narrow, variant.wide, 16))
    rows = draw(st.integers(least_rows(chosen)[0], max(least_rows(chosen)[0], most // classes)))
    tensors = [chosen_tensor("logits", chosen, (rows, classes)), chosen_tensor("labels", chosen, (rows,), classes)]
    names = ("label_smoothing", "logit_scale", "softcap", "z_loss", "count")
    params = {name: option for name in names if (option := chosen.get(name)) is not None}
    if params.get("count") == DRAWN:
        params["count"] = draw(st.integers(1, 3 * rows))
    return tensors, params


def real_logits(*, small: bool) -> Iterator[tuple[list[TensorSpec], dict[str, Any]]]:
    """Yield logits and labels of the vocabularies of the table, cut to few rows and classes for a CPU."""
    for number, shape in enumerate(_SHAPES):
        rows, classes = (2, 600 - number) if small else (shape["rows"], shape["classes"])
        params = {name: shape[name] for name in ("softcap",) if name in shape}
        regime = "gates" if number % 2 else "normal"
        yield (
            [
                TensorSpec("logits", "bf16", (rows, classes), regime=regime),
                TensorSpec("labels", "int64", (rows,), regime=f"labels_{classes}"),
            ],
            params,
        )
