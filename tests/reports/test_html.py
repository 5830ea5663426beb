"""The HTML report says what the run says, in the same numbers, and is one file that asks nobody for anything."""

import base64
import hashlib
import itertools
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lastbit.errors import LastbitError
from lastbit.reports import charts, html, stage_summary, summary
from lastbit.result import CaseResult, Comparison, Finding, StageResult, Verdict
from lastbit.run import DeviceAgreement, NotRun, Power, Run, Undecidable, Unreached

NASTY = """k<b>&amp;"'</script><script>alert(1)</script>\u2028"""
CASE = "rms_norm x=bf16[4,128]@256,1:rows weight=bf16[128] eps=1e-06 seed=17"


def measured(outside: int = 0, **changes: object) -> Comparison:
    histogram = (512 - outside, outside, 0, 0, 0, 0)
    seen = Comparison(512, 500, outside, outside, 0, 4e-6, 1.0, 1e-3, -2.0, 512, 1.0, histogram, 0.5)
    return replace(seen, **changes)  # type: ignore[arg-type]


def stage(name: str = "output", dtype: str = "bf16", outside: int = 0, *, result: bool = True) -> StageResult:
    return StageResult(name, dtype, result, measured(outside), measured(outside), f"bits of {name}")


def passed(**changes: object) -> CaseResult:
    stages = (stage("inv_rms", "fp32", result=False), stage())
    base = CaseResult(
        Verdict.PASSED,
        stages,
        case=CASE,
        op="rms_norm",
        kernel="good",
        contract="native_multiply",
        device="cpu",
        dtypes="bf16",
        seconds=0.5,
    )
    return replace(base, **{"group": "plain", "source": "kernels/norms.py:7", **changes})  # type: ignore[arg-type]


def failed(**changes: object) -> CaseResult:
    own = {
        "verdict": Verdict.FAILED,
        "kernel": "wrong",
        "stages": (stage("inv_rms", "fp32", result=False), stage(outside=7)),
        "findings": (Finding("outside", "output", "7 of 512 elements have a value that is not possible."),),
        "explained_by": ("fp32_multiply",),
    }
    return passed(**{**own, **changes})


def bare(verdict: Verdict, reason: str, **changes: object) -> CaseResult:
    return passed(**{"verdict": verdict, "stages": (), "reason": reason, **changes})


def full_run() -> Run:
    """Make a run with a kernel of every fate, two devices, two ops, and names that would break a careless page."""
    small = CASE.replace("[4,128]@256,1", "[1,2]").replace("[128]", "[2]")
    other = passed(op="mask", kernel="masked", case="mask ids=int64[8,256] seed=0", dtypes="int64")
    results = (
        passed(),
        passed(device="cuda:0"),
        passed(kernel="good", case=CASE.replace("bf16", "fp16"), dtypes="fp16", stages=(stage(dtype="fp16"),)),
        failed(),
        failed(case=small, counted=False),
        bare(Verdict.UNSUPPORTED, "the kernel takes no <residual>", kernel="wrong"),
        bare(Verdict.ERRORED, "RuntimeError: bad </script><b>", kernel=NASTY),
        bare(Verdict.INCONCLUSIVE, "no element has a single legal value", kernel="vague"),
        passed(kernel="blind"),
        replace(other, stages=(replace(stage("mask", "int64"), cumulative=measured(squared_error=0.0)),)),
    )
    power = (
        Power("blind", "cpu", "bf16", "fp32_multiply", 3, 0, True),
        Power("good", "cpu", "bf16", "fp32_multiply", 3, 20, True),
        Power("good", "cpu", "fp16", "same_bits", 3, 0, False),
    )
    agreement = (DeviceAgreement("good", "inv_rms", ("cpu", "cuda:0"), 10, 7),)
    environment = {"torch": "2.13", "records": "runs/<1>", "options": "--kernels mine", "devices": "cpu, cuda:0"}
    return Run(results, power, (NotRun("slow on cpu", "declared for cuda only"),), agreement, environment)


@dataclass
class Page(HTMLParser):
    """A page as a browser without scripts would read it: its text, its tables, its scripts, its attributes."""

    text: str = ""
    tables: dict[str, list[list[str]]] = field(default_factory=dict)
    scripts: list[str] = field(default_factory=list)
    tags: list[tuple[str, Mapping[str, str | None]]] = field(default_factory=list)
    inside: str = ""

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = tag
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")
        rows = next(reversed(self.tables.values()), [])
        if tag == "tr":
            rows.append([])
        if tag in ("td", "th"):
            rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "script":
            self.scripts[-1] += data
        elif self.inside == "caption":
            self.tables[data] = []
        elif self.inside != "style":
            self.text += data
            if self.inside in ("td", "th", "button") and self.tables and list(self.tables.values())[-1]:
                list(self.tables.values())[-1][-1][-1] += data

    def attributes(self, tag: str) -> list[Mapping[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def read(text: str) -> Page:
    page = Page()
    page.feed(text)
    return page


@pytest.fixture(scope="module")
def text() -> str:
    return html.page(full_run())


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return read(text)


def test_names_cannot_leave_their_place(page: Page) -> None:
    assert len(page.scripts) == 5, "two scripts of the page, data of the page and of two ops"
    assert not any("alert(1)" in script for script in page.scripts[-2:])
    assert "b" not in {tag for tag, _ in page.tags}
    assert NASTY in page.text
    assert "RuntimeError: bad </script><b>" in page.text
    assert any(attributes.get("data-kernel") == NASTY for attributes in page.attributes("tr"))


def test_data_is_json_that_holds_the_names(page: Page) -> None:
    kinds = [attributes.get("type") for attributes in page.attributes("script")]
    data = [json.loads(script) for script, kind in zip(page.scripts, kinds, strict=True) if kind == "application/json"]
    assert NASTY in [subject["kernel"] for subject in data[-1]["subjects"]]
    assert {name for op in data[:-1] for name in op["specifications"]} == set(charts.TITLES)


def test_nothing_is_fetched(page: Page) -> None:
    fetching = [(tag, a) for tag, a in page.tags if {"src", "srcset", "action", "data"} & set(a)]
    assert fetching == []
    links = [attributes["href"] for tag, attributes in page.tags if "href" in attributes]
    assert links
    assert all(link == "data:," or str(link).startswith("#") for link in links)


def test_policy_allows_the_scripts_of_the_page_and_nothing_else(page: Page) -> None:
    [policy] = [a["content"] for a in page.attributes("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    rules = dict(rule.strip().split(maxsplit=1) for rule in policy.split(";"))
    digests = (hashlib.sha256(script.encode()).digest() for script in page.scripts[-2:])
    assert rules["script-src"].split() == [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
    assert rules["default-src"] == "'none'"
    assert "connect-src" not in rules


def test_figures_are_those_of_the_summary(page: Page) -> None:
    run = full_run()
    [expected] = stage_summary.stage_summaries(run.of("wrong", "cpu"), ["inv_rms", "output"])[1:]
    header, *rows = page.tables["Stages of rms_norm"]
    [row] = [dict(zip(header, row, strict=True)) for row in rows if row[0] == "wrong" and "output" in row]
    assert (row["values"], row["outside"], row["dtype"], row["cases"]) == ("FAILED", "7", "bf16", "1")
    assert row["rel. error"] == summary.error(expected.worst_error) == "2.0e-03"
    assert row["mismatch"] == summary.share(7, 512)
    assert row["bias"] == summary.signed(expected.typical_bias)
    assert ["wrong", "cpu", "(inv_rms)", "fp32"] in [row[:4] for row in rows]


def test_worst_comes_first(page: Page) -> None:
    header, *rows = page.tables["Kernels, worst first"]
    verdicts = [row[header.index("verdict")] for row in rows]
    assert verdicts == ["ERRORED", "FAILED", "INCONCLUSIVE", "INCONCLUSIVE", "PASSED", "PASSED", "PASSED"]
    said = (
        "1 of 7 kernels errored, 1 failed, 2 inconclusive",
        "RuntimeError",
        "keeps fp32_multiply",
        "Not run",
        "Search",
    )
    places = [page.text.index(words) for words in said]
    assert places == sorted(places)


def test_what_was_judged_on_few_cases_or_hardly_decided_is_not_green() -> None:
    declined = bare(Verdict.UNSUPPORTED, "odd", kernel="picky", declined=True)
    vague = bare(Verdict.INCONCLUSIVE, "no element has a single legal value", kernel="vague")
    open_stage = replace(stage("lse", "fp32"), cumulative=measured(decided=1), isolated=measured(decided=1))
    results = (
        *(passed(kernel="picky"), passed(kernel="picky"), declined),
        *(passed(kernel="vague"), vague, vague),
        passed(kernel="open", stages=(open_stage,)),
    )
    undecidable = (Undecidable("open", "cpu", "lse", "fp32"),)
    run = Run((passed(), *results), undecidable=undecidable)
    assert run.overall is Verdict.PASSED
    assert [one.short for one in stage_summary.standings(run).values()] == [
        "",
        "on 2 of 3 cases",
        "on 1 of 3 cases, the others decided nothing",
        "0.2 % of lse (fp32) decided",
    ]
    text = html.page(run)
    assert "3 kernels passed on few cases, or with few elements decided" in read(text).text
    table = text[text.index("Kernels, worst first") : text.index('id="op-1"')]
    kinds = re.findall(r'data-kernel="(\w+)".*?"verdict (\w+)"', table)
    assert dict(kinds) == {"good": "passed", "picky": "partly", "vague": "partly", "open": "partly"}
    assert '<span class="badge verdict passed">PASSED' in text
    alone = html.page(Run(results, undecidable=undecidable))
    assert '<span class="badge verdict partly">PASSED' in alone
    assert '"verdict passed' not in alone[: alone.index('id="op-1"')]


def test_finding_has_its_repro_line(page: Page) -> None:
    smallest = full_run().results[4]
    assert summary.repro_line(smallest, "--kernels mine") in page.text
    assert "7 of 512 elements have a value that is not possible." in page.text
    assert "fp32_multiply: this contract of the op allows every bit" in page.text


def test_what_could_not_be_seen(page: Page) -> None:
    assert "blind on cpu with bf16 was never told from fp32_multiply (in 3 cases)" in page.text
    assert "native_multiply = same_bits (fp16)" in page.text
    assert "1 case inconclusive: no element has a single legal value (vague)" in page.text
    assert f"not asked which other contracts they can be told from: wrong on cpu, {NASTY} on cpu." in page.text
    power = page.tables["Which other contracts the run could tell from a kernel's own"]
    assert [row[-1] for row in power[1:]] == ["never told apart", "told apart", "coincide"]
    header, *rows = page.tables["How much of each stage the contract decides"]
    assert rows[0][header.index("decided")] == summary.share(500, 512)


def test_nothing_is_claimed_of_power_that_was_not_measured() -> None:
    ruled_out = "was ruled out"
    assert ruled_out not in read(html.page(Run((failed(),)))).text
    told = Power("good", "cpu", "bf16", "fp32_multiply", 3, 20, True)
    assert ruled_out in read(html.page(Run((passed(),), power=(told,)))).text


def test_what_was_not_run_and_where(page: Page) -> None:
    assert "slow on cpu: declared for cuda only" in page.text
    assert "1 case unsupported: the kernel takes no <residual> (wrong)" in page.text
    assert "runs/<1>" in page.text
    assert ["good", "inv_rms", "cpu and cuda:0", "10", "7", "70 %"] in page.tables[
        "Bits on two devices, for the same input bits"
    ]


def test_empty_and_broken_runs() -> None:
    empty = read(html.page(Run(())))
    assert "NOTHING VERIFIED" in empty.text
    broken = read(html.page(Run((passed(),), broken="the <worker> died")))
    assert "The run did not come to its end: the <worker> died" in broken.text
    assert "ERRORED" in broken.text


def test_against_a_base() -> None:
    run = Run((failed(kernel="k", fingerprint="ff"), passed(fingerprint="aa")))
    base = Run((passed(kernel="k", fingerprint="ff"), passed(fingerprint="aa")))
    text = read(html.page(run, base=base)).text
    section = text[text.index("Against the base: WORSE") :]
    assert "PASSED → FAILED" in section
    assert "1 case got worse" in section
    assert "Against" not in read(html.page(run)).text


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "vl_convert", None)
    with pytest.raises(LastbitError) as raised:
        html.page(Run(()))
    assert str(raised.value) == (
        "the HTML report needs vl_convert, which is not installed. Install what it needs, and run this command again: "
        "python3 -m pip install 'altair>=5.5' jinja2 vl-convert-python"
    )


def test_the_command_that_installs_the_libraries_installs_the_extra() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert sorted(html.LIBRARIES.values()) == sorted(project["optional-dependencies"]["report"])


# Size


def many(count: int) -> Run:
    shapes = itertools.cycle(f"{2**a + 1},{2**b - 1}" for a in range(12) for b in range(1, 13))
    kernels = itertools.cycle((passed(), failed(), passed(kernel="third", device="cuda:0")))
    return Run(
        tuple(
            replace(result, case=f"rms_norm x=bf16[{shape}] seed={seed}")
            for seed, result, shape in zip(range(count), kernels, shapes, strict=False)
        )
    )


def test_page_of_many_records_is_small() -> None:
    """Nine thousand records more may add a byte each to a page of a megabyte; no case line is as short as that."""
    small, large = (len(html.page(many(count)).encode()) for count in (1_000, 10_000))
    assert large < 1.01 * small < 15 * 2**20


def test_a_run_in_which_every_case_errored_has_a_page() -> None:
    errored = [bare(Verdict.ERRORED, "ValueError: no", case=f"{CASE}{n}") for n in range(2)]
    assert "ValueError: no" in html.page(Run(tuple(errored)))


def test_branches_that_no_case_reached_are_listed() -> None:
    branch = Unreached("norms.py", 41, "norm", "if n > 8192", "true", ("good",), 12)
    text = html.page(Run((passed(),), unreached=(branch,)))
    assert "What no case reached: 1 branch of the kernels’ own files" in text
    assert "norms.py:41 `if n &gt; 8192` was never true (12 cases)" in text
    assert "What no case reached" not in html.page(Run((passed(),)))
