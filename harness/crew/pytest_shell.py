"""pytest around a run of this machine: it chooses items by its options and plugins, hears what comes of each, and may
stop the run. Kernels are called by actors, and never in its process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Literal
from unittest.mock import patch

import pytest

from lastbit.crew.campaign import Campaign
from lastbit.crew.ledger import ItemOutcome
from lastbit.errors import LastbitError
from lastbit.result import BAD
from lastbit.verify.notes import HAS_FAILED, STOPPED, Planned
from lastbit.verify.processes import working_folder

_OF_PYTEST = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD")
"""Variables by which a test run beside lastbit is set up: they must not choose what is verified."""

# The last one looks for garbage of tests twice when it ends; there are none in this process.
_WITHOUT = ("hypothesispytest", "xdist", "xdist.looponfail", "faulthandler", "unraisableexception")
_SUITE = "suite.py"  # whose tests the items are, by name: options that name one go on to mean it


def work(campaign: Campaign, arguments: Sequence[str]) -> None:
    """Let a campaign work on the items that pytest chooses, with these `arguments`; what it prints goes to its log.

    Raises:
        LastbitError: there is no plan, the run means nothing, or pytest ended before it, as for an unknown option.
        KeyboardInterrupt: from the keyboard.
    """
    shell, log = _Shell(campaign), Path(campaign.config.folder, "pytest.log").absolute()
    options = ["-c", os.devnull, "--rootdir", str(Path(__file__).parent), "--noconftest", "--capture=no"]
    options += ["--no-header", "-q", "-rN", "--assert=plain", "-o", f"cache_dir={Path('.lastbit', 'cache').resolve()}"]
    options += [word for name in _WITHOUT for word in ("-p", f"no:{name}")]
    home, kept = os.getcwd(), {name: value for name, value in os.environ.items() if name not in _OF_PYTEST}
    os.chdir(working_folder(campaign.config.tree))
    try:
        with (
            log.open("w") as file,
            redirect_stdout(file),
            redirect_stderr(file),
            patch.dict(os.environ, kept, clear=True),
        ):
            code = pytest.main([*options, *arguments], plugins=[shell])
    finally:
        os.chdir(home)
    if shell.raised is not None:
        raise shell.raised
    if code == pytest.ExitCode.INTERRUPTED and not campaign.stop:
        raise KeyboardInterrupt
    if not shell.begun:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        first = next((i for i, line in enumerate(lines) if line.startswith("ERROR: ")), len(lines) - 20)
        raise LastbitError("\n".join(lines[max(first, 0) :]).removeprefix("ERROR: "))


class _Item(pytest.Item):
    """An item of the plan, as pytest knows it."""

    planned: Planned

    def reportinfo(self) -> tuple[str, None, str]:
        """Say where the test is."""
        return _SUITE, None, self.name

    def runtest(self) -> None:
        """Do nothing: actors run it."""


class _Shell:
    """Hooks of pytest's session."""

    def __init__(self, campaign: Campaign) -> None:
        self._campaign = campaign
        self._items: dict[str, _Item] = {}
        self._streams = sys.stdout, sys.stderr
        self.raised: BaseException | None = None
        self.begun = False

    @contextmanager
    def _lastbits(self) -> Iterator[None]:
        """Let what happens within be lastbit's: it prints where lastbit does, and raises beyond pytest."""
        with redirect_stdout(self._streams[0]), redirect_stderr(self._streams[1]):
            try:
                yield
            except (pytest.Session.Failed, pytest.Session.Interrupted):
                self._campaign.stop = STOPPED
                raise
            except pytest.exit.Exception as error:
                self._campaign.stop = f"pytest ended early: {error}"
                raise
            except BaseException as error:
                self.raised = error
                raise

    def pytest_collection(self, session: pytest.Session) -> bool:
        """Let an item of pytest stand for each one of the plan."""
        campaign = self._campaign
        with self._lastbits():
            campaign.work(until=lambda: campaign.planned)
        for planned in campaign.items:
            name = f"test_kernel[{planned.id}]"
            item = _Item.from_parent(session, name=name, nodeid=f"{_SUITE}::{name}")
            item.planned = planned
            session.items.append(item)
        hook = session.config.hook
        hook.pytest_collection_modifyitems(session=session, config=session.config, items=session.items)
        hook.pytest_collection_finish(session=session)
        session.testscollected = len(session.items)
        return True

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Let actors run what is left of the items."""
        self._session, self.begun = session, True
        chosen = [] if session.config.option.collectonly else session.items
        self._items = {item.planned.id: item for item in chosen if isinstance(item, _Item)}
        self._campaign.over = self._over
        with self._lastbits():
            self._campaign.begin(self._items)
            self._campaign.work()
        return True

    def _over(self, planned: Planned, outcome: ItemOutcome) -> None:
        """Report an item that is done to pytest, which may stop the run."""
        item, hook = self._items[planned.id], self._session.config.hook
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        (what, why), took = _told(outcome), sum(result.seconds for result in outcome.results)
        report = pytest.TestReport(item.nodeid, item.location, {}, what, why, "call", duration=took)
        hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)
        if self._session.shouldstop:
            raise self._session.Interrupted(self._session.shouldstop)


def _told(outcome: ItemOutcome) -> tuple[Literal["passed", "failed", "skipped"], str | tuple[str, int, str] | None]:
    """Return how a test of pytest ends that stands for an item with this outcome, and what is said of it."""
    bad = [result for result in outcome.results if result.verdict in BAD]
    if outcome.died or bad:
        result = outcome.died.errored if outcome.died else bad[-1]  # the smallest that was found
        sentences = [result.reason] if result.reason else [finding.sentence for finding in result.faults]
        return "failed", "\n".join([f"{result.verdict}: {result.kernel}", *sentences, result.case])
    if outcome.given_up:
        return "failed", outcome.given_up
    return ("skipped", (_SUITE, 1, f"Skipped: {HAS_FAILED}")) if outcome.left else ("passed", None)
