"""`python3 -m lastbit.calibrate DEVICE`: what `lastbit calibrate` runs in a process of its own."""

from __future__ import annotations

import sys
import traceback

import torch
from rich.console import Console
from rich.table import Table

from lastbit.calibrate.measure import measure
from lastbit.calibrate.store import MeasuredPremise, device_name, save
from lastbit.devices import made_current
from lastbit.interpret import install
from lastbit.numerics.premises import U


def main(name: str) -> int:
    """Measure, print and keep the premises of a device; 1 if one does not hold."""
    device = torch.device(name)
    if device.type == "cpu":
        install()
    with made_current(device):  # where Triton launches
        found = list(measure(device))
    table = Table(title=f"premises on {device_name(device)}")
    for column in ("premise", "worst", "documented", "tried", "holds"):
        table.add_column(column)
    for m in found:
        tried = "every significand" if m.exhaustive else "a sample"
        table.add_row(m.premise, _figure(m, m.worst), _figure(m, m.limit), tried, "yes" if m.holds else "NO")
    Console().print(table)
    print(f"kept in {save(device, found)}")
    return 0 if all(m.holds for m in found) else 1


def _figure(measurement: MeasuredPremise, value: float) -> str:
    return f"{value / U:.3g} u" if measurement.primitive else f"{value:.3g}"


def _guarded(name: str) -> int:
    """Return the exit code of `main`; 2 if it raised, since 1 says that a premise does not hold."""
    try:
        return main(name)
    except Exception:
        traceback.print_exc()
        return 2


if __name__ == "__main__":
    raise SystemExit(_guarded(sys.argv[1]))
