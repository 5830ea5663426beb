"""The work of a kernel process, done in this one: memory, results, calls in threads, answers, and files of kernels."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit.children.channel import Channel
from lastbit.isolation import runner
from lastbit.isolation.runner import (
    ALIGNMENT,
    Bare,
    Mapped,
    ReturnedResults,
    Withheld,
    alone,
    apart,
    below,
    by_name,
    called,
    called_in_thread,
    executed,
    is_lost,
    placed,
    raised,
    serve,
)


def memory_file(size: int) -> int:
    fd = os.memfd_create("memory")
    os.ftruncate(fd, size)
    return fd


@pytest.fixture
def memory() -> Mapped:
    """Give memory with block 1 of 4 KiB and block 2 of 512 bytes."""
    made = Mapped()
    blocks = [{"number": number, "bytes": size, "cuda": None} for number, size in ((1, 4096), (2, 512))]
    made.take(blocks, (), [memory_file(4096), memory_file(512)])
    return made


def block(number: int, offset: int = 0, size: int = 512) -> dict[str, int]:
    return {"memory": number, "offset": offset, "bytes": size}


# Memory


def test_words_lie_where_the_judge_has_them(memory: Mapped) -> None:
    words = memory.words(block(1))
    assert (words.dtype, words.numel(), words.untyped_storage().nbytes()) == (torch.int64, 64, 512)
    words[2] = 7
    assert memory.words(block(1, 16, 8)).tolist() == [7]
    assert memory.whole(1).numel() == 512 and memory.whole(2).numel() == 64
    assert (memory.size(1), memory.size(2), memory.size(3)) == (4096, 512, 0)


def test_blocks_that_are_gone_are_forgotten_and_descriptors_closed(memory: Mapped) -> None:
    fd = memory_file(64)
    memory.take([{"number": 5, "bytes": 64, "cuda": None}], [1, 9], iter([fd]))
    assert (memory.size(1), memory.size(2), memory.size(5)) == (0, 512, 64)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    memory.close(5)
    memory.close(5)
    assert memory.size(5) == 0


def test_memory_of_a_device_is_opened_and_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []

    class Exported:
        def __init__(self, *given: object) -> None:
            opened.append(given)

        def close(self) -> None:
            opened.append("closed")

        def __len__(self) -> int:
            return 24

    monkeypatch.setattr(runner, "ExportedMemory", Exported)
    memory = Mapped()
    memory.take([{"number": 4, "bytes": 24, "cuda": [1, "ff", 8]}], (), ())
    assert opened == [(24, 1, "ff", 8)] and memory.size(4) == 24
    memory.close(4)
    assert opened[1:] == ["closed"]


def test_an_address_is_told_by_its_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def driver(name: str, first: Any, *rest: Any) -> None:
        asked.append(name)
        if name == "cuIpcGetMemHandle":
            first._obj.reserved[1] = 0xAB
        else:
            first._obj.value = 1000

    monkeypatch.setattr(runner, "driver", driver)
    assert runner.exported(1024) == ("00ab" + "00" * 62, 24)
    assert asked == ["cuIpcGetMemHandle", "cuMemGetAddressRange_v2"]


def test_an_error_of_the_driver_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(right=lambda *given: 0 * len(given), wrong=lambda *given: 700 + len(given))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library if name == "libcuda.so.1" else None)
    runner.driver("right", 1)
    with pytest.raises(RuntimeError, match="wrong of the CUDA driver failed with error 702"):
        runner.driver("wrong", 1, 2)


# Tensors in memory


DESCRIBED = {"dtype": "float32", "shape": [2, 3], "strides": [4, 1], "start": 5}


def test_a_tensor_is_placed_among_words() -> None:
    words = torch.zeros(16, dtype=torch.int64)
    tensor = placed(words, DESCRIBED)
    tensor.fill_(1.5)
    assert (tuple(tensor.shape), tensor.stride(), tensor.storage_offset()) == ((2, 3), (4, 1), 5)
    assert words.view(torch.float32)[5:12].tolist() == [1.5, 1.5, 1.5, 0, 1.5, 1.5, 1.5]
    assert not tensor._is_view() and tensor.untyped_storage().nbytes() == 128


@pytest.mark.parametrize(
    ("shape", "strides", "size"),
    [([2, 3], [4, 1], 7), ([2, 3], [0, 1], 3), ([], [], 1), ([0, 3], [3, 1], 0), ([4], [2], 7)],
)
def test_a_tensor_alone_has_a_storage_of_its_size(shape: list[int], strides: list[int], size: int) -> None:
    words = torch.zeros(16, dtype=torch.int64)
    words.view(torch.float32)[5] = 2.5
    tensor = alone(words, DESCRIBED | {"shape": shape, "strides": strides}, 5)
    assert (list(tensor.shape), list(tensor.stride()), tensor.storage_offset()) == (shape, strides, 0)
    assert tensor.untyped_storage().nbytes() == 4 * size
    if tensor.numel():
        assert tensor.flatten()[0] == 2.5


def test_results_are_copied_each_to_a_round_place(memory: Mapped) -> None:
    x = torch.arange(70.0).reshape(7, 10)
    results = ReturnedResults(
        memory,
        {"x": x, "turned": x[:2, :3].t(), "none": torch.empty(0, 3), "there": torch.empty(2, device="meta"),
         "last": torch.tensor([3], dtype=torch.int16)},
    )  # fmt: skip
    said = results.copied(1)
    assert (said["bytes"], said["copied"]) == (512 + 256 + 256, True)
    listed = {one.pop("name"): one for one in said["returned"]}
    assert listed["x"] == {"dtype": "float32", "device": "cpu", "at": 0, "shape": [7, 10], "strides": [10, 1]}
    assert listed["turned"] == {"dtype": "float32", "device": "cpu", "at": 512, "shape": [3, 2], "strides": [1, 3]}
    assert (listed["none"]["at"], listed["there"]["at"], listed["there"]["device"]) == (-1, -1, "meta")
    assert listed["last"]["at"] == 768 == 3 * ALIGNMENT
    whole = memory.whole(1)
    for name in ("x", "turned", "last"):
        one = listed[name]
        size = getattr(torch, one["dtype"]).itemsize
        given = {"x": x, "turned": x[:2, :3].t(), "last": torch.tensor([3])}[name]
        assert torch.equal(placed(whole, one | {"start": one["at"] // size}), given)


def test_a_result_of_one_byte_is_held(memory: Mapped) -> None:
    said = ReturnedResults(memory, {"x": torch.tensor(5, dtype=torch.int8)}).copied(2)
    assert (said["returned"][0]["at"], said["bytes"], int(memory.whole(2)[0]) % 256) == (0, 256, 5)


def test_results_that_do_not_fit_are_described_alone(memory: Mapped) -> None:
    memory.whole(2).fill_(-1)
    fits, too_large = (ReturnedResults(memory, {"x": torch.zeros(n)}) for n in (128, 129))
    assert too_large.copied(2)["copied"] is False and bool((memory.whole(2) == -1).all())
    assert fits.copied(2) | {"returned": []} == {"returned": [], "bytes": 512, "copied": True}
    assert bool((memory.whole(2) == 0).all())
    assert ReturnedResults(memory, {}).copied(3) == {"returned": [], "bytes": 0, "copied": True}


def test_gradients_of_results_stay_behind(memory: Mapped) -> None:
    result = torch.ones(3, requires_grad=True) * 2
    assert ReturnedResults(memory, {"x": result}).copied(1)["copied"]
    assert placed(memory.whole(1), DESCRIBED | {"shape": [3], "strides": [1], "start": 0}).tolist() == [2, 2, 2]


# Calls


def depth() -> int:
    frame, count = sys._getframe(), 0
    while frame := frame.f_back:  # type: ignore[assignment]
        count += 1
    return count


def test_a_call_may_have_more_frames_above_it() -> None:
    assert below(0, depth) + 5 == below(5, depth)


@pytest.mark.parametrize(
    ("threaded", "device", "compiler", "elsewhere"),
    [
        (True, "cpu", False, True),
        (True, "cpu", True, True),
        (True, "cuda:0", False, True),
        (True, "cuda:0", True, False),
        (False, "cpu", False, False),
    ],
)
def test_where_a_kernel_is_called(
    threaded: bool, device: str, compiler: bool, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "called_in_thread", lambda call, device: ("thread", device, call()))
    modules = {name: module for name, module in sys.modules.items() if name != "torch._dynamo"}
    monkeypatch.setattr(runner.sys, "modules", modules | ({"torch._dynamo": None} if compiler else {}))
    found = called(lambda: 5, {"threaded": threaded, "device": device, "frames": 2})
    assert found == (("thread", device, 5) if elsewhere else 5)


@pytest.mark.parametrize("compiler", [False, True])
def test_a_thread_has_no_gradients_two_cores_and_another_beside_it(
    compiler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = {name: module for name, module in sys.modules.items() if name != "torch._dynamo"}
    monkeypatch.setattr(runner.sys, "modules", modules | ({"torch._dynamo": None} if compiler else {}))
    before, threads, hook = torch.get_num_threads(), threading.active_count(), sys.unraisablehook
    seen = called_in_thread(
        lambda: (torch.is_grad_enabled(), torch.get_num_threads(), threading.active_count(), threading.get_ident()),
        "cpu",
    )
    assert seen[:2] == ((True, before) if compiler else (False, 2))
    assert seen[2] > threads and seen[3] != threading.get_ident()
    assert (torch.get_num_threads(), threading.active_count(), sys.unraisablehook) == (before, threads, hook)


def test_what_a_thread_raises_is_raised_here() -> None:
    def fails() -> None:
        raise ValueError("in a thread")

    hook, threads = sys.unraisablehook, torch.get_num_threads()
    with pytest.raises(ValueError, match="in a thread"):
        called_in_thread(fails, "cpu")
    with pytest.raises(SystemExit, match="the kernel ended its thread"):
        called_in_thread(sys.exit, "cpu")
    assert (sys.unraisablehook, torch.get_num_threads()) == (hook, threads)


def test_a_thread_for_a_device_makes_it_current_and_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[object] = []
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    monkeypatch.setattr(torch.accelerator, "set_device_index", did.append)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: did.append("waited"))
    assert called_in_thread(lambda: did.append("called") or 7, "cuda:3") == 7
    assert did == [3, "waited", "called"]


def test_a_device_that_cannot_be_waited_for_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    assert not is_lost("cuda:0")

    def fails(device: torch.device) -> None:
        raise RuntimeError("illegal access")

    monkeypatch.setattr(torch.accelerator, "synchronize", fails)
    assert is_lost("cuda:0") and not is_lost("cpu")


class Silent(KeyError):
    """An exception that cannot be told."""

    def __str__(self) -> str:
        raise RuntimeError


def caught(error: BaseException, *, lost: bool = False) -> Mapping[str, Any]:
    try:
        raise error
    except BaseException as raising:
        found: Mapping[str, Any] = raised(raising, lost)["raised"]
        return found


def test_an_exception_is_data() -> None:
    found = caught(ValueError("x" * 30_000), lost=True)
    assert found["kinds"] == ["ValueError", "Exception", "BaseException", "object"]
    assert found["text"] == "x" * 20_000 and found["lost"] is True
    assert len(found["traceback"]) == 16_000 and found["traceback"].endswith("x\n")
    short = caught(ZeroDivisionError("by zero"))
    assert short["text"] == "by zero" and short["lost"] is False
    assert short["traceback"].startswith("Traceback (most recent call last)") and "by zero" in short["traceback"]
    assert caught(Silent())["text"] == ""


def test_results_without_names_get_them_in_order() -> None:
    x, y = torch.zeros(1), torch.ones(1)
    assert by_name(x, ["output", "lse"]) == {"output": x}
    assert by_name((x, y), ["output", "lse"]) == by_name([x, y], ["output", "lse", "more"]) == {"output": x, "lse": y}
    assert by_name({"lse": y}, ["output"]) == {"lse": y} and by_name(None, ["output"]) is None


# Answers


class Work:
    """What is asked of this one."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def say(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"said": message["word"]}

    def double(self, message: Mapping[str, Any], tensors: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
        [(described, words)] = tensors
        return {"y": placed(words, described) * 2}, {"more": message["factor"]}

    def fail(self, message: Mapping[str, Any]) -> None:
        raise ValueError("cannot")

    def stop(self, message: Mapping[str, Any]) -> None:
        raise SystemExit(3)


@pytest.fixture
def asked() -> Iterator[Callable[..., Any]]:
    """Ask a thread that serves, and return its answer."""
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=serve, args=(theirs, Work()), daemon=True)
    thread.start()
    channel, numbers = Channel(ours), iter(range(100))

    def ask(fds: tuple[int, ...] = (), **message: Any) -> Any:
        number = next(numbers)
        channel.send({**message, "number": number}, fds)
        answer, _ = channel.receive()
        assert answer.pop("number") == number
        return answer

    yield ask
    ours.close()
    thread.join(10)
    assert not thread.is_alive()  # it ends when nobody asks any more
    theirs.close()


def test_each_message_is_answered_by_the_method_of_its_name(asked: Callable[..., Any]) -> None:
    assert asked(do="say", word="yes") == {"said": "yes"}
    failed = asked(do="fail")["raised"]
    assert (failed["kinds"][0], failed["text"], failed["lost"]) == ("ValueError", "cannot", False)
    assert asked(do="stop")["raised"]["kinds"][0] == "SystemExit"
    assert asked(do="nothing")["raised"]["kinds"][0] == "AttributeError"
    assert asked(do="say", word="still here") == {"said": "still here"}


def test_tensors_are_read_where_they_lie_and_results_copied(asked: Callable[..., Any]) -> None:
    ours, out = memory_file(4096), memory_file(4096)
    given, results = torch.from_file(f"/proc/self/fd/{ours}", shared=True, size=1024), None
    given[5] = 21.0
    new = [{"number": number, "bytes": 4096, "cuda": None} for number in (1, 2)]
    tensor = {"memory": 1, "offset": 0, "bytes": 512, "dtype": "float32", "shape": [1], "strides": [1], "start": 5}
    answer = asked((ours, out), do="double", new=new, tensors=[tensor], into=3, factor=9)
    assert (answer["copied"], answer["bytes"], answer["more"]) == (False, 256, 9)  # there is no memory of that number
    assert [one["name"] for one in answer["returned"]] == ["y"]
    again = asked(do="copy", into=2)
    assert (again["copied"], again["bytes"]) == (True, 256)
    results = torch.from_file(f"/proc/self/fd/{out}", shared=True, size=1024)
    assert results[0] == 42.0
    assert asked(do="double", tensors=[tensor], into=2, factor=1)["copied"] is True
    assert asked(do="say", word="", gone=[2]) == {"said": ""}
    assert asked(do="copy", into=2)["copied"] is False


def test_where_memory_cannot_be_mapped_nothing_more_can_be_asked(asked: Callable[..., Any]) -> None:
    answer = asked(do="say", word="", new=[{"number": 1, "bytes": 8, "cuda": None}])  # no descriptor came
    assert answer["raised"]["lost"] is True


# Files


def test_a_file_is_executed_with_its_siblings_at_hand(tmp_path: Path) -> None:
    (tmp_path / "beside_it.py").write_text("NUMBER = 7\n")
    (tmp_path / "mine.py").write_text("from beside_it import NUMBER\n")
    path = list(sys.path)
    (tmp_path / "first.py").write_text("import sys\nPLACE = sys.path[0]\n")
    assert str(tmp_path) == executed(tmp_path / "first.py").PLACE
    module = executed(tmp_path / "mine.py")
    assert module.NUMBER == 7 and sys.modules["kernel_file_mine"] is module
    (tmp_path / "wrong.py").write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        executed(tmp_path / "wrong.py")
    assert sys.path == path
    for name in ("beside_it", "kernel_file_first", "kernel_file_mine", "kernel_file_wrong"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("lastbit.references", True),
        ("lastbit.judging.verdict", True),
        ("lastbit.cli", True),
        ("lastbit.kernel", False),
        ("lastbit", False),
        ("references", False),
        ("other.references", False),
        ("lastbit.referencesque", False),
    ],
)
def test_what_knows_the_answers_is_withheld(name: str, refused: bool) -> None:
    if refused:
        with pytest.raises(ImportError, match=f"cannot import {name}, which knows the judge's answers") as caught:
            Withheld.find_spec(name)
        assert caught.value.name == name
    else:
        assert Withheld.find_spec(name) is None


def test_it_is_withheld_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    Withheld.begin()
    Withheld.begin()
    assert sys.meta_path[0] is Withheld and sys.meta_path.count(Withheld) == 1


PLAIN = """\
import torch

def scaled(x, scale, stages=None):
    if stages is not None:
        stages = list(stages)
    return x * scale, torch.tensor([len(stages or ())])

def one_each(x):
    return torch.softmax(x, -1)
"""
DECLARED = """\
from lastbit.kernel import kernel

@kernel("rms_norm", contract="fp32_multiply", name="one")
def one(x, *, eps):
    return x + eps
"""


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> Bare:
    monkeypatch.setattr(Withheld, "begin", lambda: None)
    return Bare(Mapped())


def call_of(**other: Any) -> dict[str, Any]:
    plain = {"kernel": "k", "params": {"scale": 3.0}, "stages": [], "replaced": "", "device": "cpu"}
    return plain | {"threaded": False, "frames": 0, "results": ["y"], "may_return": ["count"]} | other


def test_a_plain_function_is_called_on_tensors_alone(bare: Bare, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(PLAIN)
    assert bare.load({"path": str(tmp_path / "plain.py"), "kernel": "k", "plain": "scaled"}) == {"kernels": []}
    words = torch.zeros(4, dtype=torch.int64)
    words.view(torch.float32)[2:4] = torch.tensor([1.0, 2.0])
    tensor = {"name": "x", "dtype": "float32", "shape": [2], "strides": [1], "start": 2, "memory": 1}
    found, said = bare.call(call_of(), [(tensor, words)])
    assert found["y"].tolist() == [3.0, 6.0] and found["count"].tolist() == [0] and said == {}
    found, _ = bare.call(call_of(stages=["a", "b"]), [(tensor, words)])
    assert found["count"].tolist() == [2]
    bare.load({"path": str(tmp_path / "plain.py"), "kernel": "k", "plain": "one_each"})
    for other, value in (("", 1.0), ("aten::softmax.int", 2.25)):
        found, _ = bare.call(
            call_of(params={}, replaced=other), [(tensor | {"shape": [2, 1], "strides": [1, 1]}, words)]
        )
        assert found["y"].tolist() == [[value], [value]]


def test_tensors_of_one_storage_are_views_of_one_tensor() -> None:
    words = torch.arange(8)
    common = {"dtype": "int64", "shape": [2, 2], "strides": [3, 1], "memory": 7}
    other = {"name": "y", "dtype": "int64", "shape": [2], "strides": [1], "start": 0, "memory": 8}
    pairs = [
        ({"name": "x", "start": 3, **common}, words),
        (other, words),
        ({"name": "up", "start": 1, **common}, words),
    ]
    found = apart(pairs)
    assert list(found) == ["x", "y", "up"]
    assert found["x"].tolist() == [[3, 4], [6, 7]] and found["up"].tolist() == [[1, 2], [4, 5]]
    assert found["x"]._base is found["up"]._base is not None and found["y"]._base is None
    assert found["up"].storage_offset() == 0 and found["x"].storage_offset() == 2
    assert found["x"].untyped_storage().nbytes() == 7 * 8 and found["y"].untyped_storage().nbytes() == 2 * 8


def test_declared_kernels_are_loaded_by_name(bare: Bare, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(DECLARED)
    assert bare.load({"path": str(tmp_path / "mine.py")}) == {"kernels": []}
    assert list(bare.call_of) == ["one"] and bare.call_of["one"](torch.ones(1), eps=1.0).tolist() == [2.0]
