"""`lastbit new reference`."""

from __future__ import annotations

import argparse
import inspect
import keyword
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lastbit.numerics
from lastbit.case import Case, parse_case
from lastbit.errors import UsageError, unknown
from lastbit.from_torch.reference_check import Tried, tried
from lastbit.from_torch.reference_file import write_reference
from lastbit.from_torch.tracing import Example
from lastbit.inputs import build
from lastbit.kernel import load_file
from lastbit.reports.paper import STANDARD_OUTPUT, line, make_console, write_text
from lastbit.siblings import siblings


def add_reference(parser: argparse.ArgumentParser) -> None:
    """Make a parser that of `lastbit new reference`."""
    parser.description = (
        "Write the reference of an op from a plain PyTorch function: each of its operations as an enclosure, its "
        "variables as stages, and a rounding where PyTorch rounds. Operations without a mapping are named with file "
        "and line. What is written is tried on the function first."
    )
    parser.set_defaults(command=_reference)
    parser.usage = "%(prog)s FILE:FUNCTION NAME=VALUE … [--OPTION …]"
    add = parser.add_argument
    add("function", metavar="FILE:FUNCTION", help="the function, as in model.py:gelu")
    help = "a tensor or number for each parameter, as in a case: x=bf16[3,64] weight=bf16[64] eps=1e-06"
    add("example", nargs="+", metavar="NAME=VALUE", help=help)
    add("--name", help="name of the op (default: that of the function)")
    help = "round the results only, as a fused kernel does, and no operation before them"
    add("--once", action="store_true", help=help)
    help = "write to this file, references/NAME.py of a project (default: print)"
    add("--output", metavar="PATH", help=help)


def _reference(options: argparse.Namespace, rest: Sequence[str]) -> int:
    path, wanted = function_of(options.function)
    name = options.name or wanted
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise UsageError(f"{name!r} cannot be the name of an op: --name takes lower-case letters, digits and _")
    if name in {"op", "contract", "stage", *lastbit.numerics.__all__}:
        raise UsageError(f"{name!r} has a meaning in every reference: --name gives the op another name")
    if options.output and Path(options.output).name != f"{name}.py":
        raise UsageError(f"--output {options.output}: the file of the op {name!r} must be called {name}.py")
    with siblings(path.parent):
        function = loaded(path, wanted)
        case = parse_case(" ".join([name, *options.example]))
        text, found = written(function, case, f"{path.name}:{wanted}", steps=not options.once)
    write_text(options.output or STANDARD_OUTPUT, text)
    console = make_console(stderr=not options.output)
    for sentence in told(found):
        line(console, f"{options.output or name}: {sentence}")
    return 1 if found is not None and found.broken else 0


def told(found: Tried | None) -> Iterator[str]:
    """Yield sentences on the trial of a reference."""
    if found is None:
        yield "the results are rounded once; the function itself rounds more, so that it was not tried"
        return
    yield f"{found.calls} calls of the function, {found.elements:,} elements of {found.stages} stages compared"
    for sentence in found.broken.values():
        yield (
            f"{sentence}. Either torch computes it on the CPU in steps of its own (docs/from_torch.md), or a rule of "
            "lastbit is wrong"
        )


def function_of(text: str) -> tuple[Path, str]:
    """Split FILE:FUNCTION into file and name.

    Raises:
        UsageError: it is not of this form, or there is no such file.
    """
    file, colon, name = text.rpartition(":")
    if not colon or not name.isidentifier():
        raise UsageError(f"{text!r} is not FILE:FUNCTION, as in model.py:gelu")
    if not Path(file).is_file():
        raise UsageError(f"there is no file {file!r}")
    return Path(file), name


def loaded(path: Path, name: str) -> Callable[..., Any]:
    """Load a file and return the function of this name.

    Raises:
        UsageError: there is none.
    """
    module = load_file(path)
    functions = {key: value for key, value in vars(module).items() if inspect.isfunction(value)}
    if name not in functions:
        raise unknown(f"function of {path}", name, functions)
    return functions[name]


def written(function: Callable[..., Any], case: Case, source: str, *, steps: bool = True) -> tuple[str, Tried | None]:
    """Write the reference of a function; return its text, and the result of its trial if it was tried."""
    numbers, fixed = _parameters(function, case)
    case = Case(case.op, case.tensors, numbers, case.seed)
    made = write_reference(
        case.op, function, Example(dict(build(case, "cpu").tensors), numbers, fixed), source, steps=steps
    )
    return made.text, tried(made, function, case, fixed) if steps else None


def _parameters(function: Callable[..., Any], case: Case) -> tuple[Mapping[str, float], Mapping[str, object]]:
    """Split the parameters into numbers that stay parameters of the op, and values that tracing fixes.

    Raises:
        UsageError: the function has no such parameter, or needs one that the example lacks.
    """
    parameters = inspect.signature(function).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for name in case.names:
            if name not in parameters:
                raise unknown(f"parameter of {function.__name__}", name, parameters)
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    missing = [n for n, p in parameters.items() if p.kind in plain and p.default is p.empty and n not in case.names]
    if missing:
        raise UsageError(
            f"the example lacks {', '.join(missing)}: write {missing[0]}=bf16[3,64], or {missing[0]}=NUMBER"
        )
    numbers = {n: v for n, v in case.params.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return numbers, {n: v for n, v in case.params.items() if n not in numbers}
