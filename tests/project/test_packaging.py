"""The wheel holds what lastbit needs of a checkout at run time, with kernels/ as harness/_kernels."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Folder of the checkout → where its files land in the wheel.
SHIPPED = {
    "cases": "cases",
    "harness": "harness",
    "kernels": "harness/_kernels",
    "references": "references",
    "reports": "reports",
}
METADATA = ("pyproject.toml", "README.md", "LICENSE")
NOT_SHIPPED = shutil.ignore_patterns("__pycache__", ".*")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the wheel is built from: building in place leaves, or reuses, build/."""
    copy = tmp_path_factory.mktemp("source")
    for folder in SHIPPED:
        shutil.copytree(ROOT / folder, copy / folder, ignore=NOT_SHIPPED)
    for name in METADATA:
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked as an installer would."""
    pytest.importorskip("setuptools", reason="building the wheel needs setuptools: pip install -e '.[dev]'")
    built = tmp_path_factory.mktemp("built")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(built)]
    run([sys.executable, "-m", "pip", "wheel", *options, str(source)], cwd=built)
    [archive] = built.glob("lastbit-*.whl")
    zipfile.ZipFile(archive).extractall(built / "unpacked")
    return built / "unpacked"


def run(command: list[str], *, cwd: Path, **environment: str) -> str:
    """Run a command and return what it printed; fail with its output if it fails."""
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


def files(folder: Path) -> set[str]:
    """The files below a folder, as POSIX paths relative to it."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_wheel_holds_exactly_the_checkout(source: Path, wheel: Path) -> None:
    expected = {f"{to}/{name}" for folder, to in SHIPPED.items() for name in files(source / folder)}
    actual = {name for name in files(wheel) if ".dist-info/" not in name}
    assert not expected - actual, f"missing in the wheel; see [tool.setuptools]: {sorted(expected - actual)}"
    assert not actual - expected, f"in the wheel, but not in the checkout: {sorted(actual - expected)}"


def test_wheel_holds_kernels_and_shapes(wheel: Path) -> None:
    """Independent of the checkout's listing, so that an empty folder is noticed."""
    assert any(wheel.glob("harness/_kernels/*.py"))
    assert any(wheel.glob("references/*.py"))
    assert tomllib.loads((wheel / "cases" / "shapes.toml").read_text())


def test_wheel_has_the_command(wheel: Path) -> None:
    [entry_points] = wheel.glob("*.dist-info/entry_points.txt")
    assert "lastbit = harness.cli:main" in entry_points.read_text()


def test_wheel_is_importable_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    program = "import harness.cli, references, cases, reports; print(harness.cli.__file__)"
    printed = run([sys.executable, "-c", program], cwd=tmp_path, PYTHONPATH=str(wheel))
    assert Path(printed.strip()) == wheel / "harness" / "cli.py"
