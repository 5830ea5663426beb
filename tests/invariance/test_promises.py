"""Names of properties, and what each promises in words."""

import re
from pathlib import Path

import pytest

from lastbit.config import Config
from lastbit.errors import UsageError
from lastbit.invariance.properties import check_names, properties_of
from lastbit.ops import Op
from lastbit.verify.project import open_project
from tests.commands.test_invariance_command import PLANTED

RMS_NORM = open_project(Config(folder="")).op("rms_norm")


def test_a_name_that_is_no_property_is_told_with_the_nearest_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"unknown property 'row'; did you mean 'rows'\? Known: .*rows"):
        check_names(("rows", "row"), [RMS_NORM])
    (tmp_path / "mine.py").write_text(PLANTED.replace('("rows",)', '("row",)'))
    with pytest.raises(UsageError, match=r"property in invariant of kernel 'by_number_of_rows'.*did you mean 'rows'"):
        open_project(Config(folder="", kernel_folders=(str(tmp_path),))).kernels()


def test_properties_have_promises_in_words() -> None:
    assert all(one.promise and not one.promise.endswith(".") for one in properties_of(RMS_NORM).values())


def undocumented(op: Op) -> set[str]:
    """Promises of properties of an op that its documentation lacks, whatever inputs an op scales."""
    rows = (Path(__file__).parents[2] / "docs" / "invariance.md").read_text()
    parts = [(n, part) for n, one in properties_of(op).items() for part in one.promise.split("; ")]
    said = (f"| `{name}` | {re.sub(r'^.* times a power', 'inputs times a power', part)} |" for name, part in parts)
    return {row for row in said if row not in rows}


def test_the_documentation_has_every_property_and_its_promise() -> None:
    ops = open_project(Config(folder="")).ops.values()
    assert not {row for op in ops for row in undocumented(op)}
