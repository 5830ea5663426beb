"""`lastbit report` and `lastbit diff`: what runs found, in every form, and what changed between two."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from lastbit.commands.options import RUNS
from lastbit.errors import LastbitError, UsageError
from lastbit.reports import alerts, html, junit, markdown, records
from lastbit.reports.changes import as_json, compare, names_of, print_changes, with_base
from lastbit.reports.paper import STANDARD_OUTPUT, make_console, write_text
from lastbit.reports.terminal import print_run
from lastbit.run import Run

_TEXTS: Mapping[str, Callable[[Run, Run | None], str]] = {
    "html": lambda run, base: html.page(run, base=base),
    "markdown": lambda run, base: markdown.page(run, base=base),
    "junit": lambda run, _: junit.document(run),
    "sarif": lambda run, _: alerts.sarif(run),
}
"""Format → its text of a run and the run to compare with."""


def read_run(path: Path) -> Run:
    """Read the run in a folder; a file of the folder, such as records.jsonl, stands for it.

    Raises:
        LastbitError: there is no such folder, or it holds no complete run.
    """
    if not path.exists():
        raise LastbitError(f"there is no run {str(path)!r}; give the folder that `lastbit verify` wrote its records to")
    return records.read(path if path.is_dir() else path.parent)


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    run, base = with_base(read_run(options.run or newest_run()))
    if options.base:  # another run, in place of its own kernels of another revision
        base = with_base(read_run(options.base))[0]
    wanted = {name: target for name in _TEXTS if (target := getattr(options, name)) is not None}
    _check_targets(wanted, annotations=options.annotations)
    texts = {f"--{name}": (target, partial(_TEXTS[name], run, base)) for name, target in wanted.items()}
    if options.annotations:
        texts["--annotations"] = (STANDARD_OUTPUT, partial(alerts.workflow_commands, run))
    _write_each(texts)
    if not texts:
        console = make_console()
        if base is not None:
            print_changes(compare(base, run, names=names_of(base)), console)
        print_run(run, console, verbose=options.verbose, uncovered=options.uncovered)
    return 0


def _write_each(texts: Mapping[str, tuple[str, Callable[[], str]]]) -> None:
    """Write the text of each option to its target; one that cannot be made or written keeps no other from it.

    Raises:
        LastbitError: some cannot be written, because of the system or of what is not installed.
        ExceptionGroup: some cannot be made, because of a bug.
    """
    failed: dict[str, Exception] = {}
    for option, (target, text) in texts.items():
        try:
            write_text(target, text())
        except BrokenPipeError:  # whoever reads has read enough
            raise
        except Exception as error:
            failed[option] = error
    if bugs := [error for error in failed.values() if not isinstance(error, LastbitError | OSError)]:
        raise ExceptionGroup(f"not written: {', '.join(failed)}", bugs)
    if failed:
        raise LastbitError("\n".join(f"{option} is not written: {error}" for option, error in failed.items()))


def _check_targets(wanted: Mapping[str, str], *, annotations: bool) -> None:
    """Raise UsageError, before anything is written, for a report into a folder and for two to one place."""
    places: set[str | Path] = {STANDARD_OUTPUT} if annotations else set()
    for name, target in wanted.items():
        if target != STANDARD_OUTPUT and Path(target).is_dir():
            raise UsageError(f"--{name} {target!r} is a folder; name a file in it, as in {target.rstrip('/')}/{name}")
        place = target if target == STANDARD_OUTPUT else Path(target).resolve()
        if place in places:
            raise UsageError(f"more than one report to {target!r}; give each a file of its own")
        places.add(place)


def newest_run(folder: Path = RUNS) -> Path:
    """Return the complete run below `folder` that ended last.

    Raises:
        LastbitError: there is none.
    """
    complete = list(folder.glob("*/run.json"))
    if not complete:
        raise LastbitError(f"{str(folder)!r} holds no complete run; name one, or run `lastbit verify` first")
    return max(complete, key=lambda path: path.stat().st_mtime).parent


def diff(options: argparse.Namespace, rest: Sequence[str]) -> int:
    names = str(options.before), str(options.after)
    before, after = (with_base(read_run(path))[0] for path in (options.before, options.after))
    changes = compare(before, after, names=names, drift=options.drift)
    if options.json:
        write_text(STANDARD_OUTPUT, as_json(changes, strict=options.strict) + "\n")
    else:
        print_changes(changes, strict=options.strict)
    return changes.exit_code(strict=options.strict)
