"""Cases of cross entropy and of its gradient: what logits, labels and parameters choose from, and real vocabularies."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from lastbit import (
    DRAWN,
    Chosen,
    Option,
    TensorSpec,
    chosen_tensor,
    combinations,
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
_PARAMS: dict[str, tuple[Option, ...]] = {
    "label_smoothing": (0.1, 0.5),
    "logit_scale": (0.5, 2.0, 0.3),
    "softcap": (30.0, 1.0),
    "z_loss": (1e-4, 0.1),
    "ignore_index": (0, 2),
}
"""Parameters that a kernel may be compiled with or without, and what they may be."""
_FEW = 4  # classes of labels where one is ignored, so that some rows are
_CLASSES = ((1, 64), (257, 500), (65, 256))
"""Ranges of V, which chooses the block of a kernel."""

SMALL_ELEMENTS = 1 << 11  # of logits where a CPU takes part
LARGE_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class LogitsVariant:
    """The fixed facts of a group: dtypes of logits and labels, the range of V, and which parameters are given."""

    dtype: str
    labels: str
    classes: tuple[int, int]
    params: tuple[str, ...]
    row: Chosen = field(compare=False)

    def __str__(self) -> str:
        low, high = self.classes
        return "-".join([self.dtype, f"labels_{self.labels}", *self.params, f"V{low}to{high}"])


def variants(
    accepts: frozenset[str], own: Mapping[str, Sequence[Option]], together: Callable[[Mapping[str, Any]], bool]
) -> Iterator[LogitsVariant]:
    """Yield rows of options in which every two meet that a kernel with these parameters takes, with the op's `own`."""
    axes = {"logits dtype": ("bf16", "fp16", "fp32"), "classes": range(len(_CLASSES)), **own}
    axes |= dict.fromkeys(_PARAMS, (None, DRAWN)) | {"labels dtype": ("int64", "int32")}

    def means(row: Mapping[str, Any]) -> dict[str, Any]:
        unmeant = {} if together(row) else {"": True}
        return {name: option for name, option in row.items() if name != "classes"} | unmeant

    for row in combinations(axes, accepts=accepts, means=means):
        given = tuple(name for name in _PARAMS if row[name])
        yield LogitsVariant(row["logits dtype"], row["labels dtype"], _CLASSES[row["classes"]], given, row)


def choices(variant: LogitsVariant, accepts: frozenset[str], most: int) -> dict[str, tuple[Option, ...]]:
    """Map each tensor and parameter that a kernel accepts to its options, where logits may have `most` elements."""
    layouts = layouts_like(min(most // variant.classes[1], 2), 64)
    found: dict[str, tuple[Option, ...]] = tensor_choices("logits", (variant.dtype,), _LOGITS[variant.dtype], layouts)
    labels = _LABELS[1:] if "ignore_index" in variant.params else _LABELS  # the others have labels of -100
    found |= tensor_choices("labels", (variant.labels,), labels, layouts_like(64))
    found |= {"logits columns % 16": residues(*variant.classes, 16)}
    own = {name: options if name in variant.params else (None,) for name, options in _PARAMS.items()}
    return found | {name: options for name, options in own.items() if name in accepts}


@st.composite
def drawn(
    draw: st.DrawFn, variant: LogitsVariant, most: int, chosen: Chosen
) -> tuple[list[TensorSpec], dict[str, Any]]:
    """Draw logits and labels, and return them with the parameters that were chosen."""
    classes = draw(widths_with(chosen["logits columns % 16"], *variant.classes, 16))
    rows = draw(st.integers(least_rows(chosen)[0], max(least_rows(chosen)[0], most // classes)))
    known = min(classes, _FEW) if chosen.get("ignore_index") is not None else classes
    tensors = [chosen_tensor("logits", chosen, (rows, classes)), chosen_tensor("labels", chosen, (rows,), known)]
    params = {name: option for name in (*_PARAMS, "count") if (option := chosen.get(name)) is not None}
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
