"""Sentences on problems and gaps of a run, which are the same on a terminal, in a file and in a browser."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from lastbit.reports import coverage
from lastbit.reports.stage_summary import MEANING
from lastbit.reports.summary import KernelFailure, grouped, listed, plural, share, shown_path, signed, ulp_names
from lastbit.result import CaseResult, Verdict, idle_in, simplest, told
from lastbit.run import LEAST_DECIDED, LEAST_JUDGED, Run

# As in changes.py.
MOST_NAMES = 4
# What fits into a line with their dtypes.
MOST_PAIRS = 2
# Arbitrary: half a page of a terminal.
MOST_LINES = 12
# What rounds to 0 % says nothing.
LEAST_SHARE = 0.01
"""Of the time of a run, below which a part of it is not named."""

ADVICE = (
    "→ Such a kernel may keep either contract, so it is INCONCLUSIVE unless it fails. Verify it on more cases "
    "(--cases-per-group), or on regimes and shapes for which the two contracts round differently."
)

_TENSOR = re.compile(r"(\w+)=\w+\[")  # of a case line

DECIDES_MORE = "integers, shorter sums or a declared depth or order decide more"

LEGEND = (
    ("rel. error", "‖actual − exact‖ / ‖exact‖ of the worst case that is not extreme; exact is without any rounding"),
    ("contract", "the same of the contract's own value in that case: a kernel with no more loses nothing"),
    (
        "extreme",
        "cases in which something overflows, underflows or cancels, so that far more is lost than by rounding; they "
        "count in no rel. error, ulp or bias",
    ),
    ("ulp", "largest distance from the contract's own value, of elements outside or else up to 16"),
    ("mismatch", "elements that differ from the contract's own value; no fault unless they are outside"),
    ("outside", "elements that no kernel which keeps the contract can give: one is a failure"),
    ("bias", "mean of |actual| − |exact| in ulp, of the median case; near −0.5 means cut off, not rounded"),
    ("values", "whether all values of the stage are allowed; what else a kernel fails for stands beside its cases"),
    ("(stage)", "no result of the op; the kernel shows it besides"),
    ("(stage) line", MEANING),
)
"""What the columns and rows of a table of stages mean."""


def first_lines(lines: Sequence[str]) -> list[str]:
    """Return the first `MOST_LINES`, and how many more there are."""
    rest = len(lines) - MOST_LINES
    return [*lines[:MOST_LINES], *([f"and {plural(rest, 'more line')}, in the records"] if rest > 0 else [])]


def legend(run: Run) -> list[tuple[str, str]]:
    """List the entries of `LEGEND` that the run has something to show for."""
    stages = [stage for result in run.results for stage in result.stages]
    shown = {
        "extreme": any(stage.extreme for stage in stages),
        "(stage)": any(not stage.result for stage in stages),
        "(stage) line": any(trace.stages for trace in run.traces),
    }
    return [(name, meaning) for name, meaning in LEGEND if shown.get(name, True)]


def problem_groups(problem: KernelFailure) -> str:
    """Write `groups a, b and 3 more`; empty if the cases have no group."""
    names = listed(problem.groups, MOST_NAMES)
    return f"group{'s' * (len(problem.groups) > 1)} {names}" if names else ""


def problem_fields(problem: KernelFailure, *, most_sentences: int | None = None) -> list[tuple[str, str]]:
    """List label and text of everything there is to say about a problem but its repro line.

    Each sentence of the smallest case is a field; the label of all but the first is empty. `most_sentences` of them are
    given, and how many more there are.
    """
    result = problem.smallest
    errored = result.verdict is Verdict.ERRORED
    said = []
    if problem.explained_by:  # it is sure, and leads
        failed = [r for r in problem.bad if r.verdict is Verdict.FAILED]
        extent = f"all {len(failed):,} failed results" if len(failed) > 1 else "the failed result"
        extent += ", those tried while shrinking included" if any(not r.counted for r in failed) else ""
        said.append(("keeps", allowed_by(problem.kept, extent)))
    said.append(("claims" if said else "contract", f"{problem.claimed} of {result.op}"))
    if errored:
        said.append(("error", result.reason))
    if not errored or result.faults:
        failing = result.failing_stage
        if failing is not None:
            seen = ", given the kernel's own earlier stages" if failing.isolated.outside else ", given the inputs"
            where = f"stage {failing.name} ({failing.dtype}){seen if len(result.stages) > 1 else ''}"
            said.append(("first wrong", where))
        sentences = [finding.sentence for finding in result.faults][:most_sentences]
        said += zip(["finding", *[""] * len(sentences)], sentences, strict=False)
        if rest := len(result.faults) - len(sentences):
            said.append(("", f"and {plural(rest, 'more sentence')} in the records"))
        said += _statistics(result)
        if not problem.explained_by and (own := simplest(result.explained_by, result.contract)):
            names = " or ".join(told(name, result.idle) for name in own)
            kept = f"{names} in this case, but no contract of the op allows every failed result"
            said.append(("explained by", kept))
    return [*said, ("cases", _extent(problem)), ("source", shown_path(result.source))]


def _statistics(result: CaseResult) -> list[tuple[str, str]]:
    """Describe the errors of the stage that fails, or else of one that a finding names, or else of the last result."""
    named = {finding.stage for finding in result.faults}
    stages = [s for s in result.stages if s.name in named] or [s for s in result.stages if s.result]
    if (stage := result.failing_stage or next(reversed(stages), None)) is None:
        return []
    seen = stage.isolated if stage.isolated.outside else stage.cumulative
    mismatch = f"{share(seen.mismatched, seen.numel)} of {plural(seen.numel, 'element')} mismatched"
    counts = zip(ulp_names()[1:], seen.ulp_histogram[1:], strict=True)  # beyond the elements that match
    bins = ", ".join(f"{name} ulp: {count:,}" for name, count in counts if count) or "all match"
    parts = [] if math.isnan(seen.bias) else [f"bias {signed(seen.bias)} ulp"]
    parts.append(f"{mismatch} ({bins})")
    if (rows := result.rows) is not None:
        two = f", {rows.split:,} by two" if rows.split else ""
        parts.append(f"{rows.explained:,} of {plural(rows.rows, 'row')} explained by one {rows.stages}{two}")
    return [("statistics", f"{stage.name}: {'; '.join(parts)}")]


def allowed_by(contracts: Sequence[str], extent: str) -> str:
    """Write `a or b: each of these contracts of the op allows every bit of EXTENT`."""
    which = "this contract of the op" if len(contracts) == 1 else "each of these contracts of the op"
    return f"{' or '.join(contracts)}: {which} allows every bit of {extent}"


def _extent(problem: KernelFailure) -> str:
    """Count the cases that went wrong, and say where, and why kernels raised."""
    counts = [(problem.counted(verdict), verdict.value.lower()) for verdict in (Verdict.FAILED, Verdict.ERRORED)]
    wrong = " and ".join(f"{count:,} {word}" for count, word in counts if count)
    devices = listed(dict.fromkeys(r.device for r in problem.bad), MOST_NAMES)
    where = f" in {'these groups' if len(problem.groups) > 1 else 'this group'}" if problem.groups else ""
    text = f"{wrong} of {plural(problem.cases, 'case')}{where}, on {devices}" if wrong else f"on {devices}"
    if problem.shrunk and wrong:
        text += f"; {problem.shrunk:,} more while a failure was shrunk"
    elif problem.shrunk:
        text = f"only in {plural(problem.shrunk, 'case')} that another failure was shrunk to, {text}"
    errored = next((r for r in problem.bad if r.verdict is Verdict.ERRORED), None)
    if errored is not None and problem.smallest.verdict is not Verdict.ERRORED:
        text += f"; an errored one: {errored.reason}"
    return text


def time_spent(run: Run) -> str:
    """Describe where the time of a run went, the largest parts first; empty for a run that did not note it."""
    total = sum(run.spent.seconds.values())
    if not run.spent.processes or not total:
        return ""
    shares = sorted(((seconds / total, part) for part, seconds in run.spent.seconds.items()), reverse=True)
    shown = [f"{part} {share:.0%}" for share, part in shares if share >= LEAST_SHARE]
    small = sum(share for share, _ in shares if share < LEAST_SHARE)
    parts = ", ".join([*shown, *([f"others {small:.0%}"] if small >= LEAST_SHARE else [])])
    return f"{parts} of {total:,.0f} s in {plural(run.spent.processes, 'worker')}"


def not_run(run: Run) -> list[str]:
    """Write one line for each reason why something that was asked for was not run."""
    return [f"{what}: {reason}" for reason, what in _named_together((n.reason, n.what) for n in run.not_run)]


def unverified(run: Run) -> str:
    """Count the planned kernels that were not verified, and say how to plan fewer; empty if there are none."""
    if not (names := [f"{kernel} on {device}" for kernel, device in run.unverified]):
        return ""
    count = f"{plural(len(names), 'kernel')} {'was' if len(names) == 1 else 'were'} not verified"
    advice = " To verify fewer kernels, name them, or choose an op with --op; only these are then expected."
    return f"{count}: {', '.join(names)}.{'' if run.broken else advice}"


def turned_down(run: Run) -> list[str]:
    """Write one line for each reason why kernels did not take cases."""
    return _by_reason(run, Verdict.UNSUPPORTED, Verdict.SKIPPED)


def inconclusive(run: Run) -> list[str]:
    """Return a line for each op and reason: how many kernels are inconclusive, what would decide them, and which."""
    ops = {result.kernel: result.op for result in run.results}
    kernels, ways = Counter[str](), dict[tuple[str, str], dict[str, int]]()
    for kernel, device in run.subjects():
        kernels[ops[kernel]] += 1
        if run.verdict(kernel, device) is Verdict.INCONCLUSIVE:
            own = ways.setdefault((ops[kernel], _to_decide(run, kernel, device)), {})
            own[kernel] = own.get(kernel, 0) + 1
    order = list(dict.fromkeys(ops.values()))
    return [
        f"{op}, {sum(own.values())} of {plural(kernels[op], 'kernel')}: {way} ({', '.join(own)})"
        for (op, way), own in sorted(ways.items(), key=lambda one: order.index(one[0][0]))
    ]


def _to_decide(run: Run, kernel: str, device: str) -> str:
    """Return why a kernel is inconclusive, and what would decide it."""
    alike = [p.alternative for p in run.power if (p.kernel, p.device) == (kernel, device) and p.missing]
    if alike:
        names = [told(name, idle_in(run.of(kernel, device))) for name in alike]
        return f"no case tells its contract from {listed(names, 1)}; run more cases (--cases-per-group)"
    if few := [d for d in run.decided(kernel, device) if d.missing]:
        seen = f"{share(few[0].decided, few[0].numel)} of {few[0].stage} ({few[0].dtype}) decided"
        return f"{seen}, but {100 * LEAST_DECIDED:g} % must be; {DECIDES_MORE}"
    judged, planned = run.judged(kernel, device)
    if 0 < judged < LEAST_JUDGED * planned:
        return f"it declined {planned - judged:,} of {plural(planned, 'case')}; {_to_declare(run.of(kernel, device))}"
    if branches := run.left_out(kernel):
        more = f", and {len(branches) - 1:,} more, which --uncovered lists" if len(branches) > 1 else ""
        return f"{coverage.reaching(branches[0])}{more}"
    return next(r.reason for r in run.of(kernel, device) if r.verdict is Verdict.INCONCLUSIVE)


def _to_declare(results: Iterable[CaseResult]) -> str:
    """Say how a kernel declares what it takes, in a word or by the sizes of the first tensor of its cases."""
    tensors = (match for result in results if (match := _TENSOR.search(result.case)))
    by_size = [f"or takes={{'{match[1]} columns': (64, 128, 256)}}" for match in tensors][:1]
    return " ".join(["declare what it takes, such as takes='contiguous'", *by_size])


def undecided(run: Run) -> list[str]:
    """Write one line for each result of which a run decided too little, and each reason why cases decided nothing."""
    lines = []
    for kernel, device in run.subjects():
        judged, planned = run.judged(kernel, device)
        if 0 < judged < LEAST_JUDGED * planned:
            lines.append(
                f"{kernel} on {device}: UnsupportedCase in {planned - judged:,} of {plural(planned, 'case')}, "
                f"and at least {100 * LEAST_JUDGED:g} % must be judged; {_to_declare(run.of(kernel, device))}, and "
                "as many cases are drawn inside of that"
            )
    few = [d for subject in run.subjects() for d in run.decided(*subject) if d.few]
    lines += [
        f"{d.kernel} on {d.device}: {share(d.decided, d.numel)} of {plural(d.numel, 'element')} of {d.stage} "
        f"({d.dtype}) could not have been otherwise, but {100 * LEAST_DECIDED:g} % must be; {DECIDES_MORE}"
        for d in few
        if d.missing
    ]
    open_always = grouped(((d.stage, d.dtype), d.kernel) for d in few if not d.decidable)
    lines += [
        f"{stage} ({dtype}) of {listed(dict.fromkeys(kernels), MOST_NAMES)}: nearly no element has one legal value on "
        "any input, in whatever order sums are added, because exponentials, logarithms or roots may err; what is "
        "further off fails"
        for (stage, dtype), kernels in open_always.items()
    ]
    lines += [coverage.reaching(one) for one in run.unreached or () if one.decides]
    return [*lines, *_by_reason(run, Verdict.INCONCLUSIVE)]


def _by_reason(run: Run, *verdicts: Verdict) -> list[str]:
    """Write one line for each verdict and reason: how many cases, and of which kernels."""
    results = (result for result in run.results if result.counted and result.verdict in verdicts)
    together = grouped(((result.verdict.value.lower(), result.reason), result.kernel) for result in results)
    return [
        f"{plural(len(kernels), 'case')} {word}: {reason} ({listed(dict.fromkeys(kernels), MOST_NAMES)})"
        for (word, reason), kernels in together.items()
    ]


def never_told_apart(run: Run) -> list[str]:
    """Write one line per kernel, device and dtypes with the contracts that could have been ruled out and were not."""
    together: dict[str, list[str]] = {}
    for p in run.power:
        if p.missing:
            where = f"{p.kernel} on {p.device} with {p.dtypes}"
            alternative = told(p.alternative, idle_in(run.of(p.kernel, p.device)))
            together.setdefault(where, []).append(f"{alternative} (in {plural(p.cases, 'case')})")
    return [f"{where} was never told from {listed(others, MOST_NAMES)}" for where, others in together.items()]


def unseen(run: Run) -> list[str]:
    """Return what the run did not tell from a kernel's own contract, or could not, and what it could not decide."""
    missing = never_told_apart(run)
    said = [*first_lines(missing), *[ADVICE] * bool(missing), *filter(None, [coinciding(run)])]
    return [*said, *first_lines(undecided(run))]


def coinciding(run: Run) -> str:
    """Name the pairs of contracts that no input can tell apart, with their dtypes; empty if there are none."""
    own = {result.kernel: result.contract for result in run.results}
    idle = {subject: idle_in(run.of(*subject)) for subject in run.subjects()}
    pairs: dict[str, dict[str, None]] = {}
    for p in run.power:
        if not p.separable:
            pair = (told(c, idle.get((p.kernel, p.device), ())) for c in (own.get(p.kernel, p.kernel), p.alternative))
            pairs.setdefault(p.dtypes, {})[" = ".join(sorted(pair))] = None
    alike = _named_together((listed(sorted(contracts), MOST_PAIRS), dtypes) for dtypes, contracts in pairs.items())
    said = "; ".join(f"{contracts} ({dtypes})" for contracts, dtypes in alike)
    return f"Contracts that coincide for these dtypes, so that there is nothing to see: {said}." if said else ""


def _named_together(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(key, listed(dict.fromkeys(items), MOST_NAMES)) for key, items in grouped(pairs).items()]
