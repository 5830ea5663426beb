"""The pytest plugin behind `lastbit verify`: turns the plan of a run into test items.

It reads the run's configuration from the file that the environment variable LASTBIT_CONFIG names, and the type of
device from LASTBIT_DEVICE, because every worker process of pytest-xdist has to make the same plan.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.config import Config
from harness.errors import LastbitError
from harness.interpret import install
from harness.timing import PLANNING, Clock, listening, timed
from harness.verify.notes import Notes
from harness.verify.plan import Plan, make_plan
from harness.verify.recorder import Recorder, Unrecorded
from reports.records import dump

_plan = pytest.StashKey[Plan]()
_config = pytest.StashKey[Config]()
_notes = pytest.StashKey[Notes]()


def _device_type() -> str:
    return os.environ.get("LASTBIT_DEVICE", "cpu")


def pytest_configure(config: pytest.Config) -> None:
    """Make the plan; a problem with the configuration is a usage error of pytest."""
    path = os.environ.get("LASTBIT_CONFIG")
    if path is None:
        raise pytest.UsageError("harness.plugin is started by `lastbit verify`, which sets LASTBIT_CONFIG")
    device_type = _device_type()
    config.add_cleanup(_listening())
    settings = Config.load(Path(path))
    try:
        plan = _make_plan(settings, device_type)
    except LastbitError as error:
        raise pytest.UsageError(str(error)) from error
    notes = Notes(Path(settings.folder), device_type)
    config.stash[_plan], config.stash[_config], config.stash[_notes] = plan, settings, notes
    if not hasattr(config, "workerinput"):
        notes.write("plan", {"items": [asdict(i) for i in plan.planned], "not_run": [asdict(n) for n in plan.not_run]})
        config.pluginmanager.register(_Session(notes))


def _listening() -> Callable[[], None]:
    """Let a clock count where the time of this process goes, until what is returned is called."""
    with ExitStack() as stack:
        stack.enter_context(listening(Clock()))
        return stack.pop_all().close


@timed(PLANNING)
def _make_plan(settings: Config, device_type: str) -> Plan:
    torch.set_num_threads(1)  # workers share the cores
    if device_type == "cpu":
        install()
    return make_plan(settings, device_type)


class _Session:
    """Hooks of the process that hands the items to workers: it notes what becomes of these, and of the session."""

    def __init__(self, notes: Notes) -> None:
        self.notes, self.crashed, self.unrecorded = notes, list[str](), ""

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        if error and error != "keyboard-interrupt":  # as pytest-xdist calls it
            self.crashed.append(node.gateway.id)
            self.notes.write("crashed", self.crashed)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        lines = report.longreprtext.splitlines() if report.failed else []
        said = (line.partition(f"{Unrecorded.__name__}: ")[2] for line in lines)
        self.unrecorded = next(filter(None, said), self.unrecorded)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Note that the session came to its end, and how; without it the run counts as broken."""
        self.notes.write("done", {"status": int(exitstatus), "unrecorded": self.unrecorded})


def pytest_collection_finish(session: pytest.Session) -> None:
    """Note which items are left after every option and plugin has had its say; all workers note the same."""
    selected = [vars(item)["callspec"].params["item"].id for item in session.items if hasattr(item, "callspec")]
    session.config.stash[_notes].write("selected", selected)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per item of the plan."""
    if "item" in metafunc.fixturenames:
        plan = metafunc.config.stash[_plan]
        metafunc.parametrize("item", plan.items, ids=[i.id for i in plan.items])


@pytest.fixture(scope="session")
def recorder(request: pytest.FixtureRequest) -> Recorder:
    """The files of this worker process."""
    settings = request.config.stash[_config]
    worker = getattr(request.config, "workerinput", {}).get("workerid", "main")
    return Recorder(settings, f"{os.environ.get('LASTBIT_DEVICE', 'cpu')}-{worker}", dump)
