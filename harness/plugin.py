"""The pytest plugin behind `lastbit verify`: turns the plan of a run into test items.

It reads the run's configuration from the file that the environment variable LASTBIT_CONFIG names, and the type of
device from LASTBIT_DEVICE. Every process that collects items makes the same plan; the one that hands them to workers
collects none, and imports neither torch nor a kernel.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lastbit.config import Config
from lastbit.errors import LastbitError
from lastbit.timing import PLANNING, Clock, listening, timed
from lastbit.verify.notes import Failures, Notes, Unrecorded, read_json
from lastbit.verify.schedule import Schedule, units

if TYPE_CHECKING:
    from lastbit.isolation.elsewhere import Kernels
    from lastbit.verify.item_run import Look, Probe
    from lastbit.verify.plan import Plan
    from lastbit.verify.result_recorder import ResultRecorder

_config = pytest.StashKey[Config]()
_notes = pytest.StashKey[Notes]()
_kernels = pytest.StashKey["Kernels | None"]()
_check = pytest.StashKey[Callable[[], None]]()


def _device_type() -> str:
    return os.environ.get("LASTBIT_DEVICE", "cpu")


def pytest_configure(config: pytest.Config) -> None:
    """Read what the run was asked to do."""
    path = os.environ.get("LASTBIT_CONFIG")
    if path is None:
        raise pytest.UsageError("lastbit.plugin is started by `lastbit verify`, which sets LASTBIT_CONFIG")
    config.add_cleanup(_listening())
    settings = Config.load(Path(path))
    config.stash[_config], config.stash[_notes] = settings, Notes(Path(settings.folder), _device_type())
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Session(config.stash[_notes]))


def _listening() -> Callable[[], None]:
    """Let a clock count where the time of this process goes, until what is returned is called."""
    with ExitStack() as stack:
        stack.enter_context(listening(Clock()))
        return stack.pop_all().close


class _Session:
    """Hooks of the process that hands the items to workers: it notes what becomes of these, and of the session."""

    def __init__(self, notes: Notes) -> None:
        self.notes, self.crashed, self.unrecorded = notes, list[str](), ""

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config) -> Schedule | None:
        """Hand out units of items that share work, unless --dist asks for another order."""
        workers = len(config.getvalue("tx"))
        return Schedule(workers, lambda: self._units(workers)) if config.getvalue("dist") == "load" else None

    def _units(self, workers: int) -> list[list[int]]:
        planned = {item["id"]: item for item in self.notes.read("plan")["items"]}
        return units([planned[name] for name in self.notes.read("selected")], workers)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        if error and error != "keyboard-interrupt":  # as pytest-xdist calls it
            self.crashed.append(node.gateway.id)
            self.notes.write("crashed", self.crashed)
            self._note_failure(node.gateway.id)
            if self.notes.read("selected") is None:  # another one would end likewise, for ever
                pytest.exit(f"worker {node.gateway.id} ended before it had collected anything: {error}", returncode=3)

    def _note_failure(self, worker: str) -> None:
        """Note that the kernel in whose case a worker ended has failed."""
        folder = self.notes.folder
        for path in folder.glob(f"{self.notes.device_type}-{worker}-*.started"):
            under_way = read_json(path)
            Failures(folder).add(under_way["kernel"], under_way["device"])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        lines = report.longreprtext.splitlines() if report.failed else []
        said = (line.partition(f"{Unrecorded.__name__}: ")[2] for line in lines)
        self.unrecorded = next(filter(None, said), self.unrecorded)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Note that the session came to its end, and how; without it the run counts as broken."""
        self.notes.write("done", {"status": int(exitstatus), "unrecorded": self.unrecorded})


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test per item of the plan."""
    if "item" in metafunc.fixturenames:
        plan = _plan(metafunc.config)
        metafunc.parametrize("item", plan.items, ids=[i.id for i in plan.items])


@timed(PLANNING)
def _plan(config: pytest.Config) -> Plan:
    """Make and note the plan, or note the reason why there is none."""
    import gc

    import torch

    from lastbit.interpret import install
    from lastbit.kernel import load_kernels
    from lastbit.trees import imported
    from lastbit.verify.plan import later_imports, make_plan

    torch.set_num_threads(1)  # workers share the cores
    config.stash[_kernels] = _isolated(config)
    notes, device_type = config.stash[_notes], _device_type()
    if device_type == "cpu":
        install()
    kernels = config.stash[_kernels]
    try:
        load = (kernels.declared, lambda: kernels.imported) if kernels else (load_kernels, imported)
        plan = make_plan(config.stash[_config], device_type, *load, refusing=True)
    except LastbitError as error:
        notes.refuse(error)
        raise
    config.stash[_check] = later_imports(config.stash[_config])
    gc.freeze()  # what was imported and loaded stays: no item has to look through it for garbage
    isolated = str(kernels.confinement) if kernels else ""
    items, not_run = [asdict(item) for item in plan.planned], [asdict(note) for note in plan.not_run]
    notes.write("plan", {"items": items, "not_run": not_run, "isolated": isolated})
    return plan


def _isolated(config: pytest.Config) -> Kernels | None:
    """Start the kernel processes of an isolated run; None if the run calls kernels in this process."""
    if not config.stash[_config].isolate:
        return None
    from lastbit.verify.isolating import kernels_for

    kernels = kernels_for(config.stash[_config], _device_type())
    config.add_cleanup(kernels.server.close)
    return kernels


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Refuse the run if a kernel that was called imported code of its repository from another checkout."""
    try:
        item.config.stash[_check]()
    except LastbitError as error:
        item.config.stash[_notes].refuse(error)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Note which items are left after every option and plugin has had its say; all workers note the same."""
    chosen = (vars(item)["callspec"].params["item"] for item in session.items if hasattr(item, "callspec"))
    selected = [item.id for item in chosen if hasattr(item, "id")]  # of an empty plan pytest makes an item of its own
    session.config.stash[_notes].write("selected", selected)


@pytest.fixture(scope="session")
def recorder(request: pytest.FixtureRequest) -> ResultRecorder:
    """Make the recorder that writes the files of this worker process."""
    from lastbit.reports.records import dump
    from lastbit.verify.result_recorder import ResultRecorder

    worker = getattr(request.config, "workerinput", {}).get("workerid", "main")
    return ResultRecorder(request.config.stash[_config], f"{_device_type()}-{worker}", dump)


@pytest.fixture(scope="session")
def look() -> Look:
    """Return the function that looks for the stages of kernels."""
    from lastbit.diagnosing.trace import stages_as_text

    return stages_as_text


@pytest.fixture(scope="session")
def probe() -> Probe:
    """Return the function that looks for a sum that is not as its kernel declares."""
    from lastbit.orders.declared_depth import too_deep

    return too_deep


@pytest.fixture(scope="session")
def kernels(request: pytest.FixtureRequest) -> Kernels | None:
    """Return the kernel processes of this worker; None if it calls kernels itself."""
    return request.config.stash[_kernels]
