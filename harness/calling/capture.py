"""Calls captured in CUDA graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def why_it_waits(call: Callable[[], object]) -> str:
    """Return torch's message on a call that waits for the device; empty if the call does not.

    A capture that such a call breaks leaves the allocator in disorder, so this is asked before.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(action="ignore"):  # the mode is a prototype, it says
        torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        return str(error).strip().partition("\n")[0] or type(error).__name__
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return ""


def captured(call: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """Capture a call in a CUDA graph; return the graph, and the call's value in memory that the graph owns.

    Raises what the call raises, and `RuntimeError` where something cannot be captured.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        value = call()
    return graph, value
