"""`lastbit calibrate`."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

from lastbit.commands.running import worst_code
from lastbit.devices import plan_devices
from lastbit.reports.paper import line, make_console
from lastbit.verify.processes import environment_for


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Measure in processes of their own, because Triton decides at import whether it compiles or interprets."""
    device_plan = plan_devices(options.device)
    line(make_console(), str(device_plan))
    command = [sys.executable, "-m", "lastbit.calibrate"]
    environments = {device: environment_for(device.partition(":")[0]) for device in device_plan.devices}
    codes = [subprocess.run([*command, d], env=e, check=False).returncode for d, e in environments.items()]
    return worst_code(code if code in (0, 1) else 2 for code in codes)
