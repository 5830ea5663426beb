"""What `lastbit bench` measures with: samples of times, and on which cases."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lastbit.bench.case_lines import bench_cases, case_lines
from lastbit.bench.samples import Effort, wall
from lastbit.config import Config
from lastbit.errors import UsageError
from lastbit.interpret import install
from lastbit.reports.bench import Sample, amount
from lastbit.verify.check import unsupported
from lastbit.verify.plan import Plan
from lastbit.verify.project import Project, open_project
from lastbit.verify.worker import Workplace

install()

CPU = torch.device("cpu")
LINE = "completion_mask ids=int64[2,3]:sequences_1 eos_ids=int64[1]:counting seed=0"


@pytest.fixture(scope="module")
def project() -> Project:
    return open_project(Config(folder=""))


def test_a_sample_has_the_quartiles_of_what_was_measured() -> None:
    assert Sample.of([5.0]) == Sample(5.0, 5.0, 5.0, 1)
    assert Sample.of([4.0, 1.0, 2.0, 3.0, 5.0]) == Sample(2.0, 3.0, 4.0, 5)
    assert Sample(2.0, 4.0, 8.0, 3).rate(16) == Sample(2.0, 4.0, 8.0, 3)


@pytest.mark.parametrize("file", ["verified.txt", "asserted.txt"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_case_that_is_measured_by_default_is_taken_by_a_kernel(project: Project, device: str, file: str) -> None:
    cases = list(bench_cases(project, torch.device(device), file))
    kernels = project.kernels()
    for case in cases:
        assert any(k.op == case.op and not unsupported(k, case) for k in kernels), str(case)
    sizes = [sum(1 for case in cases if case.op == op) for op in project.ops]
    assert min(sizes) >= 2 if file == "verified.txt" else cases


def test_case_files_of_a_project_are_read_and_checked(project: Project, tmp_path: Path) -> None:
    folder = tmp_path / "cases" / "bench" / "cpu"
    folder.mkdir(parents=True)
    (folder / "verified.txt").write_text("# one\nno_op x=bf16[1,2] seed=1\n")
    own = Project(project.ops, {}, (tmp_path,), (), {})
    with pytest.raises(UsageError, match="no_op"):
        list(bench_cases(own, CPU, "verified.txt"))
    assert list(bench_cases(own, CPU, "asserted.txt")) == []


def test_lines_that_were_given_take_the_place_of_the_files_and_ops_restrict_them(project: Project) -> None:
    lines = (LINE, "rms_norm x=bf16[4,8] eps=1e-06 seed=0")
    given = Workplace(Config(folder="", lines=lines), project, Plan((), (), 0))
    assert case_lines(given, "verified.txt") == list(lines)
    restricted = Workplace(Config(folder="", ops=("completion_mask",)), project, Plan((), (), 0))
    chosen = case_lines(restricted, "verified.txt")
    assert chosen and all(line.startswith("completion_mask ") for line in chosen)


def test_each_repetition_is_told_its_number() -> None:
    told: list[int] = []
    sample = wall(told.append, Effort(seconds=1e-4))
    assert told == list(range(len(told))) and len(told) > 1
    assert 0 < sample.low <= sample.median <= sample.high


@pytest.mark.parametrize(
    ("median", "unit", "expected"),
    [
        (1234.5, "s", "1,234 s"),
        (0.0123, "s", "12.3 ms"),
        (2e-8, "s", "0.02 µs"),
        (512.0, "B", "0.5 KiB"),
    ],
)
def test_amounts_are_shown_in_a_unit_that_suits_them(median: float, unit: str, expected: str) -> None:
    assert amount(Sample.of([median]), unit) == expected
