"""Placement checks: whether a kernel refuses a tensor on another device, or moves it and warns, as it declares."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import torch

from lastbit.calling.performing import Attempt, Results, attempted
from lastbit.devices import indexed
from lastbit.errors import KernelError, UnsupportedCase
from lastbit.inputs import Inputs
from lastbit.inputs.bits import bits_of
from lastbit.isolation.answers import Raised
from lastbit.kernel import Kernel
from lastbit.placement import PlacementWarning
from lastbit.result import Finding

KIND = "placement"

Attempting = Callable[[Inputs, torch.device | None], Attempt]
"""Calls a kernel with its inputs where they are, or with copies of all of them on a device."""


def in_this_process(call: Results) -> Attempting:
    """Make a function that attempts a call in this process, with the inputs in place or copied to a device."""

    def attempt(inputs: Inputs, device: torch.device | None) -> Attempt:
        handed = inputs.hand_out()
        if device is not None:
            return attempted(call, {name: tensor.to(device) for name, tensor in handed.items()})
        return replace(attempted(call, handed), rebound=tuple(inputs.rebound(handed)))

    return attempt


def placement_findings(
    kernel: Kernel, inputs: Inputs, device: torch.device, attempt: Attempting
) -> tuple[Finding, ...]:
    """Check how the kernel treats inputs that are not on `device`; return no findings if all are.

    Raises:
        KernelError: the call left the accelerator unusable, or a kernel that moves raised.
        UnsupportedCase: the kernel does not claim to handle the case, wherever its tensors are.
    """
    device = indexed(device)
    displaced = {n: where for n, t in inputs.hand_out().items() if (where := indexed(t.device)) != device}
    if not displaced:
        return ()
    there = ", ".join(f"{name} on {where}" for name, where in displaced.items())
    found = attempt(inputs, None)
    try:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
    except RuntimeError as error:
        raise KernelError(
            f"the kernel was launched with {there}, while another device may have been current, and left "
            f"{device} unusable: {error}"
        ) from found.error
    expected = [guarded.name for guarded in inputs.guards if guarded.name in kernel.mutates]
    spoiled = [*found.rebound, *inputs.violations(expected), *found.violations]
    inputs.restore()
    said = [replace(one, sentence=f"With {there}, the kernel {one.sentence}.") for one in spoiled]
    raised = ""
    if found.error is not None:  # here or in a process of the kernel's own
        raised = found.error.kind if isinstance(found.error, Raised) else type(found.error).__name__
    if kernel.placement == "refuses":
        return (*said, *_refusal(found.error, raised, displaced, device, there))
    gathered = attempt(inputs, device)
    inputs.restore()
    if gathered.error is not None:
        raise gathered.error
    if isinstance(found.error, UnsupportedCase):
        raise found.error
    if found.error is not None:
        raise KernelError(
            f'the kernel declares placement="moves", but with {there} it raised {raised}: {found.error}'
        ) from found.error
    return (*said, *_moves(found, gathered, displaced, device, kernel.unordered))


def _refusal(
    error: Exception | None, raised: str, displaced: Mapping[str, torch.device], device: torch.device, there: str
) -> Iterator[Finding]:
    """Check that a refusing kernel raised an error that names the device of the run and another one."""
    if error is None:
        for name, where in displaced.items():
            yield Finding(
                KIND,
                name,
                f"The kernel silently read {name} on {where} while it runs on {device}, although it declares to "
                'refuse. Check the devices before the launch, or move it and declare placement="moves".',
            )
        return
    text = str(error)
    if _names(text, str(device)) and any(_names(text, str(where)) for where in displaced.values()):
        return
    if isinstance(error, UnsupportedCase):
        raise error
    yield Finding(
        KIND,
        next(iter(displaced)),
        f"With {there}, the kernel raised {raised} without naming {device} and "
        f"the other device: {text[:200]!r}. Check the devices before the launch and name both.",
    )


def _moves(
    found: Attempt,
    gathered: Attempt,
    displaced: Mapping[str, torch.device],
    device: torch.device,
    unordered: Iterable[str],
) -> Iterator[Finding]:
    """Check that a moving kernel warned of each displaced tensor once, and returned the bits of gathered tensors."""
    for name, where in displaced.items():
        count = sum(_warns_of(w, name, where, device) for w in found.warnings)
        if count == 0:
            yield Finding(
                KIND,
                name,
                f"The kernel read {name} on {where} while it runs on {device}, and no warning names {name}, both "
                "devices and that this may be an upstream bug. Let lastbit.placement.moved move it.",
            )
        if count > 1:
            yield Finding(KIND, name, f"{count} warnings say in one call that {name} is on {where}; one is enough.")
    for name, where in displaced.items():
        if any(isinstance(w, PlacementWarning) or _warns_of(w, name, where, device) for w in gathered.warnings):
            yield Finding(KIND, name, f"The kernel warns of the device of a tensor although all are on {device}.")
            break
    for name, wanted in gathered.results.items():
        result = found.results[name]
        if (where := indexed(result.device)) != device:
            yield Finding(KIND, name, f"{name} is returned on {where}, but the kernel runs on {device}.")
        elif (result.shape, result.dtype) != (wanted.shape, wanted.dtype):
            yield Finding(KIND, name, f"{name} has another shape or dtype than with tensors moved beforehand.")
        elif name not in unordered and (changed := int((bits_of(result) != bits_of(wanted)).sum())):
            yield Finding(
                KIND,
                name,
                f"{changed:,} of {result.numel():,} elements of {name} have other bits than with tensors that were "
                "moved beforehand.",
            )


def _warns_of(warning: Warning, name: str, where: torch.device, device: torch.device) -> bool:
    """Return whether a warning names that tensor and both devices, and says that this may be an upstream bug."""
    if isinstance(warning, PlacementWarning):
        return (warning.name, warning.source, warning.target) == (name, where, device)
    text = str(warning)
    return "upstream" in text and all(_names(text, word) for word in (name, str(where), str(device)))


def _names(text: str, word: str) -> bool:
    """Return whether a word stands in the text, not as a part of a longer name (cuda:1 in cuda:10)."""
    return re.search(rf"(?<!\w){re.escape(word)}(?!:?\w)", text) is not None
