"""Performance of one item of a plan, in the process that calls its kernel or starts the processes that do."""

from __future__ import annotations

from typing import Protocol

import torch

from lastbit.case import Case
from lastbit.floating_point import kept_floating_point
from lastbit.isolation.elsewhere import Kernels
from lastbit.result import CaseResult, Verdict
from lastbit.verify.check import first_line
from lastbit.verify.fuzz import CaseFailed, NoCase, Stopped, run_item, unfinished
from lastbit.verify.isolating import in_processes
from lastbit.verify.memory import give_back
from lastbit.verify.notes import KnownFailures, Unrecorded
from lastbit.verify.plan import Item
from lastbit.verify.sharing import Verify

_MUCH = 1 << 30  # bytes that a worker may hold between items: to look for what can be given back takes 0.1 s


class Records(Protocol):
    """Recorder of a process, case by case, so that everything is known even if the process ends.

    Attributes:
        cases, seed, random, timeout: of the run, as its configuration has them.
        failures: the kernels that have failed; None if those run on.
    """

    cases: int
    seed: int
    random: bool
    timeout: float
    failures: KnownFailures | None

    def verify_on(self, device: torch.device) -> Verify:
        """Return the function that verifies a case on a device."""

    def started(self, item: Item, case: Case, *, counted: bool = True) -> None:
        """Note the case that is about to run, and start its clock."""

    def record(self, result: CaseResult) -> None:
        """Keep a result."""

    def leave(self, item: Item, cases: int) -> None:
        """Note how many cases of an item are not run because its kernel has failed."""

    def note_time(self) -> None:
        """Note the time that this process has spent so far, by parts."""


def perform(item: Item, records: Records, kernels: Kernels | None) -> None:
    """Run the cases of an item, whose kernel is called in processes of `kernels` if there are any.

    Raises:
        CaseFailed: with the smallest failing case that was found.
        Stopped: the kernel has failed in another item.
        Unrecorded: a result could not be kept.
    """
    device = item.subject.device
    try:
        with kept_floating_point(), in_processes(item, kernels, records.timeout) as prepared:
            run_item(
                prepared,
                cases=records.cases,
                seed_=records.seed,
                record=records.record,
                started=records.started,
                verify=records.verify_on(device),
                failures=records.failures,
                leave=records.leave,
                random=records.random,
            )
    except (CaseFailed, Stopped, Unrecorded):
        raise
    except NoCase as error:
        records.record(unfinished(item, str(error), Verdict.SKIPPED))
    except Exception as error:
        records.record(unfinished(item, first_line(error)))
        raise
    finally:
        records.note_time()
        give_back(device, beyond=_MUCH)  # another worker may need it while this one waits for its next item
