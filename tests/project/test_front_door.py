"""README.md and the pages that it opens say what is true: every command of theirs runs, and prints what they show.

`python docs/examples/run.py` writes the samples anew.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from glob import glob
from pathlib import Path

import pytest
import yaml

from docs.examples import run
from docs.examples.run import DOORS, FOLLOWED, begin, change, commands, excerpt, main, printed, steps, unhurried
from lastbit.config import Config
from lastbit.errors import LastbitError
from lastbit.verify.project import Project, open_project

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
OPS = {path.stem for path in (ROOT / "references").glob("[!_]*.py")}

CASES = (
    "rms_norm x=bf16[4,64] weight=bf16[64] eps=1e-06 seed=1",
    "rms_norm x=bf16[4,64]:tiny weight=bf16[64] eps=1e-06 seed=2",
)
"""What commands that would choose cases are given, so that all pages take a minute."""

EXIT_CODES = {
    "README.md": [1, 1, 1, 1, 0],
    "docs/test_my_kernel.md": [1, 0, 0, 0, 0],
    "docs/gate_pull_requests.md": [1, 0, 1, 1, 0],
    "docs/judge_kernels.md": [0, 1, 1, 0],
}
"""Exit codes of the commands of each page, in their order: on README.md the kernel fails."""


def on_few_cases(command: str) -> str:
    if command.startswith("lastbit judge"):
        few = command.replace("*.py", f"*.py '{CASES[1]}'") + " -n 1"
        return f"{few} --explain 0" if "--json" in command else unhurried(few)  # the sample has the line
    if command.startswith(("lastbit verify", "lastbit identify")) and "'" not in command:
        return f"{command} --cases few.txt" + (" -n 1" if "verify" in command else "")
    return command


def test_the_readme_has_at_most_900_words() -> None:
    assert len(README.split()) <= 900


@pytest.mark.slow
@pytest.mark.parametrize("page", FOLLOWED)
def test_every_command_of_a_page_does_what_the_page_says(
    page: str, tmp_path: Path, forked_lastbit: Callable[..., tuple[int, str]]
) -> None:
    """The first of README.md and those that are not lastbit's in processes of their own, the others in forks."""

    def done(command: str) -> tuple[int, str]:
        words = [found for word in shlex.split(command) for found in sorted(glob(word, root_dir=tmp_path)) or [word]]
        if words[0] != "lastbit" or (page == "README.md" and not exit_codes):
            return printed(command, tmp_path)
        code, said = forked_lastbit(words[1:], tmp_path, COLUMNS="100")
        return code, "\n".join(line.rstrip() for line in said.splitlines())

    begin(page, tmp_path)
    (tmp_path / "few.txt").write_text("\n".join(CASES))
    for program in tmp_path.glob("*.py"):
        program.write_text(program.read_text().replace('profile="smoke"', f"lines={CASES[1:]}, workers=1, explain=0.0"))
    todo, exit_codes, said = commands(page), [], ""
    for kind, match in steps(page):
        if kind == "diff":
            change(tmp_path, match["diff"])
        elif kind == "sample":
            shown = match["sample"].rstrip()
            assert excerpt(shown, match["beginnings"]) == shown
            excerpt(said, match["beginnings"])  # an error where a line of the sample is not printed any more
        elif kind == "command" and (command := match["line"] or match["quoted"]) in todo:
            exit_code, said = done(on_few_cases(command))
            exit_codes.append(exit_code)
    assert exit_codes == EXIT_CODES[page]


def test_a_sample_that_cannot_be_written_keeps_no_other_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where a judge finds no line; it is given time to."""
    said: list[str] = []

    def printed(command: str, folder: Path) -> tuple[int, str]:
        said.append(command)
        return 0, "PASSED  k.py"

    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(run, "printed", printed)
    for name, beginning in {"one.md": "line", "two.md": "PASSED"}.items():
        (tmp_path / name).write_text(f"    lastbit judge k.py\n\n<!-- printed: {beginning} -->\n\n```\nold\n```\n")
    assert main(["one.md", "two.md"]) == 1
    assert "old" in (tmp_path / "one.md").read_text() and "\nPASSED  k.py\n" in (tmp_path / "two.md").read_text()
    assert said == ["lastbit judge k.py --explain 120"] * 2
    assert "one.md is as it was: no line begins with 'line'" in capsys.readouterr().err


def test_the_readme_opens_every_door_with_a_command_that_the_door_has() -> None:
    for door in DOORS:
        (row,) = re.findall(rf"^\|.*\({door}\).*\|$", README, re.MULTILINE)
        command = row.split("`")[1]
        assert any(theirs.startswith(command) for theirs in commands(door))


def test_continuous_integration_runs_what_its_page_shows() -> None:
    """The essential line of either file, for the base that its server names."""
    (shown,) = (command for command in commands("docs/gate_pull_requests.md") if "--base" in command)
    github = yaml.safe_load((ROOT / "docs/ci/github-actions.yml").read_text())["jobs"]["verify"]["steps"]
    gitlab = yaml.safe_load((ROOT / "docs/ci/gitlab-ci.yml").read_text())["lastbit:merge-request"]["script"]
    run = [step["run"] for step in github if "--base" in step.get("run", "")] + gitlab
    assert [re.sub(r'"\$\w+"', "origin/main", line) for line in run] == [shown, shown]


def test_the_pages_name_every_op() -> None:
    assert f"[{len(OPS)} operations](docs/contracts.md)" in README
    table = (ROOT / "docs/overview.md").read_text(encoding="utf-8").partition("## Which ops")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| .*? \|", table, re.MULTILINE)))) == OPS


def test_every_contract_that_has_owners_is_one() -> None:
    """A contract of the op in the heading, of its gradient, or of the chain that the row names."""
    project = open_project(Config(folder=""))
    page = (ROOT / "docs/contracts.md").read_text(encoding="utf-8")
    found = 0
    for section in page.split("\n## ")[1:]:
        op = section.split()[0].rstrip(",")
        for row in re.findall(r"^\| (?!-).*\|$", section, re.MULTILINE):
            own = [name for name in re.findall(r"\(`(\w+)`\)", row) if name in OPS] or [op, f"{op}_backward"]
            for name in re.findall(r"(?<=\| )`([^`…]+)`(?= \|| with| \()", row):
                assert any(is_contract(project, one, name) for one in own if one in OPS), f"{op}: {name}"
                found += 1
    assert found > 40


def is_contract(project: Project, op: str, name: str) -> bool:
    try:
        project.op(op).contract(name)
    except LastbitError:
        return False
    return True


def test_the_glossary_explains_fifteen_words_at_most() -> None:
    words = re.findall(r"^\*\*(.*?)\.\*\* ", (ROOT / "docs/glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert 0 < len(words) == len(set(words)) <= 15
