"""Bisecting versions of a package that pip installs from a folder of wheels."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path

import numpy
import pytest

from lastbit.config import Config
from lastbit.errors import LastbitError, UsageError
from lastbit.history import packages
from lastbit.history.packages import open_versions
from lastbit.verify.processes import environment_of
from tests.commands.test_bisect_command import run_bisect

VERSIONS = ("1.0", "1.1", "1.2", "1.9", "1.10", "2.0rc1", "2.0", "2.1")

MODULE = {
    "rounds": "def normalized(x, inverse):\n    return (x * inverse).to(x.dtype)\n",
    "does not round": "def normalized(x, inverse):\n    return x * inverse\n",
    "raises": "import a_module_that_is_missing\n",
}

KERNEL = """\
import torch
from roundings import normalized

from lastbit.kernel import kernel


@kernel("rms_norm", contract="native_multiply")
def norm(x, weight, *, eps):
    inverse = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (normalized(x, inverse) * weight).to(x.dtype)
"""


def make_wheel(folder: Path, version: str, text: str) -> None:
    """Make a wheel of the package `roundings`, which is one module."""
    info = f"roundings-{version}.dist-info"
    files = {
        "roundings.py": text,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: roundings\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content.encode()).digest()).decode().rstrip("=")
        record += f"{name},sha256={digest},{len(content)}\n"
    with zipfile.ZipFile(folder / f"roundings-{version}-py3-none-any.whl", "w") as wheel:
        for name, content in (files | {f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}).items():
            wheel.writestr(name, content)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Version 2.0 does not round, 1.2 cannot be imported, 1.9 cannot be installed."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for version in VERSIONS:
        kind = "raises" if version == "1.2" else "does not round" if version.startswith("2") else "rounds"
        make_wheel(folder, version, MODULE[kind])
    (folder / "roundings-1.9-py3-none-any.whl").write_bytes(b"no wheel")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.mark.usefixtures("wheels")
def test_versions_are_sorted_as_versions_and_final() -> None:
    space = open_versions("roundings", "1.0", "2.1", device_type="cpu")
    assert space.candidates() == ["1.1", "1.2", "1.9", "1.10", "2.0", "2.1"]
    space = open_versions("roundings", "1.10", "2.0rc1", device_type="cpu")
    assert space.candidates() == ["2.0rc1"]


@pytest.mark.usefixtures("wheels")
def test_a_place_holds_the_version_that_a_process_imports() -> None:
    space = open_versions("roundings", "1.0", "2.1", device_type="cpu")
    with space.place("1.10") as place:
        assert (Path(place.site) / "roundings.py").read_text() == MODULE["rounds"]
        assert (Path(place.site) / "roundings-1.10.dist-info").is_dir()
    assert not Path(place.site).exists()
    with pytest.raises(LastbitError, match=r"pip install: .*1\.9"), space.place("1.9"):
        pass


@pytest.mark.usefixtures("wheels")
def test_a_process_that_would_import_another_version_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = open_versions("roundings", "1.0", "2.1", device_type="cpu")
    elsewhere = tmp_path / "elsewhere"
    packages._pip("install", "--quiet", "--target", str(elsewhere), "roundings==1.0")
    monkeypatch.setenv("PYTHONPATH", str(elsewhere))
    with space.place("2.0"):
        pass
    monkeypatch.setattr(packages, "_pip", lambda *arguments: "")
    with pytest.raises(LastbitError, match=r"2\.0 was installed, but a process finds version 1\.0"), space.place("2.0"):
        pass


@pytest.mark.usefixtures("wheels")
@pytest.mark.parametrize(
    ("package", "good", "bad", "message"),
    [
        ("roundings", "1.0", "one", "--bad 'one' is no version"),
        ("roundings", "2.0", "1.0", "--bad 1.0 must be a later version than --good 2.0"),
        ("roundings", "1.0", "1.0", "must be a later version"),
        ("roundings", "1.0", "3.0", r"unknown version of roundings '3.0'.*1.10, 1.2, 1.9, 2.0, 2.1"),
        ("roundings", "1.0", "2.0rc2", r"unknown version of roundings '2.0rc2'.*did you mean '2.0rc1'"),
        ("--index-url=x", "1.0", "2.0", "no name of a package"),
    ],
)
def test_bad_input_is_an_error_that_says_what(package: str, good: str, bad: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_versions(package, good, bad, device_type="cpu")


@pytest.mark.usefixtures("wheels")
def test_a_package_that_pip_does_not_find_is_an_error() -> None:
    with pytest.raises(LastbitError, match=r"pip index: .*ruondings"):
        open_versions("ruondings", "1.0", "2.0", device_type="cpu")


@pytest.mark.slow
@pytest.mark.usefixtures("wheels")
def test_the_version_that_rounds_elsewhere_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernels = tmp_path / "my kernels"
    kernels.mkdir()
    (kernels / "norms.py").write_text(KERNEL)
    monkeypatch.chdir(tmp_path)
    case = "rms_norm x=bf16[8,64] weight=bf16[64] eps=1e-06 seed=1"
    code = run_bisect("--package", "roundings", "--good", "1.0", "--bad", "2.1", case, str(kernels))
    printed = capsys.readouterr().out
    assert code == 0
    assert "First bad version  2.0" in printed
    assert "pip install --no-deps --target roundings-2.0 roundings==2.0" in printed
    assert f"PYTHONPATH=roundings-2.0 lastbit verify '{kernels}::norm' '{case}'" in printed
    skipped = [line for line in printed.splitlines() if " skipped " in line]
    assert any("a_module_that_is_missing" in line for line in skipped if "1.2" in line)
    assert any("pip install" in line for line in skipped if "1.9" in line)
    assert "2.0rc1" not in printed


def test_the_records_name_the_version_that_ran(tmp_path: Path) -> None:
    info = tmp_path / "triton-2.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: triton\nVersion: 2.5\n")
    environment = environment_of(Config(folder="", site=(str(tmp_path),)))
    assert environment["triton"] == "2.5"
    assert environment["numpy"] == numpy.__version__
