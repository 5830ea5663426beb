"""Imports go down only, and nothing in harness/ knows the name of an op.

`LAYERS` is the whole rule. The checker reads source with `ast` and imports nothing, so imports inside
functions and under TYPE_CHECKING count as well.
"""

import ast
import re
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
import torch

import harness
from harness import numerics

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("harness", "references", "cases", "reports", "kernels")

NOUNS = (
    "harness.dtypes",
    "harness.ops",
    "harness.case",
    "harness.kernel",
    "harness.result",
    "harness.run",
    "harness.row_check",
    "harness.relations",
    "harness.property_result",
)
PUBLIC = {f"harness.{name}": module for name, module in harness._MODULE_OF.items()}
"""What others than harness/ itself import from `harness` → the module that has it."""

BELOW_VERIFY = (
    "harness.errors",
    "harness.files",
    "harness.trees",
    "harness.timing",
    "harness.devices",
    "harness.placement",
    "harness.declared",
    "harness.bundles",
    "harness.in_place",
    "harness.siblings",
    "harness.floating_point",
    "harness.takes",
    "harness.of_file",
    "harness.sums",
    "harness.stage_names",
    "harness.chains",
    *NOUNS,
    "harness.config",
    "harness.numerics",
    "harness.inputs",
    "harness.interpret",
)
CALLS = ("harness.calling", "harness.isolation")
ABOVE_VERIFY = (*BELOW_VERIFY, *CALLS, "harness.judging", "harness.invariance", "harness.verify", "harness.outcomes")
BESIDE = tuple(
    f"harness.{name}"
    for name in ("diagnosing", "history", "bench", "sanitize", "cluster", "judges", "orders", "from_torch")
)
TOP = ("harness", "harness.__main__", "harness.cli", "harness.commands", "harness.plugin", "harness.pytest_interpreter")

# Layer → the layers of this repository that it may import, besides itself. The longest matching name counts,
# and "harness" stands for harness/__init__.py alone. kernels/ is loaded by path: no layer may import it.
LAYERS: dict[str, tuple[str, ...]] = {
    "harness.errors": (),
    "harness.files": (),
    "harness.trees": ("harness.errors", "harness.files"),
    "harness.timing": (),
    "harness.trust": (),
    "harness.templates": (
        "harness.ops",
        "harness.kernel",
        "harness.case",
        "harness.inputs",
        "harness.numerics",
        "harness.verify",
    ),
    "harness.numerics": ("harness.errors", "harness.trust"),
    "harness.declared": ("harness.errors",),
    "harness.bundles": ("harness.errors",),
    "harness.in_place": ("harness.errors",),
    "harness.siblings": (),
    "harness.floating_point": (),
    "harness.sums": (),
    "harness.ops": (
        "harness.errors",
        "harness.declared",
        "harness.bundles",
        "harness.numerics",
        "harness.sums",
        *NOUNS,
    ),
    "harness.stage_names": ("harness.ops",),
    "harness.chains": ("harness.errors", "harness.declared", "harness.stage_names", "harness.numerics", "harness.ops"),
    "harness.dtypes": (),
    "harness.case": ("harness.errors", *NOUNS),
    "harness.kernel": (
        "harness.errors",
        "harness.declared",
        "harness.bundles",
        "harness.in_place",
        "harness.siblings",
        "harness.floating_point",
        "harness.takes",
        *NOUNS,
    ),
    "harness.takes": ("harness.errors", "harness.dtypes", "harness.case"),
    "harness.of_file": ("harness.errors", "harness.siblings", "harness.takes", "harness.ops", "harness.kernel"),
    "harness.result": ("harness.errors", *NOUNS),
    "harness.run": ("harness.result", "harness.outcomes"),
    "harness.row_check": (),
    "harness.relations": (),
    "harness.property_result": (),
    "harness.devices": ("harness.errors",),
    "harness.placement": ("harness.devices",),
    "harness.config": ("harness.errors", "harness.devices", "harness.ops", "harness.case", "harness.kernel"),
    "harness.inputs": (
        "harness.errors",
        "harness.timing",
        "harness.trust",
        "harness.devices",
        "harness.dtypes",
        "harness.ops",
        "harness.case",
        "harness.kernel",
        "harness.numerics",
    ),
    "harness.interpret": ("harness.errors", "harness.numerics"),
    "harness.tracing": ("harness.errors", "harness.interpret"),
    "harness.calibrate": (
        "harness.errors",
        "harness.files",
        "harness.devices",
        "harness.numerics",
        "harness.interpret",
    ),
    "harness.judging": (
        "harness.errors",
        "harness.floating_point",
        "harness.timing",
        "harness.trust",
        "harness.dtypes",
        "harness.ops",
        "harness.case",
        "harness.result",
        "harness.row_check",
        "harness.numerics",
        "harness.inputs",
    ),
    "harness.calling": (
        "harness.errors",
        "harness.floating_point",
        "harness.timing",
        "harness.result",
        "harness.inputs",
        "harness.interpret",
    ),
    "harness.isolation": (
        "harness.errors",
        "harness.files",
        "harness.trees",
        "harness.placement",
        "harness.timing",
        "harness.dtypes",
        "harness.kernel",
        "harness.takes",
        "harness.of_file",
        "harness.result",
        "harness.inputs",
        "harness.interpret",
        "harness.calling",
        "harness.isolation.runner",
        "reports.characters",
    ),
    "harness.isolation.runner": ("harness.kernel", "harness.of_file"),
    "harness.invariance": (
        "harness.errors",
        "harness.dtypes",
        "harness.ops",
        "harness.case",
        "harness.kernel",
        "harness.relations",
        "harness.property_result",
        "harness.devices",
        "harness.siblings",
        "harness.numerics",
        "harness.inputs",
        "harness.interpret",
        "harness.calling",
    ),
    "harness.verify": (*BELOW_VERIFY, *CALLS, "harness.calibrate", "harness.judging", "harness.invariance"),
    "harness.diagnosing": (
        "harness.errors",
        "harness.config",
        "harness.devices",
        "harness.dtypes",
        "harness.interpret",
        "harness.tracing",
        "harness.chains",
        "harness.ops",
        "harness.case",
        "harness.result",
        "harness.numerics",
        "harness.inputs",
        "harness.outcomes",
        "harness.judging",
        "harness.calling",
        "harness.verify",
    ),
    "harness.outcomes": ("harness.errors", "harness.result", "harness.row_check", "harness.property_result"),
    "harness.history": (*ABOVE_VERIFY, "harness.calibrate", "harness.diagnosing"),
    "harness.bench": ABOVE_VERIFY,
    "harness.orders": ABOVE_VERIFY,
    "harness.from_torch": ABOVE_VERIFY,
    "harness.judges": (*ABOVE_VERIFY, "harness.calibrate", "harness.diagnosing", "harness.bench", "reports"),
    "harness.sanitize": ABOVE_VERIFY,
    "harness.cluster": (*ABOVE_VERIFY, "harness.calibrate", "reports"),
    **dict.fromkeys(TOP, (*ABOVE_VERIFY, *BESIDE, "reports", "reports.characters", *TOP)),
    "references": ("harness.ops", "harness.chains", "harness.numerics", "harness.relations", "harness.sums"),
    "cases": ("harness.case", "harness.inputs"),
    "reports.characters": (),
    "reports": (
        "reports.characters",
        "harness.errors",
        "harness.files",
        "harness.result",
        "harness.property_result",
        "harness.run",
        "harness.outcomes",
    ),
    "kernels": ("harness.errors", "harness.kernel", "harness.placement"),
}

# Layer → the packages from outside that it may import, besides the standard library. Layers not named here
# may import any.
OUTSIDE: dict[str, tuple[str, ...]] = {
    "harness.errors": (),
    "references": (),
    "cases": ("hypothesis",),
    "kernels": ("torch", "triton"),
}


def sources() -> list[Path]:
    """Every Python file of the layers, relative to the root."""
    files = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return sorted(path.relative_to(ROOT) for path in files)


def module_name(path: Path) -> str:
    """`harness/verify/run.py` → `harness.verify.run`; a package is named by its folder."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def known_modules(paths: Collection[Path]) -> set[str]:
    """The dotted names of the files and of every folder above them."""
    names = {module_name(path) for path in paths}
    folders = {".".join(folder.parts) for path in paths for folder in path.parents}
    return (names | folders) - {""}


def layer_of(module: str) -> str | None:
    """The layer a module belongs to, or None for one that `LAYERS` does not name."""
    matches = [layer for layer in LAYERS if module == layer or (layer != "harness" and module.startswith(f"{layer}."))]
    return max(matches, key=len, default=None)


def imports(path: Path, tree: ast.Module, known: Collection[str]) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of every import, including import_module("literal")."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                yield from ((node.lineno, alias.name) for alias in aliases)
            case ast.ImportFrom(names=aliases):
                base = absolute_base(path, node)
                names = {f"{base}.{alias.name}" for alias in aliases}
                if path.parts[0] != "harness" or "templates" in path.parts:
                    names = {PUBLIC.get(name, name) for name in names}
                yield from ((node.lineno, name if name in known else base) for name in sorted(names))
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name


def absolute_base(path: Path, node: ast.ImportFrom) -> str:
    """The module after `from`, with leading dots resolved against the file's folder."""
    if not node.level:
        return node.module or ""
    folder = path.parts[: -node.level]
    return ".".join((*folder, node.module) if node.module else folder)


def layer_violations(path: Path, source: str, known: Collection[str]) -> list[str]:
    """One sentence for each import of the file that `LAYERS` or `OUTSIDE` forbids."""
    layer = layer_of(module_name(path))
    if layer is None:
        return [f"{path}: {module_name(path)} is in no layer; name it in LAYERS in tests/project/test_layers.py"]
    found = imports(path, ast.parse(source, str(path)), known)
    return [
        f"{path}:{line}: imports {target}, but {reason}"
        for line, target in sorted(set(found))
        if (reason := objection(layer, target, known))
    ]


def objection(layer: str, target: str, known: Collection[str]) -> str:
    """Why a layer must not import the target; empty if it may."""
    top = target.split(".")[0]
    if layer == "kernels" and any(name.startswith("kernels.") and name.endswith(f".{top}") for name in known):
        return ""  # a sibling: kernels are loaded by path, with their own folder in reach
    if top in FOLDERS:
        return objection_inside(layer, target)
    allowed = OUTSIDE.get(layer)
    if allowed is None or top in sys.stdlib_module_names or top in allowed:
        return ""
    return f"from outside {layer} may import only the standard library{''.join(f', {a}' for a in allowed)}"


def objection_inside(layer: str, target: str) -> str:
    """Why a layer must not import a module of this repository; empty if it may."""
    target_layer = layer_of(target)
    if target_layer == "kernels" != layer:
        return "kernels/ is never imported: load it by path"
    if target_layer is not None and target_layer in (layer, *LAYERS[layer]):
        return ""
    allowed = ", ".join(LAYERS[layer]) or "nothing of this repository"
    hint = "; import from the module that defines the name" if target_layer == "harness" else ""
    return f"{layer} may import {allowed}{hint}"


def op_names() -> list[str]:
    """The names of the ops in this checkout: the files of references/."""
    return sorted(path.stem for path in (ROOT / "references").glob("*.py") if not path.stem.startswith("_"))


def words_of(path: Path) -> list[str]:
    """The ops that a file must not name: all but functions of mathematics, where these are defined or torch's are."""
    functions: Collection[str] = numerics.__all__ if path.parts[1] in ("numerics", "tracing") else ()
    if path.parts[1] == "from_torch":  # which maps the functions of torch by their names
        functions = dir(torch.nn.functional)
    return sorted(set(op_names()) - set(functions))


def op_mentions(path: Path, source: str, names: Collection[str]) -> list[str]:
    """One sentence for each identifier or string that names an op; docstrings and comments are free to."""
    named = re.compile(rf"(?<![a-z0-9])({'|'.join(map(re.escape, names))})(?![a-z0-9])")
    tree = ast.parse(source, str(path))
    return [
        f"{path}:{line}: {text!r} names the op {match[1]}; harness/ learns ops from the files it finds"
        for line, text in sorted(set(words(tree)))
        if (match := named.search(text))
    ]


def words(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of every identifier and every string that is not a docstring."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in docstrings:
                yield node.lineno, text
            case (
                ast.Name(id=text)
                | ast.Attribute(attr=text)
                | ast.arg(arg=text)
                | ast.keyword(arg=str(text))
                | ast.FunctionDef(name=text)
                | ast.ClassDef(name=text)
                | ast.alias(name=text)
                | ast.ImportFrom(module=str(text))
            ):
                yield node.lineno, text


SOURCES = sources()
KNOWN = known_modules(SOURCES)
HARNESS = [path for path in SOURCES if path.parts[0] == "harness"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_folder_has_sources(folder: str) -> None:
    """A renamed folder must not turn the tests below into tests of nothing."""
    assert any(path.parts[0] == folder for path in SOURCES), f"no Python file in {ROOT / folder}"


@pytest.mark.parametrize("layer", LAYERS)
def test_table_names_only_layers(layer: str) -> None:
    unknown = set(LAYERS[layer]) - set(LAYERS)
    assert not unknown, f"LAYERS[{layer!r}] allows {sorted(unknown)}, which are no layers"


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_imports_go_down(path: Path) -> None:
    violations = layer_violations(path, (ROOT / path).read_text(), KNOWN)
    assert not violations, "\n" + "\n".join(violations)


@pytest.mark.parametrize("path", HARNESS, ids=str)
def test_harness_names_no_op(path: Path) -> None:
    assert op_names(), "references/ holds no op"
    mentions = op_mentions(path, (ROOT / path).read_text(), words_of(path))
    assert not mentions, "\n" + "\n".join(mentions)


SYNTHETIC = {
    "harness/__init__.py",
    "harness/errors.py",
    "harness/ops.py",
    "harness/verify/__init__.py",
    "harness/verify/run.py",
    "references/__init__.py",
    "references/plain_sum.py",
    "kernels/plain_sum.py",
    "kernels/tiles.py",
}


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        (
            "harness/errors.py",
            "import harness.ops",
            "imports harness.ops, but harness.errors may",
        ),
        ("harness/errors.py", "import torch", "may import only the standard library"),
        ("harness/ops.py", "from harness import verify", "imports harness.verify, but harness.ops may import"),
        ("harness/ops.py", "from . import verify", "imports harness.verify"),
        ("harness/ops.py", "from .verify.run import x", "imports harness.verify.run"),
        ("harness/ops.py", "def f():\n    import harness.cli", ":2: imports harness.cli"),
        ("harness/ops.py", "import_module('harness.cli')", "imports harness.cli"),
        ("harness/ops.py", "from harness import Op", "import from the module that defines the name"),
        ("harness/ops.py", "import references.plain_sum", "imports references.plain_sum"),
        ("harness/verify/run.py", "from ..cli import main", "imports harness.cli"),
        ("harness/verify/run.py", "import reports.html", "imports reports.html"),
        ("harness/verify/__init__.py", "from ..plugin import x", "imports harness.plugin"),
        ("harness/cli.py", "import kernels.plain_sum", "kernels/ is never imported"),
        ("harness/helpers.py", "", "harness.helpers is in no layer"),
        ("references/plain_sum.py", "from torch import sum", "may import only the standard library"),
        ("references/plain_sum.py", "import harness.case", "imports harness.case"),
        ("cases/plain_sum.py", "import numpy", "the standard library, hypothesis"),
        ("reports/html.py", "from harness.verify import run", "imports harness.verify.run"),
        ("kernels/plain_sum.py", "import numpy", "the standard library, torch, triton"),
        ("kernels/plain_sum.py", "from harness.ops import Op", "kernels may import harness.errors, harness.kernel"),
    ],
)
def test_checker_finds_violation(path: str, source: str, expected: str) -> None:
    known = known_modules([Path(name) for name in SYNTHETIC])
    [violation] = layer_violations(Path(path), source, known)
    assert expected in violation
    assert violation.startswith(path)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("harness/ops.py", "import os, torch\nfrom harness.errors import E\nfrom .numerics import mean"),
        ("harness/verify/__init__.py", "from .run import x\nfrom ..ops import Op\nfrom . import run"),
        ("harness/__init__.py", "from .verify import run\nfrom harness.cli import main"),
        ("references/plain_sum.py", "import math\nfrom harness.numerics.primitives import exp"),
        ("kernels/plain_sum.py", "import triton.language as tl\nimport tiles\nfrom .tiles import tile"),
    ],
)
def test_checker_accepts(path: str, source: str) -> None:
    known = known_modules([Path(name) for name in SYNTHETIC])
    assert layer_violations(Path(path), source, known) == []


@pytest.mark.parametrize(
    "source",
    [
        "name = 'plain_sum'",
        "text = f'run plain_sum {x}'",
        "def plain_sum(): ...",
        "def f(plain_sum): ...",
        "op.plain_sum_triton",
        "from references.plain_sum import x",
    ],
)
def test_checker_finds_op_name(source: str) -> None:
    [mention] = op_mentions(Path("harness/ops.py"), source, ["plain_sum"])
    assert mention.startswith("harness/ops.py:1: ")
    assert "names the op plain_sum" in mention


@pytest.mark.parametrize(
    "source",
    ["'''As in plain_sum.'''", "def f():\n    '''Not plain_sum.'''", "x = 1  # plain_sum", "explain_sum = 1"],
)
def test_checker_accepts_text_about_ops(source: str) -> None:
    assert op_mentions(Path("harness/ops.py"), source, ["plain_sum"]) == []
