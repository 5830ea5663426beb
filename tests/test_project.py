"""Discovery of ops, and the cases that are run first."""

from harness.config import Config
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
