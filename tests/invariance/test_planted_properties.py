"""The planted kernels keep their contract, so that a run passes them, and what their bits depend on is found."""

import functools

import pytest
import torch

from lastbit.case import parse_case
from lastbit.config import Config
from lastbit.kernel import Kernel, load_kernels
from lastbit.property_result import PropertyOutcome
from lastbit.result import Verdict
from lastbit.verify.check import Subject, verify_case
from lastbit.verify.project import Project, open_project
from lastbit.verify.property_checks import properties_on
from tests.planted_properties import FOLDER, PLANTED, Planted
from tests.rms_norm_contract import INTERPRETED  # installs the bit-faithful interpreter

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the cases are for the interpreter")


@functools.cache
def project() -> Project:
    return open_project(Config(folder=""))


@functools.cache
def kernels() -> dict[str, Kernel]:
    return {k.name: k for k in load_kernels(FOLDER)}


def subject(planted: Planted) -> Subject:
    return Subject(kernels()[planted.kernel], project().op(planted.op), torch.device("cpu"))


def test_the_list_is_of_the_folder() -> None:
    listed = {planted.kernel: (planted.file, planted.op) for planted in PLANTED}
    found = {k.name: (k.source.rpartition("/")[2].partition(":")[0], k.op) for k in kernels().values()}
    assert listed == found


@pytest.mark.parametrize("planted", PLANTED, ids=str)
def test_its_contract_allows_it(planted: Planted) -> None:
    result = verify_case(subject(planted), parse_case(planted.line))
    assert result.verdict is Verdict.PASSED, result.findings or result.reason


@pytest.mark.parametrize("planted", [p for p in PLANTED if not p.cuda], ids=str)
def test_what_its_bits_depend_on_is_found(planted: Planted) -> None:
    [found] = properties_on(subject(planted), parse_case(planted.line), [planted.property], thorough=True)
    assert (found.outcome, found.legal) == (PropertyOutcome.BROKEN, True), found
    assert planted.where in found.where
