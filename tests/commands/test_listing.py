"""`lastbit list`: what can be named, in words and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lastbit import cli
from lastbit.commands import listing
from lastbit.inputs import LAYOUTS, regimes

REFERENCE = '''\
"""Three times x.

More about it.
"""

from lastbit.ops import op


@op(
    rows=("x",),
    axes={"rounding": {"once": {}, "twice": {"product": "x"}}, "deviation": {"": {}, "drops_last": {}}},
    presets={"plain": "default"},
    rounds={"y": "x"},
)
def thrice(x, scale=None, *, eps, mode="fast", contract, stage):
    stage("y", stage("product", x * 3.0), result=True)
'''

KERNELS = """\
from lastbit.kernel import kernel


@kernel("thrice", name="mine[1]", devices=("cuda",), stages=("product",))
def mine(x, *, eps, stages=()):
    return x


@kernel("rms_norm", contract="fp32_multiply")
def other(x, *, eps):
    return x
"""

List = Callable[..., str]


@pytest.fixture
def list_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> List:
    """Return the output of `lastbit list` with a project of one op and two kernels."""
    for folder, source in (("references", REFERENCE), ("kernels", KERNELS)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "thrice.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(listing, "prepare", lambda _: None)  # no file here imports Triton

    def call(*arguments: str) -> str:
        capsys.readouterr()
        assert cli.main(["list", *arguments, "--project", ".", "./kernels"]) == 0
        return capsys.readouterr().out

    return call


def test_an_op_with_its_contracts(list_: List) -> None:
    assert list_("ops", "--op", "thrice") == (
        "Ops: 1\n"
        "  thrice\n"
        "    Three times x.\n"
        "    inputs          x, scale (optional)\n"
        "    parameters      eps, mode=fast\n"
        "    axis rounding   once (default), twice\n"
        "    axis deviation  drops_last\n"
        "    preset plain    once\n\n"
    )


def test_results_stand_in_the_order_in_which_they_are_given_without_names(list_: List) -> None:
    words = " ".join(list_("ops", "--op", "rms_norm").split())
    assert "results output, quantized, scale, residual_sum axis" in words
    assert "output, lse (optional)\n" in list_("ops", "--op", "attention")


def test_a_kernel_and_where_it_is(list_: List) -> None:
    assert list_("kernels", "--op", "thrice") == (
        "Kernels: 1\n"
        "  mine[1]\n"
        "    op        thrice\n"
        "    contract  plain\n"
        "    devices   cuda\n"
        "    stages    product\n"
        "    source    kernels/thrice.py:4\n\n"
    )


def test_it_says_what_regimes_are(list_: List) -> None:
    lines = list_("regimes").splitlines()
    assert lines[:2] == [f"Regimes: {len(regimes())}", "  ways to choose the values of a tensor, :NAME in a case"]


def test_everything_as_json(list_: List) -> None:
    found: dict[str, list[dict[str, Any]]] = json.loads(list_("--json"))
    assert list(found) == ["ops", "kernels", "regimes", "layouts", "properties"]
    assert {op["name"] for op in found["ops"]} >= {"thrice", "rms_norm"}
    assert [k["facts"]["contract"] for k in found["kernels"]] == [["plain"], ["fp32_multiply+rounded_sum"]]
    assert [r["name"] for r in found["regimes"]] == list(regimes())
    assert [layout["name"] for layout in found["layouts"]] == list(LAYOUTS)
    assert all(entry["about"] for section in ("regimes", "layouts", "properties") for entry in found[section])
    assert {entry["name"] for entry in found["properties"]} >= {"rows", "run to run", "relabelling"}


def test_an_entry_without_facts_is_a_line(list_: List) -> None:
    assert "  contiguous       Place elements in row-major order.\n" in list_("layouts")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("opps",), "no kernel is called 'opps', and no file or folder here; did you mean 'ops'?"),
        (("ops", "--op", "rms_nrom"), "unknown op 'rms_nrom'; did you mean 'rms_norm'?"),
        (("kernels", "--op", "rms_nrom"), "unknown op 'rms_nrom'"),
        (("ops", "rms_nrom"), "unknown op 'rms_nrom'; did you mean 'rms_norm'?"),
        (("kernels", "./nowhere"), "kernel file or folder 'nowhere' does not exist"),
    ],
)
def test_what_does_not_exist(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "prepare", lambda _: None)
    assert cli.main(["list", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_kernels_are_those_that_verify_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of ./kernels where no word names any, and an op is named as a kernel is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(listing, "prepare", lambda _: None)
    (tmp_path / "kernels").mkdir()
    text = KERNELS.replace('"thrice", name="mine[1]", devices=("cuda",), stages=("product",)', '"softmax"')
    text = text.replace("x, *, eps, stages=()", "x")
    (tmp_path / "kernels" / "mine.py").write_text(text)
    names = {}
    for words in (("kernels",), ("kernels", "kernels"), ("kernels", "rms_norm"), ("ops", "rms_norm"), ("rms_norm",)):
        assert cli.main(["list", *words, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        names[words] = [entry["name"] for section in found if section in words for entry in found[section]]
    assert names["kernels",] == names["kernels", "kernels"] == ["mine", "other"]
    assert names["kernels", "rms_norm"] == ["other"] and names["ops", "rms_norm"] == ["rms_norm"]


def test_a_folder_of_references_that_is_no_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "references").mkdir()
    for text in ("def norm(x): return x", "import no_such_module"):
        (tmp_path / "references" / "norm.py").write_text(text)
        assert cli.main(["list", "ops", "--project", "."]) == 2
        assert "--project is for a folder with references/ of ops of your own" in capsys.readouterr().err
