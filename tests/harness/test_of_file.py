"""The kernel of a file that knows nothing of lastbit, or says more than it is asked."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from lastbit.config import Config
from lastbit.errors import KernelError, UsageError
from lastbit.of_file import Role, held_to, kernel_of_file
from lastbit.ops import Op
from lastbit.verify.project import open_project

PLAIN = "def {name}(x, weight=None, *, eps): return x\n"
DECLARED = '@kernel("rms_norm", contract="{contract}", name="{name}")\ndef f_{name}(x, weight=None, *, eps): return x\n'
IMPORT = "from lastbit.kernel import kernel\n"


@pytest.fixture(scope="module")
def op() -> Op:
    return open_project(Config(folder="")).op("rms_norm")


def file(folder: Path, text: str) -> Path:
    path = folder / "some_kernel.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "function", "name"),
    [
        (PLAIN.format(name="mine"), "", "mine"),
        (PLAIN.format(name="mine") + PLAIN.format(name="rms_norm"), "", "rms_norm"),
        (PLAIN.format(name="mine") + PLAIN.format(name="other"), "other", "other"),
        (PLAIN.format(name="mine") + PLAIN.format(name="_other"), "", "mine"),
        ("from math import floor\nfrom textwrap import dedent\n" + PLAIN.format(name="mine"), "", "mine"),
        (IMPORT + PLAIN.format(name="rms_norm") + DECLARED.format(contract="", name="told"), "", "told"),
        (IMPORT + DECLARED.format(contract="", name="a") + DECLARED.format(contract="", name="b"), "b", "b"),
        (IMPORT + DECLARED.format(contract="", name="a") + DECLARED.format(contract="", name="b"), "f_b", "b"),
    ],
)
def test_the_function_is_found(tmp_path: Path, text: str, function: str, name: str) -> None:
    found = kernel_of_file(file(tmp_path, text), Role("rms_norm", "fp32_multiply", function))
    assert (found.name, found.op, found.accepts) == (name, "rms_norm", {"x", "weight", "eps"})


@pytest.mark.parametrize(
    ("text", "function", "message"),
    [
        ("x = 1\n", "", "some_kernel.py defines no public function"),
        (PLAIN.format(name="a") + PLAIN.format(name="b"), "", "some_kernel.py defines a, b; --function says which"),
        (PLAIN.format(name="mine"), "mien", "'mien'; did you mean 'mine'?"),
        ("mine = 3\n", "mine", "unknown function of some_kernel.py 'mine'"),
        (
            IMPORT + DECLARED.format(contract="", name="a") + DECLARED.format(contract="", name="b"),
            "",
            "some_kernel.py declares several kernels of rms_norm: a, b; --function names one",
        ),
    ],
)
def test_what_there_is_is_listed(tmp_path: Path, text: str, function: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        kernel_of_file(file(tmp_path, text), Role("rms_norm", function=function))
    assert message in str(raised.value)


def test_a_file_that_raises(tmp_path: Path) -> None:
    with pytest.raises(KernelError, match="raised ValueError while it was loaded: no"):
        kernel_of_file(file(tmp_path, "raise ValueError('no')"), Role("rms_norm"))


def test_the_caller_says_what_a_plain_function_is(tmp_path: Path, op: Op) -> None:
    role = Role("rms_norm", "fp32_multiply", mutates={"x": "output"}, unordered=("output",), placement="moves")
    found = kernel_of_file(file(tmp_path, PLAIN.format(name="mine")), role)
    assert (found.contract, found.mutates, found.held) == ("fp32_multiply", ("x",), {"x": "output"})
    kept, notes = held_to(found, role, op)
    assert kept == found and not notes


def test_what_the_file_claims_is_told_and_not_believed(tmp_path: Path, op: Op) -> None:
    text = dedent("""\
        from lastbit.kernel import kernel

        @kernel("rms_norm", contract="fp32_multiply", mutates={"x": "output"}, unordered=("output",),
                placement="moves", depth=lambda terms: 3, order=16, takes="contiguous")
        def mine(x, weight=None, *, eps):
            return x
        """)
    role = Role("rms_norm", "native_multiply")
    kept, notes = held_to(kernel_of_file(file(tmp_path, text), role), role, op)
    assert (kept.contract, kept.mutates, kept.held) == ("native_multiply", (), {})
    assert (kept.unordered, kept.placement, kept.order, kept.takes) == ((), "refuses", 16, {})
    assert [note.partition(" declares ")[2].split(";")[0] for note in notes] == [
        "the contract fp32_multiply+rounded_sum",
        "that it overwrites x, which the caller does not allow",
        "output to be unordered, which the caller does not allow",
        "takes='contiguous'",
        "placement='moves'",
    ]


def test_results_that_the_caller_finds_in_inputs(tmp_path: Path) -> None:
    """The file declares a kernel that returns its result; the caller knows that an input holds another one."""
    text = IMPORT + '@kernel("rms_norm", stages=("product",))\ndef mine(x, residual, *, eps, stages=()): return None\n'
    found = kernel_of_file(file(tmp_path, text), Role("rms_norm", mutates={"x": "output", "residual": "residual_sum"}))
    assert found.call(x=1, residual=2, eps=0.0) == {"output": 1, "residual_sum": 2}
    assert (found.stages, found.held) == (("product",), {"x": "output", "residual": "residual_sum"})


def test_siblings_are_in_reach_while_the_file_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "beside_some_kernel.py").write_text("def answer(x): return x\n")
    text = "from beside_some_kernel import answer\n" + PLAIN.format(name="mine").replace("return x", "return answer(x)")
    assert kernel_of_file(file(tmp_path, text), Role("rms_norm")).call(x=4, eps=0.0) == 4
