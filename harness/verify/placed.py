"""Whether a kernel does what it declares with a tensor on another device: refuses it, or moves it and warns."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.devices import indexed
from harness.errors import KernelError, UnsupportedCase
from harness.inputs import Inputs, Rebound, Violation, guarded_allocations
from harness.inputs.bits import bits_of
from harness.kernel import Kernel
from harness.placement import PlacementWarning
from harness.result import Finding

KIND = "placement"

Call = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


@dataclass(frozen=True)
class _Attempt:
    """One call: its results or the error that it raised, and its warnings."""

    results: Mapping[str, Tensor]
    error: Exception | None
    warnings: tuple[Warning, ...]


def placement_findings(kernel: Kernel, inputs: Inputs, device: torch.device, call: Call) -> tuple[Finding, ...]:
    """What the kernel does wrong with those of `inputs` that are not on `device`; empty if all are.

    `call` calls the kernel with tensors by name, waits for the device, and returns the results by name.

    Raises:
        KernelError: the call left the accelerator unusable, or a kernel that moves raised.
        UnsupportedCase: the kernel does not claim to handle the case, wherever its tensors are.
    """
    device = indexed(device)
    handed = inputs.hand_out()
    displaced = {n: where for n, t in handed.items() if (where := indexed(t.device)) != device}
    if not displaced:
        return ()
    with guarded_allocations(0) as allocations:
        attempt = _attempt(call, handed)
        _check_usable(device, displaced, attempt)
    expected = [name for name in kernel.mutates if name in handed]
    spoiled: list[Violation | Rebound] = [*inputs.rebound(handed), *inputs.violations(expected)]
    spoiled += allocations.violations()
    inputs.restore()
    found = [Finding(v.kind, v.tensor, f"With {_listed(displaced)}, the kernel {v.sentence}.") for v in spoiled]
    if kernel.placement == "refuses":
        return (*found, *_refusal(attempt, displaced, device))
    gathered = _gathered(inputs, device, call)
    named = [*_moves(attempt, displaced, device), *_needless(gathered, displaced, device)]
    return (*found, *named, *_other_bits(attempt.results, gathered.results, device, kernel.unordered))


def _attempt(call: Call, tensors: Mapping[str, Tensor]) -> _Attempt:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            # Copies, because a result may share memory with an input that is restored afterwards.
            results, error = {name: result.clone() for name, result in call(tensors).items()}, None
        except Exception as raised:  # the kernel's own code runs here
            results, error = {}, raised
    return _Attempt(results, error, tuple(w.message for w in caught if isinstance(w.message, Warning)))


def _gathered(inputs: Inputs, device: torch.device, call: Call) -> _Attempt:
    """The call with every tensor moved beforehand."""
    with guarded_allocations(0):
        attempt = _attempt(call, {n: t.to(device) for n, t in inputs.hand_out().items()})
    inputs.restore()
    if attempt.error is not None:
        raise attempt.error
    return attempt


def _check_usable(device: torch.device, displaced: Mapping[str, torch.device], attempt: _Attempt) -> None:
    if device.type == "cpu":
        return
    try:
        torch.accelerator.synchronize(device)
    except RuntimeError as error:
        raise KernelError(
            f"the kernel was launched with {_listed(displaced)}, while another device may have been current, and left "
            f"{device} unusable: {error}"
        ) from attempt.error


def _refusal(attempt: _Attempt, displaced: Mapping[str, torch.device], device: torch.device) -> Iterator[Finding]:
    """A kernel that refuses must raise an error that names the device of the run and another one."""
    if attempt.error is None:
        for name, where in displaced.items():
            yield Finding(
                KIND,
                name,
                f"The kernel silently read {name} on {where} while it runs on {device}, although it declares to "
                'refuse. Check the devices before the launch, or move it and declare placement="moves".',
            )
        return
    text = str(attempt.error)
    if _names(text, str(device)) and any(_names(text, str(where)) for where in displaced.values()):
        return
    if isinstance(attempt.error, UnsupportedCase):
        raise attempt.error
    yield Finding(
        KIND,
        next(iter(displaced)),
        f"With {_listed(displaced)}, the kernel raised {type(attempt.error).__name__} without naming {device} and "
        f"the other device: {text[:200]!r}. Check the devices before the launch and name both.",
    )


def _moves(attempt: _Attempt, displaced: Mapping[str, torch.device], device: torch.device) -> Iterator[Finding]:
    """A kernel that moves must return, after exactly one warning for each tensor that says what it did."""
    if isinstance(attempt.error, UnsupportedCase):
        raise attempt.error
    if attempt.error is not None:
        raise KernelError(
            f'the kernel declares placement="moves", but with {_listed(displaced)} it raised '
            f"{type(attempt.error).__name__}: {attempt.error}"
        ) from attempt.error
    for name, where in displaced.items():
        count = sum(_warns_of(w, name, where, device) for w in attempt.warnings)
        if count == 0:
            yield Finding(
                KIND,
                name,
                f"The kernel read {name} on {where} while it runs on {device}, and no warning names {name}, both "
                "devices and that this may be an upstream bug. Let harness.placement.moved move it.",
            )
        if count > 1:
            yield Finding(KIND, name, f"{count} warnings say in one call that {name} is on {where}; one is enough.")


def _needless(gathered: _Attempt, displaced: Mapping[str, torch.device], device: torch.device) -> Iterator[Finding]:
    for name, where in displaced.items():
        if any(isinstance(w, PlacementWarning) or _warns_of(w, name, where, device) for w in gathered.warnings):
            yield Finding(KIND, name, f"The kernel warns of the device of a tensor although all are on {device}.")
            return


def _other_bits(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], device: torch.device, unordered: Iterable[str]
) -> Iterator[Finding]:
    """Findings for results elsewhere, or with other bits than those of tensors that were moved beforehand."""
    for name, wanted in expected.items():
        result = actual[name]
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
    """Whether the warning is about that tensor: names it and both devices, and says that this may be a bug."""
    if isinstance(warning, PlacementWarning):
        return (warning.name, warning.source, warning.target) == (name, where, device)
    text = str(warning)
    return "upstream" in text and all(_names(text, word) for word in (name, str(where), str(device)))


def _names(text: str, word: str) -> bool:
    """Whether `word` stands in the text, not as a part of a longer name (cuda:1 in cuda:10)."""
    return re.search(rf"(?<!\w){re.escape(word)}(?!:?\w)", text) is not None


def _listed(displaced: Mapping[str, torch.device]) -> str:
    return ", ".join(f"{name} on {where}" for name, where in displaced.items())
