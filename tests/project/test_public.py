"""What projects import: names with docstrings, the examples in these, and one place to import a name from."""

from __future__ import annotations

import ast
import doctest
import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

import lastbit
from lastbit import numerics, relations

ROOT = Path(__file__).resolve().parents[2]
WRITTEN_BY_PROJECTS = ("references", "cases", "kernels", "harness/templates", "docs/examples")
WRITES_FOR_PROJECTS = ("harness/from_torch", "harness/shrinking/pasted.py")
PUBLIC = {"lastbit", *(f"lastbit.{name}" for name in lastbit.__all__)}
API = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
WITH_EXAMPLES = sorted(
    ".".join((package, *path.relative_to(ROOT / folder).with_suffix("").parts))
    for folder, package in (("harness", "lastbit"), ("reports", "lastbit.reports"))
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


def test_the_page_lists_every_public_name() -> None:
    listed = re.findall(r"^::: lastbit\.(?:kernel\.)?(\w+)$", API, re.MULTILINE)
    assert sorted(listed) == sorted([*lastbit.__all__, "pytest_interpreter"])


def python_of(path: str) -> list[Path]:
    return sorted((ROOT / path).rglob("*.py")) if (ROOT / path).is_dir() else [ROOT / path]


def test_what_projects_write_imports_public_modules_only() -> None:
    """References and cases may build on others of their kind, which are no part of the harness."""
    others = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.module}"
        for folder in WRITTEN_BY_PROJECTS
        for path in python_of(folder)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and re.match(r"lastbit\b(?!\.(references|cases)\b)", node.module or "")
        if node.module not in PUBLIC
    ]
    assert others == []


@pytest.mark.parametrize("path", WRITES_FOR_PROJECTS)
def test_what_is_written_for_projects_imports_public_names_only(path: str) -> None:
    """Code stands in string literals there."""
    texts = [
        node.value
        for file in python_of(path)
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    imported = [re.findall(r"\bfrom (lastbit[\w.]*) import", text) for text in texts]
    assert {module for modules in imported for module in modules} <= PUBLIC
