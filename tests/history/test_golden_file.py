"""Golden files: what is written comes back, damage of any byte is told, and nothing is ever half written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

from lastbit.dtypes import DTYPES
from lastbit.errors import LastbitError
from lastbit.history import golden_file
from lastbit.history.golden_file import Golden, RecordedCase, RecordedStage, path_of, read, same, store, write
from lastbit.reports.golden import Figures

PROVENANCE = {"source": "0123456789abcdef", "revision": "", "device": "a CPU", "torch": "2.13.0", "triton": "3.7.1"}


def golden(kernel: str = "mine", scale: float = 1.0) -> Golden:
    """One case with a stage of every dtype, a scalar, an empty one and a large one."""
    tensors = {name: (torch.arange(15).reshape(3, 5) * scale).to(dtype) for name, dtype in DTYPES.items()}
    tensors |= {"scalar": torch.tensor(scale), "empty": torch.empty(0, 3), "large": torch.randn(70, 300) * scale}
    figures = Figures(15, 3, 0, float("inf"), float("nan"))
    stages = {name: RecordedStage(store(x), name == "fp16", figures) for name, x in tensors.items()}
    cases = (RecordedCase("op x=bf16[3,5] seed=1", "00ff", stages), RecordedCase("op x=bf16[1] seed=2", "0f", {}))
    return Golden(kernel, "op", "some+contract", "cpu", PROVENANCE, cases)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(golden(), tmp_path / "cpu")


def test_everything_comes_back(path: Path) -> None:
    before, after = golden(), read(path)
    for name in ("kernel", "op", "contract", "kind", "provenance"):
        assert getattr(after, name) == getattr(before, name)
    assert [(case.line, case.inputs) for case in after.cases] == [(case.line, case.inputs) for case in before.cases]
    for name, stage in before.cases[0].stages.items():
        kept = after.cases[0].stages[name]
        assert (kept.unordered, kept.figures.mismatched, kept.figures.rel_l2) == (stage.unordered, 3, float("inf"))
        assert str(kept.values) == str(stage.values)
        if name != "large":
            assert same(kept.values, stage.values)


def test_the_same_golden_gives_the_same_bytes(tmp_path: Path) -> None:
    """So that a repository sees no change where there is none."""
    content = golden()
    assert write(content, tmp_path / "a").read_bytes() == write(content, tmp_path / "b").read_bytes()


def regions(content: bytes) -> dict[str, int]:
    """Return a position in each part of a golden file."""
    header = 8 + int.from_bytes(content[:8], "little")
    found = {name: content.index(name.encode()) for name in ("__metadata__", "lastbit golden", "format", "checksum")}
    found |= {f"value of {name}": content.index(name.encode()) + len(name) + 6 for name in ("format", "checksum")}
    found |= {name: content.index(name.encode()) + 2 for name in ("some+contract", "2.13.0", "00ff", "data_offsets")}
    found |= {"length": 0, "highest byte of the length": 7, "first brace": 8, "padding": header - 1}
    return found | {"first tensor": header, "middle": (header + len(content)) // 2, "last byte": len(content) - 1}


REGIONS = regions(golden_file._packed(golden()))


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("mask", [0x01, 0x20, 0x80], ids=hex)
def test_one_changed_byte_is_told_wherever_it_is(path: Path, region: str, mask: int) -> None:
    damaged = bytearray(path.read_bytes())
    damaged[regions(bytes(damaged))[region]] ^= mask
    refuses(path, bytes(damaged), "damaged|no golden: it lacks")


def refuses(path: Path, content: bytes, message: str) -> None:
    """Neither reading nor writing accepts a file, which stays as it is."""
    path.write_bytes(content)
    with pytest.raises(LastbitError, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)
    with pytest.raises(LastbitError, match=message):
        write(golden(scale=2.0), path.parent)
    assert path.read_bytes() == content
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("kept", [0, 5, 8, 100, -3000, -1])
def test_a_truncated_file(path: Path, kept: int) -> None:
    refuses(path, path.read_bytes()[:kept], "damaged")


def test_a_file_with_something_behind_it(path: Path) -> None:
    refuses(path, path.read_bytes() + b"\0", "damaged: it has [0-9,]+ bytes, not")


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(lambda: safetensors.torch.save({"weight": torch.ones(3)}), id="without metadata"),
        pytest.param(lambda: safetensors.torch.save({"w": torch.ones(3)}, {"format": "pt"}), id="of another program"),
    ],
)
def test_a_foreign_safetensors_file(path: Path, content: Callable[[], bytes]) -> None:
    refuses(path, content(), "is a safetensors file, but no golden")


@pytest.mark.parametrize("content", [b"PK\3\4 a zip file", b"{}", b"\3\0\0\0\0\0\0\0[1]", b"version https://git-lfs"])
def test_a_file_of_another_kind(path: Path, content: bytes) -> None:
    refuses(path, content, "no safetensors file")


def test_a_newer_format(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(golden_file, "FORMAT", 7)
        content = golden_file._packed(golden())
    refuses(path, content, "has format 7, and this lastbit reads format 1")


def test_a_description_without_a_field(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as other:
        other.setattr(golden_file, "_described", lambda case: {"case": case.line})
        content = golden_file._packed(golden())
    refuses(path, content, "malformed")


@pytest.mark.parametrize("step", ["write_bytes", "replace"])
def test_a_failure_while_writing_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    before = path.read_bytes()

    def full(*arguments: object) -> None:
        if step == "write_bytes":
            Path(str(arguments[0])).touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path if step == "write_bytes" else os, step, full)
    with pytest.raises(LastbitError, match="No space left on device"):
        write(golden(scale=2.0), path.parent)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name], "nothing temporary stays"


def test_a_good_file_is_replaced(path: Path) -> None:
    before = path.read_bytes()
    assert write(golden(scale=2.0), path.parent) == path
    assert path.read_bytes() != before


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LastbitError, match=r"cannot read golden .*No such file"):
        read(tmp_path / "none.safetensors")


def test_names_of_kernels_become_different_safe_file_names() -> None:
    names = ["mine", "Mine", "eager[a+b]", "eager[a-b]", "eager-a-b", "a/b", "..", "../x", "x" * 300, "ä", "mine@old"]
    files = {path_of(name, Path("f")).name for name in names}
    assert len(files) == len(names) == len({file.lower() for file in files})
    assert path_of("mine", Path("f")) == Path("f", "mine.safetensors")
    for file in files:
        assert file.isascii()
        assert len(file) < 120
        assert not set(file) & set("/\\[]+@ ")
        assert not file.startswith("..")


def test_the_metadata_is_json_that_other_programs_can_read(path: Path) -> None:
    with safetensors.safe_open(str(path), "pt") as opened:
        document = json.loads(opened.metadata()["lastbit golden"])
        assert document["cases"][0]["case"] == "op x=bf16[3,5] seed=1"
        assert "0/bf16" in opened.keys()  # noqa: SIM118


def test_two_goldens_of_one_kernel_on_two_kinds_are_two_files(tmp_path: Path) -> None:
    write(golden(), tmp_path / "cpu")
    write(replace(golden(), kind="nvidia-h200"), tmp_path / "nvidia-h200")
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2
