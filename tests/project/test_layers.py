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

import lastbit
from lastbit import numerics

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {name: f"lastbit.{name}" for name in ("references", "cases", "reports")}
FOLDERS |= {"harness": "lastbit", "kernels": "kernels"}
"""Folder → how its files are imported."""

NOUNS = (
    "lastbit.dtypes",
    "lastbit.ops",
    "lastbit.case",
    "lastbit.kernel",
    "lastbit.result",
    "lastbit.run",
    "lastbit.relations",
    "lastbit.property_result",
)
PUBLIC = {f"lastbit.{name}": module for name, module in lastbit._MODULE_OF.items()}
"""What others than harness/ itself import from `lastbit` → the module that has it."""

BELOW_VERIFY = (
    "lastbit.errors",
    "lastbit.command_line",
    "lastbit.files",
    "lastbit.trees",
    "lastbit.timing",
    "lastbit.devices",
    "lastbit.placement",
    "lastbit.declared",
    "lastbit.bundles",
    "lastbit.in_place",
    "lastbit.started",
    "lastbit.refusals",
    "lastbit.siblings",
    "lastbit.floating_point",
    "lastbit.takes",
    "lastbit.of_file",
    "lastbit.stage_names",
    "lastbit.chains",
    *NOUNS,
    "lastbit.config",
    "lastbit.numerics",
    "lastbit.inputs",
    "lastbit.interpret",
)
CALLS = ("lastbit.children", "lastbit.calling", "lastbit.isolation")
ABOVE_VERIFY = (
    *(*BELOW_VERIFY, *CALLS, "lastbit.judging", "lastbit.invariance", "lastbit.verify"),
    *("lastbit.reports", "lastbit.reports.why"),
)
BESIDE = tuple(
    f"lastbit.{name}"
    for name in (
        *("diagnosing", "identifying", "shrinking", "history", "bench"),
        *("sanitize", "crew", "judges", "orders", "from_torch"),
    )
)
TOP = (
    "lastbit",
    "lastbit.checkout",
    "lastbit.old_name",
    "lastbit.__main__",
    "lastbit.cli",
    "lastbit.commands",
    "lastbit.pytest_interpreter",
)

# Layer → the layers of this repository that it may import, besides itself. The longest matching name counts,
# and "lastbit" stands for harness/__init__.py alone. kernels/ is loaded by path: no layer may import it.
LAYERS: dict[str, tuple[str, ...]] = {
    "lastbit.errors": (),
    "lastbit.command_line": ("lastbit.errors",),
    "lastbit.files": (),
    "lastbit.trees": ("lastbit.errors", "lastbit.files"),
    "lastbit.timing": (),
    "lastbit.trust": (),
    "lastbit.templates": (
        "lastbit.ops",
        "lastbit.kernel",
        "lastbit.case",
        "lastbit.inputs",
        "lastbit.numerics",
        "lastbit.verify",
    ),
    "lastbit.numerics": ("lastbit.errors", "lastbit.trust"),
    "lastbit.declared": ("lastbit.errors",),
    "lastbit.bundles": ("lastbit.errors",),
    "lastbit.in_place": ("lastbit.errors",),
    "lastbit.started": (),
    "lastbit.refusals": ("lastbit.errors", "lastbit.started"),
    "lastbit.siblings": (),
    "lastbit.floating_point": (),
    "lastbit.ops": (
        "lastbit.errors",
        "lastbit.declared",
        "lastbit.bundles",
        "lastbit.numerics",
        *NOUNS,
    ),
    "lastbit.stage_names": ("lastbit.ops",),
    "lastbit.chains": ("lastbit.errors", "lastbit.declared", "lastbit.stage_names", "lastbit.numerics", "lastbit.ops"),
    "lastbit.dtypes": (),
    "lastbit.case": ("lastbit.errors", *NOUNS),
    "lastbit.kernel": (
        "lastbit.errors",
        "lastbit.declared",
        "lastbit.bundles",
        "lastbit.in_place",
        "lastbit.refusals",
        "lastbit.siblings",
        "lastbit.floating_point",
        "lastbit.takes",
        *NOUNS,
    ),
    "lastbit.takes": ("lastbit.errors", "lastbit.dtypes", "lastbit.case"),
    "lastbit.of_file": ("lastbit.errors", "lastbit.siblings", "lastbit.takes", "lastbit.ops", "lastbit.kernel"),
    "lastbit.result": ("lastbit.errors", *NOUNS),
    "lastbit.run": ("lastbit.result", "lastbit.reports.why"),
    "lastbit.relations": (),
    "lastbit.property_result": (),
    "lastbit.devices": ("lastbit.errors",),
    "lastbit.placement": ("lastbit.devices",),
    "lastbit.config": ("lastbit.errors", "lastbit.devices", "lastbit.ops", "lastbit.case", "lastbit.kernel"),
    "lastbit.inputs": (
        "lastbit.errors",
        "lastbit.timing",
        "lastbit.trust",
        "lastbit.devices",
        "lastbit.dtypes",
        "lastbit.ops",
        "lastbit.case",
        "lastbit.kernel",
        "lastbit.numerics",
        "lastbit.result",
    ),
    "lastbit.interpret": ("lastbit.errors", "lastbit.numerics"),
    "lastbit.branches": ("lastbit.files", "lastbit.trees", "lastbit.run", "lastbit.interpret"),
    "lastbit.tracing": ("lastbit.errors", "lastbit.interpret", "lastbit.numerics", "lastbit.shadows"),
    "lastbit.shadows": (
        "lastbit.kernel",
        "lastbit.started",
        "lastbit.calling",
        "lastbit.interpret",
        "lastbit.numerics",
    ),
    "lastbit.calibrate": (
        "lastbit.errors",
        "lastbit.files",
        "lastbit.devices",
        "lastbit.numerics",
        "lastbit.interpret",
    ),
    "lastbit.judging": (
        "lastbit.errors",
        "lastbit.files",
        "lastbit.floating_point",
        "lastbit.timing",
        "lastbit.trust",
        "lastbit.dtypes",
        "lastbit.ops",
        "lastbit.case",
        "lastbit.result",
        "lastbit.numerics",
        "lastbit.inputs",
    ),
    "lastbit.calling": (
        "lastbit.errors",
        "lastbit.floating_point",
        "lastbit.timing",
        "lastbit.result",
        "lastbit.inputs",
        "lastbit.interpret",
        "lastbit.branches",
    ),
    "lastbit.children": ("lastbit.reports.characters",),
    "lastbit.isolation": (
        "lastbit.children",
        "lastbit.errors",
        "lastbit.files",
        "lastbit.trees",
        "lastbit.placement",
        "lastbit.timing",
        "lastbit.dtypes",
        "lastbit.kernel",
        "lastbit.takes",
        "lastbit.of_file",
        "lastbit.result",
        "lastbit.inputs",
        "lastbit.interpret",
        "lastbit.numerics",
        "lastbit.calling",
        "lastbit.shadows",
        "lastbit.isolation.runner",
    ),
    "lastbit.isolation.runner": ("lastbit.children", "lastbit.kernel", "lastbit.of_file"),
    "lastbit.invariance": (
        "lastbit.errors",
        "lastbit.dtypes",
        "lastbit.ops",
        "lastbit.case",
        "lastbit.kernel",
        "lastbit.relations",
        "lastbit.property_result",
        "lastbit.devices",
        "lastbit.siblings",
        "lastbit.numerics",
        "lastbit.inputs",
        "lastbit.interpret",
        "lastbit.calling",
    ),
    "lastbit.verify": (
        *BELOW_VERIFY,
        *CALLS,
        "lastbit.branches",
        "lastbit.calibrate",
        "lastbit.judging",
        "lastbit.shadows",
        "lastbit.invariance",
    ),
    "lastbit.diagnosing": (
        "lastbit.branches",
        "lastbit.errors",
        "lastbit.config",
        "lastbit.devices",
        "lastbit.dtypes",
        "lastbit.interpret",
        "lastbit.shadows",
        "lastbit.tracing",
        "lastbit.chains",
        "lastbit.ops",
        "lastbit.case",
        "lastbit.result",
        "lastbit.numerics",
        "lastbit.inputs",
        "lastbit.reports",
        "lastbit.reports.why",
        "lastbit.judging",
        "lastbit.calling",
        "lastbit.shadows",
        "lastbit.shrinking",
        "lastbit.verify",
    ),
    "lastbit.shrinking": (*ABOVE_VERIFY, "lastbit.tracing"),
    "lastbit.identifying": (*ABOVE_VERIFY, "lastbit.shadows", "lastbit.diagnosing"),
    "lastbit.history": ABOVE_VERIFY,
    "lastbit.bench": ABOVE_VERIFY,
    "lastbit.orders": ABOVE_VERIFY,
    "lastbit.from_torch": ABOVE_VERIFY,
    "lastbit.judges": (
        *ABOVE_VERIFY,
        "lastbit.calibrate",
        "lastbit.diagnosing",
        "lastbit.bench",
        "lastbit.reports.why",
    ),
    "lastbit.sanitize": ABOVE_VERIFY,
    "lastbit.crew": (*ABOVE_VERIFY, "lastbit.calibrate", "lastbit.diagnosing", "lastbit.orders"),
    **dict.fromkeys(TOP, (*ABOVE_VERIFY, *BESIDE, "lastbit.reports.characters", *TOP)),
    "lastbit.references": (
        "lastbit.ops",
        "lastbit.chains",
        "lastbit.numerics",
        "lastbit.relations",
    ),
    "lastbit.cases": ("lastbit.case", "lastbit.inputs"),
    "lastbit.reports.characters": (),
    "lastbit.reports.why": ("lastbit.result",),
    "lastbit.reports": (
        "lastbit.reports.characters",
        "lastbit.errors",
        "lastbit.command_line",
        "lastbit.files",
        "lastbit.result",
        "lastbit.property_result",
        "lastbit.run",
        "lastbit.reports.why",
    ),
    "kernels": ("lastbit.errors", "lastbit.kernel", "lastbit.placement"),
}

# Layer → the packages from outside that it may import, besides the standard library. Layers not named here
# may import any.
OUTSIDE: dict[str, tuple[str, ...]] = {
    "lastbit.errors": (),
    "lastbit.references": (),
    "lastbit.cases": ("hypothesis",),
    "kernels": ("torch", "triton"),
}


def sources() -> list[Path]:
    """Every Python file of the layers, relative to the root."""
    files = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return sorted(path.relative_to(ROOT) for path in files)


def module_name(path: Path) -> str:
    """`harness/verify/processes.py` → `lastbit.verify.processes`; a package is named by its folder."""
    parts = (*FOLDERS[path.parts[0]].split("."), *path.with_suffix("").parts[1:])
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def known_modules(paths: Collection[Path]) -> set[str]:
    """Return the dotted names of the files and of every folder above them."""
    names = {module_name(path) for path in paths}
    return names | {name[:place] for name in names for place, letter in enumerate(name) if letter == "."}


def layer_of(module: str) -> str | None:
    """Return the layer a module belongs to, or None for one that `LAYERS` does not name."""
    matches = [layer for layer in LAYERS if module == layer or (layer != "lastbit" and module.startswith(f"{layer}."))]
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
    """Resolve the module after `from`, with leading dots, against the file's folder."""
    if not node.level:
        return node.module or ""
    folder = (*FOLDERS[path.parts[0]].split("."), *path.parts[1:])[: -node.level]
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
    """Return why a layer must not import the target; empty if it may."""
    top = target.split(".")[0]
    if layer == "kernels" and any(name.startswith("kernels.") and name.endswith(f".{top}") for name in known):
        return ""  # a sibling: kernels are loaded by path, with their own folder in reach
    if top in {"lastbit", "kernels"}:
        return objection_inside(layer, target)
    allowed = OUTSIDE.get(layer)
    if allowed is None or top in sys.stdlib_module_names or top in allowed:
        return ""
    return f"from outside {layer} may import only the standard library{''.join(f', {a}' for a in allowed)}"


def objection_inside(layer: str, target: str) -> str:
    """Return why a layer must not import a module of this repository; empty if it may."""
    target_layer = layer_of(target)
    if target_layer == "kernels" != layer:
        return "kernels/ is never imported: load it by path"
    if target_layer is not None and target_layer in (layer, *LAYERS[layer]):
        return ""
    allowed = ", ".join(LAYERS[layer]) or "nothing of this repository"
    hint = "; import from the module that defines the name" if target_layer == "lastbit" else ""
    return f"{layer} may import {allowed}{hint}"


def op_names() -> list[str]:
    """Return the names of the ops in this checkout: the files of references/."""
    return sorted(path.stem for path in (ROOT / "references").glob("*.py") if not path.stem.startswith("_"))


def words_of(path: Path) -> list[str]:
    """Return the ops that a file must not name: all but functions of mathematics, where they or torch's are defined."""
    functions: Collection[str] = numerics.__all__ if path.parts[1] in ("numerics", "tracing") else ()
    if path.parts[1] == "from_torch":  # which maps the functions of torch by their names
        functions = dir(torch.nn.functional)
    if (
        path.parts[1] == "shadows"
    ):  # which has rules of torch's operators, `_scaled_dot_product_flash_attention_for_cpu`
        functions = [name for name in op_names() if any(name in function for function in dir(torch.nn.functional))]
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


def test_table_names_only_layers() -> None:
    unknown = {layer: set(allowed) - set(LAYERS) for layer, allowed in LAYERS.items()}
    assert not any(unknown.values()), f"LAYERS allows what are no layers: {unknown}"


def test_imports_go_down() -> None:
    violations = [line for path in SOURCES for line in layer_violations(path, (ROOT / path).read_text(), KNOWN)]
    assert not violations, "\n" + "\n".join(violations)


def test_harness_names_no_op() -> None:
    assert op_names(), "references/ holds no op"
    mentions = [line for path in HARNESS for line in op_mentions(path, (ROOT / path).read_text(), words_of(path))]
    assert not mentions, "\n" + "\n".join(mentions)


SYNTHETIC = {
    "harness/__init__.py",
    "harness/errors.py",
    "harness/ops.py",
    "harness/verify/__init__.py",
    "harness/verify/processes.py",
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
            "import lastbit.ops",
            "imports lastbit.ops, but lastbit.errors may",
        ),
        ("harness/errors.py", "import torch", "may import only the standard library"),
        ("harness/ops.py", "from lastbit import verify", "imports lastbit.verify, but lastbit.ops may import"),
        ("harness/ops.py", "from . import verify", "imports lastbit.verify"),
        ("harness/ops.py", "from .verify.processes import x", "imports lastbit.verify.processes"),
        ("harness/ops.py", "def f():\n    import lastbit.cli", ":2: imports lastbit.cli"),
        ("harness/ops.py", "import_module('lastbit.cli')", "imports lastbit.cli"),
        ("harness/ops.py", "from lastbit import Op", "import from the module that defines the name"),
        ("harness/ops.py", "import lastbit.references.plain_sum", "imports lastbit.references.plain_sum"),
        ("harness/verify/processes.py", "from ..cli import main", "imports lastbit.cli"),
        ("harness/verify/processes.py", "import lastbit.reports.html", "imports lastbit.reports.html"),
        ("harness/verify/__init__.py", "from ..cli import x", "imports lastbit.cli"),
        ("harness/cli.py", "import kernels.plain_sum", "kernels/ is never imported"),
        ("harness/helpers.py", "", "lastbit.helpers is in no layer"),
        ("references/plain_sum.py", "from torch import sum", "may import only the standard library"),
        ("references/plain_sum.py", "import lastbit.case", "imports lastbit.case"),
        ("cases/plain_sum.py", "import numpy", "the standard library, hypothesis"),
        ("reports/html.py", "from lastbit.verify import processes", "imports lastbit.verify.processes"),
        ("kernels/plain_sum.py", "import numpy", "the standard library, torch, triton"),
        ("kernels/plain_sum.py", "from lastbit.ops import Op", "kernels may import lastbit.errors, lastbit.kernel"),
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
        ("harness/ops.py", "import os, torch\nfrom lastbit.errors import E\nfrom .numerics import mean"),
        ("harness/verify/__init__.py", "from .run import x\nfrom ..ops import Op\nfrom . import run"),
        ("harness/__init__.py", "from .verify import run\nfrom lastbit.cli import main"),
        ("references/plain_sum.py", "import math\nfrom lastbit.numerics.primitives import exp"),
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
        "from lastbit.references.plain_sum import x",
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
