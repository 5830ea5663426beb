"""Run the commands of README.md, its three doors and docs/explain.md, and write what they print into these pages.

Run `python docs/examples/run.py`, or with names of pages for these alone (`README.md`), with the versions of
constraints.txt: another Hypothesis draws other cases. Nothing of a sample is written by hand. A page that cannot be
written anew is named at the end, the others are written all the same, and the exit code is 1.

README.md and its doors are followed as a reader would, each in a folder of its own: a file is a block after its name
(`` `norms.py`: ``), a block of `diff` changes it, an indented or quoted command runs, and `<!-- printed: A, B -->`
stands before a block that gets the paragraphs of what the last command printed which begin with the patterns A and B.

In docs/explain.md a command is an HTML comment, `<!-- $ lastbit … -->`; the block after it is replaced. Commands run
in this folder; those of `PLANTED` are made here of lastbit's own kernels and one planted fault of tests/faults.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DOORS = ("docs/test_my_kernel.md", "docs/gate_pull_requests.md", "docs/judge_kernels.md")
FOLLOWED = ("README.md", *DOORS)
EXPLAIN_MD = "docs/explain.md"
PLANTED = {"gradient": "moe_lora_backward: gate for intermediate", "outside": "rms_norm: eps outside the root"}
"""Folder → the fault in it."""

UNHURRIED = " --explain 120"
"""What a judge is given besides, so that it finds the line on a busy machine, too."""

_COMMAND = re.compile(r"(<!-- \$ (?P<command>.*?) -->\n+```\n).*?(\n```)", re.DOTALL)
_STEP = re.compile(
    r"`(?P<file>[\w/]+\.py)`:\n\n```python\n(?P<content>.*?)^```"
    r"|^```diff\n(?P<diff>.*?)^```"
    r"|^<!-- printed: (?P<beginnings>.*?) -->\n\n```\n(?P<sample>.*?)^```"
    r"|^```.*?^```"
    r"|^    (?P<line>(?:lastbit|pytest|python) [^\n]*)$"
    r"|`(?P<quoted>(?:lastbit|pytest) [^`]+)`",
    re.MULTILINE | re.DOTALL,
)


def steps(page: str) -> Iterator[tuple[str, re.Match[str]]]:
    """Yield what a reader of a followed page does, in its order: `file`, `diff`, `command`, and `sample` to compare.

    What stands in depth below a door is not followed.
    """
    for match in _STEP.finditer((ROOT / page).read_text().partition("\n## In depth\n")[0]):
        for kind in ("file", "diff", "sample", "line", "quoted"):
            if match[kind] is not None:
                yield ("command" if kind in {"line", "quoted"} else kind), match


def commands(page: str) -> list[str]:
    """Return the commands of a followed page, but for those of README that a door has, too, maybe with more options."""
    found = [match["line"] or match["quoted"] for kind, match in steps(page) if kind == "command"]
    in_doors = {command for door in DOORS for command in commands(door)} if page == "README.md" else set()
    return [command for command in found if not any(theirs.startswith(command) for theirs in in_doors)]


def begin(page: str, folder: Path) -> None:
    """Write a page's files into a folder that is a repository, whose `origin/main` is that."""
    for kind, match in steps(page):
        if kind == "file":
            (folder / match["file"]).parent.mkdir(exist_ok=True)
            (folder / match["file"]).write_text(match["content"])
    (folder / ".gitignore").write_text(".lastbit\n__pycache__\n")
    name = ("-c", "user.name=main", "-c", "user.email=main@localhost", "-c", "commit.gpgsign=false")
    for words in (["init", "-q"], ["add", "."], [*name, "commit", "-qm", "main"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    subprocess.run(["git", "update-ref", "refs/remotes/origin/main", "HEAD"], cwd=folder, check=True)


def change(folder: Path, diff: str) -> None:
    """Apply a block of `diff`, which names no file, to the one file that has its lines."""
    before, after = (
        "".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] != sign) for sign in ("+", "-")
    )
    (file,) = (file for file in folder.rglob("*.py") if before in file.read_text())
    file.write_text(file.read_text().replace(before, after))


def printed(command: str, folder: Path = HERE) -> tuple[int, str]:
    """Run a command in a folder; return its exit code, and what it prints without blanks at the ends of lines."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "harness" / "checkout"), "COLUMNS": "100"}
    environ.pop("TRITON_INTERPRET", None)
    program, _, rest = command.partition(" ")
    words = [sys.executable, *{"lastbit": [str(ROOT / "harness")], "pytest": ["-m", "pytest"]}.get(program, [])]
    began = time.perf_counter()
    line = ["bash", "-c", f"{shlex.join(words)} {rest}"]
    done = subprocess.run(line, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    print(f"{time.perf_counter() - began:6.1f} s, exit code {done.returncode}: {command}", flush=True)
    return done.returncode, "\n".join(line.rstrip() for line in (done.stdout + done.stderr).strip().splitlines())


def unhurried(command: str) -> str:
    """Return a command that says the same on a machine that is slow."""
    return command + UNHURRIED if command.startswith("lastbit judge") else command


def excerpt(text: str, beginnings: str) -> str:
    """Return the paragraphs of a text that begin with these patterns, which commas separate, one after the other.

    A paragraph is a line, with those after it that are indented by a column of labels.
    """
    found, rest = [], text
    for beginning in beginnings.split(", "):
        words = r"\s+".join(beginning.split())
        paragraph = re.search(rf"^( *){words}.*(\n\1 {{8,}}\S.*)*", rest, re.MULTILINE)
        if paragraph is None:
            raise LookupError(f"no line begins with {beginning!r}, after {found}, in\n{text}")
        found.append(paragraph[0])
        rest = rest[paragraph.end() :]
    return "\n".join(found)


def follow(page: str) -> None:
    """Follow a page in a new folder as far as its last sample, and write its samples anew."""
    shown, said, todo = (ROOT / page).read_text(), "", list(steps(page))
    while todo and todo[-1][0] != "sample":
        todo.pop()
    with TemporaryDirectory() as name:
        folder = Path(name)
        begin(page, folder)
        for kind, match in todo:
            if kind == "diff":
                change(folder, match["diff"])
            elif kind == "command":
                _, said = printed(unhurried(match["line"] or match["quoted"]), folder)
            elif kind == "sample":
                fence = f"```\n{match['sample']}```"
                now = f"```\n{excerpt(said, match['beginnings'])}\n```"
                shown = shown.replace(match[0], match[0].replace(fence, now))
    (ROOT / page).write_text(shown)


def plant(folder: str, name: str) -> None:
    """Copy lastbit's kernels with a fault in them."""
    from tests.faults.catalogue import FAULTS
    from tests.faults.plant import FOLDER, mutated, read_sources

    fault = next(fault for fault in FAULTS if str(fault) == name)
    shutil.rmtree(HERE / folder, ignore_errors=True)
    shutil.copytree(FOLDER, HERE / folder, ignore=shutil.ignore_patterns("__pycache__", "external"))
    for file, text in mutated(fault, read_sources()).items():
        (HERE / folder / file).write_text(text)


def findings(text: str) -> str:
    """Return the FAILED blocks of a run's output, where it has any."""
    found = re.findall(r"^(?:FAILED|ERRORED)  \S.* of \w+ on .*(?:\n.+)*", text, re.MULTILINE)
    return "\n\n".join(found) or text


def write_examples() -> None:
    """Write what the commands of docs/explain.md print."""
    sys.path[:0] = [str(ROOT / "harness" / "checkout"), str(ROOT)]
    for folder, name in PLANTED.items():
        plant(folder, name)
    page = ROOT / EXPLAIN_MD
    text = page.read_text()
    page.write_text(_COMMAND.sub(lambda found: found[1] + findings(printed(found["command"])[1]) + found[3], text))
    for folder in PLANTED:
        shutil.rmtree(HERE / folder)
    shutil.rmtree(HERE / ".lastbit", ignore_errors=True)


def main(pages: Sequence[str]) -> int:
    """Write the samples of pages, of all by default, and return the exit code."""
    failed: dict[str, LookupError] = {}
    for page in pages or (*FOLLOWED, EXPLAIN_MD):
        try:
            write_examples() if page == EXPLAIN_MD else follow(page)
        except LookupError as error:
            failed[page] = error
    for page, error in failed.items():
        print(f"{page} is as it was: {error}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
