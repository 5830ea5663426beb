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
from collections import Counter
from collections.abc import Iterable
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SEEDS, COUNT = (0, 1), 60
FIRST = 3
OF_VALUES = "values"
HEAD = """# Culprits: whether the line of a fault is named

`{command}`.

Each of {count} faults of `tests/faults/` is planted in a kernel that is declared without stages; the first case of
`lastbit verify` that fails is traced (`lastbit trace`), and the culprits that it names are held against the text.
*Planted* is a line that the fault changed or added (where it only deletes, a line beside the gap), or the call of a
function there. *Consumer* is a statement that takes what those lines give, through names, arguments and results, past
statements that have no step of their own: addresses, sizes, flags. *First three*: one of these is among the first
three culprits. *Unrounded* is neither: where a fault only leaves out a rounding, the statement whose value is no
longer rounded (`xhat = x * rstd`, of which the cast that followed is gone), or the argument that it is passed as; how
many rest on it has its own column. Faults whose finding is not of values have no wrong element, and stand apart.

| op | faults | traced | planted | consumer | unrounded | first culprit | among the first three | no culprit |
|---|---|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Row:
    """What became of a fault.

    Attributes:
        fault: its name with its op.
        case: the first case that fails; empty if none did.
        kind: `OF_VALUES`, or the finding that is not of values, or why nothing was traced.
        ranks: for each culprit, the likeliest first, `planted`, `consumer`, `unrounded` or empty.
        named: for each culprit, its line, text and stage.
        seconds: of the trace.
        planted: the planted lines.
    """

    fault: str
    case: str
    kind: str
    ranks: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    seconds: float = 0.0
    planted: str = ""

    @property
    def op(self) -> str:
        return self.fault.partition(":")[0]

    def hit(self, most: int) -> bool:
        """Whether one of the first culprits is it."""
        return any(self.ranks[:most])


def failing_case(fault: Any, kernel: Any) -> str:
    """The first case that the kernel fails, as a line; empty if there is none."""
    import torch

    from tests.faults import hunt

    cases = [case for seed in SEEDS for case in hunt.cases_for(fault, fault.dtypes[0], COUNT, seed)]
    seen = hunt.hunt(kernel, cases, torch.device("cpu"))
    return seen.result.case if seen else ""


def measure(fault: Any, cases: dict[str, str], *, sure: bool) -> Row:
    """Trace the first case that fails.

    Only the line that is `sure` is taken then, and it must be planted or unrounded; otherwise all candidates are.
    """
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
            return Row(name, "", "no case fails")
        subject, case = hunt.subject_of(kernel, torch.device("cpu")), parse_case(cases[name])
        kind = _kind(verify_case(subject, case, repeat=False))
        begin = time.perf_counter()
        trace = trace_case(subject, case)
        spent = time.perf_counter() - begin
    named = tuple(filter(None, [trace.blamed])) if sure else trace.culprits
    text = planted_lines(fault, read_sources())
    steps = None if sure else trace.steps
    ranks = _ranks(text, unrounded(text, read_sources()), named, steps)
    shown = tuple(_shown(step) for step in named)
    lines = ", ".join(f"{file}:{line}" for file, line in sorted(text.lines))
    return Row(name, cases[name], trace.reason or kind, ranks, shown, spent, lines)


def _kind(result: Any) -> str:
    """`OF_VALUES`, or the first finding where no element of a result is wrong."""
    from lastbit.diagnosing.handover import OF_STAGES

    of_values = result.failing_stage is not None or any(f.kind in OF_STAGES for f in result.findings)
    first = result.findings[0].sentence if result.findings else result.reason
    return OF_VALUES if of_values else first or str(result.verdict)


def _ranks(text: Any, sources: Any, named: Iterable[Any], steps: Iterable[Any] | None) -> tuple[str, ...]:
    """For each culprit, how it has to do with the fault; empty if not at all. Without steps, consumers are not."""
    from tests.faults.lines import consumers

    visible = {line for step in (*(steps or ()), *named) for line in _lines(step)}
    consuming, ranks = frozenset() if steps is None else consumers(text, visible), []
    for step in named:
        called = {(Path(c.rsplit(":", 2)[0]).name, int(c.rsplit(":", 2)[1])) for c in step.called}
        lines = {
            "planted": (_lines(step) | (called if step.launch else set())) & text.lines,
            "consumer": _lines(step) & consuming,
            "unrounded": (_lines(step) | called) & sources,
        }
        ranks.append(next((kind for kind, found in lines.items() if found), ""))
    return tuple(ranks)


def _lines(step: Any) -> set[tuple[str, int]]:
    if not step.line or step.again:
        return set()
    return {(Path(step.file).name, line) for line in range(step.line, max(step.line, step.end_line) + 1)}


def _shown(step: Any) -> str:
    stage = f" [{step.match.stage}]" if step.match else ""
    return f"{Path(step.file).name}:{step.line} `{step.text[:60]}`{stage}"


def table(rows: list[Row]) -> str:
    """A line per op, and one of all."""
    lines = [_counted(op, [r for r in rows if r.op == op]) for op in dict.fromkeys(r.op for r in rows)]
    return "".join([*lines, _counted("all", rows)])


def _counted(op: str, rows: list[Row]) -> str:
    traced = [r for r in rows if r.kind == OF_VALUES]
    first = Counter(r.ranks[0] if r.ranks else None for r in traced)
    hits = sum(r.hit(1) for r in traced), sum(r.hit(FIRST) for r in traced)
    shares = (f"{hit} ({100 * hit / max(1, len(traced)):.0f} %)" for hit in hits)
    kinds = (first[kind] for kind in ("planted", "consumer", "unrounded"))
    cells = (op, len(rows), len(traced), *kinds, *shares, first[None])
    return f"| {' | '.join(map(str, cells))} |\n"


def misses(rows: list[Row]) -> str:
    """What was named in place of the planted line, and what there is to say of faults without a wrong element."""
    text = "\n## Not named first\n\n| fault | planted | culprits |\n|---|---|---|\n"
    for row in (r for r in rows if r.kind == OF_VALUES and not r.hit(1)):
        ranked = [f"{named}{f' ({rank})' if rank else ''}" for named, rank in zip(row.named, row.ranks, strict=True)]
        text += f"| {row.fault} | {row.planted} | {'; '.join(ranked).replace('|', chr(92) + '|') or 'none'} |\n"
    text += "\n## No wrong element\n\n| fault | what is said |\n|---|---|\n"
    return text + "".join(f"| {r.fault} | {r.kind} |\n" for r in rows if r.kind != OF_VALUES)


def chosen(options: argparse.Namespace) -> list[Any]:
    """The faults that were asked for, all that some input can show if none were."""
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


def rows_of(options: argparse.Namespace) -> list[Row]:
    """A row per fault, in order, as many as the time allows."""
    cases, kept = _read(options.cases), {} if options.rows is None else _read(options.rows)
    begin, rows, before = time.monotonic(), [], dict(cases)
    for fault in chosen(options):
        name = str(fault)
        if name not in kept:
            if time.monotonic() - begin > options.seconds:
                print("more faults than time: run it again", file=sys.stderr)
                break
            kept[name] = asdict(measure(fault, cases, sure=options.held_out))
            if cases != before:
                _write(options.cases, cases)
            _write(options.rows, kept)
        row = Row(**{key: tuple(v) if isinstance(v, list) else v for key, v in kept[name].items()})
        if options.show:
            print(f"{row.ranks or '-'} {row.seconds:.1f}s {row.fault}\n    {row.case}\n    at {row.planted}")
            print("".join(f"    {named}\n" for named in row.named or (row.kind,)), end="", flush=True)
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
