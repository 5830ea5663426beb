"""Hostile kernels in processes of their own: none of them gets a verdict that it does not deserve."""

from __future__ import annotations

import ast
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from lastbit.bench.samples import Effort
from lastbit.bench.untrusted import bound_of
from lastbit.case import parse_case
from lastbit.config import Config
from lastbit.errors import UsageError
from lastbit.isolation.elsewhere import Kernels
from lastbit.isolation.isolated import Isolated
from lastbit.isolation.limits import Limits
from lastbit.isolation.process import ForkServer
from lastbit.result import CaseResult, Verdict
from lastbit.verify.check import Subject, verify_case
from lastbit.verify.project import open_project
from tests.hostile import FILES, HOSTILE, LINES, Hostile, planted, rows
from tests.rms_norm_contract import INTERPRETED  # installs the bit-faithful interpreter

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the kernels are for the CPU")

CPU = torch.device("cpu")
RMS_NORM = open_project(Config(folder="")).op("rms_norm")
LIMITS = Limits(memory=1 << 30, processes=100, file_size=1 << 28)
RECORD = '{"verdict": "FAILED", "findings": ["1"], "op": "rms_norm"}\n'


@dataclass
class Judge:
    """Judges hostile kernels, all by one fork server, beside records that they would like to write."""

    folder: Path
    server: ForkServer = field(default_factory=ForkServer)
    printed: str = ""

    @property
    def record(self) -> Path:
        return self.folder / "run" / "cpu.jsonl"

    def results(self, hostile: Hostile) -> list[CaseResult]:
        """Of the lines, with seeds that are drawn when the kernel has been loaded, until one is not PASSED."""
        self.record.parent.mkdir(exist_ok=True)
        self.record.write_text(RECORD)
        folder = planted(hostile, self.folder / hostile.name, self.record.parent)
        limits, results = LIMITS if hostile.limit else Limits(), list[CaseResult]()
        kernels = Kernels(self.server, limits=limits, printed=self._keep)
        [kernel] = kernels.declared(folder)
        with kernels.pair(kernel, timeout=2.0 if hostile.name == "hangs" else 60.0) as pair:
            subject = Subject(kernel, RMS_NORM, CPU, performer=Isolated(pair, CPU))
            for line in LINES:
                results.append(verify_case(subject, replace(parse_case(line), seed=secrets.randbits(40))))
                if pair.over or results[-1].verdict is not Verdict.PASSED:
                    break
        return results

    def _keep(self, whose: str, text: str) -> None:
        self.printed = text


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judge]:
    judge = Judge(tmp_path_factory.mktemp("hostile"))
    yield judge
    judge.server.close()


@pytest.mark.parametrize("hostile", HOSTILE, ids=str)
def test_the_verdict_of_an_isolated_hostile_kernel_is_right(judge: Judge, hostile: Hostile) -> None:
    results = judge.results(hostile)
    assert Verdict.worst(*[result.verdict for result in results]) == hostile.isolated, results
    assert judge.record.read_text() == RECORD
    assert "\x1b" not in judge.printed and len(judge.printed) < 1 << 20


def test_there_is_a_row_for_each_file_and_a_source_in_each() -> None:
    assert {hostile.file for hostile in HOSTILE} == set(FILES.glob("*.py"))
    for hostile in HOSTILE:
        words = ast.get_docstring(ast.parse(hostile.file.read_text())) or ""
        assert "Models:" in words or "reverse of" in words, hostile
    assert len(HOSTILE) >= 24


TIMED = {
    "wrong_in_the_environment": "PASSED",
    "computes_all_calls": "PASSED",
    "fakes_the_clock": "PASSED",
    "lazy_tensor": "PASSED",
    "cached_by_shape": "FAILED",
    "cached_by_address": "FAILED",
    "replays_first_call": "FAILED",
    "computes_once": "FAILED",
    "right_ten_times": "FAILED",
    "writes_later": "FAILED",
}

LEAST = {"computes_all_calls": 0.02}
"""Seconds that a call takes which does its work."""


@pytest.mark.parametrize("name", TIMED)
def test_the_verdict_of_a_timed_kernel_is_of_its_timed_calls(judge: Judge, name: str, tmp_path: Path) -> None:
    [hostile] = [hostile for hostile in HOSTILE if hostile.name == name]
    kernels = Kernels(judge.server)
    [kernel] = kernels.declared(planted(hostile, tmp_path / name))
    with kernels.pair(kernel, timeout=60.0) as pair:
        subject = Subject(kernel, RMS_NORM, CPU, performer=Isolated(pair, CPU))
        found = bound_of(subject, parse_case(LINES[0]), judge.server, Effort(seconds=0.001, rounds=1))
    assert found.verdict == TIMED[name], found
    assert found.time.low > LEAST.get(name, 0) and found.empty.low > 0


def test_given_values_cannot_be_timed(judge: Judge, tmp_path: Path) -> None:
    kernels = Kernels(judge.server)
    [kernel] = kernels.declared(planted(HOSTILE[0], tmp_path / "given"))
    case = parse_case("rms_norm x=bf16[1,1]:values(1) weight=bf16[1] eps=1e-06 seed=0")
    with kernels.pair(kernel, timeout=60.0) as pair:
        subject = Subject(kernel, RMS_NORM, CPU, performer=Isolated(pair, CPU))
        with pytest.raises(UsageError, match="the values of x are given"):
            bound_of(subject, case, judge.server, Effort(seconds=0.001, rounds=1))


def test_the_table_in_the_documents_is_that_of_the_tests() -> None:
    assert rows() in (Path(__file__).parents[2] / "docs" / "isolation.md").read_text()
