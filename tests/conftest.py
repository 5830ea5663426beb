"""Settings that every test shares: interpreted Triton, reproducible Hypothesis, one thread per worker."""

import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

# Triton decides while it is imported whether @triton.jit compiles or interprets, so this stands before every
# other import. The tests run on the CPU; TRITON_INTERPRET=0 from outside keeps compilation, for a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")
# Small tensors: threads cost more than they save, and parallel workers would each start one per core. Torch reads this
# on import too.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# As in a worker, which a process with another number of threads cannot fork.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

from lastbit import cli
from lastbit.children.child import ChildProcess
from lastbit.commands import verify
from lastbit.files import IMPORTED_FROM
from lastbit.numerics import Premises, using
from lastbit.verify import processes

# As in the actors of a run.
_GARBAGE = (10_000, 20, 10)

try:
    distribution("lastbit")
except PackageNotFoundError:  # a checkout that is not installed: processes that tests start find it as these tests do
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(IMPORTED_FROM), os.environ.get("PYTHONPATH")]))

# No deadline, because the first launch of an interpreted kernel is slow; derandomized, so that a test that
# passed on a commit passes on it again.
hypothesis.settings.register_profile("lastbit", deadline=None, derandomize=True)
hypothesis.settings.load_profile("lastbit")

# The threads of pytest-xdist read and hold no lock that a fork needs: workers are forked, as by `lastbit` itself.
processes.may_fork = lambda: not torch.cuda.is_initialized()
# Every test judges what it runs; those of kept verdicts have folders of their own.
verify.KEPT = ""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage meanwhile, and seldom later; what modules are made of stays, and no test looks through it."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
    gc.freeze()
    gc.set_threshold(*_GARBAGE)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests first, so that no worker is left alone with one; those marked gpu skipped where they cannot run."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = why_no_gpu() if marked else ""
    for item in marked:
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def why_no_gpu() -> str:
    """Return why tests marked gpu cannot run here; empty if they can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if os.environ["TRITON_INTERPRET"] != "0":
        return "Triton interprets here; run with TRITON_INTERPRET=0 to compile"
    return ""


@pytest.fixture
def no_tensor_cores() -> Iterator[Premises]:
    """Bounds of dots that add in any order and round, as on the CPU."""
    with using(Premises(tensor_cores=None)) as premises:
        yield premises


@pytest.fixture
def forked_lastbit(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[int, str]]:
    """Run a command line in a folder, in a fork of this process: its exit code, and what it prints."""

    def call(words: Sequence[str], folder: Path, **environ: str) -> tuple[int, str]:
        def run(_: int) -> None:
            os.chdir(folder)
            code = cli.main(words)
            sys.stdout.flush()
            os._exit(code)

        log = tmp_path_factory.mktemp("lastbit") / "log"
        with log.open("wb") as output:
            code = ChildProcess.forked(run, {**os.environ, **environ}, log=output).end(300)
        return code, log.read_text()

    return call
