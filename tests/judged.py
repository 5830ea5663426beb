"""Results judged by a contract for tests that ask no more than whether they keep it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lastbit.calibrate import load_premises
from lastbit.config import Config
from lastbit.judging.problem import Problem
from lastbit.judging.verdict import judge
from lastbit.result import Judgement, Verdict
from lastbit.verify.project import open_project

OPENED = open_project(Config(folder=""))


def judged(op: str, actual: Mapping[str, Tensor], *, contract: str, **arguments: Any) -> Judgement:
    """Judge as `assert_contract` does, but try no other contracts, which takes most of the time of many stages."""
    the_op, given = OPENED.op(op), {name: value for name, value in arguments.items() if value is not None}
    tensors = {name: value for name, value in given.items() if name in the_op.inputs}
    params = {name: value for name, value in given.items() if name not in tensors}
    premises = load_premises(tensors[the_op.inputs[0]].device)
    return judge(Problem(the_op, the_op.contract(contract), tensors, params, premises), actual, alternatives=False)


def assert_kept(op: str, actual: Mapping[str, Tensor], *, contract: str, **arguments: Any) -> None:
    """Raise an `AssertionError` that says what is outside if the results cannot be those of the contract."""
    judgement = judged(op, actual, contract=contract, **arguments)
    assert judgement.verdict is not Verdict.FAILED, [finding.sentence for finding in judgement.findings]
