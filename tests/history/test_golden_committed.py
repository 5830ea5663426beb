"""The goldens of this repository: there is one for every kernel, they are small, and today's kernels keep to them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lastbit.config import Config
from lastbit.history.golden_file import read
from lastbit.history.golden_folder import Target, held, load, targets
from lastbit.reports.golden import Status
from lastbit.verify.worker import plan_for, prepare, unwatched
from tests.faults.hunt import subject_of

CPU = torch.device("cpu")
GOLDENS = Path(__file__).resolve().parents[2] / "cases" / "golden"
PATHS = sorted(GOLDENS.rglob("*.safetensors"))
TARGETS = targets(plan_for(Config(folder="")).items, GOLDENS / "cpu")


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
    known = {target.path for target in TARGETS}
    assert known == {path for path in PATHS if path.parent.name == "cpu"}


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.subject.kernel.name)
def test_kernels_keep_to_them(target: Target) -> None:
    """Other processors and other releases of torch may change bits, within the contract; others are not asked for."""
    prepare(CPU)
    golden = load(target.path, target.subject.kernel.name, "cpu")
    target = replace(target, subject=subject_of(target.subject.kernel, CPU))
    outcome = held(target, golden, watch=unwatched, tick=lambda result: None).outcome
    assert outcome.status in (Status.SAME, Status.CHANGED), outcome
