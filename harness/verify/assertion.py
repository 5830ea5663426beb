"""Assertion of a contract on a result that is already computed, for use in any test."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from lastbit.calibrate import load_premises
from lastbit.calling.performing import in_order
from lastbit.config import Config
from lastbit.declared import is_order
from lastbit.devices import one_thread
from lastbit.errors import KernelError, UsageError, no_kernel, told_to_the_caller, unknown
from lastbit.floating_point import default_floating_point
from lastbit.interpret import another_has_run
from lastbit.judging.decided import shares
from lastbit.judging.problem import Params, Problem, Tensors
from lastbit.judging.verdict import judge
from lastbit.kernel import Kernel, declarations_of
from lastbit.ops import Op, check_arguments
from lastbit.result import Judgement, Verdict, simplest, told
from lastbit.run import LEAST_DECIDED
from lastbit.shadows.following import follow
from lastbit.verify.formula_check import follows, judged_by_formula
from lastbit.verify.project import Project, open_project

Depth = Callable[[int], int]

TELLING = 32
"""Decided elements from which on it says something that another contract allows all of them: of few, many do."""

_ANOTHER = (
    "Triton's own interpreter has run kernels in this process; it rounds otherwise than a GPU. Call "
    "lastbit.interpret_triton() before anything imports triton, or run pytest -p lastbit.pytest_interpreter."
)


@dataclass(frozen=True)
class AssertedJudgement(Judgement):
    """Judgement on an asserted result, with the share of it that was decided.

    Attributes:
        decided: result → share of it that is decided, see `judging.decided`; empty where it breaks its contract.
    """

    decided: Mapping[str, float] = field(default_factory=dict)


class ContractViolation(AssertionError):
    """A result breaks its contract; `judgement` has the figures."""

    def __init__(self, message: str, judgement: AssertedJudgement) -> None:
        super().__init__(message)
        self.judgement = judgement


class Undecided(UserWarning):
    """A result breaks no contract, but too little of it is decided to show that it keeps its own.

    It is a warning, or raised where `decided=` asks for more; `judgement` has the figures.
    """

    def __init__(self, message: str, judgement: AssertedJudgement) -> None:
        super().__init__(message)
        self.judgement = judgement


@told_to_the_caller(ContractViolation, Undecided)
def assert_contract(
    op: str,
    actual: Tensor | Sequence[Tensor] | Mapping[str, Tensor],
    *,
    contract: str = "",
    depth: Depth | int | None = None,
    order: int | None = None,
    kernel: str | Callable[..., Any] | None = None,
    decided: float | None = None,
    project: str | Path | None = None,
    **arguments: Any,
) -> AssertedJudgement:
    """Assert that `actual` is a result that a kernel which keeps `contract` may give for `arguments`.

        assert_contract("OP", actual, x=x, weight=w, eps=1e-6, contract="OPTION", depth=12, decided=0.9)

    Without a depth, sums may have been computed in any order. For long rows in fp32 that leaves thousands of legal
    values to each element, and a wrong eps or a column that is left out may pass: give `depth` or `kernel`, and ask for
    a share with `decided`. The error bounds are those that were measured for the device of the tensors
    (`lastbit calibrate`), or else the documented ones.

    Args:
        op: name of the op.
        actual: the result. Where the op has several: a tuple of all of them in the order of the op (`lastbit list
            ops`), or a mapping from stage names to tensors, which may hold more stages.
        contract: contract options joined with `+`; an axis that is not named takes its default.
        depth: height of the kernel's summation tree, or a function from the number of terms to it.
        order: number of terms after each of which one fp32 number holds the sum of all terms of a dot so far.
        kernel: a function decorated with `@kernel`, or the name of a kernel of lastbit or of `project`: contract,
            depth, order and unordered results are those of its declaration, where the arguments do not say otherwise.
            On the CPU it is called once more, on copies, and its formula decides what the order of sums leaves open.
        decided: the share of each result that must be decided, from 0 to 1; see `AssertedJudgement.decided`. Without it
            `Undecided` is a warning, where less than 1 % is.
        project: a folder with references/ of your own ops.
        arguments: the tensors, as they were before the call, and the parameters of the op, by name; None stands for
            an argument that is left out.

    Returns:
        The judgement: the statistics of every stage, which share of each result was `decided`, how many elements rule
        out each alternative contract (`ruled_out`), and which alternatives nothing rules out (`not_ruled_out`).

    Raises:
        ContractViolation: the result is impossible under the contract.
        Undecided: it is not, but less than `decided` is decided.
        UsageError: unknown op, contract, kernel or argument, or shapes that do not fit.
        KernelError: the result has the wrong shape, dtype or device.
    """
    opened = _built_in() if project is None else open_project(Config(folder="", projects=(str(project),)))
    the_op = opened.op(op)
    text: object = contract
    if not isinstance(text, str):
        raise UsageError(f"contract={text!r} is no text; give options joined with +, or leave it out")
    own = None if kernel is None else _declared(opened, the_op, kernel, contract)
    height = _height(depth)
    if not is_order(order):
        raise UsageError(f"order={order!r} is no number of terms; give an integer from 1")
    unordered: tuple[str, ...] = ()
    if own is not None:
        contract, height, order, unordered = (
            contract or own.contract,
            height or own.depth,
            order or own.order,
            own.unordered,
        )
    claimed = the_op.contract(contract)
    share: object = decided
    if share is not None and not (isinstance(share, int | float) and 0 <= share <= 1):
        raise UsageError(f"decided={decided!r} is no share; give a number from 0 to 1")
    tensors, params = _split(the_op, arguments)
    bounds = load_premises(tensors[the_op.inputs[0]].device)
    bounds = replace(bounds, depth=height, order=order, atomic=frozenset(unordered))
    problem = Problem(the_op, claimed, tensors, params, bounds)
    with default_floating_point(), one_thread():
        given = _by_name(problem, actual)
        judgement = judge(problem, given)
        if own is not None and judgement.verdict is not Verdict.FAILED and follows(tensors):
            copies = {n: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t) for n, t in tensors.items()}
            followed = follow(own, copies, params, judgement.results, problem.constants)
            judgement = judged_by_formula(judgement, problem, followed)
        failed = judgement.verdict is Verdict.FAILED
        asserted = AssertedJudgement(**vars(judgement), decided={} if failed else shares(problem, judgement))
    if failed:
        message = _message(op, str(claimed), asserted)
        if isinstance(actual, tuple | list):
            message += f"\n  The results were taken in this order: {', '.join(given)}"
        if another_has_run():
            message += f"\n  {_ANOTHER}"
        raise ContractViolation(message, asserted)
    least = LEAST_DECIDED if decided is None else decided
    if any(share < least for share in asserted.decided.values()):
        undecided = Undecided(_too_little(op, problem, decided, least, asserted), asserted)
        if decided is not None:
            raise undecided
        warnings.warn(undecided, stacklevel=3)  # below `told_to_the_caller`
    return asserted


@functools.cache
def _built_in() -> Project:
    """Open the ops of lastbit, which are read and checked once in a process."""
    return open_project(Config(folder=""))


def _height(depth: Depth | int | None) -> Depth | None:
    """Return the function from terms to the height of their tree, which raises `UsageError` for what is no height."""

    def is_height(height: object) -> bool:
        return not isinstance(height, bool) and isinstance(height, Integral) and int(height) >= 0

    def height_of(terms: int) -> int:
        assert callable(depth)
        name = getattr(depth, "__name__", repr(depth))
        try:
            height = depth(terms)
        except Exception as error:
            raise UsageError(f"depth={name} raised {type(error).__name__} for {terms} terms: {error}") from error
        if not is_height(height):
            raise UsageError(f"depth={name} gave {height!r} for {terms} terms; a height is an integer from 0")
        return height

    if depth is None or callable(depth):
        return None if depth is None else height_of
    if not is_height(depth):
        raise UsageError(f"depth={depth!r} is no height of a tree; give an integer from 0, or a function of the terms")
    return lambda terms: depth


def _declared(project: Project, op: Op, kernel: str | Callable[..., Any], contract: str) -> Kernel:
    """Find the declaration of a kernel, by name or from its function; of several, the one of the contract."""
    if isinstance(kernel, str):
        known = {k.name: k for k in project.kernels()}
        if kernel not in known:
            raise no_kernel(kernel, known)
        found: tuple[Kernel, ...] = (known[kernel],)
    else:
        found = declarations_of(kernel)
        if not found:
            raise UsageError(f"kernel={kernel!r} is not decorated with @kernel; give such a function, or a name")
    fitting = [k for k in found if k.op == op.name]
    if len(fitting) > 1 and contract:
        fitting = [k for k in fitting if op.contract(k.contract) == op.contract(contract)]
    if len(fitting) != 1:
        declared = ", ".join(f"{k.name} ({k.op} {k.contract})".replace(" )", ")") for k in found)
        raise UsageError(f"kernel={kernel!r} is declared as {declared}; {len(fitting)} of these are of {op.name} here")
    return fitting[0]


def _split(op: Op, arguments: Mapping[str, Any]) -> tuple[Tensors, Params]:
    """Return tensors and parameters, each of the kind that the op takes; what is None is left out."""
    kinds: Mapping[str, type] = {"float": Real, "int": Integral, "bool": bool, "str": str, "None": NoneType}
    for name, value in arguments.items():
        what = f"{name} is of type {type(value).__name__}"
        if value is not None and name in op.inputs:
            if not isinstance(value, Tensor):
                raise UsageError(f"{what}; give a tensor, such as torch.as_tensor({name})")
            _check_dense(name, value)
            if value.dtype is torch.float64:
                raise UsageError(
                    f"{name} is float64, in which lastbit itself computes; give what a kernel gets: {name}.float()"
                )
            if name not in op.integers | op.plain and not value.is_floating_point():
                raise UsageError(f"{name} is {value.dtype}; {op.name} takes floating-point numbers there")
        elif value is not None and name in op.params:
            if isinstance(value, Tensor):
                raise UsageError(f"{name} is a tensor; {op.name} takes a Python value there, such as {name}.item()")
            # Of the type that the reference's annotation names, if it has one.
            known = inspect.signature(op.reference).parameters.get(name)
            said = known.annotation if known else ""
            words = (said if isinstance(said, str) else inspect.formatannotation(said)).split(" | ")
            if all(word in kinds for word in words):
                types = tuple(kinds[word] for word in words)
                if not ("bool" in words if isinstance(value, bool) else isinstance(value, types)):
                    taken = " or ".join(words)
                    raise UsageError(
                        f"{name}={value!r} is of type {type(value).__name__}; {op.name} takes {taken} there"
                    )
    tensors = {name: v.detach() for name, v in arguments.items() if isinstance(v, Tensor)}
    params = {name: v for name, v in arguments.items() if v is not None and not isinstance(v, Tensor)}
    check_arguments(op, tensors, params)
    for name in arguments:
        if name not in op.inputs and name not in op.params:
            raise unknown(f"argument of {op.name}", name, [*op.inputs, *op.params])
    return tensors, params


def _check_dense(name: str, tensor: Tensor) -> None:
    if tensor.is_nested:
        raise UsageError(f"{name} is a nested tensor; assert the contract for each of its tensors")
    if tensor.layout is not torch.strided:
        raise UsageError(f"{name} has the layout {tensor.layout}; give a dense tensor, such as {name}.to_dense()")
    if tensor.is_meta:
        raise UsageError(f"{name} is on the device meta, where tensors have no values")


def _by_name(problem: Problem, actual: Any) -> Mapping[str, Tensor]:
    """Map stage names to the results, given by name, by order or alone, and check that these are dense tensors."""
    given: Mapping[str, object] = actual if isinstance(actual, Mapping) else {"actual": actual}
    if isinstance(actual, tuple | list):
        if (named := in_order(problem.required, problem.may_return, actual)) is None:
            said = f"{len(actual)} results were given by order"
            known = ", ".join([*problem.required, *problem.may_return])
            raise KernelError(f"{said}, but {problem.op.name} has these here: {known}")
        actual = given = named
    found: dict[str, Tensor] = {}
    for name, one in given.items():
        if not isinstance(one, Tensor):
            what = f"{name} is of type {type(one).__name__}"
            raise KernelError(f"{what}; give a tensor, or a mapping from stages to tensors")
        _check_dense(name, one)
        found[name] = one
    if isinstance(actual, Mapping):
        return found
    if len(results := problem.required) != 1:
        names = ", ".join(results)
        raise KernelError(f"{problem.op.name} has the results {names} here; give a tuple or a mapping of all of them")
    return {results[0]: actual}


def _message(op: str, contract: str, judgement: Judgement) -> str:
    lines = [f"{op} does not keep {told(contract, judgement.idle)}: {judgement.verdict}"]
    lines += [f"  {finding.stage}: {finding.sentence}" for finding in judgement.findings]
    if judgement.explained_by and sum(s.decided for s in judgement.stages if s.result) >= TELLING:
        kept = (told(name, judgement.idle) for name in simplest(judgement.explained_by, contract))
        lines.append(f"  Every bit is explained by: {', '.join(kept)}")
    return "\n".join(lines)


def _too_little(op: str, problem: Problem, decided: float | None, least: float, judgement: AssertedJudgement) -> str:
    """Describe the results of which too little was decided, and name remedies."""
    asked = "is needed to show it" if decided is None else f"decided={decided:g} asks for"
    lines = [f"{op} may keep {told(str(problem.contract), judgement.idle)}, but less is decided than {asked}"]
    formats = {stage.name: stage.dtype for stage in judgement.stages}
    for name, share in judgement.decided.items():
        if share < least:
            lines.append(f"  {name}: {share:.3f} of it is decided ({formats[name]})")
    if judgement.reason:
        lines.append(f"  {judgement.reason}")
    if judgement.not_ruled_out:
        lines.append(f"  Not ruled out: {', '.join(told(name, judgement.idle) for name in judgement.not_ruled_out)}")
    helps = ["inputs of small integers, whose sums are exact in any order"]
    if problem.premises.depth is None:
        helps.insert(0, "depth=, the height of the kernel's summation tree, or kernel=, which declares it")
    if any(formats[name] == "fp32" for name in judgement.decided):
        helps.append("results of bf16 or fp16")
    lines.append(f"  What helps: {'; '.join(helps)}; more of the kernel's stages in `actual`")
    return "\n".join([*lines, "  decided=0 asks for nothing, without this warning"] if decided is None else lines)
