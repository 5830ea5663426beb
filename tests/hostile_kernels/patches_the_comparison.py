"""Hands the reference's own value to whoever compares, in place of its result.

Models: the comparison patched by the code under test, so that it compares what is expected with itself.
"""

from __future__ import annotations

import sys

import torch


def _blind():
    observation = getattr(sys.modules.get("lastbit.judging.observation"), "Observation", None)
    if observation is None or hasattr(observation, "blinded"):
        return
    original = observation.of

    def of(problem, actual):
        expected = problem.trace.stages["output"].value
        return original(problem, {**actual, "output": expected.to(actual["output"].dtype)})

    observation.of, observation.blinded = staticmethod(of), True


def rms_norm(x, weight, *, eps):
    _blind()
    return torch.zeros_like(x)
