"""Discovery of ops and kernels, also of another revision, and the cases that are run first."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lastbit.case import Case
from lastbit.config import Config
from lastbit.devices import DevicePlan
from lastbit.errors import KernelError, LastbitError, OpError, UsageError
from lastbit.files import KERNELS
from lastbit.trees import MixedTrees
from lastbit.verify.drawing import draw
from lastbit.verify.plan import make_plan
from lastbit.verify.project import kernel_folders, open_project


def test_a_kernel_gets_the_regressions_that_it_can_take() -> None:
    project = open_project(Config(folder=""))
    every = frozenset(project.op("rms_norm").inputs) | frozenset(project.op("rms_norm").params)
    for accepts in (every, every - {"quant", "scale"}, every - {"weight_offset"}):
        first = project.groups("rms_norm", accepts, small=True)[0]
        assert first.name == "regressions"
        assert first.examples
        assert all(case.names <= accepts for case in first.examples)
    assert all(g.name != "regressions" for g in project.groups("rms_norm", frozenset({"x", "eps"}), small=True))


KERNEL = """\
from lastbit.kernel import kernel


@kernel("rms_norm", contract="{contract}")
def norm(x, weight=None, *, eps):
    raise NotImplementedError
"""


@pytest.fixture
def two_revisions(tmp_path: Path) -> Config:
    """Return a kernel today, and the same one with another contract in another revision."""
    for revision, contract in (("today", "fp32_multiply"), ("before", "native_multiply")):
        (tmp_path / revision).mkdir()
        (tmp_path / revision / "norms.py").write_text(KERNEL.format(contract=contract))
    return Config(
        folder="", kernel_folders=(str(tmp_path / "today"),), revisions={"v1/x": str(tmp_path / "before")}, cases=1
    )


def test_kernels_of_another_revision_are_beside_those_of_today(two_revisions: Config) -> None:
    opened = open_project(two_revisions)
    kernels = [*opened.kernels(), *opened.kernels_of_revisions()[0]]
    assert [(k.name, k.contract) for k in kernels] == [("norm", "fp32_multiply"), ("norm@v1/x", "native_multiply")]


def test_a_name_chooses_the_kernel_in_every_revision(two_revisions: Config) -> None:
    plan = make_plan(replace(two_revisions, kernels=("norm",)), "cpu")
    assert sorted({item.subject.kernel.name for item in plan.items}) == ["norm", "norm@v1/x"]
    with pytest.raises(UsageError, match=r"no kernel is called 'norm@v1/x', .*; did you mean 'norm'"):
        make_plan(replace(two_revisions, kernels=("norm@v1/x",)), "cpu")


def test_what_was_asked_for_and_has_no_kernel_or_no_case_is_not_run(two_revisions: Config) -> None:
    softmax = ("softmax x=bf16[1,70] seed=1",)
    asked = replace(two_revisions, ops=("softmax",))
    plan = make_plan(asked, "cpu")
    assert not plan.items
    assert [n.what for n in plan.not_run if n.reason == "no kernel that was chosen is of this op"] == ["softmax"]
    assert not any(n.kernel for n in plan.not_run)
    named = make_plan(replace(asked, kernels=("norm",)), "cpu").not_run
    assert {(n.kernel, n.device) for n in named if n.kernel} == {("norm", "cpu"), ("norm@v1/x", "cpu")}
    for lines in (softmax, ("rms_norm x=bf16[1,70] eps=1e-06 seed=1", *softmax)):
        with pytest.raises(UsageError, match=r"no kernel of softmax is here, .* there are kernels of rms_norm$"):
            make_plan(replace(two_revisions, lines=lines), "cpu")


def test_a_revision_that_cannot_be_loaded_is_not_run(two_revisions: Config) -> None:
    (Path(two_revisions.revisions["v1/x"]) / "norms.py").write_text(KERNEL.format(contract="of_old"))
    plan = make_plan(two_revisions, "cpu")
    assert {item.subject.kernel.name for item in plan.items} == {"norm"}
    assert any(n.what == "the kernels of v1/x" and "'of_old'" in n.reason for n in plan.not_run)


def test_a_name_with_the_mark_of_a_revision_is_refused(two_revisions: Config) -> None:
    file = Path(two_revisions.kernel_folders[0]) / "norms.py"
    file.write_text(KERNEL.format(contract="fp32_multiply").replace('")', '", name="norm@v1/x")'))
    with pytest.raises(UsageError, match="'norm@v1/x' holds '@'"):
        make_plan(two_revisions, "cpu")


def test_revisions_in_one_process_cannot_share_code_beside_their_kernels(
    two_revisions: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "shared_norms.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    file = Path(two_revisions.kernel_folders[0]) / "norms.py"
    file.write_text("import shared_norms\n" + file.read_text())
    with pytest.raises(MixedTrees, match="would share the module shared_norms"):
        make_plan(two_revisions, "cpu")


def test_a_module_that_only_claims_a_file_is_no_code_beside_the_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torch.classes` says that it is `_classes.py`, which would be taken for a file of the working directory."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "norms.py").write_text(KERNEL.format(contract="fp32_multiply"))
    (tmp_path / "beside.py").write_text("")
    folder = str(tmp_path / "kernels")
    settings = Config(folder="", kernel_folders=(folder,), revisions={"HEAD": folder}, cases=1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "bogus", SimpleNamespace(__file__="_classes.py"))
    monkeypatch.setitem(sys.modules, "beside", SimpleNamespace(__file__=str(tmp_path / "beside.py")))
    with pytest.raises(MixedTrees, match="would share the module beside"):
        make_plan(settings, "cpu")


VARIANTS = """\
from lastbit.kernel import kernel

def declare(contract, name):
    @kernel("softmax", contract=contract, name=name{invariant})
    def softmax(x, *, scale):
        raise NotImplementedError

for number, contract in enumerate({contracts}):
    declare(contract, f"k{{number}}")
"""


def planned(folder: Path, contracts: tuple[str, ...], invariant: str = "", **settings: Any) -> dict[str, list[Case]]:
    """Draw the cases of each kernel of one function under these contracts."""
    (folder / "kernels.py").write_text(VARIANTS.format(contracts=contracts, invariant=invariant))
    plan = DevicePlan({"cpu": ""})
    config = Config(folder=str(folder), kernel_folders=(str(folder / "kernels.py"),), device_plan=plan, **settings)
    found: dict[str, list[Case]] = {}
    for item in make_plan(config, "cpu").items:
        cases = item.own(draw(item.group, config.cases_per_group))
        assert len(cases) <= item.planned(config.cases_per_group).cases
        found.setdefault(item.subject.kernel.name, []).extend(cases)
    return found


def test_one_function_under_several_contracts_shares_its_cases(tmp_path: Path) -> None:
    alone = planned(tmp_path, ("fp32_scores",))["k0"]
    first, second, third = planned(tmp_path, ("fp32_scores", "rounded_scores", "base2")).values()
    assert set(first) | set(second) | set(third) == set(alone)
    assert (
        len(first) + len(second) + len(third) == len(alone) and min(map(len, (first, second, third))) > len(alone) // 4
    )
    names = ("fp32_scores", "rounded_scores", "base2", "zero_rows", "rounded_scores+base2")
    five = planned(tmp_path, names)
    assert set().union(*five.values()) == set(alone) and five["k4"] == five["k0"]


@pytest.mark.parametrize(
    "settings", [{"profile": "nightly", "cases": 1}, {"cases": 2}, {"isolate": True}, {"kernels": ("k1",)}]
)
def test_kernels_share_no_cases_where_each_is_to_have_all(tmp_path: Path, settings: dict[str, Any]) -> None:
    one = planned(tmp_path, ("rounded_scores",), **{**settings, "kernels": ()})["k0"]
    assert planned(tmp_path, ("fp32_scores", "rounded_scores"), **settings)["k1"] == one


def test_functions_that_differ_in_more_than_their_contract_share_no_cases(tmp_path: Path) -> None:
    first, second = planned(tmp_path, ("fp32_scores", "fp32_scores")).values()
    assert first == second


# What a folder of one's own may hold


def own_project(folder: Path, **files: str) -> Config:
    """Write files, whose names have __ for / and end in .py, or in .txt below regressions/, and return the settings."""
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path = path.with_suffix(".txt" if "regressions" in name else ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Config(folder="", projects=(str(folder),))


OP = """\
from lastbit.ops import op

@op(rows=("x",))
def {name}(x, *, scale: float = 1.0, contract, stage):
    stage("output", x * scale, result=True)
"""
CASES = """\
from lastbit.case import Group, parse_case

def groups(accepts, *, small):
    yield Group("some" if small else "all", examples=(parse_case("mine x=fp32[2] seed=1"),))
"""
MINE = OP.format(name="mine")


def test_ops_and_cases_of_a_project_stand_beside_those_of_lastbit(tmp_path: Path) -> None:
    files = {"references__mine": MINE, "references___hidden": "1 / 0", "cases__mine": CASES}
    regression = "# why\nmine x=fp32[3] scale=2.0 seed=1\n"
    project = open_project(own_project(tmp_path, **files, cases__regressions__mine=regression))
    assert project.op("mine").inputs == ("x",) and "rms_norm" in project.ops and "hidden" not in project.ops
    assert len(project.ops) == len(list(project.ops)) and {"mine", "rms_norm"} <= set(project.ops)
    assert project.op("mine") is project.op("mine")
    assert project.folders[-1] == tmp_path
    with pytest.raises(UsageError, match="unknown op 'mein'; did you mean 'mine'"):
        project.op("mein")

    def names(accepts: set[str], *, small: bool) -> list[str]:
        return [group.name for group in project.groups("mine", frozenset(accepts), small=small)]

    assert names({"x", "scale"}, small=True) == ["regressions", "some"]
    assert names({"x"}, small=False) == ["all"]  # the regression has a scale
    assert project.groups("nothing", frozenset({"x"}), small=True) == []


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        ({"references__mine": "x = 1"}, LastbitError, r"mine\.py must define the op 'mine': a function of that name"),
        ({"references__mine": MINE + "\nyours = mine\n", "references__yours": MINE + "\nyours = mine\n"}, OpError,
         r"op mine \(.*\) must be called 'yours', as its file .*yours\.py is"),
        ({"references__mine": MINE, "cases__yours": CASES}, UsageError, r"op of the cases in .*yours\.py: 'yours'"),
        ({"references__mine": MINE, "cases__regressions__yours": ""}, UsageError, r"cases in .*yours\.txt: 'yours'"),
        ({"references__mine": MINE, "cases__mine": "groups = 1"}, UsageError, r"mine\.py must define groups\(accepts"),
        ({"references__mine": "1 / 0"}, KernelError, r"division by zero[\s\S]*; --project is for a folder with"),
    ],
)  # fmt: skip
def test_a_project_with_a_mistake(files: dict[str, str], error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        open_project(own_project(tmp_path, **files))


def test_groups_that_raise_and_groups_that_choose_what_is_not_there(tmp_path: Path) -> None:
    raising = CASES.replace("yield", "raise ValueError('no groups')\n    yield")
    project = open_project(own_project(tmp_path / "a", references__mine=MINE, cases__mine=raising))
    with pytest.raises(UsageError, match=r"groups\(\) in cases/mine\.py raised ValueError: no groups"):
        project.groups("mine", frozenset({"x"}), small=True)
    choosing = CASES.replace("examples=(", 'strategy=print, choices={"y dtype": ("bf16",)}, examples=(')
    project = open_project(own_project(tmp_path / "b", references__mine=MINE, cases__mine=choosing))
    with pytest.raises(UsageError, match="choice 'y dtype' of group 'some'"):
        project.groups("mine", frozenset({"x"}), small=True)


def test_kernels_have_names_of_their_own_and_those_of_a_revision_its_label(tmp_path: Path) -> None:
    (tmp_path / "norms.py").write_text(KERNEL.format(contract="fp32_multiply"))
    here = str(tmp_path / "norms.py")
    with pytest.raises(UsageError, match="kernel names must be unique; found twice: norm"):
        open_project(Config(folder="", kernel_folders=(here, here))).kernels()
    old = open_project(Config(folder="", kernel_folders=(here,), revision="v1"))
    assert [kernel.name for kernel in old.kernels()] == ["norm@v1"]


def test_kernels_that_cannot_be_called_are_noted_where_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "norms.py").write_text(KERNEL.format(contract="of_old"))
    project = open_project(Config(folder="", kernel_folders=(str(tmp_path),)))
    with pytest.raises(UsageError, match="'of_old'"):
        project.kernels()
    refused: dict[str, str] = {}
    assert [kernel.name for kernel in project.kernels(refused)] == ["norm"]
    assert list(refused) == ["norm"] and "'of_old'" in refused["norm"]


def test_where_kernels_are_loaded_from(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "other").mkdir()
    projects = (str(tmp_path), str(tmp_path / "other"))
    assert kernel_folders(Config(folder="", projects=projects)) == (KERNELS, tmp_path / "kernels")
    assert kernel_folders(Config(folder="")) == (KERNELS,)
    assert kernel_folders(Config(folder="", projects=projects, kernel_folders=("a", "b.py"))) == (
        Path("a"),
        Path("b.py"),
    )


PLAIN = "def norm(x, *, eps):\n    return x\n\n\ndef other(x, *, eps):\n    return x\n"


def test_a_plain_function_is_a_kernel_of_the_one_op_that_is_named(tmp_path: Path) -> None:
    file = tmp_path / "plain.py"
    file.write_text(PLAIN)
    settings = Config(folder="", kernel_folders=(str(file),), plain=True, ops=("rms_norm",), kernels=("norm",))
    [kernel] = open_project(settings).kernels()
    assert (kernel.name, kernel.op, kernel.call.__name__) == ("norm", "rms_norm", "norm")
    for ops in ((), ("rms_norm", "softmax")):
        with pytest.raises(UsageError, match=r"declares no kernel.*, or name the op of a function without it: --op OP"):
            open_project(replace(settings, ops=ops)).kernels()
    with pytest.raises(UsageError, match="declares no kernel") as caught:
        open_project(replace(settings, plain=False)).kernels()
    assert "--op OP" not in str(caught.value)
    with pytest.raises(UsageError) as caught:  # which of both?
        open_project(replace(settings, kernels=("norm", "other"))).kernels()
    assert "other" in str(caught.value)
    (tmp_path / "declared.py").write_text(KERNEL.format(contract="fp32_multiply"))
    declared = replace(settings, kernel_folders=(str(tmp_path / "declared.py"),), ops=())
    assert [kernel.contract for kernel in open_project(declared).kernels()] == ["fp32_multiply"]
