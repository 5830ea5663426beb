"""Kernels: the decorator, and folders of files that are loaded by path."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lastbit.errors import KernelError, UsageError
from lastbit.kernel import Kernel, declarations_of, kernel, load_file, load_kernels

Folder = Callable[..., Path]

HEAD = "from lastbit.kernel import kernel\n"


def declared(name: str, result: object = None, op: str = "op") -> str:
    """Source that declares a kernel which returns `result`."""
    return f"{HEAD}\n\n@kernel({op!r})\ndef {name}(x):\n    return {result!r}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Make a folder of files: keywords are stems, values are sources."""

    def make(name: str = "kernels", **sources: str) -> Path:
        made = tmp_path / name
        made.mkdir(parents=True)
        for stem, source in sources.items():
            (made / f"{stem}.py").write_text(source)
        return made

    return make


def names(kernels: tuple[Kernel, ...]) -> list[str]:
    return [k.name for k in kernels]


# The decorator


def test_outside_a_load_the_decorator_returns_the_function() -> None:
    def double(x: int) -> int:
        return 2 * x

    assert kernel("op", contract="anything", name="other")(double) is double


def test_inside_a_load_it_returns_the_function_too(folder: Folder) -> None:
    source = declared("first", 1) + "\nassert first.__name__ == 'first'\nassert first(0) == 1\n"
    assert names(load_kernels(folder(a=source))) == ["first"]


def test_everything_that_is_declared(folder: Folder) -> None:
    source = f"""{HEAD}
@kernel(
    "norm", contract="native", name="mine", stages=("s",), mutates=("x",), devices=("cuda",),
    depth=lambda n: n, order=64,
)
def function(x, w=None, *, eps, stages=()):
    return x
"""
    [found] = load_kernels(folder(a=source))
    assert (found.name, found.op, found.contract) == ("mine", "norm", "native")
    assert (found.stages, found.mutates, found.devices) == (("s",), ("x",), ("cuda",))
    assert found.depth is not None
    assert (found.depth(7), found.order) == (7, 64)
    assert found.accepts == {"x", "w", "eps"}
    assert found.requires == {"x", "eps"}
    assert found.call(3, eps=0.0) == 3


def test_defaults_of_a_declaration(folder: Folder) -> None:
    [found] = load_kernels(folder(a=declared("k")))
    assert (found.contract, found.stages, found.mutates, found.devices) == ("", (), (), ())
    assert found.depth is found.order is None


def test_source_is_file_and_line(folder: Folder) -> None:
    path = folder(a=declared("k"))
    [found] = load_kernels(path)
    file, _, line = found.source.rpartition(":")
    assert Path(file) == path / "a.py"
    assert "@kernel" in (path / "a.py").read_text().splitlines()[int(line) - 1]


def test_names_that_a_call_can_take() -> None:
    def function(a, /, b, c=1, *args, d, e=2, **others): ...

    made = Kernel("k", "op", "", function)
    assert made.accepts == {"b", "c", "d", "e"}
    assert made.requires == {"b", "d"}


def test_an_object_can_be_a_kernel(folder: Folder) -> None:
    source = f"{HEAD}\nclass Doubler:\n    def __call__(self, x):\n        return 2 * x\n\n\nkernel('op')(Doubler())\n"
    [found] = load_kernels(folder(a=source))
    assert found.name == "Doubler"
    assert found.accepts == {"x"}
    assert found.call(4) == 8


def test_a_partial_function_has_the_name_of_what_it_calls(folder: Folder) -> None:
    source = f"{HEAD}from functools import partial\n\n\ndef scale(x, *, by):\n    return by * x\n\n\n"
    [found] = load_kernels(folder(a=source + "kernel('op')(partial(scale, by=3))\n"))
    assert (found.name, found.accepts, found.requires, found.call(4)) == ("scale", {"x", "by"}, {"x"}, 12)


def test_a_function_knows_what_it_was_declared_to_be() -> None:
    @kernel("op", contract="first", name="one")
    @kernel("op", contract="second", name="two")
    def function(x): ...

    assert [(k.name, k.contract, k.call) for k in declarations_of(function)] == [
        ("two", "second", function),
        ("one", "first", function),
    ]
    assert declarations_of(print) == ()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("@kernel\ndef k(x): ...", "@kernel needs the op: write @kernel(\"OP\", contract=…) above 'k' ("),
        ("@kernel()\ndef k(x): ...", "@kernel needs the op"),
        ("@kernel(3)\ndef k(x): ...", "@kernel needs the op"),
        ("kernel('op')(3)", "kernel 'int' is no function but 3"),
        ("@kernel('op')\nclass K: ...", "kernel 'K' is a class; decorate a function, or an object that can be called"),
        ("@kernel('op', stages='inv_rms')\ndef k(x): ...", "stages='inv_rms' of kernel 'k' must be a tuple of names"),
        ("@kernel('op', mutates=('x'))\ndef k(x): ...", "mutates='x' of kernel 'k' must be a tuple of names"),
        ("@kernel('op', devices='cuda')\ndef k(x): ...", "devices='cuda' of kernel 'k' must be a tuple of names"),
        ("@kernel('op', unordered=(1,))\ndef k(x): ...", "unordered=(1,) of kernel 'k' must be a tuple of names"),
        ("@kernel('op', depth=12)\ndef k(x): ...", "depth=12 of kernel 'k' must be a function: terms → height"),
        ("@kernel('op', order=0)\ndef k(x): ...", "order=0 of kernel 'k' must be a number of terms, 1 or more"),
        ("@kernel('op', order=True)\ndef k(x): ...", "order=True of kernel 'k' must be a number of terms, 1 or more"),
    ],
)
def test_declarations_that_mean_nothing(folder: Folder, source: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        load_kernels(folder(a=f"{HEAD}\n\n{source}\n"))


# Folders


def test_kernels_come_in_order_of_file_name(folder: Folder) -> None:
    path = folder(b=declared("second"), a=declared("first"), c=declared("third"))
    assert names(load_kernels(path)) == ["first", "second", "third"]


def test_files_without_kernels_are_fine(folder: Folder) -> None:
    assert names(load_kernels(folder(a=declared("k"), helpers="VALUE = 3\n"))) == ["k"]


def test_only_python_files_of_the_folder_itself_are_loaded(folder: Folder) -> None:
    path = folder(a=declared("k"))
    (path / "notes.txt").write_text("not Python")
    (path / "sub").mkdir()
    (path / "sub" / "b.py").write_text(declared("hidden"))
    assert names(load_kernels(path)) == ["k"]


@pytest.mark.parametrize("importer", ["a", "z"])
def test_siblings_import_each_other_and_are_declared_once(folder: Folder, importer: str) -> None:
    """Whether the importing file comes first or last."""
    source = "from middle import middle\n" + declared("importer") + "\nassert middle(0) == 7\n"
    path = folder(middle=declared("middle", 7), **{importer: source})
    assert sorted(names(load_kernels(path))) == ["importer", "middle"]


def test_siblings_of_a_folder_given_by_a_relative_path(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder(a="import b\n" + declared("first"), b=declared("second"))
    monkeypatch.chdir(path.parent)
    assert sorted(names(load_kernels(Path("kernels")))) == ["first", "second"]


def test_siblings_of_a_folder_behind_a_link(folder: Folder, tmp_path: Path) -> None:
    path = folder(a="import b\n" + declared("first"), b=declared("second"))
    (tmp_path / "link").symlink_to(path)
    assert sorted(names(load_kernels(tmp_path / "link"))) == ["first", "second"]


def test_siblings_are_private_to_the_load(folder: Folder) -> None:
    before = list(sys.path)
    load_kernels(folder(a="import sibling_of_a\n" + declared("k"), sibling_of_a=""))
    assert "sibling_of_a" not in sys.modules
    assert sys.path == before
    with pytest.raises(ModuleNotFoundError):
        __import__("sibling_of_a")


def test_two_revisions_side_by_side(folder: Folder) -> None:
    """Each keeps its own siblings, although all names are equal."""
    source = "import value\n" + HEAD + "\n\n@kernel('op')\ndef k(x):\n    return value.VALUE\n"
    old = load_kernels(folder("old/kernels", k=source, value="VALUE = 'old'\n"))
    new = load_kernels(folder("new/kernels", k=source, value="VALUE = 'new'\n"))
    assert [old[0].call(0), new[0].call(0)] == ["old", "new"]
    assert old[0].source != new[0].source


def test_a_file_that_changed_is_loaded_anew(folder: Folder) -> None:
    path = folder(a=declared("k", "before"))
    before = load_kernels(path)
    (path / "a.py").write_text(declared("k", "afterwards"))
    assert [before[0].call(0), load_kernels(path)[0].call(0)] == ["before", "afterwards"]


@pytest.mark.parametrize("stem", ["torch", "random", "lastbit", "kernel", "test_kernel_loading"])
def test_a_file_shadows_no_module_of_its_name(folder: Folder, stem: str) -> None:
    other = "import random\nimport torch\nimport lastbit.ops\nassert torch.ones(1) == random.Random(0).randint(1, 1)\n"
    path = folder(a=other + declared("first"), **{stem: declared("second", stem)})
    assert sorted(names(load_kernels(path))) == ["first", "second"]
    assert sys.modules["torch"] is torch
    assert sys.modules["random"] is random


def test_dataclasses_of_a_kernel_file_work(folder: Folder) -> None:
    source = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n\n\n@dataclass\nclass Tiles:\n"
        "    rows: int = 4\n\n\n" + declared("k").replace("from lastbit", "\nfrom lastbit")
    )
    assert names(load_kernels(folder(a=source))) == ["k"]


def test_a_load_within_a_load_collects_its_own(folder: Folder) -> None:
    inner = folder("inner", b=declared("inner"))
    source = (
        f"from pathlib import Path\nfrom lastbit.kernel import load_kernels\n"
        f"assert [k.name for k in load_kernels(Path({str(inner)!r}))] == ['inner']\n" + declared("outer")
    )
    assert names(load_kernels(folder(a=source))) == ["outer"]


# What goes wrong


def test_a_file_that_raises_is_named(folder: Folder) -> None:
    path = folder(a=declared("k"), b="raise ValueError('no tiles')\n")
    with pytest.raises(KernelError, match=r"b\.py raised ValueError while it was loaded: no tiles"):
        load_kernels(path)
    load_kernels(folder("other", a=declared("k")))


@pytest.mark.parametrize("source", ["def broken(:\n", "import no_such_module_anywhere\n", "1 / 0\n"])
def test_files_that_cannot_be_executed(folder: Folder, source: str) -> None:
    with pytest.raises(KernelError, match=r"a\.py raised \w+Error while it was loaded"):
        load_kernels(folder(a=source))


def test_a_file_that_exits_is_an_error_of_the_file(folder: Folder) -> None:
    with pytest.raises(KernelError, match=r"a\.py raised SystemExit"):
        load_kernels(folder(a="raise SystemExit(0)\n"))


def test_a_sibling_that_raises_is_named(folder: Folder) -> None:
    path = folder(a="import b\n", b="raise ValueError('no tiles')\n")
    with pytest.raises(KernelError, match=r"a\.py raised ValueError.*no tiles"):
        load_kernels(path)
    assert "b" not in sys.modules


def test_a_folder_without_kernels(folder: Folder) -> None:
    with pytest.raises(UsageError, match=r"no file of '.*empty' declares a kernel"):
        load_kernels(folder("empty"))
    with pytest.raises(UsageError, match="declares a kernel"):
        load_kernels(folder("helpers", a="VALUE = 1\n"))


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'.*nowhere' does not exist"):
        load_kernels(tmp_path / "nowhere")
    (tmp_path / "file.py").write_text(declared("k"))
    assert [kernel.name for kernel in load_kernels(tmp_path / "file.py")] == ["k"]


def test_two_kernels_of_one_name(folder: Folder) -> None:
    path = folder(a=declared("same"), b=declared("same"), c=declared("other"))
    with pytest.raises(UsageError, match=r"declared twice in '.*kernels': same$"):
        load_kernels(path)


def test_load_file_returns_the_module(tmp_path: Path) -> None:
    path = tmp_path / "torch.py"
    path.write_text("VALUE = __name__\n")
    module = load_file(path)
    assert module.VALUE == module.__name__ != "torch"
    assert sys.modules[module.__name__] is module


# Kernels of other files


def test_kernels_of_a_file_elsewhere_that_a_file_imports_are_not_of_the_folder(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = folder("other", elsewhere_alone=declared("stranger") + "\ndef helper():\n    return 7\n")
    monkeypatch.syspath_prepend(str(other))
    path = folder(a="from elsewhere_alone import helper\n" + declared("own") + "\nassert helper() == 7\n")
    assert names(load_kernels(path)) == ["own"]


def test_a_file_of_the_folder_that_is_imported_as_part_of_a_package_declares_once(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder("packaged", a="import packaged.b\n" + declared("first"), b=declared("second"))
    monkeypatch.syspath_prepend(str(path.parent))
    assert sorted(names(load_kernels(path))) == ["first", "second"]


def test_a_helper_elsewhere_may_declare_for_a_file_of_the_folder(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = HEAD + "\n\ndef declare(function):\n    return kernel('op')(function)\n"
    monkeypatch.syspath_prepend(str(folder("helpers", declares_for_others=source)))
    path = folder(a="from declares_for_others import declare\n\n@declare\ndef own(x):\n    return x\n")
    assert names(load_kernels(path)) == ["own"]


@pytest.mark.parametrize("name", ["red\x1b[31m", "half\ud800", "two\nlines", "\u202ereversed"])
def test_a_name_that_cannot_be_printed(folder: Folder, name: str) -> None:
    path = folder(a=f"{HEAD}\n\n@kernel('op', name={name!a})\ndef k(x):\n    return x\n")
    with pytest.raises(UsageError, match="must consist of characters that can be printed"):
        load_kernels(path)
