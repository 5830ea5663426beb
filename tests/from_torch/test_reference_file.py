"""References that are written from PyTorch functions load, allow what the functions give, and nothing of other ones."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lastbit import ContractViolation, assert_contract, cli
from lastbit.case import parse_case
from lastbit.commands.new import reference_of
from lastbit.errors import UsageError
from lastbit.from_torch.reference_check import load_op
from lastbit.from_torch.reference_file import wrapped
from lastbit.judging.problem import Problem
from tests.from_torch import functions
from tests.from_torch.functions import EXAMPLES

HERE = Path(functions.__file__)
ROOT = HERE.parents[2]


def text_of(function: Callable[..., Any], example: str, **options: bool) -> str:
    return reference_of(function, parse_case(f"{function.__name__} {example}"), "here", **options)[0]


@pytest.mark.parametrize("function", EXAMPLES, ids=lambda f: f.__name__)
def test_the_function_keeps_the_reference_that_is_written_from_it(function: Callable[..., Any]) -> None:
    text, tried = reference_of(function, parse_case(f"{function.__name__} {EXAMPLES[function]}"), "here")
    assert tried is not None and tried.calls == 6 and tried.elements and not tried.broken
    assert max(map(len, text.splitlines())) <= 120


def reference_in(folder: Path, function: Callable[..., Any]) -> Path:
    """Make a project with the reference of a function."""
    (folder / "references").mkdir()
    path = folder / "references" / f"{function.__name__}.py"
    assert (
        cli.main(
            [
                "new",
                "reference",
                f"{HERE}:{function.__name__}",
                *EXAMPLES[function].split(),
                "--output",
                str(path),
            ]
        )
        == 0
    )
    return folder


def test_one_trace_serves_both_formats_and_a_wrong_rounding_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = reference_in(tmp_path, functions.rms_norm_of_llama)
    assert "6 calls of the function, 3,474 elements of 4 stages compared" in capsys.readouterr().out
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16):
        x, weight = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((32, 100), (100,)))
        own = functions.rms_norm_of_llama(x, weight, eps=1e-6)
        assert_contract("rms_norm_of_llama", own, x=x, weight=weight, eps=1e-6, project=project)
        wrong = functions.rms_norm_of_gemma(x, weight - 1.0, eps=1e-6)
        with pytest.raises(ContractViolation, match="not possible"):
            assert_contract("rms_norm_of_llama", wrong, x=x, weight=weight, eps=1e-6, project=project)


def normed(x: torch.Tensor, w: torch.Tensor, mean: torch.Tensor, eps: float) -> torch.Tensor:
    return w * (x.float() * torch.rsqrt(mean + eps)).to(x.dtype)


def squares(x: torch.Tensor) -> torch.Tensor:
    return x.float().square()


WRONG = {
    "a shift of one column": lambda x, w, e: functions.rms_norm_of_llama(x, w, eps=e).roll(1, -1),
    "eps outside of the root": lambda x, w, e: w * (x.float() / (squares(x).mean(-1, True).sqrt() + e)).to(x.dtype),
    "no eps": lambda x, w, e: functions.rms_norm_of_llama(x, w, eps=0.0),
    "squares in 16 bits": lambda x, w, e: normed(x, w, x.square().float().mean(-1, True), e),
    "one rounding": lambda x, w, e: normed(x.float(), w.float(), squares(x).mean(-1, True), e).to(x.dtype),
    "the last column is missing": lambda x, w, e: normed(x, w, squares(x[..., :-1]).mean(-1, True), e),
    "the weight of the neighbour": lambda x, w, e: functions.rms_norm_of_llama(x, w.roll(1), eps=e),
    "divided by n - 1": lambda x, w, e: normed(x, w, squares(x).sum(-1, True) / (x.shape[-1] - 1), e),
    "the mean of the batch": lambda x, w, e: normed(x, w, squares(x).mean(), e),
    "the mean in 16 bits": lambda x, w, e: normed(x, w, squares(x).mean(-1, True).to(x.dtype).float(), e),
    "the inverse root in 16 bits": lambda x, w, e: w * (x * torch.rsqrt(squares(x).mean(-1, True) + e).to(x.dtype)),
    "the largest in place of the mean": lambda x, w, e: normed(x, w, squares(x).amax(-1, True), e),
    "cut off and not rounded": lambda x, w, e: cut_off(functions.rms_norm_of_llama(x.float(), w.float(), eps=e)),
}


def cut_off(x: torch.Tensor) -> torch.Tensor:
    return (x.view(torch.int32) & -65536).view(torch.float32).bfloat16()


@pytest.fixture(scope="module")
def norm():
    return load_op(text_of(functions.rms_norm_of_llama, EXAMPLES[functions.rms_norm_of_llama]), "rms_norm_of_llama")


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_kernel_gives_what_a_traced_reference_does_not_allow(norm, fault: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x = (torch.randn(16, 50, generator=generator) * 2.0 ** torch.arange(-12, 4)[:, None]).bfloat16()
    weight = torch.randn(50, generator=generator).bfloat16()
    legal = Problem(norm, norm.contract(), {"x": x, "weight": weight}, {"eps": 1e-6}).trace.enclosure("output")
    right = functions.rms_norm_of_llama(x, weight, eps=1e-6).double()
    assert bool(((legal.lo <= right) & (right <= legal.hi)).all())
    actual = WRONG[fault](x, weight, 1e-6).double()
    assert not bool(((legal.lo <= actual) & (actual <= legal.hi)).all())


def test_variables_are_stages_and_dtypes_those_of_inputs() -> None:
    text = text_of(functions.rms_norm_of_llama, EXAMPLES[functions.rms_norm_of_llama])
    assert 'variance = stage("variance", mean_of_squares(x))' in text
    assert '"x_2_rounded": "x",' in text and '"output": "x",' in text and 'rows=("x",)' in text
    assert "x, weight must have one dtype" in text  # torch would promote


def test_shapes_stay_expressions() -> None:
    text = text_of(functions.rotary, EXAMPLES[functions.rotary])
    assert "first = q[..., : q.shape[-1] // 2]" in text or "first = q[..., :q.shape[-1] // 2]" in text
    assert "rows=()," in text  # cos and sin have other leading dimensions


def test_numbers_that_are_added_are_those_of_a_gpu_or_of_a_cpu() -> None:
    op = load_op(text_of(functions.shifted, EXAMPLES[functions.shifted]), "shifted")
    x = torch.randn(64, 100, generator=torch.Generator().manual_seed(0)).bfloat16()
    on_cpu, on_gpu = (x + 1.7) * (0.3 - x), (x.float() + 1.7).bfloat16() * (0.3 - x.float()).bfloat16()
    for contract, right, wrong in (("rounded_scalars", on_cpu, on_gpu), ("fp32_scalars", on_gpu, on_cpu)):
        legal = Problem(op, op.contract(contract), {"x": x}, {"shift": 0.3}).trace.enclosure("output")
        assert bool(((legal.lo <= right.double()) & (right.double() <= legal.hi)).all())
        assert not bool(((legal.lo <= wrong.double()) & (wrong.double() <= legal.hi)).all())


def test_rounded_once_only_the_results_round() -> None:
    function = functions.rms_norm_of_llama
    text = text_of(function, EXAMPLES[function], steps=False)
    assert re.findall(r'^        "(\w+)": "x",$', text, re.MULTILINE) == ["output"]
    assert "product_in_any_order" in text
    load_op(text, function.__name__)


def several(x):
    return torch.cumprod(x.erfinv(), -1)


def overwrites(x):
    y = x + 1.0
    y.mul_(2.0)
    return y


def assigns(x):
    y = x + 1.0
    y[0] = 0.0
    return y


def grows(x):
    y = x + 1.0
    y += x
    return y


def branches(x):
    return x * 2.0 if x.sum() > 0 else x


def brings_a_tensor(x):
    return x * torch.ones(16)


def depends_on_dtype(x):
    return x * 2.0 if x.dtype == torch.bfloat16 else x + 1.0


def sorts(x):
    ordered = torch.sort(x, dim=-1)
    return ordered.values + x


def keeps_the_largest(x):
    largest, at = torch.topk(x, 3, dim=-1)
    return largest + at


def negates(x):
    return torch.where(torch.logical_not(x), x, 0.0)


def loops(x):
    for _ in range(3000):
        x = x * 1.5
    return x


def never_ends(x):
    while True:
        x = x * 0.5


def returns_its_input(x):
    return x


def returns_a_number(x):
    return x.shape[-1]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            several,
            r"test_reference_file.py:\d+: erfinv has no mapping\n.*test_reference_file.py:\d+: cumprod has no mapping",
        ),
        (overwrites, r"test_reference_file.py:\d+: mul_ changes a tensor in place"),
        (assigns, r"test_reference_file.py:\d+: elements are assigned in place"),
        (grows, r"test_reference_file.py:\d+: a tensor is changed in place"),
        (branches, r"test_reference_file.py:\d+: if depends on the elements of a tensor"),
        (brings_a_tensor, r"test_reference_file.py:\d+: a tensor of shape \(16,\) is no input; make it a parameter"),
        (depends_on_dtype, "does other operations with x=fp16; write a function for each dtype"),
        (sorts, r"\A[^\n]*:\n  \S*test_reference_file.py:\d+: sort has no mapping\Z"),
        (keeps_the_largest, r"\A[^\n]*:\n  \S*test_reference_file.py:\d+: topk has no mapping\Z"),
        (negates, r"test_reference_file.py:\d+: ~ of numbers is not mapped"),
        (loops, r"test_reference_file.py:\d+: the function does more than 1,000 operations, as a loop does"),
        (never_ends, r"test_reference_file.py:\d+: the function does more than 1,000 operations, as a loop does"),
        (returns_its_input, "returns its input 'x' as it is"),
        (returns_a_number, "a result must be a tensor"),
    ],
)
def test_what_cannot_be_written_is_named_with_its_place(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        text_of(function, "x=bf16[3,16]")


def cut_in_half(x):
    if x.shape[-1] % 2:
        raise ValueError("odd")
    return F.silu(x[..., : x.shape[-1] // 2])


def test_a_branch_that_was_taken_is_a_condition_of_the_reference() -> None:
    op = load_op(text_of(cut_in_half, "x=bf16[3,16]"), "cut_in_half")
    assert Problem(op, op.contract(), {"x": torch.ones(2, 8)}, {}).trace.enclosure("output").shape == (2, 4)
    with pytest.raises(UsageError, match=r"the function was traced where x\.shape\[-1\] % 2 is 0"):
        _ = Problem(op, op.contract(), {"x": torch.ones(2, 7)}, {}).trace


def test_the_guide_shows_what_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    guide = (ROOT / "docs" / "from_torch.md").read_text()
    source, shown = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)[:2]
    (tmp_path / "model.py").write_text(source)
    example = re.findall(r"'(\w+=bf16\[[\d,]+\])'", guide)[:3]
    assert cli.main(["new", "reference", f"{tmp_path}/model.py:gated_norm", *example, "eps=1e-06"]) == 0
    printed = capsys.readouterr()
    statements = [line for line in shown.splitlines() if line.startswith("    ")]
    assert len(statements) > 10 and set(statements) <= set(printed.out.splitlines())
    assert printed.err.split(": ")[1].strip() in guide


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.py:f", "x=bf16[3,4]"], "there is no file 'nowhere.py'"),
        ([str(HERE), "x=bf16[3,4]"], "is not FILE:FUNCTION"),
        ([f"{HERE}:swigl", "x=bf16[3,4]"], "swiglu"),
        ([f"{HERE}:soft_cap", "x=bf16[3,4]"], "the example lacks cap"),
        ([f"{HERE}:soft_cap", "x=bf16[3,4]", "cap=1.0", "--name", "tanh"], "'tanh' has a meaning in every reference"),
        ([f"{HERE}:soft_cap", "x=bf16[3,4]", "cap=1.0", "--output", "other.py"], "must be called soft_cap.py"),
    ],
)
def test_a_command_that_makes_no_sense_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["new", "reference", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_long_statement_is_wrapped_at_its_arguments() -> None:
    line = f"    value = hull({', '.join(['multiply_add(first_factor * second_factor, third, fourth)'] * 3)})"
    lines = wrapped(line)
    assert lines[0] == "    value = hull(" and lines[-1] == "    )" and len(lines) == 5
    assert "".join(part.strip() for part in lines).replace(",)", ")") == line.strip().replace("), m", "),m")
