"""Checks that declarations name existing things: stages of the reference, and inputs and stages of a kernel's op."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from difflib import get_close_matches

import torch

from lastbit.errors import OpError, UsageError, nearest, unknown
from lastbit.invariance.properties import check_declared
from lastbit.kernel import Kernel
from lastbit.ops import REQUIRED, Op
from lastbit.run import NotRun
from lastbit.stage_names import StageNames, stage_names
from lastbit.takes import check_takes

_DEVICE_TYPES = ("cpu", "cuda", "hpu", "mps", "mtia", "npu", "privateuseone", "xla", "xpu")  # to suggest; torch decides
_ALIKE = 0.8  # of difflib: a letter more, less or in another place, in names of five letters or more


def check_op(op: Op) -> None:
    """Raise `OpError` if the op names a stage that its reference cannot record."""
    known = stage_names(op.reference)
    of_options = [rounds for choices in op.axes.values() for rounds in choices.values()]
    rounded = [stage for rounds in (op.rounds, *of_options) for stage in rounds]
    named = {f"the stage {stage!r}, which is rounded": stage for stage in rounded}
    if op.latent is not None:
        latent = (op.latent.stage, *op.latent.instead.values(), *op.latent.also)
        named |= {f"the stage {stage!r} of its Latent": stage for stage in latent}
        named |= {f"the stage {stage!r} of its Latent's `through`": stage for stage in op.latent.through}
    named |= {f"the stage {stage!r} of its optional results": stage for stage in op.optional_results}
    named |= {f"the stage {stage!r} of its `returns`": stage for stage in op.returns}
    named |= {f"the stage {stage!r} of its sum {name!r}": stage for name, of in op.sums.items() for stage in of.results}
    for what, stage in named.items():
        if known is not None and stage not in known:
            raise OpError(f"{op.where}: {what}, is recorded nowhere in the reference{_hint(stage, known)}")


def _hint(stage: str, known: StageNames) -> str:
    """Suggest the nearest name, and list all names if that list is complete."""
    names = "" if known.spellings else f" Its stages: {', '.join(known.known)}."
    return nearest(stage, known.known) + names


def check_kernel(kernel: Kernel, op: Op) -> None:
    """Raise `UsageError` if a kernel of `op` names what the op does not have, or can be called for no case of it."""
    op.contract(kernel.contract)
    try:
        parameters = inspect.signature(kernel.call).parameters
    except (TypeError, ValueError) as error:
        raise UsageError(f"{kernel.where} has no signature that can be read ({error})") from error
    for device in kernel.devices:
        try:
            known_type = torch.device(device).type == device
        except RuntimeError:
            known_type = False
        if not known_type:
            raise unknown(f"device type of {kernel.where}:", device, _DEVICE_TYPES)
    for name in kernel.mutates:
        if name not in op.inputs:
            raise unknown(f"input that {kernel.where} mutates:", name, op.inputs)
        if name not in kernel.accepts:
            raise UsageError(f"{kernel.where} mutates {name!r}, but its signature does not take it")
    check_declared(kernel, op)
    check_takes(kernel.takes, kernel.where, op.inputs, tuple(op.params), op.rows)
    known = stage_names(op.reference)
    for name, result in kernel.held.items():
        if known is not None and result not in known:
            raise UsageError(
                f"unknown stage of {op.name} {result!r}, which {name!r} of {kernel.where} holds{_hint(result, known)}"
            )
        if name not in kernel.mutates and name in (*op.inputs, *op.params):
            raise UsageError(f"{kernel.where} declares out of {name!r}, which {op.name} gives it; declare mutates")
    for what in ("stages", "unordered"):
        for stage in getattr(kernel, what):
            if known is not None and stage not in known:
                raise UsageError(
                    f"unknown stage of {op.name} {stage!r} in {what} of {kernel.where}{_hint(stage, known)}"
                )
    # Of the parameters the kernel must require only those of the op, and take those that every case has.
    for name, parameter in parameters.items():
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise UsageError(f"{kernel.where} takes {name!r} by position only; a kernel is called by name")
    names = (*op.inputs, *op.params)
    needed = [n for n in op.inputs if n not in op.optional] + [n for n, v in op.params.items() if v is REQUIRED]
    lacking = [name for name in needed if name not in kernel.accepts]
    for name in sorted(kernel.requires):
        if name not in names:
            required = unknown(f"parameter of {op.name}, which {kernel.where} requires:", name, names)
            inputs = ", ".join(f"{n} (optional)" if n in op.optional else n for n in op.inputs)
            advice = f"The inputs of {op.name} are {inputs}: rename the parameter, or wrap the function."
            if not lacking:
                stages = list(known.known) if known else []
                example = "output" if "output" in stages or not stages else stages[-1]
                advice += f" If it receives a result, declare out={{{name!r}: {example!r}}}."
            raise UsageError(f"{required} {advice}")
    stored = parameters.get("stages")
    if stored is not None and stored.default is stored.empty:
        raise UsageError(f"{kernel.where}: its parameter `stages` needs a default, such as stages=()")
    if kernel.stages and stored is None and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise UsageError(f"{kernel.where} declares stages={kernel.stages!r}, but its signature has no `stages`")
    if lacking:
        taken = ", ".join(map(str, parameters.values()))
        raise UsageError(
            f"{kernel.where} takes ({taken}), but every case of {op.name} has {', '.join(lacking)}: name it"
        )


def likely_slips(kernel: Kernel, op: Op) -> Iterator[NotRun]:
    """Yield a note for each optional parameter of the kernel that resembles one of the op's, perhaps by a typo."""
    names = [name for name in (*op.inputs, *op.params) if name not in kernel.accepts]
    for own in sorted(kernel.accepts - {*op.inputs, *op.params}):
        if near := get_close_matches(own, names, n=1, cutoff=_ALIKE):
            reason = f"it takes {own!r}, which {op.name} does not have; did you mean {near[0]!r}?"
            yield NotRun(f"cases of {kernel.name} with {near[0]}", reason)
