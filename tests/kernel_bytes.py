"""Every byte that a kernel leaves behind, run the default way and one by one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from lastbit.case import Case
from lastbit.errors import UnsupportedCase
from lastbit.inputs import build, guarded_allocations
from lastbit.inputs.guards import Guarded
from lastbit.interpret import descending, one_by_one
from lastbit.kernel import Kernel

Way = Callable[[], AbstractContextManager[Any]]


def case_differences(kernel: Kernel, case: Case, *, turned: bool = False) -> tuple[list[str], bool]:
    """Describe what a kernel does otherwise than one by one, for each direction, and whether it raised an error.

    It stores its stages in the descending direction; in the ascending one if `turned`.
    """
    found, raised = list[str](), False
    for direction in (nullcontext, descending):
        asked = {"stages": kernel.stages} if kernel.stages and (direction is descending) is not turned else {}
        expected = left_behind(kernel, case, (one_by_one, direction), asked)
        actual = left_behind(kernel, case, (direction,), asked)
        names = [name for name in {**expected, **actual} if expected.get(name) != actual.get(name)]
        found += [f"{direction.__name__}, stages {bool(asked)}: {', '.join(names)}"] if names else []
        raised |= "error" in expected
    return found, raised


def left_behind(kernel: Kernel, case: Case, ways: tuple[Way, ...], asked: dict[str, Any]) -> dict[str, bytes]:
    """Return the bytes of all inputs, of what the kernel allocated and returned; the error if it raised one."""
    inputs = build(case, "cpu")
    handed, returned = inputs.hand_out(), dict[str, Any]()
    with guarded_allocations(0) as allocations:
        try:
            returned = _within(ways, lambda: kernel.call(**handed, **case.params, **asked))
        except UnsupportedCase:
            raise
        except Exception as error:
            returned = {"error": f"{type(error).__name__}: {error}"}
    found = {f"input {guarded.name}": _memory(guarded) for guarded in inputs.guards}
    found |= {guarded.name: _memory(guarded) for guarded in allocations._guarded}
    named = returned if isinstance(returned, dict) else {"result": returned}
    return found | {name: _bytes(value) for name, value in named.items()}


def _within(ways: tuple[Way, ...], call: Callable[[], Any]) -> Any:
    if not ways:
        return call()
    with ways[0]():
        return _within(ways[1:], call)


def _memory(guarded: Guarded) -> bytes:
    """Return the bytes of a tensor, between its rows, and of the canaries around it: from its first element on."""
    everything: bytes = guarded.words.numpy().tobytes()
    start = guarded.start * guarded.tensor.element_size()
    return everything[start:] + everything[:start]


def _bytes(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1)
        return f"{value.dtype}{tuple(value.shape)}".encode() + flat.view(torch.uint8).numpy().tobytes()
    return b"".join(map(_bytes, value)) if isinstance(value, (tuple, list)) else repr(value).encode()
