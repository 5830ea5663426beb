"""Discovery of ops and kernels, also of another revision, and the cases that are run first."""

from dataclasses import replace
from pathlib import Path

import pytest

from harness.config import Config
from harness.verify.plan import make_plan
from harness.verify.project import open_project


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
from harness.kernel import kernel


@kernel("rms_norm", contract="{contract}")
def norm(x, weight=None, *, eps):
    raise NotImplementedError
"""


@pytest.fixture
def two_revisions(tmp_path: Path) -> Config:
    """A kernel today, and the same one with another contract in another revision."""
    for revision, contract in (("today", "fp32_multiply"), ("before", "native_multiply")):
        (tmp_path / revision).mkdir()
        (tmp_path / revision / "norms.py").write_text(KERNEL.format(contract=contract))
    return Config(
        folder="", kernel_folders=(str(tmp_path / "today"),), revisions={"v1/x": str(tmp_path / "before")}, cases=1
    )


def test_kernels_of_another_revision_are_beside_those_of_today(two_revisions: Config) -> None:
    kernels = open_project(two_revisions).kernels()
    assert [(k.name, k.contract) for k in kernels] == [("norm", "fp32_multiply"), ("norm@v1/x", "native_multiply")]


@pytest.mark.parametrize(
    ("chosen", "expected"), [("norm", ["norm", "norm@v1/x"]), ("norm@v1/x", ["norm@v1/x"])], ids=["both", "one"]
)
def test_a_name_chooses_the_kernel_in_every_revision(two_revisions: Config, chosen: str, expected: list[str]) -> None:
    plan = make_plan(replace(two_revisions, kernels=(chosen,)), "cpu")
    assert sorted({item.subject.kernel.name for item in plan.items}) == expected
