"""Tensors in other places of memory: with strides, unaligned, as a view, and results in the memory of an input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lastbit.inputs import Layout, applicable_layouts, holding
from lastbit.invariance.property import Basis, Pairs, Property, contiguous, line_of
from lastbit.relations import NotApplicable, same

Placed = Mapping[str, Layout]
"""Tensor → the layout that it has in a call; all others are contiguous."""


def _layout(basis: Basis, pairs: Pairs) -> None:
    """Compare every layout of every tensor with contiguous tensors: all tensors together, and each of them alone.

    Where calls shall be few, tensors are looked at alone only in a layout that changes something for all together.
    """
    plain = contiguous(basis)
    options: dict[str, list[Layout]] = {}
    for spec in plain.case.tensors:  # no element of an overwritten input may share memory
        written, found = spec.name in basis.kernel.mutates, applicable_layouts(spec.shape, spec.dtype)
        options[spec.name] = [one for one in found if one.name != "contiguous" and not (written and 0 in one.strides)]
    names = dict.fromkeys(layout.name for layouts in options.values() for layout in layouts)
    if not names:
        raise NotApplicable("no tensor of the case has another layout than the contiguous one")
    moved = [spec for spec in basis.case.tensors if spec.strides is not None or spec.offset]
    own = {spec.name: Layout("own", spec.element_strides, spec.offset) for spec in moved}
    changed = ["the layouts of the case"] if own and not _equal(plain, pairs, own) else []
    for name in names:
        together = {tensor: layout for tensor, layouts in options.items() for layout in layouts if layout.name == name}
        equal = _equal(plain, pairs, together)
        alone = together if len(together) > 1 and (basis.thorough or not equal) else {}
        blamed = [tensor for tensor, layout in alone.items() if not _equal(plain, pairs, {tensor: layout})]
        if blamed or not equal:
            changed.append(f"{name} ({', '.join(blamed or together)})")
    pairs.where = f"changes with the layout: {', '.join(changed)}" if changed else ""


def _equal(plain: Basis, pairs: Pairs, placed: Placed) -> bool:
    """Check whether a call with tensors in these layouts gives the same bits; true if the kernel does not take it."""
    specs = list(plain.case.tensors)
    for place, spec in enumerate(specs):
        if (layout := placed.get(spec.name)) is not None:
            specs[place] = replace(spec, strides=layout.strides, offset=layout.offset)
    inputs = holding(replace(plain.case, tensors=tuple(specs)), plain.inputs.tensors, plain.device)
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


_NAME = "in place"


def _in_place(basis: Basis, pairs: Pairs) -> None:
    """Give the memory of an input for a result, where both are alike and the kernel says that this is allowed.

    That is where it declares this property, or that it may overwrite the input. What a kernel overwrites in every
    call has no call out of place to be compared with.
    """
    outs = {name: result for name, result in basis.kernel.held.items() if name not in basis.inputs.tensors}
    if not outs:
        raise NotApplicable("the kernel takes no memory for its results, or overwrites an input in every call")
    if not basis.direct:
        raise NotApplicable("the kernel runs in a process of its own, where it gets memory of its own for its results")
    allowed = basis.inputs.tensors.keys() if _NAME in basis.kernel.invariant else basis.kernel.mutates
    taken = {spec.name for spec in basis.case.tensors if spec.repeats or spec.name in basis.kernel.held}
    chosen = [
        (out, name)
        for out, result in outs.items()
        for name, tensor in basis.inputs.tensors.items()
        if (tensor.shape, tensor.dtype) == (basis.results[result].shape, basis.results[result].dtype)
        and name in allowed
        and name not in taken
    ]
    if not chosen:
        raise NotApplicable(f"the kernel says of no input that is like {', '.join(outs.values())} that it may change")
    changed = []
    for out, name in chosen:
        handed = basis.inputs.hand_out()
        try:
            returned = basis.kernel.call(**handed, **basis.case.params, **{out: handed[name]})
            results = {result: returned[result].clone() for result in basis.results}
        finally:
            basis.inputs.restore()
        if not pairs.again(basis, f"the result {basis.kernel.held[out]} in the memory of {name}", results):
            changed.append(name)
    pairs.where = f"changes where the result lies in the memory of {', '.join(changed)}" if changed else ""


LAYOUT = Property("layout", "strided, unaligned and packed tensors give the same bits as contiguous ones", _layout)
IN_PLACE = Property(
    _NAME, "a result in the memory of an input has the bits that it has in memory of its own", _in_place
)
