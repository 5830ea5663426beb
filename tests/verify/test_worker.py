"""Work on kernels that end their process or hang: the others are not affected, and the case is known."""

from __future__ import annotations

import pickle
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch

from lastbit.config import Config
from lastbit.devices import DevicePlan
from lastbit.diagnosing.handover import search_stages
from lastbit.errors import DeviceLost, UsageError
from lastbit.identifying.kept_contracts import identify_kernel
from lastbit.reports.stages import StageKind
from lastbit.verify import processes
from lastbit.verify.processes import child_for, environment_for
from lastbit.verify.worker import Worker, WorkerEnded, on_case, pickled, planned, serve
from tests.faults import vanishing
from tests.faults.losing import losing, process_of

CASE = "rms_norm x=bf16[4,64] weight=bf16[64] eps=1e-06 seed=1"


def config(folder: Path) -> Config:
    (folder / "kernels").mkdir()
    shutil.copy(vanishing.__file__, folder / "kernels")
    return Config(folder="", kernel_folders=(str(folder / "kernels"),), lines=(CASE,), timeout=1.0)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.bfloat16, torch.int64])
def test_tensors_of_every_dtype_come_through_the_pipe(dtype: torch.dtype) -> None:
    sent = torch.arange(1, 7).reshape(2, 3).to(dtype)
    name, received = pickle.loads(pickled(("codes", sent)))
    assert (name, received.dtype, received.shape) == ("codes", dtype, sent.shape)
    assert torch.equal(received.float(), sent.float())


@pytest.mark.slow
def test_kernels_that_vanish(tmp_path: Path) -> None:
    """One process for the kernel that ends it, one for the one that has to be ended, one for the rest."""
    reasons = {}
    with Worker(config(tmp_path)) as worker:
        kernels = [item.kernel for item in worker.do(planned)]
        for kernel in kernels:
            began = time.monotonic()
            try:
                found = worker.do(on_case, search_stages, kernel, CASE)
            except WorkerEnded as ended:
                reasons[kernel] = str(ended)
                assert ended.case == CASE and str(ended).endswith(f", in {CASE}")
                assert time.monotonic() - began < 60
            else:
                assert found.kind is StageKind.CLEAN
                reasons[kernel] = ""
        assert worker.do(identify_kernel, "stays", most=0).keeps_claim, "the same process, once more"
        with pytest.raises(UsageError, match="unknown dtype 'bf61'"):
            worker.do(on_case, search_stages, "stays", "rms_norm x=bf61[4]")
    assert reasons.keys() == vanishing.OUTCOMES.keys()
    for kernel, start in vanishing.OUTCOMES.items():
        assert reasons[kernel].startswith(start) and bool(reasons[kernel]) is bool(start)


def test_one_device_at_a_time() -> None:
    both = Config(folder="", device_plan=DevicePlan(("cpu", "cuda:0"), ("", "")))
    with pytest.raises(UsageError, match="takes one device"):
        Worker(both)


def test_a_process_that_has_lost_its_device_does_no_more_work(tmp_path: Path) -> None:
    with Worker(config(tmp_path)) as worker:
        first = worker.do(process_of)
        assert worker.do(process_of) == first
        with pytest.raises(DeviceLost, match=r"illegal memory access.*; its process cannot use the device any more"):
            worker.do(losing)
        assert worker.do(process_of) != first


@pytest.mark.parametrize(
    ("variable", "forks"), [(None, True), ("TRITON_INTERPRET", False), ("OPENBLAS_NUM_THREADS", False)]
)
def test_only_a_process_that_imported_alike_is_forked(
    variable: str | None, forks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton reads whether to interpret when it is imported, numpy on how many threads it computes."""
    environ = environment_for("cpu")
    for module in ("triton", "numpy"):
        monkeypatch.setitem(sys.modules, module, sys.modules.get(module, sys))
    for name in ("TRITON_INTERPRET", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "other" if name == variable else environ[name])
    started: list[str] = []
    monkeypatch.setattr(processes, "may_fork", lambda: True)
    monkeypatch.setattr(processes.ChildProcess, "forked", lambda *_, **__: started.append("forked"))
    monkeypatch.setattr(processes.ChildProcess, "__init__", lambda *_, **__: started.append("new"))
    child_for(Config(folder=""), "cpu", serve, None)
    assert started == ["forked" if forks else "new"]
