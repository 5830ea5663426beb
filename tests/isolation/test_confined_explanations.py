"""Why a kernel fails, said by a process of which nothing is believed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lastbit.config import Config
from lastbit.devices import DevicePlan
from lastbit.diagnosing.explainer import FOLLOWED, KEEPS
from lastbit.isolation.answers import KernelProcessEnded
from lastbit.isolation.elsewhere import Kernels
from lastbit.judges.confined_explanations import ConfinedExplainer, read
from lastbit.reports.encoding import encoded
from lastbit.reports.why import Explanation, Step, WorkedStage
from lastbit.result import Verdict

LINE = "rms_norm x=bf16[2,8] weight=bf16[8] eps=0.001 seed=5"
KERNEL = """import torch
from lastbit.kernel import kernel

@kernel("rms_norm", contract="fp32_multiply")
def mine(x, weight, *, eps):
    value = x.float()
    inv_rms = torch.rsqrt(value.square().mean(-1, keepdim=True) + 2 * eps)
    return (value * inv_rms * weight.float()).to(x.dtype)
"""
WRONG = Step("a * b", file="kernel.py", line=7, code="y = a * b", dtype="fp32")
NAMES = "theirs", "rms_norm", "fp32_multiply", "another case", "cuda:7"


def said(verdict: Verdict = Verdict.FAILED, reason: str = "", **fields: Any) -> Explanation:
    found = Explanation.of_nothing(*NAMES, verdict=verdict, reason=reason)
    return replace(found, trace=replace(found.trace, leaves=WRONG, blamed=WRONG), **fields)


@pytest.fixture(scope="module")
def explainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConfinedExplainer]:
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "kernel.py").write_text(KERNEL)
    with ConfinedExplainer(Config(folder="", kernel_folders=(str(folder),), kernels=("mine",))) as explainer:
        yield explainer


def test_a_kernel_of_a_folder_is_explained_in_a_process_of_its_own(explainer: ConfinedExplainer) -> None:
    assert [item.kernel for item in explainer.planned] == ["mine"]
    found = explainer.explain("mine", LINE, seconds=60)
    assert (found.verdict, found.device, found.case) == (Verdict.FAILED, "cpu", LINE)
    assert found.culprit is not None and Path(found.culprit.file).name == "kernel.py" and found.culprit.line == 7
    missing = explainer.explain("others", LINE, seconds=60)
    assert "others" in missing.reason and missing.worst is None


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what another process answers."""
    answer: dict[str, Any] = {}

    def run(self: Kernels, *args: object) -> Mapping[str, Any]:
        if "raises" in answer:
            raise answer["raises"]
        return answer

    monkeypatch.setattr(Kernels, "run", run)
    return answer


def explained(device: str) -> Explanation:
    plan = DevicePlan((device,), ("of the test",))
    return ConfinedExplainer(Config(folder="", device_plan=plan, kernels=("mine",))).explain("mine", LINE, seconds=9)


def test_names_are_those_of_the_judge(answered: dict[str, Any]) -> None:
    answered |= encoded(said(test="import os", smallest="a case"))
    found = explained("cpu")
    assert (found.kernel, found.case, found.device, found.test, found.smallest) == ("mine", LINE, "cpu", "", "")
    found = explained("cuda:0")
    assert (found.device, found.reason, found.culprit) == ("cuda:0", FOLLOWED, WRONG)


def test_a_kernel_that_is_right_on_the_cpu(answered: dict[str, Any]) -> None:
    answered |= encoded(said(Verdict.PASSED))
    found = explained("cuda:0")
    assert found.verdict is Verdict.FAILED and found.reason == KEEPS.format("cuda:0")
    assert explained("cpu").verdict is Verdict.PASSED


@pytest.mark.parametrize(
    "answer", [{}, {"kernel": 3}, {**encoded(said()), "more": 1}, {**encoded(said()), "trace": []}]
)
def test_an_answer_that_is_none(answered: dict[str, Any], answer: dict[str, Any]) -> None:
    answered |= answer
    assert explained("cpu").reason == "the process that explains it gave an answer that is none"
    assert read(answer, "cpu") == (None, "the process that looked for it gave an answer that is none")


def test_a_process_that_ends(answered: dict[str, Any]) -> None:
    answered["raises"] = KernelProcessEnded(signal=9)
    assert explained("cpu").reason == "its process was ended by signal SIGKILL"


def test_the_culprit_of_a_file() -> None:
    worked = WorkedStage("product", (0,), 2.0, 2.0, 2.0, 2.0, "fp32", False, did="gives 3", file="kernel.py", line=7)
    culprit, reason = read(encoded(said(arithmetic=(worked,))), "cpu")
    assert culprit is not None and (culprit.file, culprit.line, culprit.expression) == ("kernel.py", 7, "y = a * b")
    assert culprit.sentence == "product is 2 exactly, and the contract allows 2 in fp32; line 7 gives 3." and not reason
    assert read(encoded(said(Verdict.PASSED)), "cuda:0") == (None, KEEPS.format("cuda:0"))
    assert read(encoded(said(Verdict.PASSED)), "cpu") == (None, "it passed when it was run again")
    nothing = Explanation.of_nothing(*NAMES, verdict=Verdict.FAILED, reason="the kernel raised")
    assert read(encoded(nothing), "cpu") == (None, "the kernel raised")


@pytest.mark.parametrize(("did", "told"), [("gives 0.2", True), ("does not round", False)])
def test_a_line_that_gives_another_value_has_what_would_be_right(did: str, told: bool) -> None:
    """A rounding that is missing says that itself."""
    wrong = replace(WRONG, mend="with 1e-06 in place of 2e-06")
    worked = WorkedStage("product", (0, 0), 0.1, 0.1, 0.1, 0.1, "fp32", True, did=did, file=WRONG.file, line=WRONG.line)
    found = replace(said(), arithmetic=(worked,))
    found = replace(found, trace=replace(found.trace, leaves=wrong, blamed=wrong))
    culprit, _ = read(encoded(found), "cpu")
    assert culprit is not None and did in culprit.sentence
    assert (
        culprit.sentence.endswith("; should be: with 1e-06 in place of 2e-06; done again so, every element is right")
        is told
    )
