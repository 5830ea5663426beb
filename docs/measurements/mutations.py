"""Measure which random changes of `harness/` the tests notice that bear the name of what was changed.

    export PYTHONPATH=harness/checkout
    python docs/measurements/mutations.py [--count N] [--seed S] [--cores N] [--out FILE]

A mutation is one operator, number, condition or flag of one function, chosen at random in all of `harness/`. It is run
against `tests/PACKAGE/test_MODULE*.py`, or all of `tests/PACKAGE/` where no file has that name. Each core has a copy of
the checkout. A mutation that survives is shown with its line: a reader says whether it can be seen at all.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 420  # seconds for the tests of one mutation; a change that makes them hang is noticed
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


def tested(copy: Path, files: list[str], *options: str) -> tuple[int, float, list[str]]:
    """Run tests in a copy of the checkout: the exit code (124 for a timeout), the seconds and the tests that failed."""
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n0", "--tb=no", *options, *files]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment["PYTHONPATH"] = f"{copy}/harness/checkout:{environment.get('PYTHONPATH', '')}"
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LONGEST)
    except subprocess.TimeoutExpired:
        return 124, time.monotonic() - began, []
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return done.returncode, time.monotonic() - began, failed


def measure(copies: Queue[Path], mutation: Mutation, red: dict[str, list[str]]) -> dict[str, object]:
    """Run the tests of one mutation in a free copy; `red` are tests that fail without it."""
    copy, files = copies.get(), targets(mutation.path)
    source = copy / mutation.path
    text = source.read_text()
    try:
        lines = text.splitlines(keepends=True)
        start = sum(len(line.encode()) for line in lines[: mutation.line - 1]) + mutation.column
        end = sum(len(line.encode()) for line in lines[: mutation.end_line - 1]) + mutation.end_column
        source.write_bytes(text.encode()[:start] + mutation.after.encode() + text.encode()[end:])
        skipped = [option for file in files for test in red[file] for option in ("--deselect", test)]
        code, seconds, failed = tested(copy, files, "-x", *skipped)
    finally:
        source.write_text(text)
        copies.put(copy)
    return {**asdict(mutation), "code": code, "seconds": round(seconds, 1), "by": failed[:1], "tests": files}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("mutations.jsonl"))
    options = parser.parse_args()
    every = [
        each
        for path in sorted(ROOT.glob("harness/**/*.py"))
        if "checkout" not in path.parts
        for each in mutations(path)
    ]
    chosen = random.Random(options.seed).sample(every, options.count)
    print(f"{len(every):,} mutations are possible, {len(chosen)} are made", flush=True)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.cores) as pool:
        copies: Queue[Path] = Queue()
        for number in range(options.cores):
            leave = shutil.ignore_patterns(".git", ".nox", ".venv", ".*cache", ".hypothesis", ".lastbit", "__pycache__")
            copies.put(Path(shutil.copytree(ROOT, Path(folder) / str(number), ignore=leave, symlinks=True)))

        def without(file: str) -> list[str]:
            copy = copies.get()
            try:
                return tested(copy, [file])[2]
            finally:
                copies.put(copy)

        files = sorted({file for each in chosen for file in targets(each.path)})
        red = dict(zip(files, pool.map(without, files), strict=True))
        print("red without any mutation:", sum(map(len, red.values())), flush=True)
        survived = 0
        with options.out.open("w") as out:
            for row in pool.map(lambda each: measure(copies, each, red), chosen):
                out.write(json.dumps(row) + "\n")
                survived += row["code"] in (0, 5)
                print(
                    "survives" if row["code"] in (0, 5) else "noticed ",
                    f"{row['seconds']:6.1f} s",
                    flush=True,
                    end="  ",
                )
                print(f"{row['path']}:{row['line']}  {row['before']}  →  {row['after']}", flush=True)
    print(f"{len(chosen) - survived} of {len(chosen)} noticed")


if __name__ == "__main__":
    main()
