"""An adapter of a few lines in a folder of kernels, and the package beside it that does the work, over 12 commits."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bisect_demo import git
from bisect_histories import result

from lastbit import cli, trees
from lastbit.commands.running import Interrupted
from lastbit.config import Config
from lastbit.errors import LastbitError
from lastbit.history.golden_provenance import differences, provenance
from lastbit.history.revisions import kernels_at
from lastbit.run import Run
from lastbit.trees import MixedTrees, check_trees, checkout_of
from lastbit.verify.plan import later_imports, make_plan
from lastbit.verify.processes import environment_for, working_folder

COMMITS, FIRST_BAD = 12, 7
LINE = "thrice x=bf16[4,64] seed=1"

REFERENCE = """\
from lastbit.ops import op


@op(rows=("x",), rounds={"y": "x"})
def thrice(x, *, contract, stage):
    stage("y", x * 3.0, result=True)
"""

ADAPTER = """\
import sys
from pathlib import Path

from lastbit.kernel import kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from engine import layers


@kernel("thrice")
def triple(x):
    return layers.triple(x)
"""

LAYERS = """\
import torch

# revision {number}


def triple(x):
    y = x.float() * 3
    return {result}
"""

RIGHT = "y.to(x.dtype)"
CUTS_OFF = "(y.view(torch.int32) & ~0xFFFF).view(torch.float32).to(x.dtype)"


def make_repository(folder: Path, commits: int = COMMITS) -> Path:
    """Make commits named v0 to v11, in the engine of which a rounding is lost at v7."""
    for name, text in (
        ("references/thrice.py", REFERENCE),
        ("cases/regressions/thrice.txt", f"{LINE}\n"),
        ("lastbit_kernels/adapter.py", ADAPTER),
        ("engine/__init__.py", ""),
        ("engine/unused.py", ""),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git(folder, "init", "--quiet", "--initial-branch=main")
    for number in range(commits):
        result = CUTS_OFF if number >= FIRST_BAD else RIGHT
        (folder / "engine" / "layers.py").write_text(LAYERS.format(number=number, result=result))
        git(folder, "add", ".")
        git(folder, "commit", "--quiet", "--message", f"v{number}")
        git(folder, "tag", f"v{number}")
    return folder.resolve()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_repository(tmp_path_factory.mktemp("repository"))


Lastbit = Callable[..., tuple[int, str, str]]


@pytest.fixture
def lastbit(repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Lastbit:
    """Run a command line in the repository: its exit code, output and errors. Nothing is explained."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("lastbit.commands.explaining.failures_of", lambda run: [])
    monkeypatch.chdir(repository)

    def run(*words: str) -> tuple[int, str, str]:
        code = cli.main([*words, "--project", ".", "lastbit_kernels"])
        return code, *capsys.readouterr()

    return run


@pytest.mark.slow
def test_every_command_runs_the_code_of_the_revision(
    repository: Path, lastbit: Lastbit, request: pytest.FixtureRequest
) -> None:
    """Where the adapter alone was loaded anew, each of these measured the engine of one revision twice."""
    git(repository, "checkout", "--quiet", "v6")
    assert lastbit("golden", "record")[0] == 0
    git(repository, "checkout", "--quiet", "v9")

    code, printed, errors = lastbit(
        "verify", "--cases", "cases/regressions/thrice.txt", "-n", "1", "--base", "v6", "-v"
    )
    assert code == 1, errors
    assert "triple on cpu  FAILED" in printed and "triple@v6 on cpu  PASSED" in printed
    changes = printed.partition("Changes from v6")[2]
    assert "WORSE  triple on cpu  PASSED → FAILED" in changes and "bits unchanged in 0 of 1 tensor" in changes
    assert "verify 'triple@v6'" not in printed, "findings are those of today's kernels"

    code, printed, errors = lastbit("golden", "check")
    assert (code, "BROKEN   triple" in printed) == (1, True), errors
    assert "provenance   imports " in printed and "source " not in printed

    code, printed, errors = lastbit("bisect", LINE, "--good", "v6", "--bad", "v8")
    assert code == 0, errors
    assert f"First bad commit  {git(repository, 'rev-parse', '--short', f'v{FIRST_BAD}')}" in printed
    assert "diff --git a/engine/layers.py" in printed
    assert len(git(repository, "worktree", "list").splitlines()) == 1


@pytest.fixture
def worktree(repository: Path) -> Iterator[Path]:
    """Check out the files of v3, as a command does, beside the user's."""
    with kernels_at("v3", [repository / "lastbit_kernels"]) as place:
        yield Path(place.root)


def of(root: Path, name: str = "engine.layers") -> dict[str, Path]:
    """Import a module of a checkout."""
    return {name: Path(root, *name.split(".")).with_suffix(".py")}


def check(root: Path, modules: Mapping[str, Path], *, revision: str = "v3", together: bool = False) -> None:
    check_trees([root / "lastbit_kernels"], modules, revision=revision, together=together)


def test_a_module_of_another_checkout_is_an_error(repository: Path, worktree: Path) -> None:
    for root, other in ((worktree, repository), (repository, worktree)):
        check(root, of(root))
        with pytest.raises(MixedTrees, match=rf"the kernels of v3 import engine.layers from {other}/engine/layers.py"):
            check(root, of(other))
        with pytest.raises(MixedTrees, match=f"the kernels of {root} import"):
            check(root, of(other), revision="")


def test_what_is_of_no_checkout_or_of_lastbit_is_nobodys(repository: Path, worktree: Path, tmp_path: Path) -> None:
    check(
        worktree, {"torch": Path(torch.__file__), "json": Path(json.__file__), "elsewhere": tmp_path / "elsewhere.py"}
    )
    check(worktree, {"lastbit.trees": Path(trees.__file__)})
    assert checkout_of(tmp_path / "x") is None
    within = repository / "env" / "lib" / "site-packages" / "engine.py"  # an environment in the working tree
    check(worktree, {"engine": within})


def test_a_submodule_is_of_the_repository_and_a_clone_within_it_is_not(repository: Path, worktree: Path) -> None:
    inner = repository / "third_party" / "inner"
    inner.mkdir(parents=True)
    (inner / ".git").write_text(f"gitdir: {repository}/.git/modules/inner\n")
    with pytest.raises(MixedTrees):
        check(worktree, of(inner, "inner_layers"))
    (inner / ".git").unlink()
    (inner / ".git").mkdir()
    check(worktree, of(inner, "inner_layers"))


@pytest.mark.parametrize(
    ("origin", "copied"), [({"dir_info": {}}, True), ({"dir_info": {"editable": True}}, False), (None, False)]
)
def test_a_copy_that_was_installed_from_the_repository_is_no_revisions(
    repository: Path,
    worktree: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    origin: dict[str, object] | None,
    copied: bool,
) -> None:
    site = tmp_path / "site-packages"
    file, described = site / "engine" / "__init__.py", site / "engine-1.dist-info"
    for folder in (file.parent, described):
        folder.mkdir(parents=True)
    file.write_text("")
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: engine\nVersion: 1\n")
    (described / "RECORD").write_text("engine/__init__.py,,\n")
    if origin is not None:
        (described / "direct_url.json").write_text(json.dumps({"url": repository.as_uri(), **origin}))
    monkeypatch.syspath_prepend(str(site))
    trees._installed_from.cache_clear()
    try:
        check(repository, {"engine": file}, revision="")
        if copied:
            with pytest.raises(MixedTrees, match="which was installed from this repository"):
                check(worktree, {"engine": file})
        else:
            check(worktree, {"engine": file})
    finally:
        trees._installed_from.cache_clear()


def test_revisions_in_one_process_share_no_module(repository: Path, worktree: Path) -> None:
    check(worktree, {"adapter": worktree / "lastbit_kernels" / "adapter.py"}, together=True)
    with pytest.raises(MixedTrees, match=r"in one process would share the module engine\.layers"):
        check(worktree, of(worktree), together=True)


def test_folders_that_are_named_are_those_of_the_revision(
    repository: Path, worktree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository / "engine")
    monkeypatch.setenv("PYTHONPATH", f"..{os.pathsep}{tmp_path}")
    monkeypatch.setattr(sys, "path", [*sys.path, str(repository / "src")])  # as an editable installation does
    found = environment_for("cpu", tree=str(worktree))["PYTHONPATH"].split(os.pathsep)
    assert found[1:] == [str(worktree), str(tmp_path), str(worktree / "src"), str(worktree / "engine")]
    assert working_folder(str(worktree)) == str(worktree / "engine")
    (repository / "new").mkdir(exist_ok=True)
    monkeypatch.chdir(repository / "new")
    assert working_folder(str(worktree)) == str(worktree), "the revision has no such folder"
    monkeypatch.chdir(tmp_path)
    assert working_folder(str(worktree)) == str(tmp_path)


@pytest.fixture
def importing(repository: Path) -> Iterator[None]:
    """Restore the names and the path of this process, after kernels have imported the engine."""
    names, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - names:
        if name.partition(".")[0] == "engine":
            del sys.modules[name]


def configured(root: Path, **settings: object) -> Config:
    own = {"projects": (str(root),), "kernel_folders": (str(root / "lastbit_kernels"),)}
    return replace(Config(folder="", lines=(LINE,), **own), **settings)  # type: ignore[arg-type]


@pytest.mark.usefixtures("importing")
def test_what_a_kernel_imports_when_it_is_called_is_looked_at(repository: Path, worktree: Path) -> None:
    config = configured(worktree, tree=str(worktree), revision="v3")
    [item] = make_plan(config, "cpu").items
    assert item.subject.kernel.name == "triple@v3"
    assert Path(sys.modules["engine"].__file__ or "").is_relative_to(worktree)
    later = later_imports(config)
    sys.path.insert(0, str(repository / "engine"))
    sys.modules.pop("unused", None)
    importlib.import_module("unused")
    try:
        with pytest.raises(MixedTrees, match="the kernels of v3 import unused"):
            later()
        later()
    finally:
        del sys.modules["unused"]


@pytest.mark.usefixtures("importing")
def test_provenance_hashes_what_the_kernel_imports(tmp_path: Path) -> None:
    root = make_repository(tmp_path / "repository", commits=1)
    layers, other = root / "engine" / "layers.py", root / "engine" / "unused.py"
    layers.write_text(f"import numpy\n{layers.read_text()}")
    [item] = make_plan(configured(root), "cpu").items
    before = provenance(item.subject)
    assert before["imports"] and before["packages"].startswith("numpy ")
    assert before["revision"].endswith("-dirty")
    other.write_text("# changed\n")
    assert provenance(item.subject) == before, "nobody has imported it"
    layers.write_text(layers.read_text() + "# changed\n")
    changed = provenance(item.subject)
    assert [difference.item for difference in differences(before, changed)] == ["imports"]
    importlib.import_module("engine.unused")
    assert provenance(item.subject)["imports"] != changed["imports"], "by a name that no file spells"
    layers.write_text(layers.read_text() + "from . import unused\n")
    named = provenance(item.subject)
    other.write_text("# changed again\n")
    assert provenance(item.subject)["imports"] != named["imports"]
    older = {item: value for item, value in before.items() if item not in ("imports", "packages")}
    assert [difference.item for difference in differences(older, before)] == ["imports", "numpy"]


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (LastbitError("ROOT/adapter.py raised SyntaxError"), 0, "adapter.py raised SyntaxError: the kernels of v3"),
        (MixedTrees("the kernels of v3 import engine from elsewhere"), 2, "kernels: 1 passed"),
        (Interrupted(None), 130, "kernels: 1 passed"),
    ],
    ids=["is not loaded", "imports what is another's", "is interrupted"],
)
def test_a_base_that_cannot_be_compared(
    lastbit: Lastbit, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, words: str
) -> None:
    """Only where it does not load the run counts as one of today's kernels, which it is."""

    def execute(config: Config, arguments: object, *, workers: int, explaining: bool = False) -> Run:
        if config.tree:
            raise type(error)(str(error).replace("ROOT", config.tree)) if error.args else error
        return Run((replace(result(failed=False, decided=1000), kernel="triple"),))

    monkeypatch.setattr("lastbit.commands.verify.execute", execute)
    found, printed, errors = lastbit("verify", "--base", "v3")
    assert (found, words in printed) == (code, True), printed + errors
    assert "NOTHING GOT WORSE" not in printed
