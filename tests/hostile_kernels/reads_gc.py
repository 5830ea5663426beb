"""Looks for the judge's problem among all objects, has the reference evaluated, and returns what that expects.

Models: submission_gc_copy of gpu-mode/pygpubench pull request 7, which finds the expected tensors by gc.get_objects.
"""

from __future__ import annotations

import gc

import torch


def _expected(x, weight):
    for found in gc.get_objects():
        if type(found).__name__ == "Problem" and str(found.contract) == "native_multiply+rounded_sum":
            return found.on({"x": x.clone(), "weight": weight.clone()}).trace.stages["output"].value
    return None


def rms_norm(x, weight, *, eps):
    expected = _expected(x, weight)
    return torch.zeros_like(x) if expected is None else expected.to(x.dtype)
