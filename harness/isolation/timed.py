"""Timed calls in a kernel process, on inputs that come with the message to go.

A kernel process runs the text of this file after that of `runner`, of which it uses `alone` and `called`. Nothing here
has a say in the time or in the verdict: the judge stops its own clock when it has read results in its own memory, and
judges what lies there.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

if __name__ != "__main__":  # as in a kernel process, where nothing of lastbit is imported
    from lastbit.isolation.runner import Bare, Mapped, alone, by_name, called

Call = Callable[..., Any]
Said = Mapping[str, Any]


class TimedWorker:
    """The requests that a bare kernel process serves, and calls that are timed.

    `bare` loads kernels and calls one; `memory` is that of the judge.
    """

    def __init__(self, bare: "Bare", memory: "Mapped") -> None:
        self._bare, self._memory, self.load, self.call = bare, memory, bare.load, bare.call

    def prepare(self, message: Said) -> Said:
        """Get ready for a call, whose inputs come later; one without a kernel does nothing."""
        for number in message["close"]:
            self._memory.close(number)
        call = nothing if message["kernel"] is None else self._bare.call_of[message["kernel"]]
        self._prepared = Prepared(message, call, self._memory.whole(message["into"]))
        return {}

    def go(self, message: Said) -> Said:
        """Make the call."""
        return self._prepared.called(self._memory.whole(message["inputs"]))


class Prepared:
    """A call that is to be made, as the `message` says: which function, and where tensors lie in memory.

    `arguments` and `results` have name, dtype, shape, strides, and the element of the memory at which they start. The
    results are to lie in `into`.
    """

    def __init__(self, message: Said, call: Call, into: Tensor) -> None:
        self._call, self._message = partial(call, **message["params"]), message
        self._device, self._results = torch.device(message["device"]), placed_in(message["results"], into)

    def called(self, inputs: Tensor) -> Said:
        """Make the call, and wait for it; return how many results had to be copied to where they are to lie."""
        arguments, copied = placed_in(self._message["arguments"], inputs), 0
        with Offers({(tuple(t.shape), t.dtype): t for t in self._results.values()}):
            returned = called(partial(self._call, **arguments), self._message)
        returned = by_name(returned, self._results) or {}
        for name, place in self._results.items():
            result = returned.get(name)
            if result is not None and not same(result, place):
                place.copy_(result)
                copied += 1
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return {"copied": copied}


def placed_in(tensors: list[Said], words: Tensor) -> dict[str, Tensor]:
    """Return the tensors that messages describe, in memory."""
    return {t["name"]: alone(words, t, t["at"]) for t in tensors}


def same(result: Tensor, place: Tensor) -> bool:
    """Return whether a result lies at its place already."""
    return result.data_ptr() == place.data_ptr() and result.stride() == place.stride()


def nothing(**arguments: object) -> None:
    """Do nothing, as a kernel: the time that its calls take is that of the procedure itself."""


class Offers:
    """Memory of the judge for results, given where a kernel asks torch for memory of just that shape and dtype.

    What a kernel allocates otherwise is copied there after its call, within the time.
    """

    def __init__(self, now: dict[tuple[tuple[int, ...], torch.dtype], Tensor]) -> None:
        self.now = now
        self._own: dict[str, Any] = {}

    def __enter__(self) -> "Offers":
        for where, name, offering in self._functions():
            self._own[name] = getattr(where, name)
            setattr(where, name, offering)
        return self

    def __exit__(self, *_: object) -> None:
        for where, name, _offering in self._functions():
            setattr(where, name, self._own[name])

    def _functions(self) -> tuple[tuple[Any, str, Call], ...]:
        """Return each function of torch that is replaced: its owner, its name, and its substitute."""

        def new_empty(tensor: Tensor, *size: Any, **options: Any) -> Any:
            return self._new_empty(tensor, *size, **options)

        return (
            (torch, "empty", self._empty),
            (torch, "empty_like", self._empty_like),
            (torch, "empty_strided", self._empty_strided),
            (Tensor, "new_empty", new_empty),
        )

    def _empty(self, *size: Any, dtype: Any = None, device: Any = None, **options: Any) -> Any:
        found = None if options else self._taken(size, dtype or torch.get_default_dtype(), device or "cpu")
        return self._own["empty"](*size, dtype=dtype, device=device, **options) if found is None else found

    def _empty_like(
        self, tensor: Tensor, *, dtype: Any = None, memory_format: Any = torch.preserve_format, **options: Any
    ) -> Any:
        fits = not options and (tensor.is_contiguous() or memory_format is torch.contiguous_format)
        found = self._taken(tensor.shape, dtype or tensor.dtype, tensor.device) if fits else None
        if found is None:
            return self._own["empty_like"](tensor, dtype=dtype, memory_format=memory_format, **options)
        return found

    def _empty_strided(self, size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **options: Any) -> Any:
        known = self.now.get((tuple(size), dtype or torch.get_default_dtype()))
        fits = not options and known is not None and tuple(stride) == known.stride()
        found = self._taken(size, dtype or torch.get_default_dtype(), device or "cpu") if fits else None
        if found is None:
            return self._own["empty_strided"](size, stride, dtype=dtype, device=device, **options)
        return found

    def _new_empty(self, tensor: Tensor, *size: Any, dtype: Any = None, **options: Any) -> Any:
        found = None if options else self._taken(size, dtype or tensor.dtype, tensor.device)
        kind = {} if dtype is None else {"dtype": dtype}
        return self._own["new_empty"](tensor, *size, **kind, **options) if found is None else found

    def _taken(self, size: Any, dtype: torch.dtype, device: Any) -> Tensor | None:
        """Return the memory of a result of that size that nobody has asked for in this call; None if there is none."""
        size = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else tuple(size)
        found = self.now.get((size, dtype))
        if found is None or torch.device(device).type != found.device.type:
            return None
        return self.now.pop((size, dtype))
