"""The harness sees every fault by the case it has and names the stage; the kernel without it does not fail there."""

from __future__ import annotations

import pytest
import torch

from lastbit.case import parse_case
from lastbit.result import Verdict
from lastbit.verify.check import verify_case
from tests.faults import combinations, cross_entropy, hunt, quantize
from tests.faults.plant import Fault, alternatives, planted
from tests.rms_norm_contract import INTERPRETED  # installs the bit-faithful interpreter

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the cases are for the interpreter")

FAULTS = (*quantize.FAULTS, *combinations.FAULTS, *cross_entropy.FAULTS)
CPU = torch.device("cpu")


@pytest.mark.parametrize(("fault", "line"), FAULTS, ids=[str(fault) for fault, _ in FAULTS])
def test_fault_is_seen_and_named(fault: Fault, line: str) -> None:
    case = parse_case(line)
    with planted(fault) as kernel:
        seen = [(hunt.hunt(kernel, [case], CPU), fault.exposed)]
        if fault.hidden:
            seen.append((hunt.hunt(hunt.without_stages(kernel), [case], CPU), fault.hidden))
    for found, named in seen:
        assert found is not None and found.result.verdict is Verdict.FAILED
        assert found.named in alternatives(named)
    clean = hunt.subject_of(hunt.clean(fault, fault.family), CPU)
    without = verify_case(clean, case, repeat=False).verdict
    assert without in (Verdict.PASSED, Verdict.INCONCLUSIVE)  # little of fp32 is decided


def test_names_are_unique() -> None:
    assert len({str(fault) for fault, _ in FAULTS}) == len(FAULTS)
