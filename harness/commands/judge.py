"""`lastbit judge`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lastbit.command_line import read_words
from lastbit.commands.running import worst_code
from lastbit.devices import plan_devices
from lastbit.errors import UsageError
from lastbit.judges.warm_judges import Judges, default_count
from lastbit.reports.judged import as_json_line, print_judged
from lastbit.reports.paper import make_console

_ASKED = (
    *("op", "contract", "function", "placement", "forbid_torch_op", "may_decline", "strict"),
    *("profile", "seed", "fail_fast", "explain", "timeout", "memory", "speed", "beside"),
)
"""Options that are fields of a `Question`."""


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    asked = read_words(options.words)
    files, function = list(map(Path, asked.paths)), "" if asked.paths else next(iter(asked.kernels), "")
    if missing := [str(path) for path in files if not path.is_file()] or [function] * bool(function):
        raise UsageError(f"{missing[0]!r} is no file")
    if not files or len(asked.kernels) > 1:
        raise UsageError("judge takes files with a kernel each; name one, as in lastbit judge norms.py --op OP")
    options.function = next(iter(asked.kernels), options.function)
    question = {name: getattr(options, name) for name in _ASKED} | {
        "mutates": dict(text.partition("=")[::2] for text in options.mutates),
        "unordered": tuple(options.unordered),
        "lines": tuple(asked.cases),
    }
    codes, console = [], make_console()
    devices = plan_devices(options.device).devices
    count = options.judges or min(len(files), default_count(devices, speed=options.speed))
    with Judges(count, device=options.device, projects=options.project, **question) as judges:
        futures = [judges.judge(path) for path in files]
        for found in (future.result() for future in futures):  # in the order of the files
            if options.json:
                print(as_json_line(found), flush=True)
            else:
                print_judged(found, console)
            codes.append(found.exit_code)
    return worst_code(codes)
