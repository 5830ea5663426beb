"""Tensors in other places of memory: with strides, unaligned, as a view of a larger tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lastbit.case import TensorSpec
from lastbit.inputs import Layout, applicable_layouts, holding
from lastbit.invariance.basis import Basis, contiguous, line_of
from lastbit.invariance.property import Pairs, Property
from lastbit.relations import NotApplicable, same

Placed = Mapping[str, Layout]
"""Tensor → the layout that it has in a call; all others are contiguous."""


def _layout(basis: Basis, pairs: Pairs) -> None:
    """Compare every layout of every tensor with contiguous tensors: all tensors together, and each of them alone.

    Where calls shall be few, tensors are looked at alone only in a layout that changes something for all together.
    """
    plain = contiguous(basis)
    options = {spec.name: _layouts(spec, basis) for spec in plain.case.tensors}
    names = dict.fromkeys(layout.name for layouts in options.values() for layout in layouts)
    if not names:
        raise NotApplicable("no tensor of the case has another layout than the contiguous one")
    own = {spec.name: _own(spec) for spec in basis.case.tensors if spec.strides is not None or spec.offset}
    changed = ["the layouts of the case"] if own and not _equal(plain, pairs, own) else []
    for name in names:
        together = {tensor: layout for tensor, layouts in options.items() for layout in layouts if layout.name == name}
        equal = _equal(plain, pairs, together)
        alone = together if len(together) > 1 and (basis.thorough or not equal) else {}
        blamed = [tensor for tensor, layout in alone.items() if not _equal(plain, pairs, {tensor: layout})]
        if blamed or not equal:
            changed.append(f"{name} ({', '.join(blamed or together)})")
    pairs.where = f"changes with the layout: {', '.join(changed)}" if changed else ""


def _layouts(spec: TensorSpec, basis: Basis) -> list[Layout]:
    """List layouts other than the contiguous one; no element of an overwritten input may share memory."""
    found = [layout for layout in applicable_layouts(spec.shape, spec.dtype) if layout.name != "contiguous"]
    written = spec.name in basis.kernel.mutates
    return [layout for layout in found if not (written and 0 in layout.strides)]


def _own(spec: TensorSpec) -> Layout:
    return Layout("own", spec.element_strides, spec.offset)


def _equal(plain: Basis, pairs: Pairs, placed: Placed) -> bool:
    """Check whether a call with tensors in these layouts gives the same bits; true if the kernel does not take it."""
    specs = tuple(_placed(spec, placed.get(spec.name)) for spec in plain.case.tensors)
    inputs = holding(replace(plain.case, tensors=specs), plain.inputs.tensors, plain.device)
    what = ", ".join(f"{tensor} {layout.name}" for tensor, layout in placed.items())
    results = pairs.called(plain, inputs, what)
    if results is None:
        return True
    line = line_of(inputs, plain.device) or f"{plain.case}, with {what}"
    if any(spec.repeats for spec in specs):  # these tensors hold other values than those of the case
        here = replace(plain, inputs=inputs, results=results, line=line)
        copies = holding(plain.case, inputs.tensors, plain.device)
        results = plain.call(copies)
        return pairs.compare(here, "contiguous copies of its tensors", same(here.results, results), copies, results)
    return pairs.compare(plain, line, same(plain.results, results), inputs, results)


def _placed(spec: TensorSpec, layout: Layout | None) -> TensorSpec:
    return spec if layout is None else replace(spec, strides=layout.strides, offset=layout.offset)


LAYOUT = Property("layout", "strided, unaligned and packed tensors give the same bits as contiguous ones", _layout)
