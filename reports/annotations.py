"""A run as annotations of GitHub Actions: lines on standard output that show at lines of kernels in a pull request.

Escapes are those of actions/toolkit, packages/core/src/command.ts.
"""

from __future__ import annotations

from lastbit.reports.alerts import Alert, alerts
from lastbit.reports.characters import visible
from lastbit.run import Run


def lines(run: Run) -> str:
    """Write one workflow command per problem, worst first; GitHub shows a step's first ten errors and warnings."""
    commands = [f"::error title=lastbit::{_data(run.broken)}"] if run.broken else []
    commands += [_command(alert) for alert in alerts(run)]
    return "".join(f"{command}\n" for command in commands)


def _command(alert: Alert) -> str:
    place = alert.place
    properties = {"file": place.path, "line": str(place.line)} if place.path else {}
    if place.path and place.column:
        properties["endLine"] = str(place.end_line)
        if place.line == place.end_line:  # GitHub takes columns of one line only
            properties |= {"col": str(place.column), "endColumn": str(place.end_column)}
    properties["title"] = alert.title
    said = ",".join(f"{name}={_property(value)}" for name, value in properties.items())
    return f"::{'notice' if alert.level == 'note' else alert.level} {said}::{_data(alert.text)}"


def _data(text: str) -> str:
    shown = visible(text, keep="\r\n")
    return shown.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
