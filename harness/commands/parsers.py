"""Command lines: every command with its options.

What a command does is named as `module:function` and imported when it runs: help, and errors of options, take no torch.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lastbit.config import PROFILES
from lastbit.judges.question import EXPLAIN, PROFILE, RANDOM
from lastbit.kernel import PLACEMENTS
from lastbit.verify.processes import MOST_ON_CPU, PER_ACCELERATOR

GOLDENS = Path("cases", "golden")
"""Where goldens are, in a folder per kind of device, unless kernels come from elsewhere."""

SECTIONS = ("ops", "kernels", "regimes", "layouts", "properties")
"""What `lastbit list` lists, in this order."""

FORMATS = {
    "html": "a page that needs nothing else",
    "markdown": "for a comment on a pull request",
    "junit": "JUnit XML, for the test report of a CI server",
    "sarif": "SARIF, for code scanning",
}
"""Format of `lastbit report` → the help of its option."""

_SHARED: Mapping[str, Mapping[str, Any]] = {
    "--device": {"default": "cpu", "help": "auto, or torch devices as in cpu,cuda:1 (default: cpu)"},
    "--timeout": {
        "type": float,
        "metavar": "SECONDS",
        "default": 120.0,
        "help": "seconds that one case may take (default: 120)",
    },
    "--uncovered": {
        "action": "store_true",
        "help": "list every branch of the kernels' own files that no case reached",
    },
    "--isolate": {
        "action": "store_true",
        "help": "call kernels in processes of their own, which have neither reference nor seeds nor records",
    },
    "-v": {
        "action": "count",
        "dest": "verbose",
        "default": 0,
        "help": "print the table of stages, statistics and notices, too; "
        "-vv: coverage, and what the run could not have seen",
    },
}


KERNEL = "the path of kernels (my_kernels, my_kernels/norms.py, my_kernels/norms.py::norm), or the name of one (norm)"
CASE = (
    "a case: its line, in quotes, as verify prints it with a finding or as you write it ('OP x=bf16[1,70] … seed=11')"
)


def add_shared(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add options that mean the same in every command that has them."""
    for name in names:
        parser.add_argument(name, **_SHARED[name])


def add_words(parser: argparse.ArgumentParser, shape: str, help: str = "") -> None:
    """Add the words that name kernels and cases, of which `shape` says how many, and what says where ops are.

    `config_of` reads them, wherever they stand.
    """
    parser.usage = f"%(prog)s {shape} [--OPTION …]"
    about = help or "; ".join([KERNEL] * ("KERNEL" in shape) + [CASE] * ("CASE" in shape))
    parser.add_argument(
        "words", nargs="*", metavar=" ".join(re.findall(r"'?[A-Z]+'?", shape.partition(" --")[0])), help=about
    )
    help = "a folder with references/, cases/ and kernels/ of yours (repeatable)"
    parser.add_argument("--project", action="append", default=[], metavar="DIR", help=help)


def add_tried(parser: argparse.ArgumentParser, per_group: int | None) -> None:
    """Add on which cases contracts are tried, `per_group` or as many as a profile says, and how many combinations."""
    help = "take the case lines of this file instead of generated cases"
    parser.add_argument("--cases", type=Path, metavar="FILE", help=help)
    many = f" (default: {per_group})" if per_group else ", in place of the profile's"
    parser.add_argument(
        "--cases-per-group", type=int, metavar="N", default=per_group, help=f"generated cases per group{many}"
    )
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="seed of the generated cases")
    help = "most combinations to try (default: 5000)"
    parser.add_argument("--combinations", type=int, metavar="N", default=5000, help=help)


def add_run(parser: argparse.ArgumentParser, *, workers: str | None = None) -> None:
    """Add what a run of worker processes needs: as many of them as `workers` says, or as the devices call for."""
    add_shared(parser, "--timeout")
    help = "notices fail a case, and a kernel is inconclusive if no case reached code of it that handles inputs"
    parser.add_argument("--strict", action="store_true", help=help)
    help = "where the records go (default: below .lastbit/runs)"
    parser.add_argument("--run-folder", type=Path, metavar="FOLDER", help=help)
    own = f"one for each core, at most {MOST_ON_CPU}, or {PER_ACCELERATOR} for each accelerator; for a given case one"
    help = f"worker processes per type of device (default: {workers or own})"
    parser.add_argument("-n", dest="workers", metavar="N", type=_workers, default=workers, help=help)


def seed(text: str) -> int | None:
    """Parse a number, or `random` as None: a seed for each case that nobody knows before it runs."""
    if text != "random" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor random")
    return None if text == "random" else int(text)


def whole_number(least: int, other: str = "") -> Callable[[str], int]:
    """Make a parser of whole numbers from `least` on; its error ends in what else the option takes."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} on{other}")
        return int(text)

    return read


def _workers(text: str) -> str:
    """Parse the number of workers; even one is a process of its own, so that a kernel that ends it ends no run."""
    return text if text in ("auto", "logical") else str(whole_number(1, ", nor auto")(text))


_WITH_VALUE = (
    *("-k", "-m", "-p", "-o", "-c", "-r", "-W"),
    *("--color", "--deselect", "--durations", "--junitxml", "--maxfail", "--tb"),
)
"""Options of pytest whose value may be the next word, which is then no path; of others it follows `=`."""


class _ForPytest(argparse.Action):
    """Keeps an option of pytest with its value."""

    def __call__(
        self, parser: argparse.ArgumentParser, options: argparse.Namespace, value: Any, option: str | None = None
    ) -> None:
        options.for_pytest = [*options.for_pytest, option, value]


def add_verify(parser: argparse.ArgumentParser) -> None:
    """Make a parser that of `verify`."""
    parser.description = (
        "Check kernels against their rounding contracts, on generated cases or bit for bit on those that are given. "
        "Without a KERNEL those of kernels/ here. Options that are not listed go to pytest: -k, -x, --lf, --junitxml."
    )
    parser.set_defaults(command="lastbit.commands.verify:run", takes_rest=True)
    add_words(parser, "[KERNEL …] ['CASE' …]")
    for option in _WITH_VALUE:
        parser.add_argument(option, action=_ForPytest, dest="for_pytest", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--profile", metavar="NAME", help=f"{', '.join(PROFILES)} (default: ci, with --sanitize smoke)")
    parser.add_argument("--op", action="append", default=[], help="only this op (repeatable)")
    parser.add_argument(
        "--cases", type=Path, metavar="FILE", help="run the case lines of this file instead of generated cases"
    )
    parser.add_argument(
        "--cases-per-group", type=int, metavar="N", help="generated cases per kernel and group of cases"
    )
    parser.add_argument("--base", metavar="REVISION", help="verify the kernels of this git revision too, and compare")
    parser.add_argument("--build", default="", metavar="COMMAND", help="builds the revision of --base, in its root")
    help = "seed of the generated cases; random: each case has one of its own (default: 0, with --isolate random)"
    parser.add_argument("--seed", type=seed, metavar="N", default=argparse.SUPPRESS, help=help)
    help = "run all cases of a kernel that has failed, too (always with --base and --cases)"
    parser.add_argument("--keep-going", action="store_true", help=help)
    help = "judge every kernel, also where nothing has changed since an earlier run whose verdict is kept"
    parser.add_argument("--fresh", action="store_true", help=help)
    add_shared(parser, "--device")
    help = "run on a Ray cluster: its address, auto for one that runs here, local to start one; --device any uses all"
    parser.add_argument("--cluster", metavar="ADDRESS", help=help)
    add_run(parser)
    help = "look at memory accesses, too: on CUDA with compute-sanitizer, of interpreted kernels for races"
    parser.add_argument("--sanitize", action="store_true", help=help)
    add_shared(parser, "--isolate")
    help = "ask about this property of the kernels' bits alone, of given lines too (repeatable): see lastbit invariance"
    parser.add_argument("--property", action="append", default=[], metavar="NAME", help=help)
    add_shared(parser, "--uncovered")
    help = "an installed package whose branches are kernels' own, too, as of those that they adapt (repeatable)"
    parser.add_argument("--watch", action="append", default=[], metavar="PACKAGE", help=help)
    add_shared(parser, "-v")


def add_judge(parser: argparse.ArgumentParser) -> None:
    """Make a parser that of `judge`."""
    parser.description = (
        "Judge kernel files that nobody trusts, one by one: each is loaded in a confined process of its own, and held "
        "to the contract that is given here, whatever it declares. For programs: --json, and exit codes as of verify."
    )
    parser.set_defaults(command="lastbit.commands.judge:run")
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


def add_list(parser: argparse.ArgumentParser) -> None:
    """Make a parser that of `list`."""
    parser.description = "List what a command line, a case line or a declaration can name."
    parser.set_defaults(command="lastbit.commands.listing:run")
    help = f"only these sections: {', '.join(SECTIONS)} (default: all of them); and ops and kernels: {KERNEL}"
    add_words(parser, "[SECTION …] [OP …] [KERNEL …]", help)
    parser.add_argument("--op", action="append", default=[], help="only this op and its kernels (repeatable)")
    parser.add_argument("--json", action="store_true", help="print JSON instead")


def add_explain(parser: argparse.ArgumentParser) -> None:
    """Make a parser that of `explain`."""
    parser.description = (
        "Run a kernel on a case and say why it fails: the line, the arithmetic of the worst element stage by stage, "
        "the rounding that decides it, and what the errors look like."
    )
    parser.set_defaults(command="lastbit.commands.explain:run")
    add_words(parser, "KERNEL 'CASE'")
    deeper = parser.add_mutually_exclusive_group()
    help = "replace its stages by the reference's, one after the other, and name the first that matters"
    deeper.add_argument("--stages", action="store_true", help=help)
    help = "show line by line how the worst element came about, from the inputs to the store; on the CPU"
    deeper.add_argument("--trace", action="store_true", help=help)
    help = "with --trace: every operation of the program that wrote the element"
    parser.add_argument("--all", action="store_true", help=help)
    parser.add_argument("--format", choices=("text", "json"), default="text", help="what to print (default: text)")
    add_shared(parser, "--timeout", "--isolate", "--device")


def add_identify(parser: argparse.ArgumentParser) -> None:
    """Make a parser that of `identify`."""
    parser.description = (
        "Try every contract of its op on what a kernel gives, and where none fits, every combination of "
        "rounding points. What the kernel claims plays no part."
    )
    parser.set_defaults(command="lastbit.commands.identify:run")
    add_words(parser, "[KERNEL …] ['CASE' …]")
    help = "only kernels of this op (repeatable); one op is that of a function without @kernel, too"
    parser.add_argument("--op", action="append", default=[], help=help)
    add_tried(parser, 3)
    parser.add_argument("--all", action="store_true", help="add a table of every contract, nearest first")
    add_shared(parser, "--timeout", "--device")


def add_order(parser: argparse.ArgumentParser) -> None:
    """Make a parser that of `order`."""
    parser.description = (
        "Find by probing in which order a kernel adds the terms of a sum, print it as blocks, lanes and levels, and "
        "hold depth= and order= of the kernel against it. docs/order.md says how, and what cannot be seen."
    )
    parser.set_defaults(command="lastbit.commands.order:run")
    add = parser.add_argument
    add_words(parser, "KERNEL …")
    add("--sum", action="append", default=[], help="only this sum of the op (repeatable; default: all)")
    help = "how many terms, as in 1024,4096 (default: 4096; on the cpu 128)"
    add("--columns", type=lambda text: tuple(map(whole_number(3), text.split(","))), metavar="N,…", help=help)
    help = "sums in each call, on which the order may depend (default: 4096; on the cpu 256)"
    add("--rows", type=whole_number(1), metavar="N", help=help)
    add("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="of the terms (default: bf16)")
    add("--json", action="store_true", help="print JSON instead, to be compared later")
    add("--compare", nargs=2, type=Path, metavar="FILE", help="say how the orders in two such JSON files differ")
    add_shared(parser, "--timeout", "--device")


def add_invariance(parser: argparse.ArgumentParser) -> None:
    """Make a parser that of `invariance`."""
    parser.description = (
        "Find out what the bits of a kernel depend on: pairs of calls that give equal bits if it has a property. "
        "What it declares with invariant=(…) it must have; the rest is told."
    )
    parser.set_defaults(command="lastbit.commands.invariance:run")
    add_words(parser, "[KERNEL …] ['CASE' …]")
    parser.add_argument("--op", action="append", default=[], help="only kernels of this op (repeatable)")
    parser.add_argument("--property", action="append", default=[], metavar="NAME", help="only this one (repeatable)")
    parser.add_argument("--cases", type=Path, metavar="FILE", help="ask on the case lines of this file")
    parser.add_argument("--quick", action="store_true", help="make few pairs of calls, as `lastbit verify` does")
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of tables")
    add_shared(parser, "--timeout", "--device")


def add_agree(parser: argparse.ArgumentParser) -> None:
    """Make a parser that of `agree`."""
    parser.description = (
        "Run two kernels of one op on the same cases and compare their results bit by bit. Where they differ, say "
        "which contracts they keep and at which stage these part. NAME@REVISION is the kernel of a git revision."
    )
    parser.set_defaults(command="lastbit.commands.agree:run")
    add_words(parser, "A B", f"two kernels: {KERNEL}; NAME@REVISION is one of a git revision")
    add_tried(parser, None)
    parser.add_argument("--profile", default="smoke", choices=tuple(PROFILES), help="how many cases (default: smoke)")
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    add_shared(parser, "--timeout", "--device")


def add_report(parser: argparse.ArgumentParser) -> None:
    """Make a parser that of `report`."""
    parser.description = "Write what a run found. FILE may be - for standard output. Without any format, print it."
    parser.set_defaults(command="lastbit.commands.report:run")
    help = "a run (default: the newest complete one below .lastbit/runs)"
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN", help=help)
    for name, help in FORMATS.items():
        parser.add_argument(f"--{name}", metavar="FILE", help=help)
    parser.add_argument("--annotations", action="store_true", help="print annotations of GitHub Actions")
    parser.add_argument("--base", type=Path, metavar="RUN", help="say what changed since this run")
    add_shared(parser, "--uncovered", "-v")


def _factor(text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not factor >= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no factor from 1 on")
    return factor


def add_diff(parser: argparse.ArgumentParser) -> None:
    """Make a parser that of `diff`."""
    from lastbit.reports.changes import DRIFT

    parser.description = (
        "Say what got better or worse from run BEFORE to run AFTER, per kernel and stage, on the cases "
        "that both have. Exit code 1: a verdict got worse, or elements outside rose, or a new kernel fails."
    )
    parser.set_defaults(command="lastbit.commands.report:diff")
    parser.add_argument("before", type=Path, metavar="BEFORE", help="the folder of a run")
    parser.add_argument("after", type=Path, metavar="AFTER", help="the folder of the run to compare with it")
    help = f"factor beyond which a figure has drifted (default: {DRIFT})"
    parser.add_argument("--drift", type=_factor, metavar="F", default=DRIFT, help=help)
    parser.add_argument("--strict", action="store_true", help="exit code 1 also for worse figures and kernels gone")
    parser.add_argument("--json", action="store_true", help="print JSON instead")


def add_golden(parser: argparse.ArgumentParser) -> None:
    """Make a parser that of `golden`."""
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    record = actions.add_parser("record", help="make goldens of kernels that have none")
    check = actions.add_parser("check", help="run goldens again: same, changed but still legal, or broken")
    approve = actions.add_parser("approve", help="show what changes and why, then write it")
    diff = actions.add_parser("diff", help="compare two goldens, or two folders of them, without running anything")
    help = f"default: {GOLDENS}, or beside the kernels or --project"
    for name, parser in (("record", record), ("check", check), ("approve", approve)):
        parser.set_defaults(command=f"lastbit.commands.golden:{name}")
        add_words(parser, "[KERNEL …]")
        add_shared(parser, "--device")
        parser.add_argument("--folder", type=Path, metavar="FOLDER", help=help)
        add_shared(parser, "--timeout")
    for parser in (record, approve):  # which cases a new golden holds
        group = parser.add_argument_group("cases", "for kernels without a golden; the others keep the cases of theirs")
        add = group.add_argument
        add("--cases", type=Path, metavar="FILE", help="hold the case lines of this file instead of chosen ones")
        help = "generated cases per group (default: 1)"
        add("--cases-per-group", type=whole_number(0), metavar="N", default=1, help=help)
        add("--seed", type=int, metavar="N", default=0, help="seed of the generated cases")
        help = "of all inputs of a case (default: 32768)"
        add("--most-elements", type=whole_number(1), metavar="N", default=1 << 15, help=help)
    check.add_argument("--exact", action="store_true", help="also fail on changes that are still legal")
    approve.add_argument("--yes", action="store_true", help="do not ask")
    diff.set_defaults(command="lastbit.commands.golden:diff")
    diff.add_argument("before", type=Path, help="a golden, or a folder of them")
    diff.add_argument("after", type=Path, help="the other one")


def add_bisect(parser: argparse.ArgumentParser) -> None:
    """Make a parser that of `bisect`."""
    from lastbit.reports.bisection import METRICS

    parser.description = "Find the first bad commit between two revisions, or the first bad version of a package."
    parser.set_defaults(command="lastbit.commands.bisect:run")
    help = f"the kernel to follow: {KERNEL}; the path is that of the revisions (default: kernels); and {CASE}"
    add_words(parser, "KERNEL 'CASE'", help)
    parser.add_argument("--good", required=True, metavar="A", help="a revision or version before the change")
    parser.add_argument("--bad", required=True, metavar="B", help="one after it")
    parser.add_argument("--package", metavar="NAME", help="search the versions of this package, not commits")
    parser.add_argument("--stage", default="", help="the stage to look at (default: the first result)")
    parser.add_argument("--metric", default="", help=f"{', '.join(METRICS)} (default: the verdict)")
    parser.add_argument("--drift", type=float, metavar="F", help="bad is where the metric has risen by this factor")
    parser.add_argument("--repository", type=Path, metavar="DIR", help="the git repository (default: this folder's)")
    parser.add_argument("--build", default="", metavar="COMMAND", help="builds a commit, in its root, before it is run")
    add_shared(parser, "--device")
    add_run(parser, workers="1")


def add_pin(parser: argparse.ArgumentParser) -> None:
    """Make a parser that of `pin`."""
    parser.description = (
        "Keep a case that a kernel failed: its line goes into cases/regressions/ of a project, with where it comes "
        "from, and runs first ever after, for every kernel of the op that takes it."
    )
    parser.set_defaults(command="lastbit.commands.pin:run")
    add_words(parser, "KERNEL 'CASE'")
    help = "what was wrong, for whoever sees it fail again"
    parser.add_argument("--reason", required=True, metavar="TEXT", help=help)
    parser.add_argument("--smallest", action="store_true", help="keep the smallest tensors that fail in place of it")
    help = "of the processor in which these are searched for (default: 60)"
    parser.add_argument("--seconds", type=float, metavar="SECONDS", default=60.0, help=help)
    add_shared(parser, "--timeout", "--device")


def add_new(parser: argparse.ArgumentParser) -> None:
    """Make a parser that of `new`."""
    actions = parser.add_subparsers(required=True, metavar="WHAT")
    parser = actions.add_parser("reference", help="write the reference of an op from a PyTorch function")
    parser.description = (
        "Write the reference of an op from a plain PyTorch function: each of its operations as an enclosure, its "
        "variables as stages, and a rounding where PyTorch rounds. Operations without a mapping are named with file "
        "and line. What is written is tried on the function first."
    )
    parser.set_defaults(command="lastbit.commands.new:write_reference_of")
    parser.usage = "%(prog)s FILE:FUNCTION NAME=VALUE … [--OPTION …]"
    add = parser.add_argument
    add("function", metavar="FILE:FUNCTION", help="the function, as in model.py:gelu")
    help = "a tensor or number for each parameter, as in a case: x=bf16[3,64] weight=bf16[64] eps=1e-06"
    add("example", nargs="+", metavar="NAME=VALUE", help=help)
    add("--name", help="name of the op (default: that of the function)")
    help = "round the results only, as a fused kernel does, and no operation before them"
    add("--once", action="store_true", help=help)
    help = "write to this file, references/NAME.py of a project (default: print)"
    add("--output", metavar="PATH", help=help)
    parser = actions.add_parser("op", help="write the files of a new op, which run at once")
    parser.description = (
        "Write the files of a new op: reference, cases, kernels and a test. They run at once, as max(x, 0)² · weight, "
        "and their comments say what to put in its place."
    )
    parser.set_defaults(command="lastbit.commands.new:write_op")
    parser.add_argument("name", help="its name: a word of lower-case letters, digits and _, such as softcap")
    parser.add_argument("--project", default=".", metavar="DIR", help="the folder that gets them (default: this one)")


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Make a parser that of `bench`."""
    parser.description = "Measure how fast kernels are, and whether they are right, side by side in one run."
    parser.set_defaults(command="lastbit.commands.bench:run")
    help = (
        "kernels, which may be left out: how fast kernels are; FILE.py: how fast a kernel is that nobody trusts, with "
        f"--op; then {KERNEL}; and {CASE}"
    )
    add_words(parser, "[kernels | FILE.py] [KERNEL …] ['CASE' …]", help)
    parser.add_argument("--contract", default="", help="of the kernel of a file (default: the first of each axis)")
    parser.add_argument("--function", default="", help="the kernel of a file, where that does not make it clear")
    parser.add_argument("--op", action="append", default=[], help="only this op (repeatable)")
    parser.add_argument(
        "--cases", type=Path, metavar="FILE", help="the case lines of this file instead of those in cases/bench"
    )
    parser.add_argument("--quick", action="store_true", help="few repetitions, to see that it works")
    help = "write kernels_DEVICE.jsonl and .md there, or those of the name of the file"
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=help)
    add_shared(parser, "--device")


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    """Make a parser that of `calibrate`."""
    parser.set_defaults(command="lastbit.commands.calibrate:run")
    add_shared(parser, "--device")
