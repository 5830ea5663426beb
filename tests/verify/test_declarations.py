"""One wrong letter in an op or a kernel: whatever a declaration names must exist."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit.config import Config
from lastbit.errors import OpError, UsageError
from lastbit.inputs import build
from lastbit.judging.problem import Problem
from lastbit.kernel import Kernel
from lastbit.numerics import Enclosure
from lastbit.ops import Contract, Latent, StageRecorder, op
from lastbit.references.rms_norm import rms_norm
from lastbit.stage_names import StageNames, stage_names
from lastbit.verify.declarations import check_kernel, check_op, likely_slips
from lastbit.verify.drawing import draw
from lastbit.verify.plan import make_plan
from lastbit.verify.project import Project, open_project

ROOT = Path(__file__).resolve().parents[2]


def opened(*folders: Path, kernels: tuple[Path, ...] = ()) -> Project:
    return open_project(Config("", projects=tuple(map(str, folders)), kernel_folders=tuple(map(str, kernels))))


# References whose stages are named in many ways


def softmax(x: Enclosure, *, contract: Contract, stage: StageRecorder) -> None:
    """Stages by literals, one of two among them."""
    shifted = stage("shifted", x)
    e = stage("exp" if contract.has("narrow") else "wide_exp", shifted)
    stage("output", _halved(e, stage=stage), result=True)


def _halved(x: Enclosure, *, stage: StageRecorder) -> Enclosure:
    return stage("half", x * 0.5)


STEPS = ("first", "second")


class Layer:
    """Holds the recorder, as layers of many stages do."""

    def __init__(self, recorder: StageRecorder) -> None:
        self.recorder = recorder

    def step(self, name: str, x: Enclosure) -> Enclosure:
        """Record two stages."""
        return self.recorder(f"{name}_scaled", self.recorder(name + "_base", x * 2.0))


def layered(x: Enclosure, *, kind: str = "a", contract: Contract, stage: StageRecorder) -> None:
    """Stages by f-strings, sums and constants, in a method."""
    layer = Layer(stage)
    for name in STEPS:
        x = layer.step(f"grad_{name}", x)
    for number in range(3):
        x = stage(f"step{number}", x)
    x = stage("_".join(("in", "between")), stage("%s_rest" % STEPS[0], x))  # noqa: UP031
    stage(f"{kind}_output", x, result=True)


NAMES = {
    softmax: {"shifted", "exp", "wide_exp", "half", "output"},
    layered: {"grad_first_base", "grad_second_scaled", "step2", "in_between", "first_rest", "b_output"},
}
NO_NAMES = {
    softmax: ("expo", "narrow", "ouput", "Stages", "stage"),
    layered: ("grad_first_bsae", "grd_first_base", "grad_third_scaled", "steps2", "first_rset", "in_betwen"),
}


@pytest.mark.parametrize("reference", NAMES, ids=lambda f: f.__name__)
def test_the_stages_of_a_reference_are_read_off_its_source(reference: Callable[..., None]) -> None:
    known = stage_names(reference)
    assert known is not None
    assert {name for name in NAMES[reference] if name not in known} == set()
    assert [name for name in NO_NAMES[reference] if name in known] == []


def test_literals_alone_are_known_exactly() -> None:
    assert stage_names(softmax) == StageNames(frozenset(NAMES[softmax]))


def test_nothing_is_known_without_a_source() -> None:
    space: dict[str, Any] = {}
    exec("def made(x, *, contract, stage):\n    stage('y', x, result=True)\n", space)
    assert stage_names(space["made"]) is None
    check_op(op(rows=(), rounds={"z": "x"})(space["made"]))


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (
            {"rounds": {"expo": "x"}},
            "the stage 'expo', which is rounded, is recorded nowhere in the reference; did you ",
        ),
        ({"rounds": {"expo": "x"}}, "did you mean 'exp'? Its stages: exp, half, output, shifted, wide_exp."),
        ({"axes": {"how": {"a": {}, "b": {"hafl": "x"}}}}, "the stage 'hafl', which is rounded"),
        ({"latent": Latent("shfited", through=("output",))}, "'shfited' of its Latent, is recorded nowhere"),
        ({"latent": Latent("shifted", through=("ouptut",))}, "'ouptut' of its Latent's `through`, is recorded nowhere"),
    ],
)
def test_a_stage_with_a_wrong_letter(declared: dict[str, Any], message: str) -> None:
    wrong = op(rows=("x",), **declared)(softmax)
    with pytest.raises(OpError, match=re.escape(message)) as caught:
        check_op(wrong)
    assert f"op softmax ({__file__}:{softmax.__code__.co_firstlineno})" in str(caught.value)


def test_a_stage_with_a_wrong_letter_among_names_that_are_put_together() -> None:
    with pytest.raises(OpError, match=r"'grad_first_bsae', which is rounded, .* did you mean 'grad_first_base'\?"):
        check_op(op(rows=("x",), rounds={"grad_first_bsae": "x"})(layered))


@pytest.mark.parametrize(
    ("wrong", "right"), [("expo", '"exp"'), ("inv_rms", '"inv"')], ids=["a rounding point", "a latent stage"]
)
def test_a_wrong_letter_is_seen_when_a_project_is_opened(tmp_path: Path, wrong: str, right: str) -> None:
    source = (
        "from lastbit.ops import Latent, op\n\n\n"
        f'@op(rows=("x",), rounds={{"{wrong}": "x"}})\n'
        f'def thrice(x, *, contract, stage):\n    stage("y", stage({right}, x) * 3.0, result=True)\n'
    )
    (tmp_path / "references").mkdir()
    (tmp_path / "references" / "thrice.py").write_text(source)
    with pytest.raises(OpError, match=rf"thrice\.py:4\): the stage '{wrong}', which is rounded"):
        opened(tmp_path)


@pytest.mark.parametrize("stem", ["cases/thrcie.py", "cases/regressions/thrcie.txt", "cases/rms_norm.py"])
def test_cases_of_no_op_or_without_groups(tmp_path: Path, stem: str) -> None:
    (tmp_path / stem).parent.mkdir(parents=True)
    (tmp_path / stem).write_text("")
    expected = "unknown op of the cases in .*'thrcie'" if "thrcie" in stem else "must define groups"
    with pytest.raises(UsageError, match=expected):
        opened(tmp_path)


def test_an_op_that_is_not_called_as_its_file(tmp_path: Path) -> None:
    (tmp_path / "references").mkdir()
    source = "from lastbit.ops import op\n\n\n@op(rows=())\ndef other(x, *, contract, stage): ...\n\n\nthrice = other\n"
    (tmp_path / "references" / "thrice.py").write_text(source)
    with pytest.raises(OpError, match=r"op other .* must be called 'thrice'"):
        opened(tmp_path)


# What only an evaluation shows


def evaluated(reference: Callable[..., None], **declared: Any) -> None:
    declared_op = op(rows=("x",), **declared)(reference)
    Problem(declared_op, declared_op.contract(), {"x": torch.ones(2, 3)}, {}).evaluate()


def asks_for_another_option(x: Any, *, contract: Any, stage: Any) -> None:
    stage("y", x if contract.has("rounded_smu") else x * 2.0, result=True)


def records_twice(x: Any, *, contract: Any, stage: Any) -> None:
    stage("y", stage("y", x) * 2.0, result=True)


def records_no_result(x: Any, *, contract: Any, stage: Any) -> None:
    stage("y", x)


def leaves_out_the_latent_stage(x: Any, *, contract: Any, stage: Any) -> None:
    stage("y", x if x.shape[0] == 2 else stage("root", x), result=True)


@pytest.mark.parametrize(
    ("reference", "declared", "message"),
    [
        (
            asks_for_another_option,
            {"axes": {"sum": {"rounded_sum": {}, "plain_sum": {}}}},
            "'rounded_smu'; did you mean 'rounded_sum'? Known: plain_sum, rounded_sum.",
        ),
        (records_twice, {}, "records the stage 'y' twice"),
        (records_no_result, {}, "records no stage with result=True"),
        (
            leaves_out_the_latent_stage,
            {"latent": Latent("root", through=("y",))},
            "'y' is through the latent stage 'root', which is not recorded",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_a_reference_must_not_do(reference: Callable[..., None], declared: dict[str, Any], message: str) -> None:
    with pytest.raises(OpError, match=re.escape(message)) as caught:
        evaluated(reference, **declared)
    assert f"op {reference.__name__} ({__file__}:" in str(caught.value)


# Kernels


def norm(x: Tensor, weight: Tensor | None = None, *, eps: float, stages: tuple[str, ...] = ()) -> None: ...
def misspelled(x: Tensor, weigth: Tensor, *, eps: float) -> None: ...
def without_eps(x: Tensor, weight: Tensor) -> None: ...
def anything(*tensors: Tensor, **options: float) -> None: ...
def with_stages_required(x: Tensor, *, eps: float, stages: tuple[str, ...]) -> None: ...
def without_stages(x: Tensor, *, eps: float) -> None: ...
def by_position(x: Tensor, weight: Tensor, /, *, eps: float) -> None: ...


class Norm:
    """A kernel with state, and methods that are none."""

    def __call__(self, x: Tensor, *, eps: float) -> None: ...
    def method(self, x: Tensor, *, eps: float) -> None: ...


@pytest.mark.parametrize(
    ("call", "declared", "message"),
    [
        (
            norm,
            {"mutates": ("resdiual",)},
            "input that kernel 'mine' (a.py:1) mutates: 'resdiual'; did you mean 'residual'",
        ),
        (norm, {"mutates": ("residual",)}, "mutates 'residual', but its signature does not take it"),
        (norm, {"mutates": ("eps",)}, "unknown input that kernel 'mine' (a.py:1) mutates: 'eps'"),
        (norm, {"devices": ("cdua",)}, "unknown device type of kernel 'mine' (a.py:1): 'cdua'; did you mean 'cuda'?"),
        (norm, {"devices": ("cuda:0",)}, "'cuda:0'; did you mean 'cuda'?"),
        (
            norm,
            {"stages": ("inv_rsm",)},
            "unknown stage of rms_norm 'inv_rsm' in stages of kernel 'mine' (a.py:1); did you",
        ),
        (norm, {"unordered": ("ouptut",)}, "'ouptut' in unordered of kernel 'mine' (a.py:1); did you mean 'output'?"),
        (norm, {"contract": "fp32_mulitply"}, "'fp32_mulitply'; did you mean 'fp32_multiply'?"),
        (misspelled, {}, "which kernel 'mine' (a.py:1) requires: 'weigth'; did you mean 'weight'?"),
        (without_eps, {}, "takes (x: 'Tensor', weight: 'Tensor'), but every case of rms_norm has eps: name it"),
        (
            anything,
            {},
            "takes (*tensors: 'Tensor', **options: 'float'), but every case of rms_norm has x, eps: name it",
        ),
        (with_stages_required, {"stages": ("inv_rms",)}, "its parameter `stages` needs a default"),
        (without_stages, {"stages": ("inv_rms",)}, "declares stages=('inv_rms',), but its signature has no `stages`"),
        (by_position, {}, "takes 'x' by position only; a kernel is called by name"),
        (Norm.method, {}, "requires: 'self'"),
        (torch.nn.RMSNorm(8), {}, "but every case of rms_norm has x, eps: name it"),
    ],
)
def test_a_kernel_with_a_wrong_letter(call: Callable[..., Any], declared: dict[str, Any], message: str) -> None:
    wrong = Kernel("mine", "rms_norm", declared.pop("contract", ""), call, **declared, source="a.py:1")
    with pytest.raises(UsageError, match=re.escape(message)):
        check_kernel(wrong, rms_norm)


@pytest.mark.parametrize(
    ("call", "declared"),
    [
        (norm, {"stages": ("inv_rms", "residual_sum"), "mutates": ("x", "weight"), "unordered": ("output",)}),
        (norm, {"devices": ("cpu", "cuda", "xpu", "mps")}),
        (partial(norm, eps=1e-6), {"stages": ("inv_rms",)}),
        (Norm(), {}),
        (Norm().method, {}),
    ],
)
def test_kernels_that_declare_what_there_is(call: Callable[..., Any], declared: dict[str, Any]) -> None:
    check_kernel(Kernel("mine", "rms_norm", "", call, **declared), rms_norm)


def test_an_optional_parameter_that_is_nearly_one_of_the_op_is_noted() -> None:
    def tuned(x: Tensor, weigth: Tensor | None = None, *, eps: float, block: int = 4, num_warps: int = 2) -> None: ...

    mine = Kernel("mine", "rms_norm", "", tuned)
    check_kernel(mine, rms_norm)
    [note] = likely_slips(mine, rms_norm)
    assert note.what == "cases of mine with weight"
    assert note.reason == "it takes 'weigth', which rms_norm does not have; did you mean 'weight'?"


def test_the_plan_lists_what_a_misspelled_parameter_leaves_out(tmp_path: Path) -> None:
    source = "from lastbit.kernel import kernel\n\n\n@kernel('rms_norm')\ndef mine(x, weigth=None, *, eps): ...\n"
    (tmp_path / "mine.py").write_text(source)
    plan = make_plan(Config("", kernel_folders=(str(tmp_path),), cases=0), "cpu")
    assert "cases of mine with weight" in [note.what for note in plan.not_run]


# What ships


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "references").glob("[!_]*.py")))
def test_every_stage_that_an_op_records_is_known(name: str) -> None:
    """The rule must not call a name wrong that is recorded, under any contract or preset.

    Of many contracts every seventh is taken, from another one on in each case: seven has no factor in common with the
    lengths of axes, so that each case meets each option, and all cases together meet every contract.
    """
    made = opened().op(name)
    known = stage_names(made.reference)
    assert known is not None, "a wrong letter would not be seen"
    every = frozenset((*made.inputs, *made.params))
    contracts = [made.contract(preset) for preset in made.presets] or made.contracts()
    cases = [case for group in opened().groups(name, every, small=True) for case in draw(group, 1)]
    smallest = sorted(cases, key=lambda c: sum(t.numel for t in c.tensors))[:8]
    step = 7 if len(contracts) > 32 and len(smallest) >= 7 else 1
    for number, case in enumerate(smallest):
        tensors = build(case, torch.device("cpu")).tensors
        for contract in contracts[number % step :: step]:
            with suppress(UsageError):  # the contract is not defined for these parameters
                found = Problem(made, contract, tensors, dict(case.params)).evaluate().formats
                assert [stage for stage in found if stage not in known] == []


def test_external_kernels_declare_what_there_is() -> None:
    assert len(opened(kernels=(ROOT / "kernels" / "external",)).kernels()) > 15
