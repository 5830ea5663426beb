"""The tensors of a case, built under guards, and what a kernel changed of the objects that it was handed.

`x.data = y`, `x.set_()` and `x.resize_()` give the tensor of the caller another shape or other memory, and resizing its
storage takes the memory away from under it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lastbit.case import PEER, Case, TensorSpec
from lastbit.devices import Machine, indexed, machine, parse_device
from lastbit.errors import UnsupportedCase, UsageError, unknown
from lastbit.inputs.fingerprint import combined, fingerprints_of
from lastbit.inputs.guards import (
    Guarded,
    StorageView,
    check_separate,
    extent,
    guard_together,
    handed_out,
    is_whole,
    memories,
    once,
    twin,
)
from lastbit.inputs.overlap import overlapping
from lastbit.inputs.values import check_regime, fill
from lastbit.inputs.written import AllocationCheck, unchanged, violations
from lastbit.result import Finding
from lastbit.timing import INPUTS, timed


def rebound(handed: Tensor, guarded: Guarded) -> Finding | None:
    """Return how `handed`, an alias of `guarded.tensor` that a kernel got, differs from it now; None if it does not."""
    tensor, changes = guarded.tensor, []
    if not is_whole(guarded):
        storage, size = guarded.words.untyped_storage(), guarded.words.nbytes
        changes.append(f"a storage of {storage.nbytes():,} bytes in place of {size:,}")
    elif handed.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
        changes.append("other memory")
    elif moved := int(handed.storage_offset() - tensor.storage_offset()):
        where = "after" if moved > 0 else "before"
        changes.append(f"its first element {abs(moved):,} elements {where} the one that it had")
    pairs = {
        "dtype": (str(handed.dtype).removeprefix("torch."), str(tensor.dtype).removeprefix("torch.")),
        "shape": (list(handed.shape), list(tensor.shape)),
        "strides": (list(handed.stride()), list(tensor.stride())),
    }
    changes += [f"{what} {now} in place of {before}" for what, (now, before) in pairs.items() if now != before]
    said = f"rebound {guarded.name}: it now has {', '.join(changes)}"
    return Finding("rebound_input", guarded.name, said) if changes else None


# The first canaries are the poisons of allocations; inputs have their own, so that a kernel that copies what lies
# beyond an input to what lies beyond its result changes it. They are odd for the sign bit of the 8-bit formats.
_FIRST_NUMBER = 67


@dataclass(frozen=True, eq=False)
class Inputs:
    """The tensors of a case twice: amid canaries for the kernel, and a pristine copy of everything for the reference.

    Attributes:
        case: the case.
        guards: the tensors with their allocations, in the order of the case.
        pristine: the contents of each tensor's allocation before any call, in memory that no kernel gets.
    """

    case: Case
    guards: tuple[Guarded, ...]
    pristine: tuple[Tensor, ...]

    @classmethod
    def of(cls, case: Case, guards: Iterable[Guarded]) -> Inputs:
        """Make the inputs of a case from memory that holds their values."""
        guards = tuple(guards)
        copies = {id(first.words): first.words.clone() for first, *_ in memories(guards)}
        return cls(case, guards, tuple(copies[id(guarded.words)] for guarded in guards))

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the case by name, for the reference: nothing that a kernel does reaches them."""
        pairs = zip(self.guards, self.pristine, strict=True)
        return {guarded.name: twin(guarded, pristine) for guarded, pristine in pairs}

    def hand_out(self) -> dict[str, Tensor]:
        """Return the tensors of the case by name, for one kernel call: new objects in memory that all calls share."""
        return handed_out(self.guards)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits of the names and original values of all tensors, independent of device and strides."""
        return fingerprints(self.tensors)

    def violations(self, expect: Collection[str] = ()) -> list[Finding]:
        """Return the changes in memory since the tensors were built: see `checks`."""
        return violations(self.checks(expect))

    def checks(self, expect: Collection[str] = ()) -> list[AllocationCheck]:
        """Return the checks that nothing changed in memory since the tensors were built, but elements of `expect`.

        What became of an allocation that was resized is not looked at; `rebound` says that it was.

        Raises:
            UsageError: `expect` names no tensor of the case.
        """
        for name in expect:
            if name not in self.tensors:
                raise unknown("input", name, self.tensors)
        pristine = self._pristine_of
        return [unchanged(m, pristine[m[0].name], expect) for m in memories(self.guards) if is_whole(m[0])]

    def rebound(self, handed: Mapping[str, Tensor]) -> list[Finding]:
        """Return the changes of shape and memory of the tensors that were `handed` to a kernel."""
        found = (rebound(handed[guarded.name], guarded) for guarded in self.guards)
        return [change for change in found if change is not None]

    def restore(self) -> None:
        """Undo every change, so that the next call starts from the same bits."""
        pristine = self._pristine_of
        for guarded, *_ in memories(self.guards):
            if not is_whole(guarded):
                guarded.words.untyped_storage().resize_(guarded.words.nbytes)
            guarded.words.copy_(pristine[guarded.name])

    @property
    def _pristine_of(self) -> dict[str, Tensor]:
        return {guarded.name: pristine for guarded, pristine in zip(self.guards, self.pristine, strict=True)}


@timed(INPUTS)
def refilled(guards: tuple[Guarded, ...], case: Case, names: Collection[str] | None = None) -> Inputs:
    """Fill memory that was built for a case of the same shapes with the tensors of `case`, or with those of `names`."""
    for spec, guarded in zip(case.tensors, guards, strict=True):
        if names is None or spec.name in names:
            fill(guarded.tensor, spec, case.seed)
    return Inputs.of(case, guards)


@timed(INPUTS)
def build(case: Case, device: torch.device | str) -> Inputs:
    """Build the tensors of `case`, on `device` or on devices of their own, with the values that regime and seed define.

    Raises:
        UsageError: a regime is unknown or does not suit its tensor, captured values cannot be read, strides make
            elements overlap, those of two tensors in one storage do, or this machine lacks a tensor's device.
        UnsupportedCase: a tensor belongs on a peer of `device`, and there is none.
    """
    here = machine() if case.displaced else Machine()
    for spec in case.tensors:
        check_regime(spec)
    check_places(case)
    devices = {spec.name: device_of(spec, torch.device(device), here) for spec in case.tensors}
    guards = _allocated(case, devices)
    for spec, guarded in zip(case.tensors, guards, strict=True):
        fill(guarded.tensor, spec, case.seed)
    return Inputs.of(case, guards)


@timed(INPUTS)
def holding(case: Case, tensors: Mapping[str, Tensor], device: torch.device) -> Inputs:
    """Build the tensors of a case on `device` with these values, in place of those that regime and seed define.

    Raises:
        UsageError: strides make elements overlap.
    """
    check_places(case)
    guards = _allocated(case, {spec.name: device for spec in case.tensors})
    for spec, guarded in zip(case.tensors, guards, strict=True):
        # Copies of one element may overlap.
        once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in spec.element_strides)
        guarded.tensor[once].copy_(tensors[spec.name][once])
    return Inputs.of(case, guards)


def check_places(case: Case) -> None:
    """Raise a `UsageError` for strides and offsets under which elements, of a tensor or of two, share memory."""
    for spec in case.tensors:
        check_separate(spec.name, spec.shape, spec.element_strides)
    for together in _storages(case):
        for a, b in overlapping(map(_view_of, together), together[0].torch_dtype.itemsize):
            raise UsageError(
                f"tensors {a!r} and {b!r} share elements of one storage: write other strides, or another +offset"
            )


def device_of(spec: TensorSpec, device: torch.device, here: Machine) -> torch.device:
    """Return the device on which a tensor of a case lies in a run on `device`; errors as in `build`."""
    if not spec.device:
        return device
    if spec.device != PEER:
        return parse_device(spec.device, here)
    if not (peers := here.peers(str(indexed(device)))):
        raise UnsupportedCase(f"{spec.name} belongs on a peer of {device}, but this machine has {here}")
    return torch.device(peers[0])


def fingerprints(tensors: Mapping[str, Tensor]) -> str:
    """Return one fingerprint of named tensors, as of a kernel's results; equal to `Inputs.fingerprint` of the same."""
    return combined(dict(zip(tensors, fingerprints_of(list(tensors.values())), strict=True)))


def _allocated(case: Case, devices: Mapping[str, torch.device]) -> list[Guarded]:
    """Allocate the tensors of a case, those that share a storage together."""
    found: dict[str, Guarded] = {}
    for together in _storages(case):
        first = together[0]
        number = _FIRST_NUMBER + 2 * case.tensors.index(first)
        places = [_view_of(spec) for spec in together]
        guards = guard_together(places, dtype=first.torch_dtype, device=devices[first.name], number=number)
        found |= {guarded.name: guarded for guarded in guards}
    return [found[spec.name] for spec in case.tensors]


def _storages(case: Case) -> list[list[TensorSpec]]:
    """Return the tensors of a case by storage, in the order of the first of each."""
    found: dict[str, list[TensorSpec]] = {}
    for spec in case.tensors:
        found.setdefault(spec.owner, []).append(spec)
    return list(found.values())


def _view_of(spec: TensorSpec) -> StorageView:
    return StorageView(spec.name, spec.shape, spec.element_strides, spec.offset)


def bare(inputs: Inputs, device: torch.device) -> dict[str, Tensor]:
    """Return name → a copy on `device`, in an allocation that ends with the last element in it.

    Nothing is written before its first element, or to gaps between its rows.
    """
    reach: dict[str, int] = {}
    for spec in inputs.case.tensors:
        end = spec.offset + extent(spec.shape, spec.element_strides)
        reach[spec.owner] = max(end, reach.get(spec.owner, 0))
    copies, memory = {}, dict[str, torch.UntypedStorage]()
    for spec in inputs.case.tensors:
        tensor = inputs.tensors[spec.name]
        if spec.owner not in memory:
            memory[spec.owner] = torch.empty(reach[spec.owner], dtype=tensor.dtype, device=device).untyped_storage()
        made = torch.tensor([], dtype=tensor.dtype, device=device)
        copies[spec.name] = made.set_(memory[spec.owner], spec.offset, spec.shape, spec.element_strides)
        once(made).copy_(once(tensor))
    return copies
