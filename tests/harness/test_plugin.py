"""The process that hands items to workers: it knows them by the notes of these, and does not replace them for ever."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from lastbit.plugin import _Session
from lastbit.verify.notes import Notes
from lastbit.verify.plan import Planned
from lastbit.verify.schedule import Schedule

NODE = SimpleNamespace(gateway=SimpleNamespace(id="gw3"))
ITEM = Planned("a", "kernel", "op", "contract", "cpu", "group", "k.py:1", cases=2, cost=6)


@pytest.fixture
def session(tmp_path: Path) -> _Session:
    return _Session(Notes(tmp_path, "cpu"))


def test_a_worker_that_ends_before_it_has_items_ends_the_run(session: _Session) -> None:
    """As where a kernel's file ends its process: every worker would."""
    with pytest.raises(pytest.exit.Exception, match="gw3 ended before it had collected anything: killed"):
        session.pytest_testnodedown(NODE, "killed")


def test_a_worker_that_ends_in_an_item_is_noted_and_replaced(session: _Session) -> None:
    session.notes.write("selected", ["a"])
    session.pytest_testnodedown(NODE, "killed")
    session.pytest_testnodedown(NODE, "keyboard-interrupt")
    session.pytest_testnodedown(NODE, None)
    assert session.notes.read("crashed") == ["gw3"]


def test_items_are_known_by_the_order_of_pytest(session: _Session) -> None:
    """Which may be another than that of the plan, and lack some of it."""
    planned = [ITEM, replace(ITEM, id="b", group="other", cost=90), replace(ITEM, id="c", kernel="kernel2")]
    session.notes.write("plan", {"items": [asdict(item) for item in planned], "not_run": []})
    session.notes.write("selected", ["c", "b"])
    assert session._units(1) == [[1], [0]]


@pytest.mark.parametrize(("dist", "own"), [("load", True), ("worksteal", False), ("each", False)])
def test_another_order_of_items_can_be_asked_for(session: _Session, dist: str, own: bool) -> None:
    options = {"dist": dist, "tx": ["popen"] * 3}
    config = SimpleNamespace(getvalue=options.get)
    assert isinstance(session.pytest_xdist_make_scheduler(config), Schedule) is own  # type: ignore[arg-type]
