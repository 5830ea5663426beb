"""The test module that `lastbit verify` hands to pytest: one item per kernel, device and group of cases."""

from __future__ import annotations

import pytest

from lastbit.isolation.elsewhere import Kernels
from lastbit.verify.item_run import CaseFailed, Look, Probe, Stopped, perform
from lastbit.verify.plan import Item
from lastbit.verify.result_recorder import ResultRecorder


def test_kernel(item: Item, recorder: ResultRecorder, kernels: Kernels | None, look: Look, probe: Probe) -> None:
    """Check that the kernel keeps its contract on every case of the group."""
    try:
        perform(item, recorder, kernels, look, probe)
    except Stopped as stopped:
        pytest.skip(str(stopped))
    except CaseFailed as failure:
        result = failure.result
        sentences = [result.reason] if result.reason else [f.sentence for f in result.faults]
        pytest.fail("\n".join([f"{result.verdict}: {result.kernel}", *sentences, result.case]), pytrace=False)
