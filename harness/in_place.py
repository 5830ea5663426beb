"""Results that a kernel leaves in what it is given: in inputs that it overwrites, and in parameters for results.

    @kernel("rms_norm", out={"out": "output"})
    def rms_norm(out, x, weight, *, eps): ...

    @kernel("rms_norm", mutates={"x": "output", "residual": "residual_sum"})
    def fused_add_rms_norm(x, residual, weight, *, eps): ...

Such a kernel may return nothing. `returning` makes it a function that returns its results by name, as every other.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lastbit.errors import KernelError, UsageError, no_such


@dataclass(frozen=True)
class Out:
    """Declare a parameter of a kernel that receives a result: memory of its own, which holds nothing yet.

    Attributes:
        result: name of the result.
        like: the input that has its shape and dtype; the kernel's first one unless another is named. For a result that
            is like none, a function that allocates it, called with the tensors and parameters of the case by name.
    """

    result: str
    like: str | Callable[..., Any] = ""

    def allocated(self, arguments: Mapping[str, Any]) -> Any:
        """Allocate memory for the result, contiguous if it is like an input; torch's allocations are guarded in a run.

        Raises:
            KernelError: what it is like, or what was allocated for it, is no tensor.
        """
        if isinstance(self.like, str):
            like, what = arguments[self.like], self.like
        else:
            like, what = (
                self.like(**{n: v for n, v in arguments.items() if n != "stages"}),
                "what its function returned",
            )
        if not hasattr(like, "new_empty_strided"):
            raise KernelError(
                f"the result {self.result!r} is like {what}, {like!r}; write Out({self.result!r}, like=INPUT)"
            )
        if isinstance(self.like, str):
            return like.new_empty(like.shape)
        return like.new_empty_strided(like.shape, like.stride())  # what the function left in its memory is no result


def checked_outs(
    function: Callable[..., Any], where: str, out: Mapping[str, str | Out], overwritten: Mapping[str, str]
) -> dict[str, Out]:
    """Map parameters to the results they receive; `overwritten` inputs hold others, and `where` names the kernel.

    Raises:
        UsageError: the function has no such parameter, or it is like none that the function always gets, or two
            parameters hold the same result.
    """
    given: object = out
    named = [o.result if isinstance(o, Out) else o for o in given.values()] if isinstance(given, Mapping) else [None]
    if not all(isinstance(name, str) for name in named):
        raise UsageError(f"out={out!r} of {where} must map parameters to results, such as {{'out': 'output'}}")
    outs = {name: Out(o) if isinstance(o, str) else o for name, o in out.items()}
    results = [*filter(None, overwritten.values()), *(o.result for o in outs.values())]
    if twice := [name for name in results if results.count(name) > 1]:
        raise UsageError(f"{where} declares the result {twice[0]!r} to be in two parameters")
    if not outs:
        return outs
    own = inspect.signature(function).parameters
    always = [p.name for p in own.values() if p.name not in outs and p.default is p.empty and p.kind in _BY_NAME]
    for name, made in outs.items():
        if name not in own:
            raise UsageError(no_such(f"parameter in out of {where}:", name, own))
        if callable(made.like):
            continue
        what = f"the result {made.result!r} of {where} is like"
        if not isinstance(made.like, str):
            raise UsageError(f"{what} {made.like!r}; name an input, or give a function")
        like = made.like or next(iter(always), "")
        if like not in always:
            raise UsageError(no_such(f"input that {what}:", like, always))
        outs[name] = Out(made.result, like)
    return outs


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def returning(
    function: Callable[..., Any], overwritten: Mapping[str, str], outs: Mapping[str, Out]
) -> Callable[..., Any]:
    """Return a function without the parameters of `outs` that also returns the results held in parameters.

    `overwritten` maps inputs to the results that they hold afterwards, where that is known. The function is called by
    name; itself if no result is in a parameter. Memory for a result is allocated unless a call names its parameter.
    """
    held = {name: result for name, result in overwritten.items() if result}
    if not held and not outs:
        return function

    @functools.wraps(function)
    def called(**arguments: Any) -> Mapping[str, Any]:
        given = {name: arguments.pop(name) for name in outs if name in arguments}
        made = {name: given[name] if name in given else out.allocated(arguments) for name, out in outs.items()}
        kept = {name: tensor.detach() for name, tensor in made.items()}  # what the caller of the kernel looks at
        returned = function(**arguments, **made)
        if rebound := [name for name, tensor in made.items() if not _is_same(tensor, kept[name])]:
            raise KernelError(
                f"the kernel rebound {rebound[0]}, so that its caller's memory got no result; write into it"
            )
        there = {result: arguments[name] for name, result in held.items() if arguments.get(name) is not None}
        return _together(returned, there | {out.result: made[name] for name, out in outs.items()})

    own = inspect.signature(function)
    kept = [p for p in own.parameters.values() if p.name not in outs]
    called.__signature__ = own.replace(parameters=kept)  # type: ignore[attr-defined]
    return called


def _together(returned: object, there: Mapping[str, Any]) -> Mapping[str, Any]:
    """Combine the returned results and those in parameters, by name.

    Raises:
        KernelError: it returned something without a name, or another tensor for what is in a parameter.
    """
    if isinstance(returned, Mapping):
        for name in there.keys() & returned.keys():
            if not _is_same(returned[name], there[name]):
                raise KernelError(f"the kernel returned another tensor for {name!r} than the parameter that holds it")
        return {**returned, **there}
    parts = returned if isinstance(returned, tuple | list) else () if returned is None else (returned,)
    for part in parts:
        if not any(_is_same(part, tensor) for tensor in there.values()):
            held = ", ".join(there)
            raise KernelError(
                f"the kernel returned a {type(part).__name__} without a name, beside what is in its parameters "
                f"({held}); return other results in a mapping"
            )
    return there


def _is_same(a: Any, b: Any) -> bool:
    """Check whether two tensors are the same elements in the same order."""
    from torch import Tensor  # the kernel has imported it

    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return False
    return a is b or ((a.data_ptr(), a.shape, a.stride(), a.dtype) == (b.data_ptr(), b.shape, b.stride(), b.dtype))
