"""A time in which everything that a kernel does is recorded."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from lastbit.interpret.watching import watched
from lastbit.tracing.events import Program
from lastbit.tracing.log import LIMIT, Log
from lastbit.tracing.of_torch import TorchWatch, record_input
from lastbit.tracing.of_triton import Watch


@contextmanager
def traced(inputs: Mapping[str, Tensor], wanted: Collection[Program] = (), limit: int = LIMIT) -> Iterator[Log]:
    """Record what happens to `inputs` and to what is made of them, in PyTorch and in interpreted Triton kernels.

    Of Triton programs all operations of those `wanted` are kept, and of the others what they write. Functions that
    `torch.compile` would compile run as they are written.

    Raises:
        TraceLimit: the values take more than `limit` bytes.
    """
    log = Log(frozenset(wanted), limit)
    for name, tensor in inputs.items():
        record_input(log, name, tensor)
    with watched(Watch(log)), torch.compiler.set_stance("force_eager"), TorchWatch(log):
        yield log
    log.check()
