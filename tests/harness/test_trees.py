"""Checkouts: where they begin, what lies in them, and modules that are of another one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lastbit import trees
from lastbit.errors import UsageError
from lastbit.trees import (
    Checkout,
    MixedTrees,
    check_trees,
    checkout_of,
    folders_of_package,
    image,
    imported,
    of_repository,
    outermost,
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Make a repository, a worktree and a submodule of it, and another repository, without git."""
    git = tmp_path / "main" / ".git"
    (git / "worktrees" / "other").mkdir(parents=True)
    (git / "modules" / "sub").mkdir(parents=True)
    (git / "worktrees" / "other" / "commondir").write_text("../..\n")
    for folder, own in (("other", git / "worktrees" / "other"), ("main/sub", git / "modules" / "sub")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / ".git").write_text(f"gitdir: {own}\n")
    (tmp_path / "apart" / ".git").mkdir(parents=True)
    (tmp_path / "plain").mkdir()
    return tmp_path.resolve()


def test_the_checkout_of_a_path(tree: Path) -> None:
    main, other, sub, apart = (checkout_of(tree / name) for name in ("main", "other", "main/sub/deeper", "apart"))
    git = tree / "main" / ".git"
    assert main == Checkout(tree / "main", git) and other == Checkout(tree / "other", git)
    assert sub == Checkout(tree / "main" / "sub", git / "modules" / "sub")
    assert main is not None and other is not None and sub is not None and apart is not None
    assert other.is_of(main) and main.is_of(other) and sub.is_of(main) and not main.is_of(sub)
    assert not apart.is_of(main) and checkout_of(tree / "plain") is None


def test_a_path_in_another_worktree(tree: Path) -> None:
    main, other = tree / "main", str(tree / "other")
    assert image(str(main / "a" / "b.py"), other) == f"{other}/a/b.py"
    for path in (tree / "plain" / "b.py", tree / "apart" / "b.py", main / "sub" / "b.py"):
        assert image(str(path), other) == str(path)
    assert image(str(main / "b.py"), str(tree / "plain")) == str(main / "b.py")
    installed = main / "venv" / "site-packages" / "b.py"
    assert image(str(installed), other) == str(installed)


def test_modules_of_a_package_are_inside_of_it() -> None:
    modules = {
        name: Path(file)
        for name, file in {
            "package": "/a/package/__init__.py",
            "package.part": "/a/package/part.py",
            "package.elsewhere": "/b/elsewhere.py",
            "single": "/a/single.py",
            "single.odd": "/a/odd.py",
        }.items()
    }
    assert [*outermost(modules)] == ["package", "package.elsewhere", "single", "single.odd"]


def test_modules_with_a_file_that_are_imported_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def put(name: str, file: str | None) -> None:
        module = ModuleType(name)
        module.__file__ = file
        monkeypatch.setitem(sys.modules, name, module)

    for name, file in (("one", "/a/one.py"), ("two", "two.py"), ("three", None), ("lastbit_x_0123456789ab.y", "/y.py")):
        put(name, file)
    found = imported()
    assert found["one"] == Path("/a/one.py") and not {"two", "three", "lastbit_x_0123456789ab.y"} & found.keys()
    assert "one" not in imported(["one"])


def test_modules_that_lie_in_the_repository(tree: Path) -> None:
    main = checkout_of(tree / "main")
    modules = {
        "own": tree / "main" / "own.py",
        "other": tree / "other" / "own.py",
        "sub": tree / "main" / "sub" / "own.py",
        "apart": tree / "apart" / "own.py",
        "plain": tree / "plain" / "own.py",
        "installed": tree / "main" / "site-packages" / "own.py",
        "lastbit": Path(__file__),
    }
    for copied in (False, True):
        assert [*of_repository(main, modules, copied=copied)] == ["own", "other", "sub"]
    assert [*of_repository(None, modules, copied=False)] == ["own", "other", "sub", "apart"]


@pytest.mark.parametrize(
    ("folders", "module", "message"),
    [
        (["main/kernels"], "main/own.py", ""),
        (["main/kernels"], "plain/own.py", ""),
        (["main/kernels"], "apart/own.py", ""),
        (["main/kernels"], "other/own.py", "the kernels of R import own from .*, which is of another checkout"),
        (["main/kernels", "other"], "other/own.py", ""),
    ],
)
def test_kernels_of_a_revision_use_its_modules(tree: Path, folders: list[str], module: str, message: str) -> None:
    asked, modules = [tree / folder for folder in folders], {"own": tree / module}
    if not message:
        check_trees(asked, modules, revision="R", together=False)
        return
    with pytest.raises(MixedTrees, match=message):
        check_trees(asked, modules, revision="R", together=False)


def test_revisions_share_no_module_and_no_checkout_has_none(tree: Path) -> None:
    modules = {"own": tree / "main" / "own.py"}
    with pytest.raises(MixedTrees, match=r"several revisions in one process would share the module own"):
        check_trees([tree / "main" / "kernels"], modules, revision="", together=True)
    check_trees([tree / "main" / "kernels"], modules, revision="", together=False)
    check_trees([tree / "main"], modules, revision="", together=True)
    with pytest.raises(MixedTrees, match="the kernels of R import own"):
        check_trees([tree / "plain"], modules, revision="R", together=False)


def test_the_folder_of_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_package").mkdir()
    (tmp_path / "some_package" / "__init__.py").touch()
    (tmp_path / "some_module.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert folders_of_package("some_package") == (tmp_path.resolve() / "some_package",)
    assert folders_of_package("some_module") == (tmp_path.resolve() / "some_module.py",)
    for name in ("no_such_package", "some_module.part", ""):
        with pytest.raises(UsageError, match=f"there is no installed package '{name}' to watch"):
            folders_of_package(name)


@pytest.mark.parametrize(
    ("origin", "place", "is_copy"),
    [
        ({"dir_info": {}}, "main", True),
        ({"dir_info": {"editable": False}}, "main", True),
        ({"dir_info": {"editable": True}}, "main", False),
        ({"vcs_info": {}, "dir_info": {"editable": True}}, "main", True),
        ({}, "main", False),
        ({"dir_info": {}}, "main/sub", True),
        ({"dir_info": {}}, "apart", False),
        ({"dir_info": {}}, "plain", False),
    ],
)
def test_copies_that_pip_installed_from_the_repository(
    tree: Path, origin: dict[str, Any], place: str, is_copy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are one and the same for every revision, so that none can be measured by them."""
    site = tree / "site-packages"

    def distribution(text: str | None, files: list[str] | None) -> SimpleNamespace:
        return SimpleNamespace(read_text=lambda name: text, files=files, locate_file=lambda file: site / file)

    told = json.dumps({"url": (tree / place).as_uri(), **origin})
    others = [
        distribution(None, ["x.py"]),
        distribution(told.replace("file:", "https:"), ["y.py"]),
        distribution(told, None),
    ]
    monkeypatch.setattr(trees, "distributions", lambda: [*others, distribution(told, ["own.py"])])
    modules = {name: site / f"{name}.py" for name in ("own", "x", "y")}
    main = checkout_of(tree / "main")
    assert [*of_repository(main, modules, copied=True)] == ["own"] * is_copy
    assert not of_repository(main, modules, copied=False)
    if is_copy:
        with pytest.raises(MixedTrees, match=r"import own from .*, which was installed from this repository"):
            check_trees([tree / "main" / "kernels"], modules, revision="R", together=False)
    check_trees([tree / "main" / "kernels"], modules, revision="", together=False)
