"""README's commands as they stand there, on Pythons that a newcomer has: the system's, and one that somebody built."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORK_ON_IT = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Work on lastbit")[2].partition("\n## ")[0]
COMMANDS = re.findall(r"^    (.*nox -s .*)$", WORK_ON_IT, re.MULTILINE)

OUR_PYTHON = Path(sys.base_prefix) / "bin" / "python3"
PYTHONS = {"the system's": Path("/usr/bin/python3"), "this one": OUR_PYTHON}
USABLE = "import ensurepip, sys; sys.exit(sys.version_info < (3, 11))"

NOX = {
    "nox.py": "import sys\n\ndef main():\n    print('nox', *sys.argv[1:])\n",
    "nox-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: nox\nVersion: 1\n",
    "nox-1.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "nox-1.dist-info/entry_points.txt": "[console_scripts]\nnox = nox:main\n",
    "nox-1.dist-info/RECORD": "",
}
"""A package of that name which prints what it is asked: the real one would come from the network."""


def test_continuous_integration_runs_them_as_they_stand() -> None:
    assert len(COMMANDS) == 2
    assert set(COMMANDS) <= set((ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("python", PYTHONS.values(), ids=PYTHONS)
def test_they_need_no_environment_made_beforehand(python: Path, tmp_path: Path) -> None:
    if subprocess.run([python, "-c", USABLE], capture_output=True, check=False).returncode:
        pytest.skip(f"{python} is older than Python 3.11, or has no venv")
    with zipfile.ZipFile(tmp_path / "nox-1-py3-none-any.whl", "w") as wheel:
        for name, text in NOX.items():
            wheel.writestr(name, text)
    environment = {"PATH": f"{python.parent}{os.pathsep}/usr/bin{os.pathsep}/bin", "HOME": str(tmp_path)}
    environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    environment["PIP_REQUIRE_VIRTUALENV"] = "1"  # refused as by Debian's Python, which nothing here is to change
    done = subprocess.run(
        ["bash", "-ec", "\n".join(COMMANDS)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["nox -s verify", "nox -s tests"]
