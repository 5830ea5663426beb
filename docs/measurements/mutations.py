"""Measure which random changes of `harness/` the tests notice that bear the name of what was changed.

    export PYTHONPATH=harness/checkout
    python docs/measurements/mutations.py [--count N] [--seed S] [--cores N] [--leave-out GLOB …] [--out FILE]

A mutation is one operator, number, condition or flag of one function, chosen at random in all of `harness/`. It is run
against `tests/PACKAGE/test_MODULE*.py`, or all of `tests/PACKAGE/` where no file has that name, those files first that
speak of the module. Nothing is written: a process that has collected these tests forks for each mutation, and the fork
changes the functions in its memory. So a test that starts another interpreter sees the code as it is. A mutation that
survives, or that is undecided after `--seconds` of the processor, is shown with its line: a reader says whether it can
be seen at all.
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib
import json
import linecache
import os
import random
import select
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FunctionType

import pytest
from hypothesis.internal.conjecture.engine import ConjectureRunner

ROOT = Path(__file__).resolve().parents[2]
OTHER = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    """A span of a file, lines and columns counted as `ast` does, and the text that replaces it."""

    path: str
    line: int
    column: int
    end_line: int
    end_column: int
    before: str
    after: str


def mutated(node: ast.expr) -> ast.expr | None:
    """Return what a mutation makes of an expression; None for one that is left alone."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in OTHER:
            return ast.Compare(node.left, [OTHER[type(op)]()], node.comparators)
        case ast.BinOp() if type(node.op) in OTHER:
            return ast.BinOp(node.left, OTHER[type(node.op)](), node.right)
        case ast.BoolOp():
            return ast.BoolOp(OTHER[type(node.op)](), node.values)
        case ast.UnaryOp(op=ast.Not()):
            return node.operand
        case ast.Constant(value=bool(value)):
            return ast.Constant(not value)
        case ast.Constant(value=int(value)):
            return ast.Constant(value + 1)
    return None


def mutations(path: Path) -> Iterator[Mutation]:
    """Find all mutations of a file, in functions alone: annotations, messages and f-strings are left as they are."""
    text = path.read_text()

    def inside(node: ast.AST) -> Iterator[Mutation]:
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.arg) or node in quiet:
            return
        if isinstance(node, ast.expr) and (other := mutated(node)) is not None:
            before = ast.get_source_segment(text, node) or ""
            after = f"({ast.unparse(ast.fix_missing_locations(other))})"
            place = (node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0)
            yield Mutation(str(path.relative_to(ROOT)), *place, before, after)
        for child in ast.iter_child_nodes(node):
            yield from inside(child)

    tree = ast.parse(text)
    quiet = {node.annotation for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    nested = {inner for function in functions for inner in ast.walk(function) if inner is not function}
    for function in functions:
        if function not in nested:
            for statement in function.body:
                yield from inside(statement)


def targets(path: str) -> list[str]:
    """Return the tests of a module of `harness/`: files of its name, or the folder of its package."""
    module = Path(path)
    folder = "harness" if module.parent.name == "harness" else "/".join(module.parent.parts[1:2])
    named = sorted(ROOT.glob(f"tests/{folder}/test_{module.stem}*.py")) or sorted(
        ROOT.glob(f"tests/{folder}/test_*.py")
    )
    return [str(each.relative_to(ROOT)) for each in named]


def source_of(mutation: Mutation) -> str:
    """Return the text of the mutated file; every function begins at the line at which it begins without it."""
    text = (ROOT / mutation.path).read_text()
    lines = text.splitlines(keepends=True)
    start = sum(len(line.encode()) for line in lines[: mutation.line - 1]) + mutation.column
    end = sum(len(line.encode()) for line in lines[: mutation.end_line - 1]) + mutation.end_column
    after = mutation.after[:-1] + "\n" * (mutation.end_line - mutation.line) + ")"
    return (text.encode()[:start] + after.encode() + text.encode()[end:]).decode()


Place = tuple[str, str, int]
"""File, qualified name and first line of a function."""


def functions_by_place() -> dict[Place, list[FunctionType]]:
    """Return all functions of `harness/` that are in memory."""
    gc.unfreeze()  # what conftest.py has frozen is not told otherwise
    found = defaultdict(list)
    for each in gc.get_objects():
        if isinstance(each, FunctionType) and each.__code__.co_filename.startswith(str(ROOT / "harness")):
            code = each.__code__
            found[code.co_filename, code.co_qualname, code.co_firstlineno].append(each)
    return found


def apply(mutation: Mutation, functions: dict[Place, list[FunctionType]]) -> None:
    """Change the functions in memory, and the text that Triton's interpreter reads."""
    file, text = str(ROOT / mutation.path), source_of(mutation)
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    codes = [compile(text, file, "exec", dont_inherit=True)]
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        for function in functions.get((file, code.co_qualname, code.co_firstlineno), ()):
            function.__code__ = code


@dataclass
class Running:
    """A fork that runs tests for a mutation, and the pipe on which it names the first test that fails."""

    mutation: Mutation
    process: int
    pipe: int
    began: float

    @property
    def seconds(self) -> float:
        """Seconds of the processor that it took."""
        fields = Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        os.killpg(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        os.close(self.pipe)


class Mutating:
    """A plugin of pytest that runs the tests it has collected in forks, for one mutation each."""

    def __init__(self, chosen: list[Mutation], options: argparse.Namespace) -> None:
        self.chosen, self.options = chosen, options
        self.failed = ""
        self.sound: dict[str, bool] = {}  # of the tests that failed: they pass without any mutation

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for path in {each.path for each in self.chosen}:
            parts = Path(path).with_suffix("").parts[1:]
            importlib.import_module(".".join(("lastbit", *parts)).removesuffix(".__init__"))
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        self.functions = functions_by_place()
        self.items: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in session.items:
            self.items[item.nodeid.partition("::")[0]].append(item)
        waiting, running, survived = list(self.chosen), list[Running](), 0
        with self.options.out.open("w") as out:
            while waiting or running:
                while waiting and len(running) < self.options.cores:
                    running.append(self.begin(waiting.pop(0)))
                for one, by in self.ended(running):
                    running.remove(one)
                    if by and not self.passes(by):  # it fails anyway
                        print(f"red without any mutation: {by}", flush=True)
                        waiting.insert(0, one.mutation)
                        continue
                    seconds = round(time.monotonic() - one.began, 1)
                    survived += not by
                    told = "undecided" if by is None else "noticed  " if by else "survives "
                    row = {**asdict(one.mutation), "answer": told.strip(), "seconds": seconds, "by": by}
                    out.write(json.dumps(row) + "\n")
                    out.flush()
                    change = f"{one.mutation.before}  →  {one.mutation.after}"
                    print(f"{told} {seconds:6.1f} s  {one.mutation.path}:{one.mutation.line}  {change}", flush=True)
        print(f"{len(self.chosen) - survived} of {len(self.chosen)} noticed")
        return True

    def begin(self, mutation: Mutation) -> Running:
        """Fork, and run the tests of a mutation in the fork."""
        files, stem = targets(mutation.path), Path(mutation.path).stem
        files.sort(key=lambda file: stem not in (ROOT / file).read_text())
        tests = [item for file in files for item in self.items[file] if self.sound.get(item.nodeid, True)]
        return self.forked(mutation, tests, lambda: apply(mutation, self.functions))

    def forked(self, mutation: Mutation, tests: list[pytest.Item], change: Callable[[], None]) -> Running:
        pipe, end = os.pipe()
        if process := os.fork():
            os.close(end)
            return Running(mutation, process, pipe, time.monotonic())
        try:
            os.setpgid(0, 0)
            change()
            ConjectureRunner.shrink_interesting_examples = lambda self: None  # type: ignore[method-assign]
            for stream in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            for item, following in zip(tests, [*tests[1:], None], strict=True):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if self.failed:
                    break
            os.write(end, f"{self.failed}\n".encode())
        except BaseException as error:  # the mutation ended the run itself
            os.write(end, f"{type(error).__name__}\n".encode())
        finally:
            os._exit(0)

    def ended(self, running: list[Running]) -> Iterator[tuple[Running, str | None]]:
        """Wait a little; yield the forks that ended and the test that failed, "" for none, None where time was up."""
        ready = select.select([each.pipe for each in running], [], [], 0.2)[0]
        for each in list(running):
            limit = self.options.seconds
            if each.pipe in ready:
                told = os.read(each.pipe, 1 << 16).decode()
                yield each, told.rstrip("\n") if told else "nothing: the process ended"
            elif each.seconds < limit and time.monotonic() - each.began < 10 * limit:
                continue
            else:
                yield each, None
            each.end()

    def passes(self, test: str) -> bool:
        """Return whether a test passes without any mutation."""
        if test not in self.sound:
            items = [item for item in self.items[test.partition("::")[0]] if item.nodeid == test]
            fork = self.forked(self.chosen[0], items, lambda: None)
            self.sound[test] = os.read(fork.pipe, 1 << 16) == b"\n"
            fork.end()
        return self.sound[test]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60, help="of the processor, for the tests of one mutation")
    parser.add_argument("--leave-out", nargs="*", default=[], metavar="GLOB", help="files of which no change is made")
    parser.add_argument("--out", type=Path, default=Path("mutations.jsonl"))
    options = parser.parse_args()
    left_out = {path for pattern in options.leave_out for path in ROOT.glob(pattern)}
    every = [
        each
        for path in sorted(set(ROOT.glob("harness/**/*.py")) - left_out)
        if "checkout" not in path.parts
        for each in mutations(path)
    ]
    chosen = random.Random(options.seed).sample(every, options.count)
    print(f"{len(every):,} mutations are possible, {len(chosen)} are made", flush=True)
    options.out = options.out.absolute()
    os.chdir(ROOT)
    files = sorted({file for each in chosen for file in targets(each.path)})
    pytest.main(["-q", "-n0", "-p", "no:cacheprovider", "--tb=no", *files], plugins=[Mutating(chosen, options)])


if __name__ == "__main__":
    main()
