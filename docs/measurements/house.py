"""How this project is built, beside packages that people hold up: lines, functions, classes and comments, counted.

    python docs/measurements/house.py [FOLDER …] [--at REVISION]

Without folders: harness, reports and kernels of this checkout and of each revision, and the packages of `MODELS` that
are installed. Lines of code are those that are neither blank nor comments nor docstrings. Files in a Python newer than
the one that runs this are left out.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tarfile
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median, quantiles

ROOT = Path(__file__).resolve().parents[2]
OWN = ("harness", "reports", "kernels")
MODELS = {"Hypothesis": "hypothesis", "pytest": "_pytest", "nox": "nox", "attrs": "attr", "pluggy": "pluggy"}
MODELS |= {"torch.testing": "torch.testing"}
MOST_PARAMETERS = 6  # of a function; more are counted
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class House:
    """What was counted in the files of a folder; a function's length is that of its body without its docstring."""

    files: int = 0
    lines: int = 0
    code: int = 0
    comments: int = 0
    lengths: list[int] = field(default_factory=list)
    many_parameters: int = 0
    private: int = 0
    of_one_caller: int = 0
    classes: list[str] = field(default_factory=list)
    dataclasses: int = 0
    only_carry: int = 0

    def add(self, text: str) -> None:
        """Count one file."""
        tree, lines = ast.parse(text), text.splitlines()
        whole = sum(line.lstrip().startswith("#") for line in lines)
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        documented = sum(extent(docstring(node)) for node in ast.walk(tree))
        self.files, self.lines = self.files + 1, self.lines + len(lines)
        self.code += len(lines) - whole - documented - sum(not line.strip() for line in lines)
        self.comments += sum(token.type == tokenize.COMMENT for token in tokens)
        used = Counter(names_used(tree))
        for node in ast.walk(tree):
            if isinstance(node, FUNCTION):
                self.lengths.append(extent(node) - extent(docstring(node)))
                given = node.args
                self.many_parameters += len(given.posonlyargs + given.args + given.kwonlyargs) > MOST_PARAMETERS
                if node.name.startswith("_") and not node.name.startswith("__"):
                    self.private += 1
                    self.of_one_caller += used[node.name] <= 1
            elif isinstance(node, ast.ClassDef):
                self.classes.append(node.name)
                if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
                    self.dataclasses += 1
                    self.only_carry += not any(isinstance(inner, FUNCTION) for inner in node.body)

    def rows(self) -> dict[str, str]:
        """Return the column of a table: the name of a figure → the figure."""
        twice = [name for name, count in Counter(self.classes).items() if count > 1]
        last = quantiles(self.lengths, n=20)[-1]
        share = lambda part, whole: f"{part / whole:.1%}" if whole else "–"  # noqa: E731
        return {
            "files / lines": f"{self.files} / {self.lines:,}",
            "lines of a function: median / p95 / max": f"{median(self.lengths):.0f} / {last:.0f} / {max(self.lengths)}",
            "functions per 1,000 lines of code": f"{1000 * len(self.lengths) / self.code:.0f}",
            "private functions called from one place": share(self.of_one_caller, self.private),
            f"functions of more than {MOST_PARAMETERS} parameters": share(self.many_parameters, len(self.lengths)),
            "comments ÷ code": share(self.comments, self.code),
            "classes / dataclasses / that only carry": f"{len(self.classes)} / {self.dataclasses} / {self.only_carry}",
            "class names defined twice": f"{len(twice)} of {len(set(self.classes))}",
        }


def extent(node: ast.AST | None) -> int:
    """Return the lines that a node takes; decorators are not of it."""
    return 0 if node is None else node.end_lineno - node.lineno + 1  # type: ignore[attr-defined]


def docstring(node: ast.AST) -> ast.AST | None:
    """Return the docstring of a module, class or function; None of anything else."""
    documented = isinstance(node, ast.Module | ast.ClassDef | FUNCTION) and ast.get_docstring(node, clean=False)
    return node.body[0] if documented else None  # type: ignore[attr-defined]


def names_used(tree: ast.AST) -> Iterator[str]:
    """Yield each name that is read, as often as it is."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def house(*folders: Path) -> House:
    """Count the Python files of folders."""
    found = House()
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        if "testing/_internal" not in str(path):  # torch's own tests
            with suppress(SyntaxError):
                found.add(path.read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="*", metavar="FOLDER")
    parser.add_argument("--at", action="append", default=[], metavar="REVISION", help="of this repository (repeatable)")
    options = parser.parse_args()
    columns = {str(folder): house(folder) for folder in options.folders}
    if not columns:
        for revision in options.at:
            packed = subprocess.run(
                ["git", "archive", revision, *OWN], cwd=ROOT, check=True, capture_output=True
            ).stdout
            with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(packed)) as files:
                files.extractall(folder, filter="data")
                columns |= {f"{name} at {revision}": house(Path(folder, name)) for name in OWN}
        columns |= {name: house(ROOT / name) for name in OWN}
        specs = {title: find_spec(module) for title, module in MODELS.items()}
        columns |= {title: house(Path(spec.origin).parent) for title, spec in specs.items() if spec and spec.origin}
    rows = {title: counted.rows() for title, counted in columns.items()}
    print("| |", " | ".join(rows), "|")
    print("|---|" + "---|" * len(rows))
    for figure in next(iter(rows.values())):
        print(f"| {figure} |", " | ".join(column[figure] for column in rows.values()), "|")


if __name__ == "__main__":
    main()
