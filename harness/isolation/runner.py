"""The work of a kernel process: it takes messages, maps memory, calls a function and copies its results.

It imports nothing of lastbit but `Channel`, so that a *bare* kernel process can run the texts of both files, where
nothing of lastbit is to be seen but what the kernel's own file imports.
"""

from __future__ import annotations

import _thread
import ctypes
import importlib.util
import mmap
import os
import socket
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from operator import methodcaller
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

if __name__ != "__main__":  # as in a bare kernel process, which has run the text of that file before
    from lastbit.children.channel import Channel

Message = Mapping[str, Any]
Placed = Sequence[tuple[Message, Tensor]]
"""Descriptions of tensors, and the words that hold each of them."""

ALIGNMENT = 256
"""Bytes between the starts of results in memory, of which they are multiples."""

_TEXT, _TRACE = 20_000, 16_000


class Handle(ctypes.Structure):
    """The handle by which the driver of CUDA lets another process have memory of a device."""

    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


def driver(name: str, *arguments: object) -> None:
    """Call a function of the driver of CUDA, in the context that torch has made current."""
    status = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    if status:
        raise RuntimeError(f"{name} of the CUDA driver failed with error {status}")


def exported(address: int) -> tuple[str, int]:
    """Return the handle by which another process opens the segment of an address, and the address's offset in it."""
    handle, base, size = Handle(), ctypes.c_uint64(), ctypes.c_size_t()
    driver("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
    driver("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    return bytes(handle.reserved).hex(), address - base.value


class ExportedMemory:
    """Memory of a device that another process has exported; it stays where it is until this process ends.

    A kernel may keep a tensor of an earlier call, and look at it.
    """

    def __init__(self, size: int, index: int, handle: str, offset: int) -> None:
        self.device, self._size, base = torch.device("cuda", index), size, ctypes.c_uint64()
        with torch.cuda.device(self.device):
            torch.empty(1, device=self.device)  # makes its context the current one
            known = Handle.from_buffer_copy(bytes.fromhex(handle))
            driver("cuIpcOpenMemHandle_v2", ctypes.byref(base), known, ctypes.c_uint(1))
        self.address, self._base = base.value + offset, base

    def close(self) -> None:
        """Let it go: whatever still lies there is no memory any more."""
        with torch.cuda.device(self.device):
            driver("cuIpcCloseMemHandle", self._base)

    def __len__(self) -> int:
        return self._size


class Mapped:
    """Memory of the judge by number: bytes of a file that both have mapped, or of a device."""

    def __init__(self) -> None:
        self._blocks: dict[int, mmap.mmap | ExportedMemory] = {}

    def take(self, new: Iterable[Message], gone: Iterable[int], fds: Iterable[int]) -> None:
        """Map what is new, and forget what is gone."""
        fds = list(fds)
        for number in gone:
            self._blocks.pop(number, None)
        for block in new:
            if block["cuda"] is None:
                fd = fds.pop(0)
                self._blocks[block["number"]] = mmap.mmap(fd, block["bytes"])
                os.close(fd)
            else:
                self._blocks[block["number"]] = ExportedMemory(block["bytes"], *block["cuda"])

    def words(self, place: Message) -> Tensor:
        """Return a tensor of int64 over the bytes of a place, in a storage that has these bytes alone."""
        block, offset, size = self._blocks[place["memory"]], place["offset"], place["bytes"]
        if isinstance(block, mmap.mmap):
            return torch.frombuffer(block, dtype=torch.int64, count=size // 8, offset=offset)
        part = torch._C._construct_storage_from_data_pointer(block.address + offset, block.device, size)
        return torch.tensor([], dtype=torch.int64, device=block.device).set_(part, 0, (size // 8,), (1,))

    def close(self, number: int) -> None:
        """Forget a block, and let its memory of a device go."""
        block = self._blocks.pop(number, None)
        if isinstance(block, ExportedMemory):
            block.close()

    def whole(self, number: int) -> Tensor:
        """Return a tensor of int64 over all of a block."""
        return self.words({"memory": number, "offset": 0, "bytes": self.size(number)})

    def size(self, number: int) -> int:
        return len(self._blocks.get(number, ()))


class ReturnedResults:
    """The results of a call, until they are copied where the judge wants them."""

    def __init__(self, memory: Mapped, named: Mapping[str, Tensor]) -> None:
        self._memory, self._bytes = memory, 0
        self._tensors: list[tuple[int, Tensor, Sequence[int]]] = []
        self._listed: list[Message] = []
        for name, tensor in named.items():
            size = tensor.numel() * tensor.element_size()
            held = tensor.device.type != "meta" and size > 0
            kind = {"dtype": str(tensor.dtype).removeprefix("torch."), "device": str(tensor.device)}
            strides = torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()
            place = {"at": self._bytes if held else -1, "shape": list(tensor.shape), "strides": list(strides)}
            self._listed.append({"name": str(name), **kind, **place})
            if held:
                self._tensors.append((self._bytes, tensor.detach(), strides))
                self._bytes += -(-size // ALIGNMENT) * ALIGNMENT

    def copied(self, into: int) -> Message:
        """Copy all results to memory `into` if it is large enough; return their description."""
        done = self._bytes <= self._memory.size(into)
        if done and self._bytes:
            words = self._memory.words({"memory": into, "offset": 0, "bytes": self._bytes})
            for at, tensor, strides in self._tensors:
                there = torch.tensor([], dtype=tensor.dtype, device=words.device)
                there.set_(words.untyped_storage(), at // tensor.element_size(), tensor.shape, strides)
                there.copy_(tensor)
            if words.device.type != "cpu":
                torch.accelerator.synchronize(words.device)
        return {"returned": self._listed, "bytes": self._bytes, "copied": done}


def placed(words: Tensor, tensor: Message) -> Tensor:
    """Return the tensor that a message describes, at its place among the words; no view, as autograd sees it."""
    made = torch.tensor([], dtype=getattr(torch, tensor["dtype"]), device=words.device)
    return made.set_(words.untyped_storage(), tensor["start"], tensor["shape"], tensor["strides"])


def alone(words: Tensor, tensor: Message, start: int) -> Tensor:
    """Return the tensor that a message describes, in a storage of just its size: as in memory that is its own.

    `start` is the element of the words at which it lies.
    """
    made = torch.tensor([], dtype=getattr(torch, tensor["dtype"]), device=words.device)
    each, end = made.element_size(), end_of({**tensor, "start": start})
    return made.set_(words.untyped_storage()[start * each : end * each], 0, tensor["shape"], tensor["strides"])


def apart(tensors: Placed) -> dict[str, Tensor]:
    """Return the tensors that messages describe, each as in memory that is its own.

    Those that share a block of memory are views of one tensor that is, as lastbit's `handed_out` makes them.
    """
    together: dict[int, list[tuple[Message, Tensor]]] = {}
    for described in tensors:
        together.setdefault(described[0]["memory"], []).append(described)
    made: dict[str, Tensor] = {}
    for (first, words), *others in together.values():
        if not others:
            made[first["name"]] = alone(words, first, first["start"])
            continue
        members = [first, *(tensor for tensor, _ in others)]
        begin = min(tensor["start"] for tensor in members)
        whole = {"dtype": first["dtype"], "shape": [max(map(end_of, members)) - begin], "strides": [1]}
        base: Any = alone(words, whole, begin)
        base.views = {t["name"]: (t["shape"], t["strides"], t["start"] - begin) for t in members}
        made |= {name: base.as_strided(*place) for name, place in base.views.items()}
    return {tensor["name"]: made[tensor["name"]] for tensor, _ in tensors}


def end_of(tensor: Message) -> int:
    """Return the element of the words after the last one of a tensor that a message describes."""
    shape, strides = tensor["shape"], tensor["strides"]
    reach = 0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return int(tensor["start"] + reach)


def called(call: Callable[[], Any], message: Message) -> Any:
    """Return what a call gives, in a thread of its own if the message says `threaded`, and below so many more `frames`.

    Where `torch.compile` may have compiled something, nothing for CUDA is called in another thread, since graphs of
    CUDA belong to the one that made them.
    """
    if message["threaded"] and (message["device"] == "cpu" or "torch._dynamo" not in sys.modules):
        return called_in_thread(call, message["device"])
    return below(message["frames"], call)


def below(frames: int, call: Callable[[], Any]) -> Any:
    """Call with so many more frames above it on the stack, as in the layers of a model."""
    return below(frames - 1, call) if frames else call()


def called_in_thread(call: Callable[[], Any], device: str) -> Any:
    """Return what a call gives in a new thread, with nothing above it on the stack, while another thread is there.

    There, torch records no gradients and has two threads on the CPU, unless `torch._dynamo` is there: what
    `torch.compile` has compiled is compiled anew for both, until it fails at the limit of that.
    """
    results, errors = list[Any](), list[Any]()
    ended, before = _thread.allocate_lock(), torch.get_num_threads()
    ready: list[Callable[[], object]] = []
    if device != "cpu":  # of which each thread has its own current one, and makes its context when it first waits
        index = torch.accelerator.current_device_index()
        ready = [partial(torch.accelerator.set_device_index, index), torch.accelerator.synchronize]
    once = partial(call)
    watched = weakref.ref(once, lambda _: ended.release())  # which the thread lets go when all is done
    there = threading.Event()
    beside, hook = threading.Thread(target=there.wait, daemon=True), sys.unraisablehook
    beside.start()
    if "torch._dynamo" not in sys.modules:
        ready.append(partial(torch.set_grad_enabled, False))
        torch.set_num_threads(2)
    try:
        sys.unraisablehook = lambda raised: errors.append(raised.exc_value)
        ended.acquire()
        _thread.start_new_thread(results.extend, (map(methodcaller("__call__"), [*ready, once]),))
        del once
        ended.acquire()
    finally:
        sys.unraisablehook = hook
        torch.set_num_threads(before)
        there.set()
        beside.join()
        del watched
    if len(results) <= len(ready):
        raise errors[-1] if errors else SystemExit("the kernel ended its thread")
    return results[-1]


def is_lost(device: str) -> bool:
    """Return whether a device can no longer be used, as after an illegal access to memory."""
    try:
        if device != "cpu":
            torch.accelerator.synchronize(torch.device(device))
    except Exception:
        return True
    return False


def raised(error: BaseException, lost: bool) -> Message:
    """Return an exception as data; with `lost`, nothing more can be asked."""
    try:
        text = str(error)
    except Exception:
        text = ""
    kinds = [kind.__name__ for kind in type(error).__mro__]
    texts = {"text": text[:_TEXT], "traceback": traceback.format_exc()[-_TRACE:]}
    return {"raised": {"kinds": kinds, **texts, "lost": lost}}


def serve(connection: socket.socket, work: object, memory: Mapped | None = None) -> None:
    """Do what the judge asks for, until it asks no more.

    `work` has a method for each thing that it can be asked, which gets the message and returns what to answer. With
    tensors, it gets these too, as pairs of a description and the words that hold it, and returns named tensors besides.
    Who needs the judge's `memory` otherwise gives it.
    """
    channel, memory = Channel(connection, takes_fds=True), memory or Mapped()
    results = ReturnedResults(memory, {})
    answer: Message
    while True:
        message, fds = channel.receive()
        if message is None:
            return
        mapped = False
        try:
            memory.take(message.get("new", ()), message.get("gone", ()), fds)
            mapped = True
            if "tensors" in message:
                results = ReturnedResults(memory, {})
                asked = getattr(work, message["do"])
                named, said = asked(message, [(t, memory.words(t)) for t in message["tensors"]])
                results = ReturnedResults(memory, named)
                del named
                answer = {**results.copied(message["into"]), **said}
            elif message["do"] == "copy":
                answer = results.copied(message["into"])
            else:
                answer = getattr(work, message["do"])(message)
        except BaseException as error:
            answer = raised(error, not mapped or is_lost(message.get("device", "cpu")))
        sys.stdout.flush()
        sys.stderr.flush()
        channel.send({**answer, "number": message["number"]})


def executed(path: Path) -> ModuleType:
    """Execute a file as a module, which can import its siblings meanwhile, and return it."""
    spec = importlib.util.spec_from_file_location(f"kernel_file_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


@contextmanager
def replaced(name: str, device: str) -> Iterator[None]:
    """Let an operator of torch, such as `aten::add`, give other values on a device; nothing where it has none there.

    What `torch.compile` has compiled runs as it was written meanwhile, so that no operator hides in it.
    """
    key, library = device.partition(":")[0].upper(), torch.library.Library("aten", "IMPL")
    try:
        original = torch.library.get_kernel(name, key)
    except RuntimeError:
        yield
        return

    def other(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return tuple(map(other, value))
        return 1.25 * value + 1 if isinstance(value, Tensor) and value.is_floating_point() else value

    def implementation(keys: Any, *arguments: Any, **options: Any) -> Any:
        return other(original.call_boxed(keys, *arguments, **options))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it is replaced
        library.impl(name.partition("::")[2], implementation, key, with_keyset=True)
    written = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    try:
        with written:
            yield
    finally:
        library._destroy()


def by_name(value: Any, names: Iterable[str]) -> Any:
    """Return what a kernel gave without names as a mapping, in the order of `names`."""
    value = [value] if isinstance(value, Tensor) else value
    return dict(zip(names, value, strict=False)) if isinstance(value, tuple | list) else value


class Withheld:
    """Refuse to import what the judge knows: references, cases, kernels of lastbit, and all that judges by them."""

    PARTS = (
        *("references", "cases", "_kernels", "judging", "judges", "verify", "diagnosing", "history", "orders"),
        *("identifying", "shrinking", "shadows", "bench", "commands", "cli", "reports", "from_torch"),
    )

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> None:
        """Raise `ImportError` for a part that is withheld, and leave every other module to those who find it."""
        top, _, rest = name.partition(".")
        if top == "lastbit" and rest.partition(".")[0] in cls.PARTS:
            raise ImportError(
                f"a kernel that is judged cannot import {name}, which knows the judge's answers. Remove that import: "
                "such a file needs nothing of lastbit. If a test in it does, as one with assert_contract, move that "
                "test to a file of its own",
                name=name,
            )

    @classmethod
    def begin(cls) -> None:
        """Refuse from now on, in this process."""
        if cls not in sys.meta_path:
            sys.meta_path.insert(0, cls)


class Bare:
    """A kernel that is called with nothing of lastbit around it, also in calls that the judge times.

    Their inputs come with the message to go. Nothing here has a say in the time or in the verdict: the judge stops its
    own clock when it has read results in its own `memory`, and judges what lies there.
    """

    def __init__(self, memory: Mapped) -> None:
        self._memory = memory

    def load(self, message: Message) -> Message:
        Withheld.begin()
        path = Path(message["path"])
        if message.get("plain"):
            self.call_of = {message["kernel"]: vars(executed(path))[message["plain"]]}
        elif "role" in message:
            from lastbit.of_file import kernel_of_file, role_of

            self.call_of = {message["kernel"]: kernel_of_file(path, role_of(message["role"])).call}
        else:
            from lastbit.kernel import loaded_kernels  # of which the kernel's own file imports

            self.call_of = {one.kernel.name: one.kernel.call for one in loaded_kernels(path)}
        return {"kernels": []}

    def call(self, message: Message, tensors: Placed) -> tuple[Mapping[str, Tensor], Message]:
        arguments = apart(tensors)
        stages = {"stages": tuple(message["stages"])} if message["stages"] else {}
        other = replaced(message["replaced"], message["device"]) if message["replaced"] else nullcontext()
        with other:
            value = called(
                partial(self.call_of[message["kernel"]], **arguments, **message["params"], **stages), message
            )
        if message["device"] != "cpu":
            torch.accelerator.synchronize(torch.device(message["device"]))
        return by_name(value, [*message["results"], *message["may_return"]]), {}

    def prepare(self, message: Message) -> Message:
        """Get ready for a timed call, whose inputs come later; one without a kernel does nothing."""
        for number in message["close"]:
            self._memory.close(number)
        call = nothing if message["kernel"] is None else self.call_of[message["kernel"]]
        self._prepared = Prepared(message, call, self._memory.whole(message["into"]))
        return {}

    def go(self, message: Message) -> Message:
        """Make the call."""
        return self._prepared.called(self._memory.whole(message["inputs"]))


class Prepared:
    """A call that is to be made, as the `message` says: which function, and where tensors lie in memory.

    `arguments` and `results` have name, dtype, shape, strides, and the element of the memory at which they start. The
    results are to lie in `into`.
    """

    def __init__(self, message: Message, call: Callable[..., Any], into: Tensor) -> None:
        self._call, self._message = partial(call, **message["params"]), message
        self._device, self._results = torch.device(message["device"]), placed_in(message["results"], into)

    def called(self, inputs: Tensor) -> Message:
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


def placed_in(tensors: list[Message], words: Tensor) -> dict[str, Tensor]:
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

    def __enter__(self) -> Offers:
        for where, name, offering in self._functions():
            self._own[name] = getattr(where, name)
            setattr(where, name, offering)
        return self

    def __exit__(self, *_: object) -> None:
        for where, name, _offering in self._functions():
            setattr(where, name, self._own[name])

    def _functions(self) -> tuple[tuple[Any, str, Callable[..., Any]], ...]:
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
