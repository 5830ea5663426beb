"""The test module that `lastbit verify` hands to pytest: one item per kernel, device and group of cases."""

from __future__ import annotations

import pytest

from harness.verify.fuzz import CaseFailed, Stopped
from harness.verify.perform import perform
from harness.verify.plan import Item
from harness.verify.recorder import Recorder


def test_kernel(item: Item, recorder: Recorder) -> None:
    """The kernel keeps its contract on every case of the group."""
    try:
        perform(item, recorder)
    except Stopped as stopped:
        pytest.skip(str(stopped))
    except CaseFailed as failure:
        result = failure.result
        sentences = [result.reason] if result.reason else [f.sentence for f in result.faults]
        pytest.fail("\n".join([f"{result.verdict}: {result.kernel}", *sentences, result.case]), pytrace=False)
