"""A result that is already there, judged inside anyone's test."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from harness.config import Config
from harness.errors import KernelError, unknown
from harness.result import Verdict, simplest
from harness.verify.evaluate import check_arguments, evaluate
from harness.verify.judge import Judgement, judge
from harness.verify.project import open_project


class ContractViolation(AssertionError):
    """A result breaks its contract, or decides nothing; `judgement` has the figures."""

    def __init__(self, message: str, judgement: Judgement) -> None:
        super().__init__(message)
        self.judgement = judgement


def assert_contract(
    op: str,
    actual: Tensor | Mapping[str, Tensor],
    *,
    contract: str = "",
    project: str | Path | None = None,
    **arguments: Any,
) -> Judgement:
    """Assert that `actual` is a result that a kernel which keeps `contract` may give for `arguments`.

        assert_contract("OP", actual, x=x, weight=w, eps=1e-6, contract="OPTION")

    Args:
        op: name of the op.
        actual: the result, or a mapping from stage names to tensors where the op has several; it may hold more stages.
        contract: contract options joined with `+`; an axis that is not named takes its default.
        project: a folder with references/ of your own ops.
        arguments: the tensors and parameters of the op, by name; None stands for an argument that is left out.

    Returns:
        The judgement, with the statistics of every stage.

    Raises:
        ContractViolation: the result is not possible under the contract, or no element of it can be decided.
        UsageError: unknown op, contract or argument.
        KernelError: the result has the wrong shape, dtype or device.
    """
    opened = open_project(Config(folder="", projects=(str(project),) if project is not None else ()))
    the_op = opened.op(op)
    the_contract = the_op.contract(contract)
    tensors = {name: v for name, v in arguments.items() if isinstance(v, Tensor)}
    params = {name: v for name, v in arguments.items() if v is not None and not isinstance(v, Tensor)}
    check_arguments(the_op, tensors, params)
    for name in arguments:
        if name not in the_op.inputs and name not in the_op.params:
            raise unknown(f"argument of {op}", name, [*the_op.inputs, *the_op.params])
    if not isinstance(actual, Tensor | Mapping):
        raise KernelError(f"the result is {type(actual).__name__}; give a tensor, or a mapping from stages to tensors")
    if isinstance(actual, Tensor):
        results = evaluate(the_op, the_contract, tensors, params).results
        if len(results) != 1:
            raise KernelError(f"{op} has the results {', '.join(results)} here; give a mapping with all of them")
        actual = {results[0]: actual}
    judgement = judge(the_op, the_contract, tensors, params, actual)
    if judgement.verdict is not Verdict.PASSED:
        raise ContractViolation(_message(op, str(the_contract), judgement), judgement)
    return judgement


def _message(op: str, contract: str, judgement: Judgement) -> str:
    undecided = judgement.verdict is Verdict.INCONCLUSIVE
    lines = [f"{op} {'may or may not' if undecided else 'does not'} keep {contract}: {judgement.verdict}"]
    lines += [f"  {finding.stage}: {finding.sentence}" for finding in judgement.findings]
    if judgement.reason:
        lines.append(f"  {judgement.reason}")
    if judgement.explained_by:
        lines.append(f"  Every bit is explained by: {', '.join(simplest(judgement.explained_by, contract))}")
    return "\n".join(lines)
