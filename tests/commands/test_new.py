"""`lastbit new op` writes files that run at once, and harms nothing that is there."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from lastbit import cli
from lastbit.commands.new import written
from lastbit.config import Config
from lastbit.devices import plan_devices
from lastbit.errors import UsageError
from lastbit.result import Verdict
from lastbit.verify.check import verify_case
from lastbit.verify.drawing import draw
from lastbit.verify.plan import make_plan
from tests.rms_norm_contract import INTERPRETED  # installs the bit-faithful interpreter

ROOT = Path(__file__).resolve().parents[2]


def test_its_kernels_pass_on_its_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["new", "op", "brand_new", "--project", str(tmp_path)]) == 0
    assert f"lastbit verify --project {tmp_path} {tmp_path}/kernels --op brand_new" in capsys.readouterr().out
    found = verdicts("brand_new", tmp_path)
    assert {contract for contract, _, _ in found} == {"fp32_activation", "rounded_activation"}
    assert {verdict for _, _, verdict in found} == {Verdict.PASSED}


def test_the_kernels_of_the_tutorial_pass() -> None:
    found = verdicts("softcap", ROOT / "docs" / "examples" / "softcap")
    assert {verdict for _, dtype, verdict in found if dtype != "fp32"} == {Verdict.PASSED}
    assert {verdict for _, dtype, verdict in found if dtype == "fp32"} <= {Verdict.PASSED, Verdict.INCONCLUSIVE}


def verdicts(op: str, project: Path) -> list[tuple[str, str, Verdict]]:
    """Contract, dtype and verdict of the kernels of a project, on the fixed cases of its op and one of each group."""
    config = Config(
        folder="",
        device_plan=plan_devices("cpu"),
        ops=(op,),
        projects=(str(project),),
        kernel_folders=(str(project / "kernels"),),
        cases=1,
    )
    items = [i for i in make_plan(config, "cpu").items if INTERPRETED or not i.subject.kernel.name.startswith("triton")]
    return [
        (item.subject.kernel.contract, case.tensors[0].dtype, verify_case(item.subject, case).verdict)
        for item in items
        for case in [*item.group.examples, *draw(item.group, 1)]
    ]


def load(path: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification and specification.loader
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_its_test_passes(tmp_path: Path) -> None:
    written("brand_new", tmp_path)
    test = load(tmp_path / "tests" / "test_brand_new.py")
    test.test_the_formula_in_fp32_rounded_once_keeps_the_default_contract(torch.bfloat16)
    test.test_a_kernel_that_rounds_the_activation_does_not_keep_it()
    test.test_a_weight_of_another_width_is_refused()


@pytest.mark.parametrize("name", ["Brand", "2nd", "brand-new", "class", "", "../brand"])
def test_what_is_no_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be the name of an op: use lower-case letters"):
        written(name, tmp_path)
    assert not [*tmp_path.iterdir()]


def test_the_name_of_an_op_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is an op 'rms_norm' already; `lastbit list ops --op rms_norm`"):
        written("rms_norm", tmp_path)
    assert not [*tmp_path.iterdir()]


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    mine = tmp_path / "kernels" / "brand_new.py"
    mine.write_text("mine")
    with pytest.raises(UsageError, match=r"left as it is: .*kernels/brand_new\.py; choose another name"):
        written("brand_new", tmp_path)
    assert mine.read_text() == "mine"
    assert [*tmp_path.rglob("*.py")] == [mine]
