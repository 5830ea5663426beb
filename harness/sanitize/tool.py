"""compute-sanitizer: where it is, and how a process is started under one of its tools."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lastbit.config import Config
from lastbit.errors import UsageError

NAME = "compute-sanitizer"

TOOLS: Mapping[str, tuple[str, ...]] = {
    "memcheck": ("--destroy-on-device-error", "kernel", "--report-api-errors", "no", "--padding", str(1 << 16)),
    "initcheck": (),
    "racecheck": ("--racecheck-report", "hazard"),
    "synccheck": (),
}
"""Tool → its options. Padding keeps a write far beyond one allocation out of the next."""

USUAL_PLACE = "/usr/local/cuda/bin"
"""Where the CUDA toolkit puts it."""

# Arbitrary: a kernel that writes out of bounds reports every thread; the first ones name the line.
MOST_REPORTS = 100
"""Reports of one process that are printed."""

UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
"""Without its cache, torch makes an allocation for every tensor, and compute-sanitizer knows where that ends."""

# Arbitrary: importing torch and compiling takes many times longer under the tool.
_START = 600  # seconds that a process may take until it uses the GPU


@dataclass(frozen=True)
class Sanitizer:
    """An installed compute-sanitizer."""

    path: str

    def launcher(self, tool: str, log: Path) -> list[str]:
        """Return the words before a command that run it under a tool, which writes its reports to `log`."""
        options = ["--tool", tool, *TOOLS[tool], "--target-processes", "all", "--launch-timeout", str(_START)]
        options += ["--show-backtrace", "no", "--print-limit", str(MOST_REPORTS), "--log-file", str(log)]
        return [self.path, *options]

    @property
    def version(self) -> str:
        """`2025.3.1.0`, or what it says instead."""
        said = subprocess.run([self.path, "--version"], capture_output=True, text=True, check=False, timeout=60).stdout
        words = [line for line in said.splitlines() if line.startswith("Version")] or said.splitlines()[-1:]
        return words[0].removeprefix("Version ").partition(" (")[0] if words else "of unknown version"


def sanitizer_for(config: Config, environ: Mapping[str, str] = os.environ) -> Sanitizer | None:
    """Find the compute-sanitizer that a run needs; None if the run needs none.

    Raises:
        UsageError: there is none, or a device is of a type that it does not know.
    """
    types = [kind for kind in config.device_plan.types if kind != "cpu"] if config.sanitize else []
    if others := [kind for kind in types if kind != "cuda"]:
        raise UsageError(f"--sanitize on {others[0]}: there is no tool; {NAME} knows CUDA, and lastbit itself the CPU")
    return installed(environ) if types else None


def installed(environ: Mapping[str, str]) -> Sanitizer:
    """Find the compute-sanitizer of the CUDA toolkit that CUDA_HOME names, of PATH, or of /usr/local/cuda.

    Raises:
        UsageError: there is none.
    """
    home = [str(Path(environ["CUDA_HOME"], "bin"))] if environ.get("CUDA_HOME") else []
    folders = [*home, environ.get("PATH", os.defpath), USUAL_PLACE]
    found = next(filter(None, (shutil.which(NAME, path=folder) for folder in folders)), None)
    if found is None:
        raise UsageError(
            f"--sanitize on CUDA needs {NAME}, which comes with NVIDIA's CUDA toolkit and is neither below CUDA_HOME "
            f"nor in PATH nor in /usr/local/cuda. Install the toolkit, or set CUDA_HOME to its folder: the one with "
            f"bin/{NAME}."
        )
    return Sanitizer(found)
