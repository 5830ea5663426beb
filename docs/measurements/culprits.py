"""Whether a trace names the line that a fault was planted in, for kernels that store no stages.

Run `TRITON_INTERPRET=1 python docs/measurements/culprits.py [--op OP] [--only NAME] [--out FILE]`; it writes
culprits.md. `--cases FILE` and `--rows FILE` keep failing cases and finished rows, so that a later run goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SEEDS, COUNT = (0, 1), 60
OF_VALUES, FEW = "values", 10
HEAD = """# Culprits: whether the line of a fault is named

`{command}`.

Each of {count} faults of `tests/faults/` is planted in a kernel that is declared without stages; the first case of
`lastbit verify` that fails is traced (`lastbit explain --trace`), and the line that it names is held against the text.
*Right* is a line that the fault changed or added (where it only deletes, a line beside the gap), or the call of a
function there; where a fault only leaves out a rounding, the statement whose value is no longer rounded
(`xhat = x * rstd`, of which the cast that followed is gone), or the argument that it is passed as. A line is named
where the recorded call, done again with one operation of it mended, gives what the contract allows, residues included.
Faults whose finding is not of values have no wrong element, and stand apart.

| op | faults | traced | planted line | another | among three | stage for stage | at most 10 lines | more lines |
|---|---|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class CulpritRow:
    """The fate of a fault.

    Attributes:
        fault: its name with its op.
        case: the first case that fails; empty if none did.
        kind: `OF_VALUES`, or the finding that is not of values, or why nothing was traced.
        rank: of the line that is named, `planted`, `unrounded` or empty.
        among: the same of the best of the first three lines that could be mended, that one included.
        named: that line, its text and how it is mended; empty where none is named.
        seconds: of the trace.
        planted: the planted lines.
        told: the lines that could be mended, where none is named.
        held: the stage that is taken for another, where that is told.
        between: lines between what is right and what is wrong, where no line is named; 0 if none are told.
        inside: a planted line is among them.
    """

    fault: str
    case: str
    kind: str
    rank: str = ""
    among: str = ""
    named: str = ""
    seconds: float = 0.0
    planted: str = ""
    told: str = ""
    held: str = ""
    between: int = 0
    inside: bool = False

    @property
    def op(self) -> str:
        return self.fault.partition(":")[0]


def failing_case(fault: Any, kernel: Any) -> str:
    """Return the first case that the kernel fails, as a line; empty if there is none."""
    import torch

    from tests.faults import hunt

    cases = [case for seed in SEEDS for case in hunt.cases_for(fault, fault.dtypes[0], COUNT, seed)]
    seen = hunt.hunt(kernel, cases, torch.device("cpu"))
    return seen.result.case if seen else ""


def measure(fault: Any, cases: dict[str, str]) -> CulpritRow:
    """Trace the first case that fails."""
    import torch

    from lastbit.case import parse_case
    from lastbit.diagnosing.trace import trace_case
    from lastbit.verify.check import verify_case
    from tests.faults import hunt
    from tests.faults.lines import planted_lines
    from tests.faults.plant import planted, read_sources
    from tests.faults.unrounded import unrounded

    name = str(fault)
    with planted(fault) as whole, redirect_stderr(StringIO()):
        kernel = hunt.without_stages(whole)
        if name not in cases:
            cases[name] = failing_case(fault, kernel)
        if not cases[name]:
            return CulpritRow(name, "", "no case fails")
        subject, case = hunt.subject_of(kernel, torch.device("cpu")), parse_case(cases[name])
        kind = _kind(verify_case(subject, case, repeat=False))
        begin = time.perf_counter()
        trace = trace_case(subject, case)
        spent = time.perf_counter() - begin
    text = planted_lines(fault, read_sources())
    lines = ", ".join(f"{file}:{line}" for file, line in sorted(text.lines))
    ranked = [
        _rank(text, unrounded(text, read_sources()), step) for step in filter(None, [trace.blamed, *trace.mended])
    ]
    among = next(filter(None, ranked[: 3 + bool(trace.blamed)]), "")
    if trace.blamed is None:
        told = "; ".join(map(_shown, trace.mended))
        held = f"{trace.held} for {trace.until}" if trace.held else ""
        spans = [(Path(file).name, first, last) for file, first, last in map(_ends, trace.between)]
        inside = any(file == own and first <= line <= last for own, first, last in spans for file, line in text.lines)
        between = sum(last - first + 1 for _, first, last in spans)
        return CulpritRow(
            *(name, cases[name], trace.reason or kind, "", among, "", spent, lines, told, held, between, inside)
        )
    return CulpritRow(name, cases[name], trace.reason or kind, ranked[0], among, _shown(trace.blamed), spent, lines)


def _ends(span: str) -> tuple[str, int, int]:
    """Return the file, first and last line of `FILE:FIRST to LAST`."""
    file, _, numbers = span.rpartition(":")
    first, _, last = numbers.partition(" to ")
    return file, int(first), int(last or first)


def _kind(result: Any) -> str:
    """Return `OF_VALUES`, or the first finding where no element of a result is wrong."""
    from lastbit.result import OF_STAGES

    of_values = result.failing_stage is not None or any(f.kind in OF_STAGES for f in result.findings)
    first = result.findings[0].sentence if result.findings else result.reason
    return OF_VALUES if of_values else first or str(result.verdict)


def _rank(text: Any, sources: Any, step: Any) -> str:
    """Return how the line that is named has to do with the fault; empty if not at all."""
    called = {(Path(c.rsplit(":", 2)[0]).name, int(c.rsplit(":", 2)[1])) for c in step.called}
    if (_lines(step) | (called if step.launch else set())) & text.lines:
        return "planted"
    return "unrounded" if (_lines(step) | called) & sources else ""


def _lines(step: Any) -> set[tuple[str, int]]:
    if not step.line or step.again:
        return set()
    return {(Path(step.file).name, line) for line in range(step.line, max(step.line, step.end_line) + 1)}


def _shown(step: Any) -> str:
    mend = f", {step.mend}" if step.mend else ""
    return f"{Path(step.file).name}:{step.line} `{step.text[:60]}`{mend}"


def table(rows: list[CulpritRow]) -> str:
    """Return a line per op, and one of all."""
    lines = [_counted(op, [r for r in rows if r.op == op]) for op in dict.fromkeys(r.op for r in rows)]
    return "".join([*lines, _counted("all", rows)])


def _counted(op: str, rows: list[CulpritRow]) -> str:
    traced = [r for r in rows if r.kind == OF_VALUES]
    named = [r for r in traced if r.named]
    planted = sum(bool(r.rank) for r in named)
    among = sum(bool(r.among) for r in traced)
    held = [r for r in traced if r.held and not r.named]
    told = [r for r in traced if r.between and not r.held and not r.named]
    few = [r for r in told if r.between <= FEW]
    of = f"{planted} ({100 * planted / max(1, len(traced)):.0f} %)"
    inside = (f"{sum(r.inside for r in part)} of {len(part)}" for part in (few, told))
    cells = (op, len(rows), len(traced), of, len(named) - planted, among, len(held), *inside)
    return f"| {' | '.join(map(str, cells))} |\n"


def misses(rows: list[CulpritRow]) -> str:
    """Return what was named in place of the planted line, and what is said of faults without a wrong element."""
    text = "\n## Not named, or another line\n\n| fault | planted | named |\n|---|---|---|\n"
    for row in (r for r in rows if r.kind == OF_VALUES and not r.rank):
        text += f"| {row.fault} | {row.planted} | {(row.named or row.told).replace('|', chr(92) + '|') or 'none'} |\n"
    text += "\n## No wrong element\n\n| fault | what is said |\n|---|---|\n"
    return text + "".join(f"| {r.fault} | {r.kind} |\n" for r in rows if r.kind != OF_VALUES)


def chosen(options: argparse.Namespace) -> list[Any]:
    """Return the faults that were asked for, or all that some input can show."""
    from tests.faults.catalogue import FAULTS
    from tests.faults.held_out import HELD_OUT

    found = [
        f
        for f in (HELD_OUT if options.held_out else FAULTS)
        if not f.equivalent and (not options.op or f.op in options.op)
    ]
    found = [f for f in found if not options.only or any(part in str(f) for part in options.only)]
    found = found[options.start :: options.every]
    return found[: options.limit] if options.limit else found


def rows_of(options: argparse.Namespace) -> list[CulpritRow]:
    """Return a row per fault, in order, as many as the time allows."""
    cases, kept = _read(options.cases), {} if options.rows is None else _read(options.rows)
    begin, rows, before = time.monotonic(), [], dict(cases)
    for fault in chosen(options):
        name = str(fault)
        if name not in kept:
            if time.monotonic() - begin > options.seconds:
                print("more faults than time: run it again", file=sys.stderr)
                break
            kept[name] = asdict(measure(fault, cases))
            if cases != before:
                _write(options.cases, cases)
            _write(options.rows, kept)
        row = CulpritRow(**kept[name])
        if options.show:
            print(f"{row.rank or '-'} {row.seconds:.1f}s {row.fault}\n    {row.case}\n    at {row.planted}")
            print(f"    {row.named or row.kind} {row.told}", flush=True)
        rows.append(row)
    return rows


def _read(path: Path | None) -> dict[str, Any]:
    return json.loads(path.read_text()) if path and path.exists() else {}


def _write(path: Path | None, content: dict[str, Any]) -> None:
    if path:
        path.write_text(json.dumps(content, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--op", action="append", help="faults of this op only")
    parser.add_argument("--only", action="append", help="faults with this in their name only")
    parser.add_argument("--held-out", action="store_true", help="the faults of tests/faults/held_out.py")
    parser.add_argument("--limit", type=int, default=0, help="so many faults only")
    parser.add_argument("--every", type=int, default=1, help="one of so many faults only")
    parser.add_argument("--start", type=int, default=0, help="the number of the first of them")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no fault after so long")
    parser.add_argument("--cases", type=Path, help="a file of failing cases, read and written")
    parser.add_argument("--rows", type=Path, help="a file of finished rows, read and written")
    parser.add_argument("--show", action="store_true", help="print each fault")
    parser.add_argument("--out", type=Path, help="where to write the table")
    options = parser.parse_args()
    os.environ.setdefault("TRITON_INTERPRET", "1")
    sys.path[:0] = [str(ROOT / "harness" / "checkout"), str(ROOT)]
    import torch

    from lastbit.interpret import install

    torch.set_num_threads(1)
    install()
    rows = rows_of(options)
    command = "TRITON_INTERPRET=1 python docs/measurements/culprits.py"
    text = HEAD.format(command=command, count=len(rows)) + table(rows) + misses(rows)
    print(table(rows), end="")
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
