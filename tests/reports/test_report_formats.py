"""Reports for machines and web pages: valid, complete, and safe whatever a kernel is called or raises."""

import html
import io
import json
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from markdown_it import MarkdownIt
from packaging.requirements import Requirement
from rich.console import Console

from lastbit.cli import make_parser
from lastbit.errors import LastbitError
from lastbit.reports import alerts, junit, markdown, records
from lastbit.reports.terminal import print_run
from lastbit.result import Finding, Verdict
from lastbit.run import Power, Run
from tests.reports.test_reports import bare, failed, full_run, passed

ROOT = Path(__file__).resolve().parents[2]
NASTY = "k|`x` <script>alert(1)</script> @all [a](b) \x00\x1b[31m\ud800\n*y* ::error:: 100%, $z$"


def nasty() -> Run:
    """Make a run whose kernel and reason hold everything that a format could take for its own."""
    return Run(
        (bare(Verdict.ERRORED, NASTY, kernel=NASTY, group=NASTY), failed(kernel=NASTY)), environment={NASTY: NASTY}
    )


def many(count: int) -> Run:
    return Run((*(failed(kernel=f"kernel{n}") for n in range(count)), passed(kernel="fine")))


# Markdown


def rendered(text: str) -> str:
    """As HTML, with tables, and with the tags that the page itself may use."""
    return str(MarkdownIt("gfm-like", {"linkify": False}).render(text))


def test_page_begins_with_the_verdict_and_has_findings_before_tables() -> None:
    page = markdown.page(full_run())
    assert page.splitlines()[0].startswith("## 💥 ERRORED · kernels: 2 passed, 2 inconclusive, 1 failed, 1 errored · ")
    parts = ["ERRORED broken", "FAILED wrong", "7 of 512 elements", "### Stages", "### Not run"]
    parts += ["### What this run could not have seen", "Environment"]
    places = [page.index(part) for part in parts]
    assert places == sorted(places)


def test_tables_of_failed_kernels_are_open_and_others_folded() -> None:
    page = markdown.page(full_run())
    assert r"#### FAILED wrong\[x\] on cpu" in page
    assert "<summary>PASSED triton" in page
    assert page.count("<details>") == page.count("</details>") > 0


def test_many_findings_are_folded() -> None:
    page = markdown.page(many(5))
    assert page.count("### ❌ FAILED") == 3
    assert page.count("<summary>FAILED kernel") == 2


def test_worse_kernels_come_before_findings() -> None:
    page = markdown.page(Run((failed(kernel="k"),)), base=Run((passed(kernel="k"),)))
    places = [
        page.index(part) for part in ("### Against the base: WORSE", "#### WORSE k PASSED → FAILED", "### ❌ FAILED k")
    ]
    assert places == sorted(places)
    assert "0 → 7" in page


def test_names_and_reasons_are_shown_as_they_are() -> None:
    page = rendered(markdown.page(nasty(), base=nasty()))
    assert "<script>" not in page
    assert "<em>y" not in page
    assert 'href="b"' not in page
    assert "@all" not in re.sub(r"<code.*?</code>", "", page, flags=re.DOTALL)  # would notify them
    assert page.count("alert(1)") > 3


def on_a_terminal(run: Run) -> str:
    console = Console(file=io.StringIO(), width=100)
    print_run(run, console, verbose=2)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("form", [on_a_terminal, markdown.page, junit.document, alerts.workflow_commands])
def test_no_character_of_a_name_or_reason_is_a_command(form: Callable[[Run], str]) -> None:
    """What names and messages hold is shown escaped, and never sent to a terminal or left out."""
    text = form(nasty())
    assert {c for c in text if not c.isprintable()} <= {"\n", "\u200b"}  # Markdown puts the latter behind an @
    assert "\\x1b" in text.replace("\\\\", "\\")
    assert "\\ud800" in text.replace("\\\\", "\\")


@pytest.mark.parametrize("text", ["a|b", "``", "`a", "a` `", "x ``` y", "<b>", "\\|"])
def test_code_in_a_table_is_one_cell(text: str) -> None:
    page = rendered(markdown.table(("a", "b"), [(markdown.code(text), "end")], left=1))
    first, last = re.findall(r"<td.*?>(.*?)</td>", page)
    assert html.unescape(first.removeprefix("<code>").removesuffix("</code>")) == text
    assert last == "end"


def test_block_of_code_cannot_be_left() -> None:
    assert "<h1>" not in rendered(markdown.block_of_code("a\n```\n# b"))


@pytest.mark.parametrize("count", [50, 200])
def test_page_keeps_below_the_limit_and_says_what_is_missing(count: int) -> None:
    page = markdown.page(many(count), base=many(0))
    assert len(page.encode()) <= markdown.LIMIT
    assert page.count("<details>") == page.count("</details>")
    last = page.splitlines()[-1]
    found = len(re.findall("### ❌ FAILED|<summary>FAILED kernel[0-9]+, group", page))
    assert re.fullmatch(r"\*\*Left out\*\* to stay below 60 KiB: .*\. `lastbit report` shows all of them\.", last)
    left_out = {what: int(n) for n, what in re.findall(r"([\d,]+) (kernel|finding|stage table)", last)}
    assert left_out.get("finding", 0) + found == count
    assert "### Stages" in page
    assert "Environment" in page


def test_page_that_fits_leaves_nothing_out() -> None:
    assert "Left out" not in markdown.page(full_run())


def test_message_as_long_as_a_file_is_clipped() -> None:
    page = markdown.page(Run((bare(Verdict.ERRORED, "x" * 100_000),)))
    assert "(98,500 more characters)" in page
    assert "lastbit verify" in page


# JUnit

SCHEMA = {
    "testsuites": ({"name", "time", "tests", "failures", "errors"}, {"testsuite"}),
    "testsuite": (
        {"name", "tests", "failures", "errors", "skipped", "time", "timestamp", "hostname", "id", "package", "file"},
        {"properties", "testcase", "system-out", "system-err"},
    ),
    "properties": (set(), {"property"}),
    "property": ({"name", "value"}, set()),
    "testcase": ({"name", "classname", "time"}, {"skipped", "error", "failure", "system-out", "system-err"}),
    "failure": ({"type", "message"}, set()),
    "error": ({"type", "message"}, set()),
    "skipped": ({"type", "message"}, set()),
}
"""Element → its attributes and children, in junit-10.xsd of jenkinsci/xunit-plugin."""


def suites(run: Run) -> dict[str, ElementTree.Element]:
    root = ElementTree.fromstring(junit.document(run).encode())
    return {suite.get("name", ""): suite for suite in root}


def cases(suite: ElementTree.Element) -> dict[str, ElementTree.Element]:
    return {case.get("name", ""): case for case in suite.iter("testcase")}


@pytest.mark.parametrize("run", [full_run(), nasty(), many(3), Run(())])
def test_junit_keeps_to_the_schema(run: Run) -> None:
    root = ElementTree.fromstring(junit.document(run).encode())
    for element in root.iter():
        attributes, children = SCHEMA[element.tag]
        assert set(element.keys()) <= attributes
        assert {child.tag for child in element} <= children
    for name, tag in (("failures", "failure"), ("errors", "error")):
        assert int(root.get(name, "")) == len(list(root.iter(tag)))
        assert all(int(suite.get(name, "")) == len(list(suite.iter(tag))) for suite in root)
    assert int(root.get("tests", "")) == len(list(root.iter("testcase")))


def test_junit_has_a_suite_per_op_and_device_and_a_case_per_kernel_and_group() -> None:
    found = suites(full_run())
    assert list(found) == ["rms_norm on cpu", "rms_norm on cuda:0", "the run"]
    wrong = cases(found["rms_norm on cpu"])["wrong[x]: odd [strides]"]
    [failure] = wrong
    assert failure.tag == "failure"
    assert failure.get("type") == "outside"
    assert "7 of 512 elements" in failure.get("message", "")
    assert "seed=17' --device cpu" in (failure.text or "")
    assert "fp32_multiply" in (failure.text or "")
    assert wrong.get("time") == "1.000"
    assert cases(found["rms_norm on cpu"])["broken: plain"][0].get("message") == "RuntimeError: bad [shape]"


def test_group_is_skipped_only_if_no_case_of_it_was_decided() -> None:
    turned_down = bare(Verdict.UNSUPPORTED, "no residual")
    found = cases(suites(Run((turned_down, passed(group="other"))))["rms_norm on cpu"])
    assert [[e.tag for e in case] for case in found.values()][:2] == [["skipped"], []]
    assert "no residual" in next(iter(found.values()))[0].get("message", "")
    [only, *_] = cases(suites(Run((turned_down, passed())))["rms_norm on cpu"]).values()
    assert list(only) == []


def test_inconclusive_kernel_fails_a_test_case_of_its_own() -> None:
    found = cases(suites(full_run())["rms_norm on cpu"])
    [failure] = found["blind: told from other contracts"]
    assert failure.get("type") == "INCONCLUSIVE"
    assert "blind on cpu with bf16 was never told from fp32_multiply" in failure.get("message", "")
    assert "wrong[x]: told from other contracts" not in found


def test_junit_fails_exactly_if_the_run_does() -> None:
    for run in (
        full_run(),
        Run((passed(),)),
        many(1),
        Run((passed(),), broken="ended early"),
        Run((passed(),), power=(Power(passed().kernel, "cpu", "bf16", "x", 1, 0, True),)),
    ):
        root = ElementTree.fromstring(junit.document(run).encode())
        bad = int(root.get("failures", "")) + int(root.get("errors", ""))
        assert bool(bad) == bool(run.exit_code)


def test_what_was_not_run_is_skipped_with_the_reason() -> None:
    [skipped] = cases(suites(full_run())["the run"])["slow on cpu"]
    assert (skipped.tag, skipped.get("message")) == ("skipped", "declared for cuda only")


def test_figures_and_environment_are_properties() -> None:
    suite = suites(replace(full_run(), environment={"torch": "2.13"}))["rms_norm on cpu"]
    found = {p.get("name"): p.get("value") for p in suite.iter("property")}
    assert found["torch"] == "2.13"
    assert found["wrong[x]/output/bf16/outside"] == "7"
    assert found["blind/inv_rms/fp32/verdict"] == "PASSED"


# Notices, SARIF, annotations


def log(run: Run) -> dict[str, object]:
    [only] = json.loads(alerts.sarif(run))["runs"]
    return dict(only)


def test_one_alert_per_problem_and_per_inconclusive_kernel() -> None:
    found = alerts.alerts(full_run())
    assert [(a.kind, a.level) for a in found] == [
        ("errored", "error"),
        ("outside", "error"),
        ("inconclusive", "warning"),
        ("inconclusive", "warning"),
    ]
    assert found[1].place == alerts.Location("kernels/rms_norm.py", 108)
    assert "never told from" in "".join(a.text for a in found[2:])


def test_place_is_relative_to_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "deep").mkdir()
    monkeypatch.chdir(tmp_path / "deep")
    [inside] = alerts.alerts(Run((failed(source=f"{tmp_path}/my kernels/n.py:7"),)))
    assert inside.place == alerts.Location("my kernels/n.py", 7)
    [outside] = alerts.alerts(Run((failed(source="/elsewhere/n.py:7"),)))
    assert outside.place == alerts.Location("/elsewhere/n.py", 7)
    [nowhere] = alerts.alerts(Run((failed(source=""),)))
    assert nowhere.place.path == ""


def test_sarif_result(monkeypatch: pytest.MonkeyPatch) -> None:
    source = str(Path.cwd() / "my kernels" / "n.py") + ":7"
    found = log(Run((failed(source=source), failed(group="other", source=source))))
    [result] = found["results"]  # type: ignore[misc]
    location = result["locations"][0]
    assert location["physicalLocation"] == {
        "artifactLocation": {"uri": "my%20kernels/n.py", "uriBaseId": "SRCROOT"},
        "region": {"startLine": 7},
    }
    assert (result["ruleId"], result["level"]) == ("outside", "error")
    assert "lastbit verify" in result["message"]["text"].splitlines()[-1]
    assert found["originalUriBaseIds"].keys() == {"SRCROOT"}  # type: ignore[attr-defined]


def test_sarif_rules_are_those_of_the_results() -> None:
    found = log(full_run())
    rules = found["tool"]["driver"]["rules"]  # type: ignore[index]
    assert all(rules[r["ruleIndex"]]["id"] == r["ruleId"] for r in found["results"])  # type: ignore[attr-defined]
    assert {r["level"] for r in found["results"] if r["ruleId"] == "inconclusive"} == {"warning"}  # type: ignore[attr-defined]


def test_sarif_outside_the_repository_is_absolute() -> None:
    [result] = log(Run((failed(source="/elsewhere/n.py:7"),)))["results"]  # type: ignore[misc]
    assert result["locations"][0]["physicalLocation"]["artifactLocation"] == {"uri": "file:///elsewhere/n.py"}


def test_sarif_fingerprint_outlives_line_and_case() -> None:
    def fingerprint(**changes: object) -> str:
        [result] = log(Run((failed(**changes),)))["results"]  # type: ignore[misc]
        return str(result["partialFingerprints"])

    assert fingerprint() == fingerprint(source=str(Path.cwd() / "kernels" / "rms_norm.py") + ":9", case="x seed=2")
    others = {fingerprint(kernel="other"), fingerprint(findings=(Finding("rows", "inv_rms", "bad"),)), fingerprint()}
    assert len(others) == 3


def test_sarif_says_that_a_run_broke() -> None:
    [invocation] = log(Run((passed(),), broken="ended early"))["invocations"]  # type: ignore[misc]
    assert not invocation["executionSuccessful"]
    assert invocation["toolExecutionNotifications"][0]["message"]["text"] == "ended early"


def test_every_kind_of_finding_has_a_rule() -> None:
    folders = (ROOT / "harness" / name for name in ("verify", "calling", "judging", "inputs"))
    source = "".join(path.read_text() for folder in folders for path in folder.glob("*.py"))
    kinds = set(re.findall(r'Finding\(\s*"(\w+)"|^KIND = "(\w+)"|"(special)" if', source, re.MULTILINE))
    found = {kind for groups in kinds for kind in groups if kind} | {"outside", "wrote_outside", "mutated_input"}
    found |= {"rebound_input"}
    assert found >= {"rows", "placement", "unwritten", "process_state"}
    assert found <= set(alerts.RULES)


def test_annotations_are_one_line_each() -> None:
    finding = Finding("outside", "output", "50% wrong,\r\nreally: yes")
    result = failed(kernel="a:b,c%", findings=(finding,), source=str(Path.cwd() / "a,b.py") + ":3")
    [line] = alerts.workflow_commands(Run((result,))).splitlines()
    assert line.startswith("::error file=a%2Cb.py,line=3,title=FAILED a%3Ab%2Cc%25%3A output::keeps: ")
    assert "50%25 wrong,%0D%0Areally: yes%0A" in line


def test_annotations_of_an_inconclusive_kernel_are_warnings() -> None:
    run = Run((passed(),), power=(Power(passed().kernel, "cpu", "bf16", "other", 1, 0, True),))
    assert alerts.workflow_commands(run).startswith("::warning file=kernels/rms_norm.py,line=108,title=INCONCLUSIVE ")


def test_broken_run_is_an_annotation_without_a_place() -> None:
    assert alerts.workflow_commands(Run((passed(),), broken="ended early")) == "::error title=lastbit::ended early\n"


@pytest.mark.parametrize("text", [alerts.workflow_commands(nasty()), *alerts.workflow_commands(nasty()).splitlines()])
def test_nothing_in_an_annotation_is_a_command(text: str) -> None:
    assert all(re.match(r"::(error|warning) (file|title)=", line) for line in text.splitlines())


@pytest.mark.parametrize("line", ['{"x": "' + "y" * 5000, json.dumps(["y" * 5000])])
def test_malformed_line_is_shown_in_part(line: str) -> None:
    with pytest.raises(LastbitError, match="more characters") as error:
        records.parse(line.encode(), "here")
    assert line[:200] in str(error.value)
    assert len(str(error.value)) < 400


# Recipes

RECIPES = sorted((ROOT / "docs" / "ci").glob("*.yml"))


def lastbit_commands(text: str) -> Iterator[list[str]]:
    """Yield the arguments of every `lastbit` command of a file, outside of comments; continued lines are one."""
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        if found := re.match(r"\s*(?:- )?(?:run: )?lastbit (.*)", line):
            words = shlex.split(found[1], comments=True)
            end = next((n for n, word in enumerate(words) if word in (">", ">>", "|", "||", "&&", ";")), len(words))
            yield words[:end]


@pytest.mark.parametrize("path", [*RECIPES, ROOT / "docs" / "gate_pull_requests.md"], ids=lambda path: path.name)
def test_commands_of_a_recipe_are_commands_of_lastbit(path: Path) -> None:
    commands = list(lastbit_commands(path.read_text()))
    assert {words[0] for words in commands} >= {"verify", "diff" if path.suffix == ".md" else "report"}
    for words in commands:
        _, rest = make_parser().parse_known_args(words)
        assert not rest, f"lastbit {shlex.join(words)}: {rest} would go to pytest"


def test_both_servers_have_a_recipe() -> None:
    assert [path.name for path in RECIPES] == ["github-actions.yml", "gitlab-ci.yml"]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_recipe_is_yaml(path: Path) -> None:
    assert isinstance(yaml.safe_load(path.read_text()), dict)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_recipe_installs_lastbit_and_not_the_project_that_it_is_copied_to(path: Path) -> None:
    """PyTorch comes first, in its build for CPUs: pip would fetch that of CUDA for lastbit."""
    lines = re.findall(r"^[ -]*python -m pip install (.+)$", path.read_text(), re.MULTILINE)
    installs = [shlex.split(line) for line in lines]
    assert installs[0] == ["torch", "--index-url", "https://download.pytorch.org/whl/cpu"]
    requirement = Requirement(" ".join(installs[1]))
    assert (requirement.name, requirement.extras) == ("lastbit", {"report"})
    assert requirement.url and requirement.url.startswith("git+https://")
    assert all("." not in words for words in installs)


def test_recipes_report_after_a_failure() -> None:
    github, gitlab = (path.read_text() for path in RECIPES)
    assert len(re.findall(r"if: \$\{\{ !cancelled\(\) \}\}", github)) == 3  # verdicts, report, records
    assert gitlab.index("after_script:") < gitlab.index("lastbit report")
    assert "when: always" in gitlab


def test_token_of_a_pull_request_cannot_write_where_its_code_runs() -> None:
    verify, publish = RECIPES[0].read_text().split("  publish:")
    assert "write" not in re.sub("#.*", "", verify)
    assert "lastbit verify" not in publish
    assert "pip install" not in publish
