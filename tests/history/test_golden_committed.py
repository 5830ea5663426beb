"""The goldens of this repository: there is one for every kernel, they are small, and today's kernels keep to them."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lastbit.case import parse_case
from lastbit.history.golden_check import Target, found_today, held, held_of, load
from lastbit.history.golden_file import Golden, RecordedCase, path_of, read, same, store
from lastbit.inputs import build, fingerprints
from lastbit.kernel import Kernel
from lastbit.reports.golden import Status
from lastbit.verify.case_calls import Caller
from lastbit.verify.check import Subject
from lastbit.verify.worker import prepare, unwatched
from tests.faults.hunt import clean_kernels, subject_of

CPU = torch.device("cpu")
GOLDENS = Path(__file__).resolve().parents[2] / "cases" / "golden"
PATHS = sorted(GOLDENS.rglob("*.safetensors"))
OF_CPU = [path for path in PATHS if path.parent.name == "cpu"]


@functools.cache
def known() -> dict[Path, Kernel]:
    """Return the kernels that run on a CPU by their goldens."""
    kernels = (kernel for kernel in clean_kernels() if not kernel.devices or "cpu" in kernel.devices)
    return {path_of(kernel.name, GOLDENS / "cpu"): kernel for kernel in kernels}


def bits_kept(subject: Subject, recorded: RecordedCase) -> bool:
    """Call the kernel once, and compare its inputs and all its stages with those that were recorded.

    The reference, which takes longer than most kernels, is not asked what the results are: they are what was recorded.
    """
    inputs = build(parse_case(recorded.line).gathered(), subject.device)
    shapes = {name: stage.values.shape for name, stage in recorded.stages.items()}
    results = subject.op.in_order(name for name in shapes if name not in subject.kernel.stages)
    call = Caller(subject.kernel, subject.device, tuple(results), shapes=shapes).last(inputs)
    if (
        fingerprints(subject.problem(inputs).tensors) != recorded.inputs
        or call.findings
        or call.actual.keys() != recorded.stages.keys()
    ):
        return False
    return all(not s.unordered and same(s.values, store(call.actual[n])) for n, s in recorded.stages.items())


def properties_kept(subject: Subject, golden: Golden) -> bool:
    asked = golden.properties or {}
    return held_of(found_today(subject, asked, unwatched), asked).keys() == asked.keys()


def test_they_are_small_enough_to_commit() -> None:
    sizes = [path.stat().st_size for path in PATHS]
    assert max(sizes) < 512 * 1024
    assert sum(sizes) / len(sizes) < 96 * 1024  # there is one for each kernel and kind of device


@pytest.mark.parametrize("path", PATHS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_each_is_whole_and_where_it_belongs(path: Path) -> None:
    golden = read(path)
    assert golden.kind == path.parent.name
    assert golden.cases
    assert golden.provenance["source"]
    assert not golden.provenance["revision"].endswith("-dirty"), "recorded from kernels that are committed"


def test_every_kernel_has_one_and_every_one_has_a_kernel() -> None:
    assert known().keys() == set(OF_CPU)


@pytest.mark.slow
@pytest.mark.parametrize("path", OF_CPU, ids=lambda path: path.stem)
def test_kernels_keep_to_them(path: Path) -> None:
    """Other processors and other releases of torch may change bits, within the contract; others are not asked for.

    The same bits of the same inputs need no second judgement: only cases and properties that changed are verified.
    """
    prepare(CPU)
    kernel = known()[path]
    golden = load(path, kernel.name, "cpu")
    subject = subject_of(kernel, CPU)
    changed = tuple(case for case in golden.cases if not bits_kept(subject, case))
    lost = {} if properties_kept(subject, golden) else golden.properties
    if not changed and not lost:
        return
    rest = replace(golden, cases=changed, properties=lost)
    outcome = held(Target(subject, (), path), rest, watch=unwatched, tick=lambda result: None).outcome
    assert outcome.status in (Status.SAME, Status.CHANGED), outcome
