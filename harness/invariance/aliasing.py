"""Results in the memory of an input, for kernels that are given memory for their results."""

from __future__ import annotations

from lastbit.invariance.basis import Basis
from lastbit.invariance.property import Pairs, Property
from lastbit.relations import NotApplicable, same

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
    chosen = [(out, name) for out in outs for name in _alike(basis, outs[out])]
    if not chosen:
        raise NotApplicable(f"the kernel says of no input that is like {', '.join(outs.values())} that it may change")
    changed = [name for out, name in chosen if not _equal(basis, pairs, out, name)]
    pairs.where = f"changes where the result lies in the memory of {', '.join(changed)}" if changed else ""


def _alike(basis: Basis, result: str) -> list[str]:
    """List the inputs whose memory can hold a result."""
    own, declared = basis.results[result], _NAME in basis.kernel.invariant
    taken = {spec.name for spec in basis.case.tensors if spec.repeats or spec.name in basis.kernel.held}
    return [
        name
        for name, tensor in basis.inputs.tensors.items()
        if (tensor.shape, tensor.dtype) == (own.shape, own.dtype)
        and (declared or name in basis.kernel.mutates)
        and name not in taken
    ]


def _equal(basis: Basis, pairs: Pairs, out: str, name: str) -> bool:
    handed = basis.inputs.hand_out()
    try:
        returned = basis.kernel.call(**handed, **basis.case.params, **{out: handed[name]})
        results = {result: returned[result].clone() for result in basis.results}
    finally:
        basis.inputs.restore()
    what = f"the result {basis.kernel.held[out]} in the memory of {name}"
    return pairs.compare(basis, what, same(basis.results, results), basis.inputs, results)


IN_PLACE = Property(
    _NAME, "a result in the memory of an input has the bits that it has in memory of its own", _in_place
)
