"""What the bits of a kernel depend on."""

import torch

from harness.case import parse_case
from harness.config import Config
from harness.kernel import Kernel
from harness.property_result import Outcome
from harness.verify.check import Subject
from harness.verify.project import open_project
from harness.verify.properties import properties_on

CPU = torch.device("cpu")
CASE = parse_case("rms_norm x=fp32[40,256] weight=fp32[256] eps=1e-06 seed=1")
RMS_NORM = open_project(Config(folder="")).op("rms_norm")
THRESHOLD = 19


def by_number_of_rows(x, weight, *, eps):
    """Sums in halves from some number of rows on."""
    squares = x.square()
    total = squares.sum(-1) if x.shape[0] < THRESHOLD else squares[:, ::2].sum(-1) + squares[:, 1::2].sum(-1)
    return x * torch.rsqrt(total / x.shape[-1] + eps)[:, None] * weight


def subject(function, **declared):
    return Subject(Kernel("planted", "rms_norm", "fp32_multiply", function, **declared), RMS_NORM, CPU)


def test_rows_are_bisected():
    [found] = properties_on(subject(by_number_of_rows, invariant=("rows",)), CASE, ["rows"])
    assert found.outcome is Outcome.BROKEN and found.fails and found.legal
    assert found.where == f"changes between {THRESHOLD - 1} and {THRESHOLD} rows"
