"""The test module that `lastbit verify` hands to pytest: one item per kernel, device and group of cases."""

from __future__ import annotations

import pytest

from harness.isolation.declared import Kernels
from harness.verify.check import first_line
from harness.verify.fuzz import CaseFailed, Stopped, run_item, unfinished
from harness.verify.isolating import in_processes
from harness.verify.memory import give_back
from harness.verify.notes import Unrecorded
from harness.verify.plan import Item
from harness.verify.recorder import Recorder

_MUCH = 1 << 30  # bytes that a worker may hold between items: to look for what can be given back takes 0.1 s


def test_kernel(item: Item, recorder: Recorder, kernels: Kernels | None) -> None:
    """The kernel keeps its contract on every case of the group."""
    device = item.subject.device
    try:
        with in_processes(item, kernels, recorder.timeout) as prepared:
            run_item(
                prepared,
                cases=recorder.cases,
                seed_=recorder.seed,
                record=recorder.record,
                started=recorder.started,
                verify=recorder.verify_on(device),
                failures=recorder.failures,
                leave=recorder.leave,
                random=recorder.random,
            )
    except Stopped as stopped:
        pytest.skip(str(stopped))
    except CaseFailed as failure:
        result = failure.result
        sentences = [result.reason] if result.reason else [f.sentence for f in result.faults]
        pytest.fail("\n".join([f"{result.verdict}: {result.kernel}", *sentences, result.case]), pytrace=False)
    except Unrecorded:
        raise
    except Exception as error:
        recorder.record(unfinished(item, first_line(error)))
        raise
    finally:
        recorder.note_time()
        give_back(device, beyond=_MUCH)  # another worker may need it while this one waits for its next item
