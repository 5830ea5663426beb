"""Collection of the notes and records that a run's pytest processes have left in its folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lastbit.config import Config
from lastbit.errors import LastbitError
from lastbit.result import BAD, CaseResult
from lastbit.run import NotRun, Run, Spent
from lastbit.trees import MixedTrees
from lastbit.verify.assemble import INTERRUPTED, STOPPED, Ended, Key, UnderWay, assembled, isolation_of
from lastbit.verify.notes import LEFT, TIME, read_json
from lastbit.verify.plan import NO_ACCELERATOR, Planned
from lastbit.verify.run import Child, environment_of

_RAN, _STOPPED = (0, 1, 5), 2  # statuses of pytest: all passed, some failed, nothing selected; stopped by -x


def collect(
    config: Config, children: Sequence[Child], recorded: Sequence[CaseResult], *, interrupted: bool = False
) -> Run:
    """Read the run from its folder, with results in the order of the plan; of an interrupted run, as many as there are.

    Raises:
        LastbitError: a process could not make its plan (the message is from there), or the run's folder is gone.
    """
    dones = {child.device_type: child.notes.read("done") or {} for child in children}
    ended = [_ended(child, dones[child.device_type]) for child in children]
    left = {child.device_type: list(_left(child)) for child in children}
    failed = any(result.verdict in BAD for result in recorded) or any(c.died for cases in left.values() for c in cases)
    for place, process in enumerate(ended):
        stop = _stop(process.device_type, dones[process.device_type].get("status"), interrupted, failed)
        cases = [replace(case, died=case.died or not stop) for case in left[process.device_type]]
        ended[place] = replace(process, stop=stop, under_way=tuple(cases))
    if not torch.accelerator.is_available():
        lacking = NotRun("every kernel on an accelerator", NO_ACCELERATOR)
        ended[-1] = replace(ended[-1], not_run=(*ended[-1].not_run, lacking))
    environment, spent = environment_of(config) | isolation_of(ended), _spent(Path(config.folder))
    return assembled(config, ended, recorded, environment=environment, spent=spent, interrupted=interrupted)


def _spent(folder: Path) -> Spent:
    """Sum the time that the workers noted, by parts."""
    noted = (Spent(read_json(path), processes=1) for path in sorted(folder.glob(f"*{TIME}")))
    return sum(noted, Spent())


def _ended(child: Child, done: dict[str, Any]) -> Ended:
    notes = child.notes
    if refused := notes.read("refused"):
        raise (MixedTrees if refused["mixed"] else LastbitError)(refused["reason"])
    if not (plan := notes.read("plan")):
        raise LastbitError(_last_words(child.log))
    selected = notes.read("selected")
    return Ended(
        device_type=child.device_type,
        log=child.log,
        items=tuple(Planned(**item) for item in plan["items"]),
        not_run=tuple(NotRun(**n) for n in plan["not_run"]),
        selected=None if selected is None else frozenset(selected),
        unrecorded=done.get("unrecorded", ""),
        rest=_left_by_failures(child),
        isolated=plan.get("isolated", ""),
    )


def _last_words(log: Path) -> str:
    """Return the error message that ended a process: from its first ERROR line on, or else the last lines."""
    if not log.is_file():
        return f"the folder of the run, {log.parent}, was removed while the run went on; its results are lost"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    first = next((i for i, line in enumerate(lines) if line.startswith("ERROR: ")), len(lines) - 20)
    return "\n".join(lines[max(first, 0) :]).removeprefix("ERROR: ")


def _stop(device_type: str, status: int | None, interrupted: bool, failed: bool) -> str:
    """Return the reason for which a process ended before its items; empty if it did not, or only its workers did."""
    if interrupted:
        return INTERRUPTED
    if status in _RAN:
        return ""
    return STOPPED if failed and status == _STOPPED else f"pytest for {device_type} ended early"


def _left_by_failures(child: Child) -> dict[Key, int]:
    """Map the items that stopped because their kernel had failed to the number of cases that were not run."""
    notes = [note for path in child.log.parent.glob(f"{child.device_type}-*{LEFT}") for note in read_json(path)]
    return {(note["kernel"], note["device"], note["group"]): note["cases"] for note in notes}


def _left(child: Child) -> Iterator[UnderWay]:
    """Yield the cases during which workers ended; one died if it hung or the worker crashed."""
    crashed = child.notes.read("crashed") or ()
    for path in sorted(child.log.parent.glob(f"{child.device_type}-*.started")):
        _, worker, _ = path.stem.split("-")
        trace = path.with_suffix(".trace")
        hung = trace.is_file() and "Timeout" in trace.read_text()
        yield UnderWay(read_json(path), died=hung or worker in crashed, hung=hung, trace=str(trace))
