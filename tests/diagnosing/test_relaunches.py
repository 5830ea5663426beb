"""What a launch is passed wrongly is named where it is passed: the launch done again with it changed is right."""

from __future__ import annotations

from pathlib import Path

import pytest
import triton

from lastbit.interpret import install
from tests.diagnosing.test_mends import CALLS, LINE, found, printed
from tests.diagnosing.test_mends_culprits import STRIDED, TRITON

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="the traces are of the interpreter")

if triton.knobs.runtime.interpret:
    install()

LAUNCH = "    _norm[(x.shape[0],)](x, weight, y, x.shape[1], x.stride(0), eps, ROUND=True, BLOCK=64)\n"
HELPED = CALLS.replace(
    "@kernel(",
    """
def launch(x, vectors, y, stride, **flags):
    [weight], columns = vectors, x.shape[1]
    _norm[(x.shape[0],)](
        x, vectors[0], y,
        columns, stride, flags.pop("eps"),
        **flags, BLOCK=64,
    )


@kernel(""",
).replace(
    LAUNCH,
    """    launch(
        x,
        [weight],
        y,
        x.stride(0),
        eps=eps, ROUND=True,
    )
""",
)


@pytest.mark.parametrize(
    ("text", "old", "new", "code", "mend", "line"),
    [
        (TRITON, "x.stride(0), eps", "x.stride(1), eps", "_norm[", "stride = 72 in place of 1", STRIDED),
        (TRITON, "(x, weight, y", "(x, x, y", "_norm[", "w_ptr = weight in place of x", LINE),
        (TRITON, "(x.shape[0],)]", "(x.shape[0] - 1,)]", "_norm[", "the grid = (3, 1, 1) in place of (2, 1, 1)", LINE),
        (CALLS, "ROUND=True", "ROUND=False", "_norm[", "ROUND = True in place of False", LINE),
        (CALLS, "(0), eps, ROUND", "(0), 2 * eps, ROUND", "_norm[", "eps = 0.01 in place of 0.02", LINE),
        (HELPED, "x.stride(0)", "x.stride(1)", "x.stride(1),", "stride = 72 in place of 1", STRIDED),
        (HELPED, "[weight],\n        y", "[x],\n        y", "[x],", "w_ptr = weight in place of x", LINE),
        (HELPED, "ROUND=True", "ROUND=False", "eps=eps, ROUND=False", "ROUND = True in place of False", LINE),
        (HELPED, "columns, stride", "columns - 1, stride", "columns - 1, stride", "n = 1000 in place of 999", LINE),
    ],
)
def test_the_line_that_passes_what_is_wrong(
    tmp_path: Path, text: str, old: str, new: str, code: str, mend: str, line: str
) -> None:
    explanation = found(tmp_path, text, old, new, line)
    assert explanation.culprit is not None and explanation.culprit.code.startswith(code)
    assert explanation.culprit.mend == f"with {mend} in the launch of _norm"
    assert f"should be: with {mend} in the launch of _norm; done again so" in printed(explanation)


def test_no_line_where_either_of_two_arguments_mends(tmp_path: Path) -> None:
    """The kernel rounds if one of two flags says so, and the launch passes neither."""
    text = CALLS.replace("ROUND: tl.constexpr, BLOCK", "ROUND: tl.constexpr, ALSO: tl.constexpr, BLOCK")
    text = text.replace("element_ty, ROUND)", "element_ty, ROUND or ALSO)")
    explanation = found(tmp_path, text, "ROUND=True", "ROUND=False, ALSO=False")
    assert explanation.culprit is None
    mends = [step.mend.split(" in the launch")[0] for step in explanation.trace.mended]
    assert {"with ROUND = True in place of False", "with ALSO = True in place of False"} <= set(mends)


def test_a_kernel_that_is_wrong_itself_is_named(tmp_path: Path) -> None:
    explanation = found(tmp_path, CALLS, "element_ty, ROUND)", "element_ty, False)")
    assert explanation.culprit is not None and explanation.culprit.code.startswith("xhat = rounded(")


MADE = HELPED.replace("    y = torch", "    [made] = vectors_of(x, weight)\n    y = torch").replace(
    "def launch(", "def vectors_of(x, weight):\n    return [weight]\n\n\ndef launch("
)


@pytest.mark.parametrize(
    ("text", "old", "new"),
    [
        (MADE.replace("[weight],\n        y", "[made],\n        y"), "return [weight]", "return [x]"),
        (HELPED, "[weight], columns = vectors, x", "vectors, columns = [torch.zeros_like(vectors[0])], x"),
        (HELPED.replace("[weight],\n", "[(x, weight)[-at]],\n").replace("    y = torch", "    at = 1\n    y = torch"),
         "at = 1", "at = 0"),
    ],
    ids=["made by another function", "a parameter assigned anew", "by a key"],
)  # fmt: skip
def test_no_line_where_the_text_does_not_say_who_passed_it(tmp_path: Path, text: str, old: str, new: str) -> None:
    explanation = found(tmp_path, text, old, new)
    assert explanation.culprit is None
    assert explanation.trace.mended[0].mend.startswith("with w_ptr = weight in place of")
