"""An explanation as a run would have it, for tests of what reports say of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lastbit.reports.why import Element, Explanation, KernelTrace, StageMatch, Step, WorkedStage
from lastbit.result import CaseResult, Worst

LINES = (
    "def norm(x, w, y):",
    "    rstd = 1 / tl.sqrt(tl.sum(x * x) / n + eps)",
    "    xhat = x * rstd",
    "    tl.store(y, xhat * w)",
)
BLAMED = 3


def kernel_file(folder: Path, name: str = "norm.py") -> Path:
    path = folder / name
    path.write_text("\n".join(LINES) + "\n")
    return path


def step(file: Path | str, line: int, text: str, value: str, match: StageMatch | None = None) -> Step:
    code = LINES[line - 1].strip()
    column = LINES[line - 1].index(text)
    columns = {"column": column, "end_line": line, "end_column": column + len(text)}
    values = {"dtype": "fp32", "count": 1, "first": (Element(value, "0x3e18"),), "code": code, "function": "norm"}
    return Step(text, file=str(file), line=line, match=match, **columns, **values)  # type: ignore[arg-type]


def explained(result: CaseResult, file: Path | str, **changes: object) -> Explanation:
    """Return why a result failed: line 3 of the file does not round."""
    match = StageMatch("normalized", 0.149, 0.1484375, 0.1484375, 300, 300, expected=0.1484375, format="bf16")
    fine = StageMatch("inv_rms", 0.64, 0.64, 0.64, 0, 4, format="fp32")
    steps = (
        Step("x[0, 1]", "bf16", operation="input", count=1, first=(Element("0.5"),)),
        step(file, 2, "1 / tl.sqrt(tl.sum(x * x) / n + eps)", "0.64", fine),
        step(file, BLAMED, "x * rstd", "0.14904", match),
        step(file, 4, "xhat * w", "0.1494140625"),
    )
    names = result.kernel, result.op, result.contract, result.case, result.device
    worst = Worst((0, 1), 0.1494140625, 0.1484375, 0.149, 0.1484375, 0.1484375, 1.0)
    trace = KernelTrace(
        *names, result.verdict, stage="output", worst=worst, steps=steps, leaves=steps[2], blamed=steps[2]
    )
    worked = WorkedStage(
        "normalized",
        (0, 1),
        exact=0.1486,
        expected=0.1484375,
        lo=0.1484375,
        hi=0.1484375,
        format="bf16",
        rounds=True,
        below=0.1484375,
        above=0.1494140625,
        did="does not round",
        line=BLAMED,
    )
    base = Explanation(
        result.kernel,
        result.device,
        result.case,
        result.verdict,
        trace,
        explained_by=("fp32_multiply",),
        diagnoses=("Every row is off.",),
        worst=worst,
        arithmetic=(worked,),
    )
    return replace(base, **changes)  # type: ignore[arg-type]
