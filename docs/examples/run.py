"""Run the commands in docs/explain.md and the sample of README.md, and write what they print into both.

Run `python docs/examples/run.py`, or with `sample` for README's alone, with the versions of constraints.txt: another
Hypothesis draws other cases. A command is an HTML comment, `<!-- $ lastbit … -->`; the block after it is replaced. The
commands run in this folder; `gradient/` is made here of lastbit's own kernels and one planted fault of tests/faults.
The kernel of the sample is README's own, under another claim.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE = HERE.with_name("explain.md")
PLANTED = {"gradient": "moe_lora_backward: gate for intermediate"}
_COMMAND = re.compile(r"(<!-- \$ (?P<command>.*?) -->\n+```\n).*?(\n```)", re.DOTALL)


def plant(folder: str, name: str) -> None:
    """Copy lastbit's kernels with a fault in them."""
    from tests.faults.catalogue import FAULTS
    from tests.faults.plant import FOLDER, mutated, read_sources

    fault = next(fault for fault in FAULTS if str(fault) == name)
    shutil.rmtree(HERE / folder, ignore_errors=True)
    shutil.copytree(FOLDER, HERE / folder, ignore=shutil.ignore_patterns("__pycache__", "external"))
    for file, text in mutated(fault, read_sources()).items():
        (HERE / folder / file).write_text(text)


def printed(command: str, folder: Path = HERE) -> str:
    """What a command prints in a folder, without blanks at the ends of lines."""
    words = [sys.executable, "-m", "lastbit", *shlex.split(command)[1:]]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "harness" / "checkout"), "COLUMNS": "100"}
    environ.pop("TRITON_INTERPRET", None)
    began = time.perf_counter()
    done = subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    print(f"{time.perf_counter() - began:6.1f} s, exit code {done.returncode}: {command}", flush=True)
    return "\n".join(line.rstrip() for line in (done.stdout + done.stderr).strip().splitlines())


def findings(text: str) -> str:
    """The FAILED blocks of a run's output, where it has any."""
    found = re.findall(r"^(?:FAILED|ERRORED)  \S.* of \w+ on .*(?:\n.+)*", text, re.MULTILINE)
    return "\n\n".join(found) or text


def write_sample() -> None:
    """Write the table and the findings of README's kernel into its sample, whose options of commands are cut."""
    page = ROOT / "README.md"
    text = page.read_text()
    source = text.partition("```python\nimport torch\nfrom lastbit ")[2].partition("```")[0]
    before, _, after = text.partition("## Reading the output")
    head, fence, rest = after.partition("```\n")
    with TemporaryDirectory() as folder:
        (Path(folder) / "my_kernels").mkdir()
        claimed = source.replace('contract="fp32_multiply"', 'contract="native_multiply"')
        Path(folder, "my_kernels", "norms.py").write_text(f"import torch\nfrom lastbit {claimed}")
        shown = printed("lastbit verify my_kernels --profile smoke --keep-going -v", Path(folder))
    table = re.search(r"^  stage .*?(?=\n\n)", shown, re.MULTILINE | re.DOTALL)
    assert table, shown
    found = re.sub(r"(::my_rms_norm '[^']*') .*", r"\1 …", findings(shown))
    page.write_text(f"{before}## Reading the output{head}{fence}{table[0]}\n\n{found}\n{rest[rest.index('```') :]}")


def main() -> None:
    sys.path[:0] = [str(ROOT / "harness" / "checkout"), str(ROOT)]
    write_sample()
    if sys.argv[1:] == ["sample"]:
        return
    for folder, name in PLANTED.items():
        plant(folder, name)
    text = PAGE.read_text()
    PAGE.write_text(_COMMAND.sub(lambda found: found[1] + findings(printed(found["command"])) + found[3], text))
    for folder in PLANTED:
        shutil.rmtree(HERE / folder)
    shutil.rmtree(HERE / ".lastbit", ignore_errors=True)


if __name__ == "__main__":
    main()
