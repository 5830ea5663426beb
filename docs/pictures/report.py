"""Draw report.svg: what `lastbit verify -v` prints of the kernel in examples/fp32_weight, its stages and its findings.

Run `python docs/pictures/report.py`; it verifies that kernel. The legend and what was not run are left out.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 116
SHOWN = ("Stages", "FAILED")
"""How the blocks begin that are shown."""


def printed(folder: Path) -> str:
    """What is printed of the run that is kept in a folder, with its colours."""
    from lastbit.reports.records import read
    from lastbit.reports.terminal import print_run

    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=WIDTH)
    print_run(read(folder), console, verbose=1)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def drawn(text: str) -> str:
    blocks = [block for block in text.split("\n\n") if Text.from_ansi(block).plain.lstrip().startswith(SHOWN)]
    console = Console(record=True, file=io.StringIO(), width=WIDTH)
    console.print(Text.from_ansi("\n\n".join(blocks)), soft_wrap=True)
    return console.export_svg(title="lastbit verify fp32_weight --profile smoke -v")


def main() -> None:
    sys.path[:0] = [str(ROOT / "harness" / "checkout"), str(ROOT)]
    examples = ROOT / "docs" / "examples"
    with TemporaryDirectory() as folder:
        environ = {**os.environ, "PYTHONPATH": str(ROOT / "harness" / "checkout")}
        environ.pop("TRITON_INTERPRET", None)
        words = [sys.executable, "-m", "lastbit", "verify", str(examples / "fp32_weight"), "--profile", "smoke"]
        subprocess.run(words, cwd=folder, env=environ, stdout=subprocess.DEVNULL, check=False)
        os.chdir(examples)
        (run,) = Path(folder, ".lastbit", "runs").iterdir()
        svg = drawn(printed(run).replace(f"{examples}/", ""))
    Path(__file__).with_suffix(".svg").write_text(svg)


if __name__ == "__main__":
    main()
