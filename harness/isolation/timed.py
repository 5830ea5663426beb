"""What a kernel process does to be timed: calls one after the other, on inputs that come with the message to go.

It imports nothing of lastbit, like `runner`. Nothing here has a say in the time or in the verdict: the judge stops its
own clock when it has read results in its own memory, and judges what lies there.
"""

import torch


class Timed:
    """What a bare kernel process does, and calls one after the other.

    `bare` loads kernels and calls one; `memory`, which whoever serves sets, is that of the judge.
    """

    def __init__(self, bare):
        self._bare, self.load, self.call = bare, bare.load, bare.call

    def prepare(self, message):
        """Get ready for calls, whose inputs come later; those without a kernel do nothing."""
        for number in message["close"]:
            self.memory.close(number)
        self._call = nothing if message["kernel"] is None else self._bare.call_of[message["kernel"]]
        self._sets = Sets(message)
        return {}

    def go(self, message):
        """Make the calls."""
        inputs, into = (self.memory.whole(message[what]) for what in ("inputs", "into"))
        return self._sets.called(self._call, inputs, into)


class Sets:
    """Calls that are to be made: where the tensors of each lie in memory, and where its results are to lie.

    `tensors` and `results` have name, dtype, shape, strides, and for each call the element of the memory `at` which it
    starts.
    """

    def __init__(self, message):
        self._tensors, self._results, self._params = message["tensors"], message["results"], message["params"]
        self._device, self._count = torch.device(message["device"]), message["calls"]

    def called(self, call, inputs, into):
        """Make the calls, and wait for them; how many results had to be copied to where they are to lie."""
        tensors = [self._placed(t, inputs) for t in self._tensors]
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

    def _placed(self, tensor, words):
        """The name of a tensor, and a function: number of a call → the tensor of that call."""
        base = words.view(getattr(torch, tensor["dtype"]))
        shape, strides, at = tensor["shape"], tensor["strides"], tensor["at"]
        return tensor["name"], lambda number: base.as_strided(shape, strides, at[number])


def same(result, place):
    """Whether a result lies at its place already."""
    return result.data_ptr() == place.data_ptr() and result.stride() == place.stride()


def nothing(**arguments):
    """A kernel that does nothing: what its calls take is what the procedure takes."""


class Offers:
    """Memory of the judge for results, given where a kernel asks torch for memory of just that shape and dtype.

    What a kernel allocates otherwise is copied there after its call, within the time.
    """

    def __init__(self):
        self.now = {}
        self._own = torch.empty, torch.empty_like, torch.Tensor.new_empty, torch.empty_strided

    def __enter__(self):
        torch.empty, torch.empty_like, torch.empty_strided = self._empty, self._empty_like, self._empty_strided
        torch.Tensor.new_empty = lambda tensor, *size, **options: self._new_empty(tensor, *size, **options)
        return self

    def __exit__(self, *_):
        torch.empty, torch.empty_like, torch.Tensor.new_empty, torch.empty_strided = self._own

    def _empty(self, *size, dtype=None, device=None, **options):
        found = None if options else self._taken(size, dtype or torch.get_default_dtype(), device or "cpu")
        return self._own[0](*size, dtype=dtype, device=device, **options) if found is None else found

    def _empty_like(self, tensor, *, dtype=None, memory_format=torch.preserve_format, **options):
        fits = not options and (tensor.is_contiguous() or memory_format is torch.contiguous_format)
        found = self._taken(tensor.shape, dtype or tensor.dtype, tensor.device) if fits else None
        if found is None:
            return self._own[1](tensor, dtype=dtype, memory_format=memory_format, **options)
        return found

    def _new_empty(self, tensor, *size, dtype=None, **options):
        found = None if options else self._taken(size, dtype or tensor.dtype, tensor.device)
        if dtype is not None:
            options["dtype"] = dtype
        return self._own[2](tensor, *size, **options) if found is None else found

    def _empty_strided(self, size, stride, *, dtype=None, device=None, **options):
        dtype = dtype or torch.get_default_dtype()
        found = None if options else self.now.get((tuple(size), dtype))
        if found is None or tuple(stride) != found.stride():
            return self._own[3](size, stride, dtype=dtype, device=device, **options)
        return self._taken(size, dtype, device or "cpu")

    def _taken(self, size, dtype, device):
        """Memory of a result of that size, which nobody has asked for in this call."""
        size = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else tuple(size)
        found = self.now.get((size, dtype))
        if found is None or torch.device(device).type != found.device.type:
            return None
        return self.now.pop((size, dtype))
