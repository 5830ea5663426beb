"""What a kernel can say and do beside its results gains it nothing, and costs the judge nothing but that kernel."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attacks import NO_HARM, NO_PASS

from lastbit.calling.performing import CallRequest
from lastbit.case import parse_case
from lastbit.config import Config
from lastbit.errors import LastbitError, UnsupportedCase
from lastbit.inputs import build
from lastbit.interpret import install
from lastbit.isolation.answers import parsed, results_of
from lastbit.isolation.elsewhere import Kernels
from lastbit.isolation.isolated import Isolated, _performed
from lastbit.isolation.process import ForkServer
from lastbit.result import CaseResult, Verdict
from lastbit.verify.check import Subject, verify_case
from lastbit.verify.project import open_project

CPU = torch.device("cpu")
RMS_NORM = open_project(Config(folder="")).op("rms_norm")
CASE = parse_case("rms_norm x=bf16[4,64] weight=bf16[64] eps=1e-06 seed=1")
INPUTS = build(CASE.gathered(), CPU)
ASKED = CallRequest({}, ("output",), frozenset({"rstd"}))


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    install()
    server = ForkServer()
    yield server
    server.close()


def judged(server: ForkServer, folder: Path, text: str, timeout: float = 1.5) -> CaseResult:
    """Judge the kernel of a file in its own processes."""
    (folder / "attacking.py").write_text(text)
    kernels = Kernels(server)
    (kernel,) = kernels.declared(folder)
    with kernels.pair(kernel, timeout) as pair:
        return verify_case(Subject(kernel, RMS_NORM, CPU, performer=Isolated(pair, CPU)), CASE)


@pytest.mark.parametrize("name", NO_PASS)
def test_a_kernel_that_answers_for_its_runner_does_not_pass(server: ForkServer, tmp_path: Path, name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        verdict = judged(server, tmp_path, NO_PASS[name]).verdict
    except LastbitError:
        verdict = Verdict.ERRORED
    assert verdict in (Verdict.FAILED, Verdict.ERRORED)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 << 10


@pytest.mark.parametrize("name", NO_HARM)
def test_a_right_kernel_that_does_more_passes(server: ForkServer, tmp_path: Path, name: str) -> None:
    before = set(os.listdir("/proc/self/fd"))
    assert judged(server, tmp_path, NO_HARM[name], timeout=20.0).verdict is Verdict.PASSED
    assert len(set(os.listdir("/proc/self/fd")) - before) < 20


ANSWER = {
    "returned": [
        {"name": "output", "dtype": "bfloat16", "device": "cpu", "at": 0, "shape": [4, 64], "strides": [64, 1]},
        {"name": "rstd", "dtype": "float32", "device": "cpu", "at": 512, "shape": [4], "strides": [1]},
    ],
    "number": "n",
    "bytes": 768,
    "copied": True,
    "results": ["output"],
    "shared": [["output", "rstd"]],
    "poison": {"output": [1, [2, 3]]},
    "rebound": [["rebound_input", "x", "said"]],
    "violations": [["wrote_outside", "x", "said"]],
    "findings": [["race", "x", "said"]],
    "reused": [["reused_memory", "x", "said"]],
    "descended": True,
}
ODD: tuple[Any, ...] = (
    *(None, True, -1, 1 << 70, 0.5, float("nan"), float("inf"), "", "x" * 100_000, "\x1b[2J\ud800", "__class__"),
    *([], {}, [[]], [[], []], {"": {}}, [None] * 1001, {str(n): 0 for n in range(1001)}),
)


def places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return where something stands in JSON, from the whole to its leaves."""
    yield path
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, part in items:
        yield from places(part, (*path, key))


def changed(path: tuple[Any, ...], odd: object) -> Any:
    """Return the answer with something else at a place."""
    answer = json.loads(json.dumps(ANSWER))
    if not path:
        return odd
    part = answer
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = odd
    return answer


@pytest.mark.parametrize("path", list(places(ANSWER)), ids=str)
def test_whatever_stands_in_an_answer_it_is_read_or_refused(path: tuple[Any, ...]) -> None:
    """What is read has no character that commands a terminal, and no memory of its own."""
    for odd in ODD:
        try:
            answer = parsed(json.dumps(changed(path, odd)).encode(), "n")
            results, needed = results_of(answer)
            named = {r.name: torch.empty_strided(r.shape, r.strides, dtype=r.dtype, device="meta") for r in results}
            performed = _performed(answer, named, INPUTS, ASKED)
        except (LastbitError, UnsupportedCase):
            continue
        assert 0 <= needed < 1 << 52
        assert repr(performed).isprintable() and "\x1b" not in str(performed)
