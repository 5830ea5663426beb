"""The harness sees every fault that it must see, names the stage, and passes the kernel without the fault."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from inspect import unwrap
from itertools import islice
from pathlib import Path

import pytest
import torch

from lastbit.case import Case, parse_case
from lastbit.kernel import Kernel, load_kernels
from lastbit.result import BAD, Verdict
from lastbit.verify.check import verify_case
from tests.faults import hunt, upstream
from tests.faults.catalogue import FAULTS
from tests.faults.known_bugs import NOT_PLANTED, ROWS, rows_of
from tests.faults.plant import (
    FOLDER,
    Edit,
    Fault,
    Outdated,
    alternatives,
    kernel_of,
    mutated,
    planted,
    read_sources,
    without_faults,
)
from tests.rms_norm_contract import INTERPRETED  # installs the bit-faithful interpreter

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the cases are for the interpreter; a GPU runs sight.py")

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]
COUNT = 60
SEEDS = (0, 1)  # two runs of so many cases have the rarest combination of options, regime and layout that a fault needs
EQUIVALENT = [f for f in FAULTS if f.equivalent]
SEEN = [f for f in FAULTS if not f.equivalent]


@functools.cache
def verdict_without(variant: str, case: Case) -> Verdict:
    """Judge the case when the kernel has no fault."""
    subject = hunt.subject_of(kernel_of(hunt.clean_kernels(), variant), CPU)
    return verify_case(subject, case, repeat=False).verdict


def verdict_of(named: str) -> Verdict:
    """Return FAILED for a fault, unless what the kernel returns cannot be judged."""
    return Verdict.ERRORED if named == "errored" else Verdict.FAILED


def cases_for(fault: Fault) -> Iterator[Case]:
    """Draw cases; those of the second run where those of the first are not enough."""
    for seed in SEEDS:
        yield from hunt.cases_for(fault, fault.dtypes[0], COUNT, seed)


def shown(kernel: Kernel, fault: Fault, first: int) -> hunt.Sighting:
    """Try the case that showed a fault before, the `first` of which is 1, then all of them."""
    kept = hunt.hunt(kernel, list(islice(cases_for(fault), first - 1, first)), CPU)
    found = kept or hunt.hunt(kernel, list(cases_for(fault)), CPU)
    assert found is not None
    return found


def hidden_by(exposed: hunt.Sighting, kernel: Kernel) -> hunt.Sighting:
    """Judge the same results alone; what calls show stays, and what a result itself shows does, too."""
    stage = exposed.result.failing_stage
    if exposed.named != (stage and stage.name) or (stage.result and stage.cumulative.outside):
        return exposed
    return hunt.judged_alone(kernel, exposed, CPU)


@pytest.mark.parametrize("fault", SEEN, ids=str)
def test_fault_is_seen_and_named(fault: Fault):
    first, first_hidden = hunt.KEPT.get(str(fault), (1, 1))
    with planted(fault) as kernel:
        exposed = shown(kernel, fault, first)
        apart = first != first_hidden or not exposed.actual
        hidden = shown(hunt.without_stages(kernel), fault, first_hidden) if apart else hidden_by(exposed, kernel)
    assert exposed.named in alternatives(fault.exposed)
    assert hidden.named in alternatives(fault.hidden)
    assert (exposed.result.verdict, hidden.result.verdict) == (verdict_of(fault.exposed), verdict_of(fault.hidden))
    for line in {exposed.result.case, hidden.result.case}:
        assert verdict_without(fault.variant, parse_case(line)) not in BAD  # of constants alone, it is INCONCLUSIVE


@pytest.mark.parametrize("fault", EQUIVALENT, ids=str)
def test_equivalent_copy_gives_the_same_bits(fault: Fault):
    cases = list(islice(hunt.cases_for(fault, fault.dtypes[0], COUNT), 12))
    assert cases
    with planted(fault) as kernel:
        assert not any(hunt.changed(kernel, hunt.clean(fault), case, CPU) for case in cases)


def test_replacements_apply_to_the_kernel_as_it_is():
    sources = read_sources()
    for fault in FAULTS:
        changed = mutated(fault, sources)
        assert changed and all(changed[name] != sources[name] for name in changed), fault


def test_a_replacement_that_does_not_apply_is_an_error():
    fault = Fault("gone", "does what no kernel does", (Edit("no such line", ""),), "output", "output")
    with pytest.raises(Outdated, match=r"rms_norm\.py has 0 places that read 'no such line'"):
        mutated(fault, read_sources())


def test_a_planted_kernel_shares_the_files_that_the_fault_leaves_alone():
    fault = next(f for f in FAULTS if {e.file for e in f.edits} == {"moe_lora_outer.py"})
    folder = without_faults()
    assert [k.name for k in folder.kernels] == [k.name for k in load_kernels(FOLDER)]
    with planted(fault) as kernel:
        outer, grouped_linear = (unwrap(kernel.call).__globals__[name] for name in ("grouped_outer", "grouped_linear"))
    assert kernel.call is not kernel_of(folder.kernels, fault.variant).call
    assert outer is not folder.modules["moe_lora_outer"].grouped_outer
    assert grouped_linear is folder.modules["grouped_linear"].grouped_linear
    assert not folder.modules.keys() & sys.modules.keys()


@pytest.mark.parametrize("name", ["rms_norm: squares rounded", "moe_lora: base rounded"])
def test_trying_other_contracts_changes_no_verdict(name: str):
    fault = next(f for f in FAULTS if str(f) == name)
    case = next(hunt.cases_for(fault, fault.dtypes[0], COUNT))
    with planted(fault) as faulty:
        for kernel in (hunt.clean(fault), faulty):
            quick = verify_case(hunt.subject_of(kernel, CPU), case)
            whole = verify_case(replace(hunt.subject_of(kernel, CPU), op=hunt.project().op(fault.op)), case)
            # as text: an exact value that is not known is NaN
            said = [repr((one.verdict, one.stages, one.findings)) for one in (quick, whole)]
            assert said[0] == said[1]
            assert whole.ruled_out and not quick.ruled_out


def test_names_are_unique():
    assert len({str(f) for f in FAULTS}) == len(FAULTS)


def test_every_known_bug_is_planted_or_says_where_it_is_tested():
    planted_rows = {row for fault in FAULTS for row in rows_of(fault.description)}
    assert planted_rows | NOT_PLANTED.keys() == set(ROWS)
    for row, words in NOT_PLANTED.items():
        for file, test in re.findall(r"`(tests/\w+\.py)::(\w+)`", words):
            assert f"def {test}(" in (ROOT / file).read_text(), f"{row}: {file} has no {test}"


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("op", upstream.BOUNDS)
def test_the_upstream_tests_pass_the_kernel_without_a_fault(op: str, balanced: bool):
    fault = next(f for f in FAULTS if f.op == op and f.options == "exact")
    assert upstream.outcome(hunt.clean(fault), fault, CPU, balanced=balanced).passes


@pytest.mark.parametrize("name", ["moe_lora: adapters left out", "moe_lora_backward: adapter of down left out"])
def test_the_upstream_tests_see_adapters_only_where_they_matter(name: str):
    fault = next(f for f in FAULTS if str(f) == name)
    with planted(fault) as kernel:
        outcomes = [upstream.outcome(kernel, fault, CPU, balanced=balanced) for balanced in (False, True)]
    assert [outcome.passes for outcome in outcomes] == [True, False]
