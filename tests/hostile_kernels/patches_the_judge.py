"""Replaces the judge's functions by some that find nothing, wherever a module holds them.

Models: the evaluator's own functions patched by the code under test, in the process that both share.
"""

from __future__ import annotations

import dataclasses
import sys

import torch


def _blind():
    for name, module in list(sys.modules.items()):
        if not name.startswith("lastbit.") or not callable(judge := getattr(module, "judge", None)):
            continue
        if not hasattr(judge, "blinded"):
            module.judge = _blinded(judge)


def _blinded(judge):
    def judged(problem, actual, **options):
        found = judge(problem, actual, **options)
        return dataclasses.replace(found, verdict=type(found.verdict).PASSED, findings=())

    judged.blinded = True
    return judged


def rms_norm(x, weight, *, eps):
    _blind()
    return torch.zeros_like(x)
