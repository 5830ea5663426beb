"""What projects import: names with docstrings, the examples in these, and one place to import a name from."""

from __future__ import annotations

import ast
import doctest
import inspect
from importlib import import_module
from pathlib import Path

import pytest

import lastbit
from lastbit import numerics, relations

ROOT = Path(__file__).resolve().parents[2]
WRITTEN_BY_PROJECTS = ("references", "cases", "kernels", "harness/templates", "docs/examples")
WITH_EXAMPLES = sorted(
    ".".join((package, *path.relative_to(ROOT / folder).with_suffix("").parts))
    for folder, package in {"harness": "lastbit", "reports": "lastbit.reports"}.items()
    for path in (ROOT / folder).rglob("*.py")
    if "    >>> " in path.read_text()
)


@pytest.mark.parametrize("module", [lastbit, numerics, relations], ids=lambda module: module.__name__)
def test_public_names_have_docstrings(module: object) -> None:
    public = {name: getattr(module, name) for name in module.__all__}
    ours = {name: value for name, value in public.items() if getattr(value, "__module__", "").startswith("lastbit")}
    assert len(ours) > 5
    assert [name for name, value in ours.items() if not inspect.getdoc(value)] == []


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples_in_docstrings_run(module: str) -> None:
    failed, tried = doctest.testmod(import_module(module))
    assert (failed, tried > 0) == (0, True)


def test_what_projects_write_imports_public_modules_only() -> None:
    own = ("lastbit.references", "lastbit.cases")  # lastbit's ops share files beside them, and chains name their parts
    public = {"lastbit", *(f"lastbit.{name}" for name in lastbit.__all__)}
    others = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.module}"
        for folder in WRITTEN_BY_PROJECTS
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lastbit")
        if node.module not in public and not node.module.startswith(own)
    ]
    assert others == []
