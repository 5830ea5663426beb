"""One syntax: what words mean to every command, and that the commands which are printed are read as they were meant."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastbit import cli
from lastbit.command_line import Asked, command, read_words
from lastbit.commands.former import modern
from lastbit.errors import UsageError
from lastbit.reports.agreement import Agreement, KernelSide, print_agreement
from lastbit.reports.explanation import explain_line
from lastbit.reports.paper import make_console
from lastbit.reports.summary import repro_command
from lastbit.reports.why import Explanation
from lastbit.result import Verdict

CASE = "rms_norm x=bf16[1,70] weight=bf16[70] eps=1e-06 seed=11"

Main = Callable[..., tuple[int, str, str]]


@pytest.fixture
def main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Main:
    """Run the command line in an empty folder; return its exit code, and what it says."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        return cli.main(arguments), *capsys.readouterr()

    return call


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (["my_kernels/a.py"], Asked(paths=("my_kernels/a.py",))),
        (["a.py::norm", "a.py::other", CASE], Asked(("a.py",), ("norm", "other"), (CASE,))),
        (["norm", CASE], Asked((), ("norm",), (CASE,))),
        ([CASE, "eager[a+b]"], Asked((), ("eager[a+b]",), (CASE,))),
        (["norm@origin/main", "a/b.py::norm@v1/x"], Asked(("a/b.py",), ("norm@origin/main", "norm@v1/x"))),
        (["kernels::norm"], Asked(("kernels",), ("norm",))),
        (["here", "there"], Asked(("here",), ("there",))),
        (["::a=b c/d.py"], Asked((), ("a=b c/d.py",))),
    ],
)
def test_what_words_are(words: list[str], asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert read_words(words) == asked


@given(
    st.lists(st.text(st.characters(exclude_characters="\0:/"), min_size=1).map(lambda t: f"{t}.py"), max_size=2),
    st.text(min_size=1),
)
def test_a_command_names_what_it_was_made_for(paths: list[str], kernel: str) -> None:
    options = shlex.join(word for path in paths for word in ("--kernels", path))
    _, name, *words, device, cpu = shlex.split(command("verify", kernel, CASE, f"--device cpu {options}"))
    assert (name, device, cpu) == ("verify", "--device", "cpu")
    found = read_words(words)
    assert [Path(path) for path in found.paths] == [*dict.fromkeys(map(Path, paths))]
    assert (found.kernels, found.cases) == ((kernel,), (CASE,))


def test_printed_commands_are_read_by_their_parsers(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--kernels 'my kernels' --project . --strict"
    why = Explanation.of_nothing("eager[x]", "rms_norm", "", CASE, "cuda:0", verdict=Verdict.FAILED, reason="")
    sides = KernelSide("norm", ""), KernelSide("norm@v1", "")
    print_agreement(Agreement("rms_norm", "cpu", sides, line=CASE), make_console(), options)
    printed = [line.strip() for line in capsys.readouterr().out.splitlines() if "lastbit verify" in line]
    assert len(printed) == 2 and "--base v1" in printed[1] and "--base" not in printed[0]
    printed += [repro_command(CASE, "eager[x]", "cpu", ["run to run"], options), explain_line(why, options)]
    for text in printed:
        words = shlex.split(text)[1:]
        read = cli.make_parser(words).parse_args(words)
        asked = read_words(read.words)
        assert asked.paths == ("my kernels",) and asked.cases == (CASE,) and asked.kernels[0] in ("norm", "eager[x]")


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (f"repro '{CASE}' --kernel k --kernels my_kernels", f"verify my_kernels::k '{CASE}'"),
        (f"stages '{CASE}' --kernel k --device cuda", f"explain k '{CASE}' --stages --device cuda"),
        (f"trace '{CASE}' --all", f"explain '{CASE}' --trace --all"),
        ("reference from-torch m.py:f x=bf16[3]", "new reference m.py:f 'x=bf16[3]'"),
        ("verify --kernels a --kernels=b --op x --kernel 'eager[y]'", "verify a b 'eager[y]' --op x"),
        ("identify mine --kernels a.py", "identify a.py::mine"),
        ("agree a b --kernels k --seed 1", "agree k::a k::b --seed 1"),
        ("golden check --kernels k", "golden check k"),
        (f"pin '{CASE}' --kernel k --reason 'a b'", f"pin k '{CASE}' --reason 'a b'"),
        (f"judge a.py --op x --case '{CASE}'", f"judge a.py '{CASE}' --op x"),
        ("bench kernels --kernel k", "bench kernels k"),
    ],
)
def test_a_former_command_says_what_to_type_now(main: Main, before: str, now: str) -> None:
    code, _, said = main(*shlex.split(before))
    assert code == 2
    assert said == f"lastbit: this is written differently now; type\n\n    lastbit {now}\n\n"
    assert modern(shlex.split(now)) == shlex.split(now)


def test_the_commands_by_task(main: Main, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown, _ = main()
    assert code == 2, "nothing was verified"
    with pytest.raises(SystemExit) as ended:
        main("--help")
    assert ended.value.code == 0 and capsys.readouterr().out == shown
    assert re.findall(r"^  (\w+) ", shown, re.MULTILINE) == [*cli.COMMANDS]
    assert max(map(len, shown.splitlines())) <= 80 and len(shown.splitlines()) <= 40


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("verfiy",), "'verfiy' is no command; did you mean 'verify'? `lastbit --help` lists them"),
        (("explain", "norm"), "explain needs a case; give its line, in quotes,"),
        (("bisect", "norm", CASE, CASE, "--good", "a", "--bad", "b"), "bisect takes one case, and was given 2"),
        (("golden", "check", CASE), "golden takes kernels and no case, as which 'rms_norm x=bf16[1,70]"),
        (("explain", "norm", CASE, "--stages", "--isolate"), "--stages looks into a kernel, which --isolate forbids"),
        (("explain", CASE, "--isolate"), f"as verify did: lastbit explain NAME '{CASE}' --isolate"),
        (("explain", "norm", CASE, "--all"), "--all goes with --trace"),
        (("order", "--rows", "3"), "no kernel is named"),
        (("judge", "norm", "--op", "rms_norm"), "'norm' is no file"),
        (("verify", "norm", "x=bf16[2]"), "'x=bf16[2]' is a part of a case; put quotes around all of its line"),
        (("verify", ""), "'' names no kernel and no case; a variable of the shell may be empty"),
    ],
)
def test_what_is_missing_or_too_much(main: Main, words: tuple[str, ...], said: str) -> None:
    code, _, error = main(*words)
    assert code == 2
    assert said in error


def test_words_between_options_and_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from lastbit.commands import identify

    seen: list[tuple[str, ...]] = []

    def config_of(options: object, **_: object) -> None:
        seen.append(tuple(vars(options)["words"]))
        raise UsageError("enough")

    monkeypatch.setattr(identify, "config_of", config_of)
    assert cli.main(["identify", "a", "--seed", "1", "b", "--all", "c"]) == 2
    assert seen == [("a", "b", "c")]
