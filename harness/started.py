"""What a kernel starts: launches of Triton programs, and operations of torch that compute or write."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def reported_launches(told: Callable[[Any, Any, Any, Callable[[], Any]], Any]) -> Iterator[None]:
    """Report every launch of a Triton program: interpreted, compiled, or compiled for an earlier launch."""

    def launching(run: Callable[..., Any]) -> Callable[..., Any]:
        def launched(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            launch = partial(run, self, *args, grid=grid, warmup=warmup, **kwargs)
            return launch() if warmup else told(self, args, kwargs, launch)

        return launched

    def compiled(of_grid: Callable[..., Any]) -> Callable[..., Any]:
        def launching(self: Any, grid: Any) -> Any:
            run, source = of_grid(self, grid), self.src

            def launched(*args: Any, **kwargs: Any) -> Any:
                names = source.fn.arg_names
                fixed = {names[path[0]]: x for path, x in source.constants.items() if len(path) == 1}
                given = {**dict(zip(names, args, strict=False)), **fixed}
                return told(source.fn, (), given, partial(run, *args, **kwargs))

            return launched if hasattr(source, "fn") else run

        return launching

    kinds = {
        ("triton.runtime.jit", "JITFunction", "run"): launching,
        ("triton.runtime.interpreter", "InterpretedFunction", "run"): launching,
        ("triton.compiler.compiler", "CompiledKernel", "__getitem__"): compiled,
    }
    with ExitStack() as stack:
        for (module, kind, method), instead in kinds.items():
            if (owner := getattr(sys.modules.get(module), kind, None)) is not None:
                stack.callback(setattr, owner, method, before := getattr(owner, method))
                setattr(owner, method, wraps(before)(instead(before)))
        yield


_IDLE = frozenset(
    {
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "full", "full_like"),
        *("zeros", "zeros_like", "ones", "ones_like", "scalar_tensor", "lift_fresh"),
        *("clone", "_to_copy", "_local_scalar_dense", "_unsafe_view"),
    }
)
"""Operations of torch that only make memory, copy into it, or read a number, beside the views."""

_FILLS = frozenset({"fill_", "zero_", "copy_", "set_", "resize_"})
"""Operations that do no more than that for a tensor that was made before."""


class Launched(TorchDispatchMode):
    """A mode within which `any` says whether something was started that computes or writes.

    A launch of Triton counts from its call on, as it may fail when it is compiled; an operation of torch once it has
    returned, as it checks its arguments by itself.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.any = False
        self._made: dict[int, Tensor] = {}  # by address; alive, so that no other memory is there
        self._reporting = ExitStack()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # importing the compiler takes seconds

    def __enter__(self) -> Launched:
        self._reporting.enter_context(reported_launches(self._launched))
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._reporting.close()

    def _launched(self, program: Any, args: Any, kwargs: Any, launch: Callable[[], Any]) -> Any:
        self.any = True
        return launch()

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        fills = name in _FILLS and _address(args[0]) in self._made
        returned = func(*args, **(kwargs or {}))
        aliased = name == "_unsafe_view" or any(r.alias_info is not None for r in func._schema.returns)
        if name in _IDLE and not aliased and isinstance(returned, Tensor):
            self._made[_address(returned)] = returned
        self.any |= not (fills or name in _IDLE or (func.is_view and not func._schema.is_mutable))
        return returned


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
