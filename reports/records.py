"""Records of a run on disk: lines of JSON that restore every result, and a table to query.

A folder holds `records.jsonl` (one `CaseResult` a line), `records.parquet` (the table below) and `run.json` (everything
else of a `Run`, and in `results_count` how many results there are; written last, so that a folder which has it is
complete). `lastbit.reports.stage_summary.frame` makes a table of the stages that were found in kernels which declare
none. JSON is strict: a float that JSON cannot spell is the string `NaN`, `Infinity` or `-Infinity`.

The table has one row per case × kernel × stage; a result without stages has one row whose `stage` is empty. Columns, in
this order:

| columns | type | meaning |
|---|---|---|
| `op`, `case`, `kernel`, `contract`, `device`, `dtypes`, `group` | text | what was run |
| `fingerprint` | text | hash of the input bits |
| `verdict`, `reason` | text | outcome of the case |
| `counted` | bool | generated, rather than tried while a failure was shrunk |
| `seconds` | float | time that the case took |
| `stage`, `stage_dtype` | text | the stage, and its format under the contract |
| `result` | bool | whether the stage is a result of the op |
| `numel`, `decided`, `mismatched`, `outside`, `special` | int | elements, counted as in `Comparison` |
| `rel_l2`, `contract_l2`, `max_error`, `bias`, `max_ulp` | float | errors, as in `Comparison` |
| `ulp_0`, `ulp_1`, `ulp_2`, `ulp_3_to_4`, `ulp_5_to_16`, `ulp_above_16` | int | elements by distance in ulp |
| `budget_ratio` | float | share of the allowed deviation that was used; above 1 is outside |
| `roundoff` | float | sum of the unit roundoffs of the stages up to this one |
| `extreme` | bool | `contract_l2` is more than the roundings explain: no ordinary case |
| `worst_index` | text | index of the worst element, a JSON list; empty where there is none |
| `worst_actual`, `worst_expected`, `worst_exact`, `worst_lo`, `worst_hi` | float | its values, and what is allowed |
| `equal`, `differing` | int | elements that follow from the contract's formula, and from another one |
| `isolated_outside`, `isolated_mismatched` | int | the same, from the kernel's own values of earlier stages |
| `isolated_rel_l2`, `isolated_max_ulp` | float | likewise |
| `rows`, `rows_explained`, `rows_split` | int | rows tried, those that one latent value explains, or two |
| `ruled_out` | text | alternative contract → elements outside it, a JSON object |
| `explained_by` | text | contracts that allow every bit of a failed result, separated by `, ` |
| `properties` | text | property of the bits → what was found of it, a JSON object; empty where none was asked |
| `findings`, `notices` | text | sentences, one a line: of what fails the case, and of what informs |
| `output_fingerprint` | text | hash of the stage's bits |
| `source` | text | file and line of the kernel |
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lastbit.errors import LastbitError
from lastbit.files import replace_file
from lastbit.reports.encoding import decoded, encoded, names_of
from lastbit.reports.summary import ulp_names
from lastbit.result import CaseResult, Comparison, Worst
from lastbit.run import Run

if TYPE_CHECKING:
    import pandas as pd


_BINS = tuple(f"ulp_{name}" for name in ulp_names("_to_", "above_"))
_TEXT, _FLAG, _COUNT, _NUMBER = "str", "boolean", "Int64", "float64"
_TABLE = (
    (_TEXT, "op case kernel contract device dtypes group fingerprint verdict reason"),
    (_FLAG, "counted"),
    (_NUMBER, "seconds"),
    (_TEXT, "stage stage_dtype"),
    (_FLAG, "result"),
    (_COUNT, "numel decided mismatched outside special"),
    (_NUMBER, "rel_l2 contract_l2 max_error bias max_ulp"),
    (_COUNT, " ".join(_BINS)),
    (_NUMBER, "budget_ratio roundoff"),
    (_FLAG, "extreme"),
    (_TEXT, "worst_index"),
    (_NUMBER, "worst_actual worst_expected worst_exact worst_lo worst_hi"),
    (_COUNT, "equal differing"),
    (_COUNT, "isolated_outside isolated_mismatched"),
    (_NUMBER, "isolated_rel_l2 isolated_max_ulp"),
    (_COUNT, "rows rows_explained rows_split"),
    (_TEXT, "ruled_out explained_by properties findings notices output_fingerprint source"),
)
COLUMNS: Mapping[str, str] = {name: kind for kind, names in _TABLE for name in names.split()}
"""Column → pandas dtype, in the order of the table."""

_MEASURED = tuple(name for name in COLUMNS if hasattr(Comparison, name))


def dump(result: CaseResult) -> str:
    """Write one result as one line of JSON, without the line break."""
    return json.dumps(encoded(result), allow_nan=False)


def parse(line: bytes, where: str) -> CaseResult:
    """Restore the result from a line of `dump`; `where` names the place for the error.

    Raises:
        LastbitError: the line is malformed.
    """
    try:
        result = decoded(CaseResult, json.loads(line))
    except _MALFORMED as error:
        text = line.decode(errors="replace")
        rest = f" and {len(text) - _SHOWN:,} more characters" if len(text) > _SHOWN else ""
        raise LastbitError(f"{where} is malformed ({error}): {text[:_SHOWN]!r}{rest}") from error
    assert isinstance(result, CaseResult)
    return result


# Two lines of a terminal: it stands in an error beside what is wrong with it.
_SHOWN = 200
_MALFORMED = (ValueError, TypeError, RecursionError)  # the last of JSON that is nested too deeply


def load(path: Path) -> list[CaseResult]:
    """Load the results of a file of lines that `dump` made.

    A last line without its line break is what a worker leaves that died while writing: it is ignored if it is cut off.

    Raises:
        LastbitError: the file cannot be read, or another line is malformed.
    """
    *lines, tail = _read(path).split(b"\n")
    with suppress(ValueError, RecursionError):
        json.loads(tail)
        lines.append(tail)
    return [parse(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def frame(results: Iterable[CaseResult]) -> pd.DataFrame:
    """Make the table described at the top of this module."""
    import pandas as pd

    def in_utf8(value: object) -> object:  # without lone surrogates, which an exception's message may hold
        if not isinstance(value, str) or value.isascii():
            return value
        return value.encode(errors="backslashreplace").decode()

    rows = [{k: in_utf8(v) for k, v in row.items()} for result in results for row in _rows(result)]
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype(dict(COLUMNS))


def write(run: Run, folder: Path) -> None:
    """Write the three files of a run; each is either its old self or complete, whenever the process is stopped."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(f"{dump(result)}\n" for result in run.results)
    replace_file(folder / "records.jsonl", lambda path: path.write_text(lines, encoding="utf-8"))
    replace_file(folder / "records.parquet", lambda path: frame(run.results).to_parquet(path, index=False))
    write_rest(run, folder)


def write_rest(run: Run, folder: Path) -> None:
    """Write everything of a run but its results, which `write` has written before."""
    rest = {name: value for name, value in encoded(replace(run, results=())).items() if name != "results"}
    text = json.dumps({**rest, _COUNT_OF_RESULTS: len(run.results)}, indent=2, allow_nan=False) + "\n"
    replace_file(folder / "run.json", lambda path: path.write_text(text, encoding="utf-8"))


def read(folder: Path) -> Run:
    """Read the run that `write` left in a folder.

    Raises:
        LastbitError: a file is missing or malformed, or there are not as many results as the run had.
    """
    path = folder / "run.json"
    if not path.is_file():
        raise LastbitError(f"{str(folder)!r} holds no complete run: it has no run.json")
    text = _read(path)
    try:
        rest = dict(json.loads(text))
        count = decoded(int | None, rest.pop(_COUNT_OF_RESULTS, None))  # None in runs of an older lastbit
        run = decoded(Run, {**rest, "results": []})
    except _MALFORMED as error:
        raise LastbitError(f"{path} is malformed ({error})") from error
    assert isinstance(run, Run)
    results = tuple(load(folder / "records.jsonl"))
    if count not in (None, len(results)):
        raise LastbitError(
            f"{folder / 'records.jsonl'} has {len(results):,} results, but the run had {count:,}; restore the file, or "
            "run again"
        )
    return replace(run, results=results)


_COUNT_OF_RESULTS = "results_count"


def _rows(result: CaseResult) -> Iterator[dict[str, object]]:
    case = {name: getattr(result, name) for name in COLUMNS if name in names_of(CaseResult)}
    case |= {
        "verdict": result.verdict.value,
        "rows": result.rows.rows if result.rows else None,
        "rows_explained": result.rows.explained if result.rows else None,
        "rows_split": result.rows.split if result.rows else None,
        "ruled_out": json.dumps(dict(result.ruled_out)),
        "explained_by": ", ".join(result.explained_by),
        "properties": json.dumps({one.name: one.outcome for one in result.properties}) if result.properties else "",
        "findings": "\n".join(finding.sentence for finding in result.faults),
        "notices": "\n".join(notice.sentence for notice in result.notices),
        "stage": "",
    }
    for stage in result.stages:
        seen, isolated, worst = stage.cumulative, stage.isolated, stage.cumulative.worst
        yield {
            **case,
            "stage": stage.name,
            "stage_dtype": stage.dtype,
            "result": stage.result,
            **{name: getattr(seen, name) for name in _MEASURED},
            **dict(zip(_BINS, seen.ulp_histogram, strict=True)),
            "worst_index": json.dumps(worst.index) if worst else "",
            **({f"worst_{name}": getattr(worst, name) for name in names_of(Worst) if name != "index"} if worst else {}),
            "roundoff": stage.roundoff,
            "extreme": stage.extreme,
            "equal": stage.equal,
            "differing": stage.differing,
            "isolated_outside": isolated.outside,
            "isolated_mismatched": isolated.mismatched,
            "isolated_rel_l2": isolated.rel_l2,
            "isolated_max_ulp": isolated.max_ulp,
            "output_fingerprint": stage.fingerprint,
        }
    if not result.stages:
        yield {**dict.fromkeys((name for name, kind in COLUMNS.items() if kind == "str"), ""), **case}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise LastbitError(f"cannot read {path}: {error.strerror}") from error
