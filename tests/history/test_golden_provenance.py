"""Provenance of a golden: the sources that decide its bits, and nobody's name."""

from __future__ import annotations

import getpass
import platform
import subprocess
from pathlib import Path

import pytest
import torch

from lastbit.history.golden_provenance import REVISION_VARIABLE, differences, kind_of, provenance
from lastbit.kernel import Kernel
from lastbit.references.rms_norm import rms_norm
from lastbit.reports.golden import ProvenanceDifference
from lastbit.verify.check import Subject


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a kernel that imports a sibling, which imports another, and a file that it does not import."""
    (tmp_path / "mine.py").write_text("import torch\nfrom helping import f\n")
    (tmp_path / "helping.py").write_text("def f():\n    import deeper\n")
    (tmp_path / "deeper.py").write_text("import mine\n")
    (tmp_path / "other.py").write_text("")
    return tmp_path


def found(folder: Path) -> dict[str, str]:
    kernel = Kernel("mine", "rms_norm", "", print, source=f"{folder / 'mine.py'}:2")
    return provenance(Subject(kernel, rms_norm, torch.device("cpu")))


@pytest.mark.parametrize("name", ["mine.py", "helping.py", "deeper.py"])
def test_every_file_that_decides_the_bits_changes_the_source(folder: Path, name: str) -> None:
    before = found(folder)["source"]
    with (folder / name).open("a") as file:
        file.write("# changed\n")
    assert found(folder)["source"] != before


def test_another_file_does_not(folder: Path) -> None:
    before = found(folder)["source"]
    (folder / "other.py").write_text("# changed\n")
    assert found(folder)["source"] == before


def test_the_revision_is_that_of_git_and_says_what_is_not_committed(folder: Path) -> None:
    assert found(folder)["revision"] == ""

    def git(*words: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init")
    git("add", ".")
    git("commit", "-m", "kernels")
    head = git("rev-parse", "HEAD")
    assert found(folder)["revision"] == head
    (folder / "other.py").write_text("# changed\n")
    assert found(folder)["revision"] == head, "it is no source of the kernel"
    (folder / "deeper.py").write_text("# changed\n")
    assert found(folder)["revision"] == f"{head}-dirty"


def test_the_revision_is_that_of_the_kernels_inside_a_hook_of_another_repository(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = folder / "other"
    for place in (folder, other):
        subprocess.run(["git", "init", str(place)], capture_output=True, check=True)
        words = ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "--allow-empty", "-m", place.name]
        subprocess.run(["git", *words], cwd=place, capture_output=True, check=True)
    before = found(folder)["revision"]
    assert before
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git" / "index"))
    assert found(folder)["revision"] == before


def test_the_revision_of_an_exported_tree_can_be_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REVISION_VARIABLE, "abc")
    assert found(folder)["revision"] == "abc"


def test_a_kernel_without_a_file(tmp_path: Path) -> None:
    assert (found(tmp_path)["source"], found(tmp_path)["revision"]) == ("", "")


def test_it_names_the_device_and_nobody(folder: Path) -> None:
    items = found(folder)
    assert set(items) == {"source", "imports", "packages", "revision", "device", "driver", "torch", "triton"}
    assert items["torch"] == torch.__version__
    assert items["device"]
    assert kind_of(torch.device("cpu")) == "cpu"
    text = " ".join(items.values())
    assert platform.node() not in text.split()
    assert getpass.getuser() not in text.split()
    assert str(folder) not in text


def test_kinds_of_accelerators_are_their_models(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        @staticmethod
        def get_device_name(device: torch.device) -> str:
            return "NVIDIA H200"

    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    assert kind_of(torch.device("cuda:1")) == "nvidia-h200"


def test_the_revision_counts_only_where_the_source_does() -> None:
    old = {"source": "a", "revision": "1", "torch": "2"}
    assert differences(old, {**old, "revision": "2"}) == ()
    assert differences(old, {**old, "torch": "3"}) == (ProvenanceDifference("torch", "2", "3"),)
    moved = differences(old, {**old, "source": "b", "revision": "2"})
    assert [d.item for d in moved] == ["source", "revision"]
