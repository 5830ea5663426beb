"""What residues see of kernels: right ones, planted faults, and what enclosures cannot see.

Run `python docs/measurements/residues.py [--cases N] [--op OP] [--every N] [--workers N] [--kept FILE] [--out FILE]`.
It writes residues.md. `--kept` names a file of finished rows, read and written, so that a later run goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stderr
from functools import cache
from io import StringIO
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("kernels", "tests/correct_kernels")
SEED = 0
LARGEST = 1 << 15  # elements of all tensors of a case
DRAWN, TRIED = 60, 8  # cases of a fault, and those of them that it is looked for in
OF_ONE_CALL = ("nondeterministic", "uninitialised", "unwritten")  # findings of kernels that leave other memory alone
SIGHTS = ("both", "enclosures alone", "residues alone", "other checks alone", "none")
COLUMNS, KEYS, WIDTH = 4096, (512, 4096), 64
LONGEST = ("moe_lora_backward", "moe_lora", "layer_norm_gated_backward", "attention")  # ops whose rows begin first
HEAD = """# What residues see

`{command}`, {date}: torch {torch}, Python {python}, Triton's interpreter, a core for each process.

A kernel is followed on residues beside its own numbers, and its results are compared with those of its contract
([residues.md](../residues.md)).

## Right kernels

Every kernel of {folders} that runs on a CPU, on up to {cases} cases each. Hypothesis drew
them from the groups that the kernel takes; those of more than {largest:,} elements in all tensors are left out. An
element counts if it is finite under the contract and no integer code. *Equal* ones follow from the formula of the
contract, *open* ones may follow from it or not, *differing* ones do not. *Opaque* says where no rule led on. *In fp32*
are the cases of which all floating-point tensors are fp32.
{right}
## Planted faults

{faults} faults of `tests/faults/` (`catalogue.py`, `held_out.py`) that some input can show, each planted in a kernel
that is declared without stages, in the first dtype of its cases, and in fp32 besides where that shows it. It is looked
for in the first {tried} of {drawn} cases that `lastbit verify` generates for it, without those of more than {largest:,}
elements, until both oracles see it. *Enclosures* are those of the results. *Other checks* are what `lastbit verify` has
beside them, of memory and of errors; a kernel that they find to write elsewhere is not followed. *None*: none of these
cases shows it.

{planted}
## What only residues see

Inputs are normal numbers. Enclosures *decide* an element of which the contract allows one value; residues decide one
that is equal or differs.

{blind}"""


def share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "–"


def table(*lines: tuple[Any, ...]) -> str:
    head, *rows = [f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines]
    return "".join([head, "|" + "---|" * len(lines[0]) + "\n", *rows])


OF_FOLDERS = HEAD[: HEAD.index("## Planted faults")]


def reason(opaque: str) -> str:
    """Phrase an opaque operation with its reason, without the place in the kernel's text."""
    return re.sub(r" at \S+:\d+( `.*`)?(?=: )", "", opaque).partition("\n")[0]


# Right kernels


def cases_of(kernel: Any, count: int) -> Iterator[Any]:
    """Draw cases of a kernel, at most two from a group at a time, none of which is too large."""
    from lastbit.verify.drawing import drawing, free
    from lastbit.verify.narrowing import groups_of
    from tests.faults.hunt import project

    groups = [g for g in groups_of(project(), kernel, small=True) if g.strategy is not None]
    random.Random(kernel.name).shuffle(groups)
    seen: set[str] = set()
    for round_ in range(2 + count // max(1, len(groups))):
        for group in groups:
            drawn: list[Any] = []
            drawing(free(group), drawn.append, count=3, seed_=SEED + round_)
            for case in drawn[1:]:  # the first one is the simplest, of every seed
                if str(case) not in seen and sum(t.numel for t in case.tensors) <= LARGEST:
                    seen.add(str(case))
                    yield case


def compared(subject: Any, case: Any) -> tuple[Counter[str], list[str]]:
    """Count elements and opaque operations of a kernel in a case; nothing if it turns the case down."""
    from lastbit.errors import UnsupportedCase
    from lastbit.inputs import build
    from lastbit.judging.formula import compare_formulas
    from lastbit.shadows.following import follow

    inputs = build(case.gathered(), subject.device)
    problem = subject.problem(inputs)
    optional = subject.op.optional_results

    def followed_for(results: tuple[str, ...]) -> Any:
        return follow(subject.kernel, inputs.hand_out(), case.params, results, problem.constants)

    followed = followed_for(tuple(problem.trace.results))
    if not followed.results:  # it leaves out results that it may leave out
        followed = followed_for(tuple(r for r in problem.trace.results if r not in optional))
    if any(f"raised {UnsupportedCase.__name__}" in opaque for opaque in followed.opaque):
        return Counter(), []
    counts: Counter[str] = Counter(cases=1)
    for one in compare_formulas(problem, followed.results).values():
        counts.update(elements=one.numel, equal=one.equal, differing=one.differs)
    return counts, list(map(reason, followed.opaque))


def right(kernel: Any, count: int) -> dict[str, Any]:
    """Return what was seen of a right kernel: counts of all cases, of those in fp32, and opaque operations."""
    import torch

    from lastbit.verify.check import Subject, takes
    from tests.faults.hunt import project

    subject = Subject(kernel, project().op(kernel.op), torch.device("cpu"))
    every, fp32, opaque, differing = Counter[str](), Counter[str](), Counter[str](), []
    for case in islice((c for c in cases_of(kernel, count) if takes(subject, c)), count):
        try:
            counts, where = compared(subject, case)
        except Exception as error:
            counts, where = Counter(raised=1), [f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"]
        every += counts
        opaque.update(set(where))
        if {t.dtype for t in case.tensors if t.dtype.startswith(("bf", "fp"))} == {"fp32"}:
            fp32 += counts
        if counts["differing"]:
            differing.append(str(case))
    return {"op": kernel.op, "all": every, "fp32": fp32, "opaque": opaque, "differing": differing}


def cells(counts: Counter[str] | dict[str, int]) -> tuple[Any, ...]:
    counts = Counter(counts)
    elements, left = counts["elements"], counts["elements"] - counts["equal"] - counts["differing"]
    return (
        counts["cases"],
        f"{elements:,}",
        share(counts["equal"], elements),
        share(left, elements),
        counts["differing"],
    )


def right_table(rows: dict[str, dict[str, Any]]) -> str:
    """Yield a line per kernel, another one of its cases in fp32, and one of all."""
    lines = [("kernel", "cases", "elements", "equal", "open", "differing", "opaque, in cases")]
    text, every, fp32 = "", Counter[str](), Counter[str]()
    for name, row in sorted(rows.items(), key=lambda item: (item[1]["op"], item[0])):
        opaque = "; ".join(f"{what} ({n})" for what, n in Counter(row["opaque"]).most_common())
        lines.append((f"{row['op']}: `{name.partition(': ')[2]}`", *cells(row["all"]), opaque))
        if row["fp32"]:
            lines.append(("… in fp32", *cells(row["fp32"]), ""))
        every, fp32 = every + Counter(row["all"]), fp32 + Counter(row["fp32"])
        text += "".join(f"* differs: {name} `{case}`\n" for case in row["differing"])
    lines += [(f"all {len(rows)}", *cells(every), ""), ("… in fp32", *cells(fp32), "")]
    return f"\n{table(*lines)}\n{text}"


# Planted faults


def faults(options: argparse.Namespace) -> dict[str, tuple[Any, str]]:
    """Return name → fault and dtype, in random order: the first dtype that shows it, and fp32 if that does, too."""
    from tests.faults.catalogue import FAULTS
    from tests.faults.held_out import HELD_OUT

    found = [f for f in (*FAULTS, *HELD_OUT) if not f.equivalent and (not options.op or f.op in options.op)]
    random.Random(SEED).shuffle(found)
    every = [(f, dtype) for f in found[:: options.every] for dtype in dict.fromkeys((f.dtypes[0], f.dtypes[-1]))]
    return {f"{f}, fp32" if d == "fp32" else str(f): (f, d) for f, d in every if d in ("fp32", f.dtypes[0])}


def sighted(fault: Any, dtype: str) -> dict[str, Any]:
    """Return whether enclosures, residues and other checks see a fault, and what was left open where they do not."""
    import torch

    from lastbit.result import BAD, OF_STAGES
    from lastbit.verify.check import verify_case
    from tests.faults import hunt
    from tests.faults.plant import planted

    seen, counts, opaque = Counter[str](), Counter[str](), Counter[str]()
    small = [c for c in hunt.cases_for(fault, dtype, DRAWN) if sum(t.numel for t in c.tensors) <= LARGEST]
    with planted(fault) as whole, redirect_stderr(StringIO()):
        subject = hunt.subject_of(hunt.without_stages(whole), torch.device("cpu"))
        for case in small[:TRIED]:
            result = verify_case(subject, case, repeat=False)
            of_values = result.failing_stage is not None or any(f.kind in OF_STAGES for f in result.findings)
            if result.verdict in BAD:
                seen["enclosures" if of_values else "other checks"] += 1
            if any(f.kind not in (*OF_STAGES, *OF_ONE_CALL) for f in result.findings):
                counts["not followed"] += 1
                continue
            try:
                own, where = compared(subject, case)
            except Exception as error:
                own, where = Counter(raised=1), [f"raises {type(error).__name__}"]
            seen["residues"] += own["differing"] > 0
            counts += own + Counter(decided=sum(s.cumulative.decided for s in result.stages if s.result))
            opaque.update(set(where))
            if seen["enclosures"] and seen["residues"]:
                break
    return {"op": fault.op, "description": fault.description, "seen": seen, "counts": counts, "opaque": opaque}


def sight(row: dict[str, Any]) -> str:
    seen = Counter(row["seen"])
    if seen["enclosures"]:
        return "both" if seen["residues"] else "enclosures alone"
    return "residues alone" if seen["residues"] else "other checks alone" if seen["other checks"] else "none"


def why(row: dict[str, Any]) -> str:
    """Say why the oracle that does not see a fault sees nothing in the results."""
    counts, opaque = Counter(row["counts"]), "; ".join(row["opaque"])
    if sight(row) == "residues alone":
        return f"enclosures decide {share(counts['decided'], counts['elements'])}"
    if counts["not followed"]:
        return "not followed where it shows, for other checks find it, too"
    if not counts["elements"]:
        return opaque or "no number among the results: codes, or not finite"
    equal = share(counts["equal"], counts["elements"])
    return f"{equal} equal, the rest open" + (f": {opaque}" if opaque else "")


def planted_tables(rows: dict[str, dict[str, Any]]) -> str:
    """Count by op, and list the faults that not both oracles see."""
    rows = dict(sorted(rows.items()))
    ops = [*dict.fromkeys(row["op"] for row in rows.values())]
    lines = [("op", "faults", *SIGHTS)]
    for op in [*ops, "all"]:
        found = Counter(sight(row) for row in rows.values() if op in (row["op"], "all"))
        lines.append((op, found.total(), *(found[kind] for kind in SIGHTS)))
    text = table(*lines)
    for kind in SIGHTS[1:]:
        own = [(name, row["description"], why(row)) for name, row in rows.items() if sight(row) == kind]
        if own:
            text += f"\n### Seen by {kind}\n\n{table(('fault', 'a copy of the kernel that', 'why'), *own)}"
    return text


# What only residues see


def norm(*, eps_times: float = 1, fewer: int = 0, left_out: int = 0) -> Callable[..., Any]:
    """Compute a norm that is wrong in its eps, in the number that it divides by, or in the columns that it adds."""
    import torch

    def call(x: Any, weight: Any, eps: float) -> Any:
        squares = x[..., : x.shape[-1] - left_out].square().sum(-1, keepdim=True)
        return x * torch.rsqrt(squares / (x.shape[-1] - fewer) + eps_times * eps) * weight

    return call


def attention(*, keep: Callable[[Any, Any], Any] | None = None, width: int = WIDTH) -> Callable[..., Any]:
    """Attend to the keys that `keep` leaves of those of q and k, with a scale of 1 / √width."""
    import torch

    def call(q: Any, k: Any, v: Any, scale: float) -> Any:
        if keep is not None:
            k, v = k[:, kept := keep(q, k)], v[:, kept]
        scores = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) * (scale if width == WIDTH else width**-0.5)
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        return (weights / weights.sum(-1, keepdim=True) @ v.transpose(1, 2)).transpose(1, 2).contiguous()

    return call


def blind_table() -> str:
    """Table the share of elements that either oracle decides and finds wrong, for fp32 kernels with long sums."""
    import torch

    from lastbit.judging.formula import compare_formulas
    from lastbit.judging.problem import Problem
    from lastbit.judging.verdict import judge
    from lastbit.kernel import Kernel
    from lastbit.shadows.following import follow
    from tests.faults.hunt import project

    torch.manual_seed(SEED)
    row = {"x": torch.randn(4, COLUMNS), "weight": torch.randn(COLUMNS)}, {"eps": 1e-6}
    width = f"rms_norm, fp32, {COLUMNS:,} columns: "
    kernels = [
        (f"{width}right", "rms_norm", norm(), row),
        (f"{width}eps × 10", "rms_norm", norm(eps_times=10), row),
        (f"{width}n - 1", "rms_norm", norm(fewer=1), row),
        (f"{width}a column left out of the sum", "rms_norm", norm(left_out=1), row),
    ]
    for count in KEYS:
        heads = torch.randn(1, 8, 1, WIDTH), torch.randn(1, count, 1, WIDTH), torch.randn(1, count, 1, WIDTH)
        qkv = dict(zip("qkv", heads, strict=True)), {"scale": WIDTH**-0.5}
        keys = f"attention, fp32, {count:,} keys, D {WIDTH}: "
        kernels += [
            (f"{keys}right", "attention", attention(), qkv),
            (f"{keys}the last key missing", "attention", attention(keep=lambda q, k: slice(k.shape[1] - 1)), qkv),
            (f"{keys}the key of least weight missing", "attention", attention(keep=least_missing), qkv),
            (f"{keys}a scale of 1 / √(D + 1)", "attention", attention(width=WIDTH + 1), qkv),
        ]
    lines = [("kernel", "enclosures: decided", "outside", "residues: decided", "equal", "differing")]
    for name, op_name, call, (tensors, params) in kernels:
        op = project().op(op_name)
        problem = Problem(op, op.contract("flash" if op_name == "attention" else "native_multiply"), tensors, params)
        (seen,) = (s.cumulative for s in judge(problem, {"output": call(**tensors, **params)}).stages if s.result)
        kernel = Kernel(name, op_name, str(problem.contract), call)
        followed = follow(kernel, {n: t.clone() for n, t in tensors.items()}, params, ("output",), problem.constants)
        one = compare_formulas(problem, followed.results)["output"]
        figures = seen.decided, seen.outside, one.equal + one.differs, one.equal, one.differs
        lines.append((name, *(share(n, seen.numel) for n in figures)))
    return table(*lines)


def least_missing(q: Any, k: Any) -> Any:
    """Return which keys there are but for the one of the least of the largest scores."""
    import torch

    scores = (q[0, :, 0] @ k[0, :, 0].T).amax(0)
    return torch.arange(len(scores)) != scores.argmin()


def prepared() -> None:
    """Import nothing of lastbit's, torch's or Triton's before this."""
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path[:0] = [str(ROOT / "harness" / "checkout"), str(ROOT)]
    import torch

    from lastbit.interpret import install

    torch.set_num_threads(1)
    install()


Row = tuple[str, str]
"""A part of the tables and a name in it."""


def measured(options: argparse.Namespace, until: float, row: Row) -> tuple[Row, Any]:
    """Return a row, and what was measured for it; None where time was over."""
    part, name = row
    if time.time() > until:
        return row, None
    if part == "text":
        return row, blind_table()
    if part == "right":
        return row, right(kernels(options)[name], options.cases)
    return row, sighted(*faults(options)[name])


@cache
def loaded(folder: str) -> tuple[Any, ...]:
    from lastbit.kernel import load_kernels

    return tuple(load_kernels(ROOT / folder))


def kernels(options: argparse.Namespace) -> dict[str, Any]:
    """Return name → right kernel."""
    found = {f"{k.op}: {k.name}": k for folder in options.folder or FOLDERS for k in loaded(folder)}
    return {
        name: kernel
        for name, kernel in found.items()
        if (not options.op or kernel.op in options.op) and (not kernel.devices or "cpu" in kernel.devices)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=40, help="cases of each right kernel")
    parser.add_argument("--op", action="append", default=[], help="kernels and faults of this op only")
    parser.add_argument("--folder", action="append", default=[], help="right kernels of this folder, and nothing else")
    parser.add_argument("--every", type=int, default=1, help="one of so many faults only")
    parser.add_argument("--part", action="append", default=[], help="only text, right or faults")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no row after so long")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--kept", type=Path, help="a file of finished rows, read and written")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    options = parser.parse_args()
    prepared()
    import torch

    kept = json.loads(options.kept.read_text()) if options.kept and options.kept.exists() else {}
    chosen = {"text": ["blind"], "right": list(kernels(options)), "faults": list(faults(options))}
    parts = options.part or (["right"] if options.folder else list(chosen))
    rows = [(part, name) for part in parts for name in chosen[part] if name not in kept.get(part, {})]
    rows.sort(key=lambda row: next((i for i, op in enumerate(LONGEST) if row[1].startswith(f"{op}:")), len(LONGEST)))
    with ProcessPoolExecutor(options.workers, get_context("spawn"), prepared) as pool:
        for done in as_completed([pool.submit(measured, options, time.time() + options.seconds, row) for row in rows]):
            (part, name), found = done.result()
            if found is not None:
                kept.setdefault(part, {})[name] = found
                print(part, name, found, file=sys.stderr, flush=True)
                if options.kept:
                    options.kept.write_text(json.dumps(kept))
    own = kept.get("right", {})
    all_cases = sum(row["all"].get("cases", 0) for row in own.values())
    print(f"{len(own)} kernels, {all_cases:,} cases, differing in {sum(len(r['differing']) for r in own.values())}")
    text = (OF_FOLDERS if options.folder else HEAD).format(
        folders=" and ".join(f"`{folder}`" for folder in options.folder or FOLDERS),
        command=shlex.join(["python", "docs/measurements/residues.py", *sys.argv[1:]]),
        date=time.strftime("%Y-%m-%d"),
        torch=torch.__version__,
        python=platform.python_version(),
        cases=options.cases,
        largest=LARGEST,
        right=right_table(own),
        faults=f"{len(kept.get('faults', ()))} of {len(chosen['faults'])}",
        tried=TRIED,
        drawn=DRAWN,
        planted=planted_tables(kept.get("faults", {})),
        blind=kept.get("text", {}).get("blind", ""),
    )
    options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
