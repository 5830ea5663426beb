"""`lastbit judge`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lastbit.command_line import read_words
from lastbit.commands.options import CASE, add_words, whole_number
from lastbit.commands.running import worst_code
from lastbit.config import PROFILES
from lastbit.devices import plan_devices
from lastbit.errors import UsageError
from lastbit.judges.question import EXPLAIN, PROFILE, RANDOM
from lastbit.judges.warm_judges import Judges, default_count
from lastbit.kernel import PLACEMENTS
from lastbit.reports.judged import as_json_line, print_judged
from lastbit.reports.paper import make_console

_ASKED = (
    *("op", "contract", "function", "placement", "forbid_torch_op", "may_decline", "strict"),
    *("profile", "seed", "fail_fast", "explain", "timeout", "memory", "speed", "beside"),
)
"""Options that are fields of a `Question`."""


def add_judge(parser: argparse.ArgumentParser) -> None:
    """Make a parser that of the command."""
    parser.description = (
        "Judge kernel files that nobody trusts, one by one: each is loaded in a confined process of its own, and held "
        "to the contract that is given here, whatever it declares. For programs: --json, and exit codes as of verify."
    )
    parser.set_defaults(command=_judge)
    help = f"Python files with a kernel each, as in norms.py or norms.py::norm; {CASE}, in place of generated ones"
    add_words(parser, "FILE … ['CASE' …] --op OP", help)
    parser.add_argument("--op", required=True, help="what the kernel computes")
    parser.add_argument("--device", default="cpu", help="auto, or torch devices as in cuda:0,cuda:1 (default: cpu)")
    parser.add_argument("--json", action="store_true", help="print a line of JSON per file")
    add = parser.add_argument_group("what the kernel is and may do; its file is not believed").add_argument
    add("--contract", default="", help="contract options joined by + (default: the first of each axis)")
    add("--function", default="", help="its name, where the file does not make clear which it is")
    add("--mutates", action="append", default=[], metavar="INPUT[=RESULT]", help="an input that it may overwrite")
    add("--unordered", action="append", default=[], metavar="RESULT", help="a result whose bits may differ")
    add("--placement", choices=PLACEMENTS, default="refuses", help="with tensors elsewhere (default: refuses)")
    add("--forbid-torch-op", action="store_true", help="it fails if it calls torch's own operator for the op")
    add("--may-decline", action="store_true", help="it may raise UnsupportedCase for cases that its signature takes")
    add("--strict", action="store_true", help="notices fail a case, too")
    add = parser.add_argument_group("how much is done").add_argument
    add("--profile", default=PROFILE, choices=tuple(PROFILES), help=f"how many cases (default: {PROFILE})")
    help = "of the cases; by default drawn when the kernel has been loaded, and reported as random:N"
    add("--seed", metavar="N", default=RANDOM, help=help)
    add("--fail-fast", action="store_true", help="stop at the first failing case, and do not make it small")
    seconds = f"look for the wrong line for so long (default: {EXPLAIN:g}, or 0 with --fail-fast)"
    add("--explain", type=float, metavar="SECONDS", help=seconds)
    add("--speed", action="store_true", help="time a kernel that passes; wrong results of timed calls fail it")
    add("--beside", action="store_true", help="with --speed: time a kernel of the project as well")
    add("--timeout", type=float, metavar="SECONDS", default=120.0, help="seconds that one case may take (default: 120)")
    add("--memory", type=int, metavar="BYTES", help="that the kernel's process may take")
    help = "judges (default: one for each core, or device with --speed, or file)"
    add("-n", dest="judges", metavar="N", type=whole_number(1), help=help)


def _judge(options: argparse.Namespace, rest: Sequence[str]) -> int:
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
