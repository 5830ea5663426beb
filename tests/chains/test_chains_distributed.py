"""All-reduce and RMSNorm by two processes: the rounding of ROCm/aiter #2586 is missed and named."""

from __future__ import annotations

import pytest
import torch

from lastbit.reports.identification import kept
from lastbit.result import Verdict
from tests.chain_ranks import LINES, contracts_of, judged, results_of

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
BACKENDS = [
    pytest.param("gloo", marks=pytest.mark.slow),
    pytest.param("nccl", marks=[pytest.mark.gpu, needs_two]),
]


@pytest.fixture(scope="module", params=BACKENDS)
def ranks(request, tmp_path_factory):
    """Compute the results of both ranks, and name the device that they are judged on."""
    found = results_of(2, request.param, LINES, tmp_path_factory.mktemp("ranks"))
    return found, torch.device("cpu" if request.param == "gloo" else "cuda:0")


def test_the_unfused_path_and_a_correct_fused_kernel_keep_the_chain(ranks):
    found, device = ranks
    for rank in found:
        for way in ("unfused", "fused"):
            assert [judged(*given, device).verdict for given in zip(LINES, rank[way], strict=True)] == [
                Verdict.PASSED
            ] * 2


def test_the_missing_rounding_fails_and_is_named(ranks):
    found, device = ranks
    for rank in found:
        judgement = judged(LINES[0], rank["planted"][0], device)
        assert judgement.verdict is Verdict.FAILED
        wrong = [stage.name for stage in judgement.stages if stage.cumulative.outside]
        assert wrong == ["residual_sum", "output"]
        assert "unrounded_reduced" in kept(contracts_of(LINES, rank["planted"], device))


def test_all_ranks_have_the_same_bits(ranks):
    found, _ = ranks
    for way, cases in found[0].items():
        for one, other in zip(cases, found[1][way], strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)
