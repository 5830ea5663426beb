"""What a kernel process does to be timed: calls one after the other, on inputs that come with the message to go.

It imports nothing of lastbit, like `runner`. Nothing here has a say in the time or in the verdict: the judge stops its
own clock when it has read results in its own memory, and judges what lies there.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from harness.isolation.runner import Bare, Mapped

Call = Callable[..., Any]
Said = Mapping[str, Any]


class Timed:
    """What a bare kernel process does, and calls one after the other.

    `bare` loads kernels and calls one; `memory` is that of the judge.
    """

    def __init__(self, bare: "Bare", memory: "Mapped") -> None:
        self._bare, self._memory, self.load, self.call = bare, memory, bare.load, bare.call

    def prepare(self, message: Said) -> Said:
        """Get ready for calls, whose inputs come later; those without a kernel do nothing."""
        for number in message["close"]:
            self._memory.close(number)
        self._call: Call = nothing if message["kernel"] is None else self._bare.call_of[message["kernel"]]
        self._sets = Sets(message)
        return {}

    def go(self, message: Said) -> Said:
        """Make the calls."""
        inputs, into = (self._memory.whole(message[what]) for what in ("inputs", "into"))
        return self._sets.called(self._call, inputs, into)


class Sets:
    """Calls that are to be made: where the tensors of each lie in memory, and where its results are to lie.

    `arguments` and `results` have name, dtype, shape, strides, and for each call the element of the memory at which it
    starts.
    """

    def __init__(self, message: Said) -> None:
        self._arguments, self._results, self._params = message["arguments"], message["results"], message["params"]
        self._device, self._count = torch.device(message["device"]), message["calls"]

    def called(self, call: Call, inputs: Tensor, into: Tensor) -> Said:
        """Make the calls, and wait for them; how many results had to be copied to where they are to lie."""
        tensors = [self._placed(t, inputs) for t in self._arguments]
        results = [self._placed(r, into) for r in self._results]
        copied = 0
        with Offers() as offers:
            for number in range(self._count):
                there = {name: place(number) for name, place in results}
                offers.now = {(tuple(t.shape), t.dtype): t for t in there.values()}
                returned = call(**{name: place(number) for name, place in tensors}, **self._params)
                if not isinstance(returned, dict):
                    returned = {self._results[0]["name"]: returned}
                for name, place in there.items():
                    result = returned.get(name)
                    if result is not None and not same(result, place):
                        place.copy_(result)
                        copied += 1
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return {"copied": copied}

    def _placed(self, tensor: Said, words: Tensor) -> tuple[str, Callable[[int], Tensor]]:
        """The name of a tensor, and a function: number of a call → the tensor of that call."""
        base = words.view(getattr(torch, tensor["dtype"]))
        shape, strides, at = tensor["shape"], tensor["strides"], tensor["at"]
        return tensor["name"], lambda number: base.as_strided(shape, strides, at[number])


def same(result: Tensor, place: Tensor) -> bool:
    """Whether a result lies at its place already."""
    return result.data_ptr() == place.data_ptr() and result.stride() == place.stride()


def nothing(**arguments: object) -> None:
    """A kernel that does nothing: what its calls take is what the procedure takes."""


class Offers:
    """Memory of the judge for results, given where a kernel asks torch for memory of just that shape and dtype.

    What a kernel allocates otherwise is copied there after its call, within the time.
    """

    def __init__(self) -> None:
        self.now: dict[tuple[tuple[int, ...], torch.dtype], Tensor] = {}
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
        """Where each function of torch is, and what takes its place; one of tensors gets the tensor first."""

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
        """Memory of a result of that size, which nobody has asked for in this call."""
        size = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else tuple(size)
        found = self.now.get((size, dtype))
        if found is None or torch.device(device).type != found.device.type:
            return None
        return self.now.pop((size, dtype))
