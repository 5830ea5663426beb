"""A kernel followed on residues: it runs as it is, and the residues of its results are found beside them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lastbit.calling.performing import named_results
from lastbit.interpret.watching import watched
from lastbit.kernel import Kernel
from lastbit.numerics.residues import Residues, products_of
from lastbit.shadows.aten import Following, Opaque
from lastbit.shadows.memory import ShadowMemory
from lastbit.shadows.programs import Shadowing


@dataclass(frozen=True)
class Followed:
    """What was seen of a kernel.

    Attributes:
        results: name → residues, OPEN where an operation has none.
        opaque: the operations that have none, each with its place in the kernel's text and the reason.
    """

    results: Mapping[str, Residues]
    opaque: tuple[str, ...]


class _Apart(Shadowing):
    """Follows programs, whose own arithmetic is no operation of the kernel's in PyTorch."""

    @contextmanager
    def launch(self, function: Any, arguments: Mapping[str, Any]) -> Iterator[None]:
        with _disable_current_modes(), super().launch(function, arguments):
            yield


def follow(
    kernel: Kernel,
    tensors: Mapping[str, Tensor],
    params: Mapping[str, Any],
    results: Collection[str],
    constants: Sequence[float],
) -> Followed:
    """Call a kernel on tensors of the CPU, which it may write to, and follow what it computes.

    `constants` are the numbers of the case that the kernel's own may be made of.

    Raises what the kernel raises, or a `KernelError` where it does not return `results`.
    """
    memory = ShadowMemory()
    programs = _Apart(memory, kernel.primitives)
    with products_of(constants), torch.compiler.set_stance("force_eager"):
        with watched(programs), Following(memory) as operations:
            returned = kernel.call(**tensors, **params)
        named = named_results(returned, tuple(results))
        read = {name: memory.read(tensor) for name, tensor in named.items()}
    opaque = dict.fromkeys(map(str, (*operations.opaque, *(Opaque(*entry) for entry in programs.opaque))))
    return Followed(read, tuple(opaque))
