"""torch.compile: a kernel whose launch is traced gives what it gives without."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lastbit.interpret import untraced
from lastbit.invariance.basis import Basis
from lastbit.invariance.direct import called, require_direct, said
from lastbit.invariance.property import Pairs, Property
from lastbit.relations import NotApplicable, Tensors, same
from lastbit.siblings import in_reach

TRACED = "eager"
"""Dynamo traces the function, and what it traced runs as it was written: no arithmetic is another."""

GENERATED = "inductor"
"""Code is generated for PyTorch's operators, which may round less often; Triton kernels are launched as they are."""


def backends(basis: Basis) -> tuple[str, ...]:
    """Choose the backends of torch.compile; code is generated on accelerators only, where it takes seconds."""
    return (TRACED, GENERATED) if basis.thorough and basis.device.type != "cpu" else (TRACED,)


def show(basis: Basis, pairs: Pairs) -> None:
    """Compare calls under torch.compile, for fixed shapes and for any, with the call without."""
    require_direct(basis, "compiled")
    for backend in backends(basis):
        for dynamic in (False, True):
            what = f"torch.compile(backend={backend!r}, dynamic={dynamic})"
            try:
                results, traced = _compiled(basis, backend, dynamic)
            except Exception as error:  # of a compiler that meets what it does not know
                pairs.untried.append(f"{what}: {said(error)}")
                continue
            if traced:
                pairs.compare(basis, what, same(basis.results, results), basis.inputs, results)
            else:
                pairs.untried.append(f"{what}: nothing of the kernel was traced")
    if pairs.untried and not pairs.tried:
        raise NotApplicable("; ".join(pairs.untried))


def _compiled(basis: Basis, backend: str, dynamic: bool) -> tuple[Tensors, bool]:
    """Call the kernel under torch.compile; return its results and whether any of the function was traced."""
    from torch._dynamo.utils import counters

    with _traceable(basis):
        function = torch.compile(basis.kernel.call, backend=backend, dynamic=dynamic)
        return called(basis, basis.inputs, function), counters["frames"]["ok"] > 0


@contextmanager
def _traceable(basis: Basis) -> Iterator[None]:
    """Clear Dynamo's caches before and after, let it find a kernel's files, and keep it from tracing its programs."""
    import torch._dynamo
    from torch._dynamo import symbolic_convert
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    if cached := getattr(symbolic_convert, "_import_module", None):
        cached.cache_clear()  # files of the same names lie beside other kernels
    try:
        with warnings.catch_warnings(action="ignore"), in_reach(basis.kernel.call), untraced():
            yield
    finally:
        torch._dynamo.reset()
        _forget_modules(getattr(basis.kernel.call, "__globals__", {}))


def _forget_modules(scope: dict[str, object]) -> None:
    """Take away what dynamo leaves in the globals of a function: modules by name, of which a later load has others."""
    for name in [name for name in scope if name.startswith("__import_")]:
        del scope[name]


COMPILED = Property("compiled", "a call under torch.compile gives the same bits as one without", show, quick=False)
