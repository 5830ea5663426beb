"""Launches of interpreted programs as torch.compile is to see them: one opaque step each, like compiled kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from lastbit.interpret import installed


@contextmanager
def untraced() -> Iterator[None]:
    """Keep Dynamo from tracing code that interprets a program: it would put other arithmetic in its place."""
    if not installed():
        yield
        return
    from lastbit.interpret.launch import Launcher

    with patch.object(Launcher, "__call__", torch.compiler.disable(Launcher.__call__)):
        yield
