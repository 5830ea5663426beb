"""The pytest plugin behind `lastbit verify`: turns the plan of a run into test items.

It reads the run's configuration from the file that the environment variable LASTBIT_CONFIG names, and the type of
device from LASTBIT_DEVICE, because every worker process of pytest-xdist has to make the same plan.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from harness.config import Config
from harness.errors import LastbitError
from harness.interpret import install
from harness.verify.plan import Plan, make_plan
from harness.verify.recorder import Recorder, write_json
from harness.verify.run import DONE_FILE, PLAN_FILE
from reports.records import dump

_plan = pytest.StashKey[Plan]()
_config = pytest.StashKey[Config]()


def _device_type() -> str:
    return os.environ.get("LASTBIT_DEVICE", "cpu")


def pytest_configure(config: pytest.Config) -> None:
    """Make the plan; a problem with the configuration is a usage error of pytest."""
    path = os.environ.get("LASTBIT_CONFIG")
    if path is None:
        raise pytest.UsageError("harness.plugin is started by `lastbit verify`, which sets LASTBIT_CONFIG")
    device_type = _device_type()
    settings = Config.load(Path(path))
    try:
        plan = _make_plan(settings, device_type)
    except LastbitError as error:
        raise pytest.UsageError(str(error)) from error
    config.stash[_plan], config.stash[_config] = plan, settings
    if not hasattr(config, "workerinput"):
        summary = {"cases": plan.cases, "not_run": [asdict(n) for n in plan.not_run]}
        write_json(Path(settings.folder) / PLAN_FILE.format(device=device_type), summary)


def _make_plan(settings: Config, device_type: str) -> Plan:
    torch.set_num_threads(1)  # workers share the cores
    if device_type == "cpu":
        install()
    return make_plan(settings, device_type)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Leave a note that the session came to its end, and how; without it the run counts as broken."""
    if not hasattr(session.config, "workerinput"):
        folder, device_type = Path(session.config.stash[_config].folder), _device_type()
        write_json(folder / DONE_FILE.format(device=device_type), {"status": int(exitstatus)})


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
