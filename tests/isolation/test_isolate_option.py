"""`lastbit verify --isolate`: what it means for the rest of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from lastbit.cli import main
from lastbit.commands import explaining, verify
from lastbit.config import Config
from lastbit.devices import DevicePlan
from lastbit.errors import UsageError
from lastbit.judges import confined_explanations
from lastbit.run import Run
from lastbit.verify.processes import environment_of, options_of
from tests.diagnosing.test_explaining import Explainer, found
from tests.reports.test_reports import failed, passed


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Note the configurations of the runs that were asked for, none of which begins."""
    found: list[Config] = []

    def run(config: Config, *_: object, **__: object) -> int:
        found.append(config)
        return 0

    monkeypatch.setattr(verify, "_run", run)
    return found


@pytest.mark.parametrize(
    ("words", "isolate", "random", "seed"),
    [
        ([], False, False, 0),
        (["--seed", "7"], False, False, 7),
        (["--seed", "random"], False, True, 0),
        (["--isolate"], True, True, 0),
        (["--isolate", "--seed", "7"], True, False, 7),
        (["--isolate", "--seed", "random"], True, True, 0),
    ],
)
def test_seeds_are_random_where_kernels_are_isolated(
    ran: list[Config], words: list[str], isolate: bool, random: bool, seed: int
) -> None:
    assert main(["verify", *words]) == 0
    [config] = ran
    assert (config.isolate, config.random, config.seed) == (isolate, random, seed)


def test_a_seed_is_a_number_or_random(ran: list[Config], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["verify", "--seed", "chance"])
    assert "'chance' is neither a number nor random" in capsys.readouterr().err


def test_a_failure_of_an_isolated_run_is_explained_in_isolation(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Config] = []

    class Confined(Explainer):
        planned = ()

        def __init__(self, config: Config) -> None:
            made.append(config)

    monkeypatch.setattr(confined_explanations, "ConfinedExplainer", Confined)
    line = "rms_norm x=bf16[2,8] eps=0.001 seed=5"
    assert main(["explain", line, "--isolate"]) == 2, "no kernel is named"
    main(["explain", line, "--isolate", "mine"])
    assert [config.kernels for config in made] == [("mine",)]


def test_a_run_says_that_it_was_isolated(tmp_path: Path) -> None:
    config = Config(str(tmp_path), device_plan=DevicePlan(("cpu",), ("",)), isolate=True, random=True)
    assert options_of(config) == "--isolate"
    assert environment_of(config)["seed"] == "random"
    assert Config.load(config.save()) == config


def test_what_cannot_be_isolated() -> None:
    on_cuda = DevicePlan(("cuda:0",), ("",))
    with pytest.raises(UsageError, match="--sanitize on an accelerator"):
        Config("", device_plan=on_cuda, isolate=True, sanitize=True)


def test_failures_of_isolated_kernels_are_explained_in_confined_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere their code would run in a process that has everything."""
    monkeypatch.setattr(explaining, "ConfinedExplainer", Explainer)
    monkeypatch.setattr(Explainer, "configs", [])
    monkeypatch.setattr(Explainer, "kernels", {"a": found})
    run = explaining.with_explanations(Config("", isolate=True), Run((failed(kernel="a"), passed(kernel="b"))))
    assert [one.kernel for one in run.explanations] == ["a"] and [c.kernels for c in Explainer.configs] == [("a",)]
