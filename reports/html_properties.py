"""The table kernel × property of the HTML report."""

from __future__ import annotations

from collections.abc import Sequence

from lastbit.reports.html_tables import Cell, Row, Table
from lastbit.reports.properties import Found, PropertyTable, cell


def property_table(found: PropertyTable) -> Table:
    """One row per kernel of an op: a word for each property that was asked of its bits."""
    return Table(
        f"Properties of the bits of {found.op}",
        tuple((name, "") for name in found.headers),
        tuple(_asked(one, found.properties) for one in found.kernels),
    )


def _asked(found: Found, names: Sequence[str]) -> Row:
    words = [cell(found.properties.get(name)) for name in names]
    looks = {"BROKEN": "bad", "ERRORED": "bad", "broken": "doubtful", "errored": "doubtful"}
    cells = [Cell(text, kind=looks.get(text, ""), detail=detail) for text, detail in words]
    about = {"op": found.op, "kernel": found.kernel, "device": found.device}
    return Row((Cell(found.kernel, kind="name"), Cell(found.device), *cells), about)
