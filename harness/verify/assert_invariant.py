"""Properties of a kernel's bits, asserted inside anyone's test."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lastbit.calibrate import load_premises
from lastbit.case import parse_case
from lastbit.config import Config
from lastbit.devices import parse_device
from lastbit.errors import UsageError, told_to_the_caller
from lastbit.interpret import install
from lastbit.invariance.properties import check_names
from lastbit.kernel import Kernel, declarations_of
from lastbit.property_result import PropertyOutcome, PropertyResult
from lastbit.verify.check import Subject, unsupported
from lastbit.verify.declarations import check_kernel
from lastbit.verify.narrowing import groups_of
from lastbit.verify.project import open_project
from lastbit.verify.property_checks import asked_cases, properties_on, sentence_of


class InvarianceViolation(AssertionError):
    """The bits of a kernel depend on something they must not depend on; `results` has the outcome of each property."""

    def __init__(self, message: str, results: Sequence[PropertyResult]) -> None:
        super().__init__(message)
        self.results = tuple(results)


@told_to_the_caller(InvarianceViolation)
def assert_invariant(
    kernel: Callable[..., Any],
    *properties: str,
    op: str = "",
    contract: str = "",
    cases: Sequence[str] = (),
    device: str = "cpu",
    project: str | Path | None = None,
) -> tuple[PropertyResult, ...]:
    """Assert that a kernel has each of the properties, such as `rows`, and keeps its contract in the calls that differ.

        assert_invariant(my_kernel, "rows", "layout", op="OP", contract="OPTION", cases=["OP x=fp32[40,256] seed=1"])

    The kernel is called in this process, with all that this takes of seconds and memory.

    Args:
        kernel: a function that takes the tensors and parameters of the op by name, or one decorated with `@kernel`,
            which says itself what `op` and `contract` are.
        properties: names of properties; none for those that the decorated function declares.
        cases: case lines; without any, those on which `lastbit invariance` asks kernels of the op.
        device: where the tensors are.
        project: a folder with references/ and cases/ of your own ops.

    Returns:
        What was found of each property on each case; not applicable is no violation, unless it is so on every case.

    Raises:
        InvarianceViolation: a property is broken, cannot be asked on any case, or the kernel raised in its calls.
        UsageError: unknown op, contract, property or device, or a case that is not one of the kernel.
    """
    opened = open_project(Config(folder="", projects=() if project is None else (str(project),)))
    declared = next((one for one in declarations_of(kernel) if op in ("", one.op)), None)
    if declared is None and not op:
        raise UsageError(f"kernel={kernel!r} is not decorated with @kernel; give op= and contract= with it")
    own = declared or Kernel(getattr(kernel, "__name__", "kernel"), op, contract, kernel)
    names = properties or own.invariant
    the_op = opened.op(own.op)
    check_kernel(own, the_op)
    check_names(names, [the_op])
    if not names:
        raise UsageError(f"{own.where} declares no property; name those that it must have")
    given = []
    for line in cases:
        given.append(case := parse_case(line))
        if case.op != own.op:
            raise UsageError(f"case {line!r} is one of {case.op}, and the kernel is one of {own.op}")
        if reason := unsupported(own, case):
            raise UsageError(f"case {line!r} is not one of the kernel: {reason}")
    on = parse_device(device)
    if on.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        install()
    subject = Subject(own, the_op, on, load_premises(on))
    groups = [] if given else groups_of(opened, own, small=on.type == "cpu")
    chosen = given or asked_cases(subject, groups)
    found = [one for case in chosen for one in properties_on(subject, case, names)]
    wrong = []
    for name in names:
        mine = [one for one in found if one.name == name]
        broken = [one for one in mine if one.outcome in (PropertyOutcome.BROKEN, PropertyOutcome.ERRORED)]
        if broken:
            wrong.append("\n".join(filter(None, [sentence_of(broken[0]), broken[0].first, broken[0].second])))
        elif all(one.outcome is not PropertyOutcome.HOLDS for one in mine):
            reasons = "; ".join(dict.fromkeys(one.reason for one in mine if one.reason))
            wrong.append(f"{name} cannot be asked on any of {len(mine)} cases: {reasons}")
    if wrong:
        raise InvarianceViolation("\n".join([f"the bits of {own.name} are not what they must be", *wrong]), found)
    return tuple(found)
