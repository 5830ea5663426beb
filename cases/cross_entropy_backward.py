"""Cases of the gradient of cross entropy: the logits and labels of the forward pass, gradients, and a saved lse."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from hypothesis import strategies as st

from lastbit import DRAWN, Case, Choices, Chosen, Group, TensorSpec, chosen_tensor, layouts_like, tensor_choices
from lastbit.cases._cross_entropy import (
    LARGE_ELEMENTS,
    SMALL_ELEMENTS,
    LogitsVariant,
    choices,
    drawn,
    real_logits,
    variants,
)
from lastbit.cases._edges import edges
from lastbit.cases._properties import properties

_GRADIENTS = ("normal", "uniform", "ones", "tiny", "rows", "zeros", "special")
_SAVED = ("normal", "gates", "special")


def groups(accepts: frozenset[str], *, small: bool) -> Iterator[Group]:
    """Yield the groups for a kernel that takes the tensors and parameters `accepts`; `small` cuts rows and classes."""
    yield Group("real-shapes", examples=tuple(_real_shapes(accepts, small=small)))
    yield Group("edges", examples=tuple(edges("cross_entropy_backward", accepts, small=small)))
    yield from properties("cross_entropy_backward", accepts, small=small)
    most = SMALL_ELEMENTS if small else LARGE_ELEMENTS
    axes = {"grad_output dtype": ("fp32", "bf16", "fp16"), "lse dtype": (None, "fp32")}
    for variant in variants(accepts, axes, lambda row: row["grad_output dtype"] in ("fp32", row["logits dtype"])):
        grad, saved = str(variant.row["grad_output dtype"]), variant.row["lse dtype"] is not None
        own = {**choices(variant, accepts, most), **_gradients(grad, saved=saved)}
        own |= {"count": (None, DRAWN)} if "count" in accepts else {}
        name = f"{variant}-grad_{grad}{'-lse' * saved}"
        yield Group(name, partial(_cases, variant, saved, most), choices=own, combination=variant.row)


def _gradients(dtype: str, *, saved: bool) -> Choices:
    found = tensor_choices("grad_output", (dtype,), _GRADIENTS, layouts_like(64))
    return found | (tensor_choices("lse", ("fp32",), _SAVED, layouts_like(64)) if saved else {})


@st.composite
def _cases(draw: st.DrawFn, variant: LogitsVariant, saved: bool, most: int, chosen: Chosen) -> Case:
    tensors, params = draw(drawn(variant, most, chosen))
    rows = tensors[0].shape[:1]
    tensors.append(chosen_tensor("grad_output", chosen, rows))
    if saved:
        tensors.append(chosen_tensor("lse", chosen, rows))
    return Case("cross_entropy_backward", tuple(tensors), params, draw(st.integers(0, 2**32 - 1)))


def _real_shapes(accepts: frozenset[str], *, small: bool) -> Iterator[Case]:
    """Yield every vocabulary of the table, with the gradient of a mean: one number for all rows."""
    for seed, (tensors, params) in enumerate(real_logits(small=small)):
        rows = tensors[0].shape[:1]
        tensors.append(TensorSpec("grad_output", "fp32", rows, (0,), regime="ones"))
        params |= {"count": rows[0]} if "count" in accepts else {}
        if (case := Case("cross_entropy_backward", tuple(tensors), params, seed)).names <= accepts:
            yield case
