"""Provenance of a golden: the sources that decide its bits, and nobody's name."""

from __future__ import annotations

import getpass
import platform
import subprocess
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

from lastbit.history import golden_provenance as module
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


# What a file imports


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import a, b.c", ("a", "b.c")),
        ("from a.b import c, d", ("a.b", "a.b.c", "a.b.d")),
        ("from . import c", (".c",)),
        ("from .. import c as d", ("..c",)),
        ("from .a import c", (".a", ".a.c")),
        ("def f():\n    import a", ("a",)),
        ("x = 1", ()),
    ],
)
def test_names_of_modules_in_a_text(text: str, names: tuple[str, ...], tmp_path: Path) -> None:
    assert module._names_of(text.encode()) == names
    (tmp_path / "a.py").write_text(text)
    (tmp_path / "a.so").write_text(text)
    assert module._names_in(tmp_path / "a.py") == names and module._names_in(tmp_path / "a.so") == ()


def test_a_module_is_in_its_packages() -> None:
    assert list(module._with_packages("a.b.c")) == ["a", "a.b", "a.b.c"]
    assert list(module._with_packages("a")) == ["a"]


def known(folder: Path, **texts: str) -> dict[str, Path]:
    """Write modules, whose names have __ for dots; a package ends with one more."""
    found = {}
    for name, text in texts.items():
        path = folder.joinpath(*name.split("__"))
        path = path / "__init__.py" if name.endswith("__") else path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        found[name.strip("_").replace("__", ".")] = path
    return found


def test_modules_are_reached_through_packages_and_relative_imports(tmp_path: Path) -> None:
    modules = known(
        tmp_path,
        top__="",
        top__pack__="from . import first",
        top__pack__first="from .second import f",
        top__pack__second="from ..other import g\nimport gone",
        top__other="",
        top__pack__sub__="from ..third import h",
        top__pack__third="from .sub import again",
        other="",
    )
    everything = {"top.pack", "top.pack.first", "top.pack.second", "top.other"}
    assert module._reached_from(["top.pack"], modules) == {"top", *everything}
    assert module._reached_from(["top.pack.sub", "gone"], modules) == {
        *("top", "top.pack.sub", "top.pack.third"),
        *everything,
    }
    file = tmp_path / "kernel.py"
    file.write_text("from top.other import x\nfrom other import y")
    assert module._reached([file], modules) == {"top", "top.other", "other"}
    assert module._reached([], modules) == set()


def test_packages_are_told_with_those_that_they_require(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Installed:
        def __init__(self, version: str, *requires: str) -> None:
            self.version, self.requires = version, list(requires) or None

    here = {
        "one-two": Installed("1.0", "three>=2", "Extra; extra == 'more'", "torch", "gone"),
        "three": Installed("2.5"),
    }
    here |= {"extra": Installed("9"), "torch": Installed("8")}

    def distribution(name: str) -> Installed:
        if name not in here:
            raise PackageNotFoundError
        return here[name]

    monkeypatch.setattr(module, "distribution", distribution)
    monkeypatch.setattr(module, "_providers", lambda: {"one": ["One_Two"], "torch": ["torch"]})
    (tmp_path / "kernel.py").write_text("import one.part, torch, nothing")
    assert module._packages([tmp_path / "kernel.py"]) == "one-two 1.0, three 2.5"
    assert module._packages([]) == ""


def test_packages_are_compared_one_by_one() -> None:
    before = {"packages": "a 1, b 2", "torch": "1", "imports": "x"}
    after = {"packages": "b 3, c 4", "torch": "1", "imports": "x", "driver": "5"}
    assert differences(before, after) == (
        ProvenanceDifference("a", "1", ""),
        ProvenanceDifference("b", "2", "3"),
        ProvenanceDifference("driver", "", "5"),
        ProvenanceDifference("c", "", "4"),
    )


def test_a_hash_is_of_names_and_contents(tmp_path: Path) -> None:
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    for file in (one, other):
        file.write_text("x = 1")
    assert module._hash_of([one]) != module._hash_of([other]) and len(module._hash_of([one])) == 16
    assert module._hash_of([]) == ""


def test_output_of_commands() -> None:
    assert module._command("sh", "-c", "echo ' two\nlines '") == "two\nlines"
    assert module._command("sh", "-c", "echo no; exit 1") == module._command("no-such-command-here") == ""
    assert module._driver(torch.device("cpu")) == ""


def test_modules_of_a_repository_count_if_a_kernel_names_them_or_nobody_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = known(tmp_path, own="import deeper", deeper="", others="", unnamed="import below", below="")
    (tmp_path / "kernels").mkdir()
    mine, other = (tmp_path / "kernels" / name for name in ("mine.py", "other.py"))
    mine.write_text("import own")
    other.write_text("import others")
    beside = {"other": other}
    monkeypatch.setattr(module, "checkout_of", lambda path: None if path.name == "bare.py" else tmp_path)
    monkeypatch.setattr(module, "of_repository", lambda checkout, imported, copied: modules | beside)
    names = ("below", "deeper", "own", "unnamed")
    assert [path.stem for path in module._repository_modules([mine])] == list(names)
    assert [path.stem for path in module._repository_modules([other])] == ["below", "others", "unnamed"]
    assert module._repository_modules([]) == [] and module._repository_modules([tmp_path / "bare.py"]) == []
    monkeypatch.setattr(module, "of_repository", lambda checkout, imported, copied: beside)
    assert module._repository_modules([mine]) == []
