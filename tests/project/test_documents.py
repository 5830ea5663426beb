"""What the documents say of each other and of the package is true."""

import re
import runpy
import tomllib
from pathlib import Path

import pytest
import yaml

import lastbit

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("folder", ["measurements", "contracts"])
def test_an_index_names_every_document_of_its_folder(folder: str) -> None:
    pages = ROOT / "docs" / folder
    named = re.findall(r"\]\((\w+\.md)\)", (pages / "README.md").read_text())
    assert sorted(named) == sorted(page.name for page in pages.glob("*.md") if page.name != "README.md")


def test_the_site_has_every_guide() -> None:
    navigation = re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= set(navigation)


def test_the_page_of_the_command_line_is_that_of_the_parsers() -> None:
    """`python docs/cli.py` writes it anew."""
    page = runpy.run_path(str(ROOT / "docs" / "cli.py"))["page"]
    assert page() == (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")


def test_what_a_pass_means_is_said_of_every_op() -> None:
    ops = {path.stem for path in (ROOT / "references").glob("[a-z]*.py")}
    headings = "".join(re.findall(r"^## .*$", (ROOT / "docs" / "pass.md").read_text(), re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", headings)) == ops


def test_one_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest and newest[1] == cited == lastbit.__version__


def test_the_lowest_versions_of_the_matrix_are_those_that_the_package_takes() -> None:
    taken = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    bounds = [requirement.partition(";")[0] for requirement in taken if requirement.startswith(("torch", "triton"))]
    assert all(re.fullmatch(r"\w+>=\d+\.\d+", bound) for bound in bounds), "noxfile.lowest() reads these"


def test_the_architecture_has_every_package_in_2500_words() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    packages = {path.parent.name for path in (ROOT / "harness").glob("*/__init__.py")}
    assert packages <= set(re.findall(r"\*\*(\w+)\*\*", text))
    assert len(text.split()) <= 2500


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_files_that_a_document_names_are_there(page: str) -> None:
    """Names with a capital stand for those of a reader: `references/OP.py`."""
    folders = ("harness", "reports", "references", "cases", "kernels", "tests", "docs")
    files = [f"/{path.relative_to(ROOT)}" for folder in folders for path in (ROOT / folder).rglob("*.*")]
    named = set(re.findall(r"`((?:\w+/)*\w+\.(?:py|md|toml))`", (ROOT / page).read_text(encoding="utf-8")))
    lacking = {name for name in named if name == name.lower() and not (ROOT / name).exists()}
    assert not {name for name in lacking if not any(file.endswith(f"/{name}") for file in files)}
