"""Every fault of a combination fails by the case that shows it, which the kernel without it does not fail."""

from __future__ import annotations

import pytest
import torch

from lastbit.case import parse_case
from lastbit.result import Verdict
from lastbit.verify.check import verify_case
from tests.faults import hunt
from tests.faults.combined import SHOWN
from tests.faults.cross_entropy import Shown
from tests.faults.plant import alternatives, planted
from tests.rms_norm_contract import INTERPRETED  # installs the bit-faithful interpreter

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the cases are for the interpreter")

CPU = torch.device("cpu")


@pytest.mark.parametrize("shown", SHOWN, ids=str)
def test_fault_of_a_combination_is_seen_and_named(shown: Shown) -> None:
    case = parse_case(shown.case)
    with planted(shown.fault) as kernel:
        found = hunt.hunt(kernel, [case], CPU)
    assert found is not None and found.result.verdict is Verdict.FAILED
    assert found.named in alternatives(shown.fault.exposed)
    clean = hunt.clean(shown.fault, shown.fault.family)
    without = verify_case(hunt.subject_of(clean, CPU), case, repeat=False).verdict
    assert without in (Verdict.PASSED, Verdict.INCONCLUSIVE)
