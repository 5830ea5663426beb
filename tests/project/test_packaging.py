"""The wheel holds what lastbit needs of a checkout at run time, under the one name lastbit, without goldens."""

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
    "harness": "lastbit",
    "cases": "lastbit/cases",
    "kernels": "lastbit/_kernels",
    "references": "lastbit/references",
    "reports": "lastbit/reports",
}
METADATA = ("pyproject.toml", "README.md", "LICENSE")
LEFT_OUT = shutil.ignore_patterns("__pycache__", ".*", "golden")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy what the wheel is built from: building in place leaves, or reuses, build/."""
    copy = tmp_path_factory.mktemp("source")
    for folder in SHIPPED:
        shutil.copytree(ROOT / folder, copy / folder, ignore=LEFT_OUT)
    for name in METADATA:
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel, and unpack it as an installer would."""
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
    """List the files below a folder, as POSIX paths relative to it."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_wheel_holds_exactly_the_checkout(source: Path, wheel: Path) -> None:
    expected = {f"{to}/{name}" for folder, to in SHIPPED.items() for name in files(source / folder)}
    expected = {name for name in expected if not name.startswith("lastbit/checkout/")}
    actual = {name for name in files(wheel) if ".dist-info/" not in name}
    assert not expected - actual, f"missing in the wheel; see [tool.setuptools]: {sorted(expected - actual)}"
    assert not actual - expected, f"in the wheel, but not in the checkout: {sorted(actual - expected)}"


def test_wheel_holds_kernels_and_shapes(wheel: Path) -> None:
    """Independent of the checkout's listing, so that an empty folder is noticed."""
    assert any(wheel.glob("lastbit/_kernels/*.py"))
    assert any(wheel.glob("lastbit/references/*.py"))
    assert tomllib.loads((wheel / "lastbit" / "cases" / "shapes.toml").read_text())


def test_wheel_has_the_command(wheel: Path) -> None:
    [entry_points] = wheel.glob("*.dist-info/entry_points.txt")
    assert "lastbit = lastbit.cli:main" in entry_points.read_text()


KERNEL = """
from lastbit import kernel


@kernel("rms_norm", contract="native_multiply")
def norm(x, weight, eps):
    normalized = x.float() * (x.float().pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    return (normalized.to(weight.dtype) * weight).to(x.dtype)
"""
TEST = """
import torch
from lastbit import assert_contract
from my_kernels.norms import norm


def test_norm():
    x, weight = torch.randn(4, 64).bfloat16(), torch.ones(64).bfloat16()
    assert_contract("rms_norm", norm(x, weight, 1e-6), x=x, weight=weight, eps=1e-6, contract="native_multiply")
"""


def test_wheel_works_where_folders_have_the_names_of_ours(wheel: Path, tmp_path: Path) -> None:
    for name in ("harness", "references", "cases", "reports", "kernels", "my_kernels"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / "my_kernels" / "norms.py").write_text(KERNEL)
    (tmp_path / "test_norms.py").write_text(TEST)
    where = {"cwd": tmp_path, "PYTHONPATH": f".{os.pathsep}{wheel}", "OMP_NUM_THREADS": "1"}
    imported = "import lastbit, harness; print(lastbit.__file__, harness.__file__)"
    ours, theirs = map(Path, run([sys.executable, "-c", imported], **where).split())
    assert (ours.parent, theirs.parent) == (wheel / "lastbit", tmp_path / "harness")
    run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], **where)
    words = ["verify", "my_kernels", "--profile", "smoke", "--cases-per-group", "1", "-n", "1"]
    verified = run([sys.executable, "-m", "lastbit", *words], **where)
    assert "PASSED  kernels: 1 passed" in verified


@pytest.mark.parametrize("from_checkout", [False, True])
def test_harness_is_another_name_of_the_same_modules(wheel: Path, tmp_path: Path, from_checkout: bool) -> None:
    first = "harness" if from_checkout else "lastbit"  # behind which `harness` is found, installed
    program = f"""if True:
        import sys
        import {first}
        from harness.verify.assertion import Undecided
        import harness, harness.kernel, lastbit
        assert harness.Undecided is lastbit.Undecided is Undecided and harness.kernel is lastbit.kernel
        assert sys.modules["harness.kernel"] is sys.modules["lastbit.kernel"] and callable(lastbit.kernel)
        assert sys.modules["lastbit.verify.assertion"].__spec__.name == "lastbit.verify.assertion"
    """
    # -S: no installation of this checkout is seen, but what it needs is
    others = os.pathsep.join(path for path in sys.path if path.endswith("site-packages"))
    command = [sys.executable, "-S", "-W", "error", "-W", "ignore:harness is called lastbit", "-c", program]
    run(command, cwd=tmp_path, PYTHONPATH=os.pathsep.join([str(ROOT if from_checkout else wheel), others]))


@pytest.mark.parametrize("command", [[str(ROOT / "harness")], ["-m", "harness"], ["-m", "lastbit"]])
def test_a_checkout_works_without_an_installation(command: list[str], tmp_path: Path) -> None:
    others = os.pathsep.join(path for path in sys.path if path.endswith("site-packages"))
    path = f"{ROOT / 'harness' / 'checkout'}{os.pathsep}{others}" if command[-1] == "lastbit" else others
    where = {"cwd": ROOT if command[-1] == "harness" else tmp_path, "PYTHONPATH": path}
    assert "rms_norm" in run([sys.executable, "-S", *command, "list", "ops"], **where)
