"""`lastbit new op` and `lastbit new reference`."""

from __future__ import annotations

import argparse
import inspect
import keyword
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lastbit.numerics
from lastbit.case import Case, parse_case
from lastbit.config import Config
from lastbit.errors import UsageError, unknown
from lastbit.files import PACKAGE
from lastbit.from_torch.reference_check import Tried, tried
from lastbit.from_torch.reference_file import write_reference
from lastbit.from_torch.tracing import Example
from lastbit.inputs import build
from lastbit.kernel import load_file
from lastbit.reports.paper import STANDARD_OUTPUT, line, make_console, write_text
from lastbit.siblings import siblings
from lastbit.verify.project import open_project

TEMPLATES = PACKAGE / "templates"

_NAME = "op_name"
"""What stands for the name of the op in the templates."""


def write_op(options: argparse.Namespace, rest: Sequence[str]) -> int:
    console, folder = make_console(), Path(options.project)
    for path, what in written(options.name, folder).items():
        line(console, f"wrote {path}: {what}")
    line(console, f"lastbit verify --project {folder} {folder / 'kernels'} --op {options.name}")
    line(console, f"python3 -m pytest {folder / 'tests' / f'test_{options.name}.py'}")
    return 0


_FILES = {
    "references": "what it computes, and where it may round",
    "cases": "what it is tried on",
    "cases/sizes": "its dimensions, and how long they get",
    "kernels": "three implementations of it",
    "tests": "a test of the reference, and of what it tells apart",
}


def written(name: str, folder: Path) -> dict[Path, str]:
    """Write the files of an op of this name, all of them or none, and return their texts by path.

    Raises:
        UsageError: the name is none, there is such an op, or one of the files is there.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise UsageError(f"{name!r} cannot be the name of an op: use lower-case letters, digits and _, as in 'softcap'")
    sources = {path: what for what in _FILES for path in sorted((TEMPLATES / what).glob(f"*{_NAME}.*"))}
    files = {path: folder / what / path.name.replace(_NAME, name) for path, what in sources.items()}
    texts = {files[path]: path.read_text().replace(_NAME, name) for path in sources}
    if there := [str(path) for path in texts if path.exists()]:
        raise UsageError(f"left as it is: {', '.join(there)}; choose another name for the op, or remove this first")
    known = open_project(Config(folder="", projects=(str(folder),) if folder.is_dir() else ())).ops
    if name in known:
        raise UsageError(f"there is an op {name!r} already; `lastbit list ops --op {name}` describes it")
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return {files[path]: _FILES[what] for path, what in sources.items()}


def write_reference_of(options: argparse.Namespace, rest: Sequence[str]) -> int:
    file, colon, wanted = options.function.rpartition(":")
    if not colon or not wanted.isidentifier():
        raise UsageError(f"{options.function!r} is not FILE:FUNCTION, as in model.py:gelu")
    path = Path(file)
    if not path.is_file():
        raise UsageError(f"there is no file {file!r}")
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
        text, found = reference_of(function, case, f"{path.name}:{wanted}", steps=not options.once)
    write_text(options.output or STANDARD_OUTPUT, text)
    console = make_console(stderr=not options.output)
    if found is None:
        said = ["the results are rounded once; the function itself rounds more, so that it was not tried"]
    else:
        said = [f"{found.calls} calls of the function, {found.elements:,} elements of {found.stages} stages compared"]
        steps = "torch computes it on the CPU in steps of its own (docs/from_torch.md)"
        said += [f"{sentence}. Either {steps}, or a rule of lastbit is wrong" for sentence in found.broken.values()]
    for sentence in said:
        line(console, f"{options.output or name}: {sentence}")
    return 1 if found is not None and found.broken else 0


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


def reference_of(
    function: Callable[..., Any], case: Case, source: str, *, steps: bool = True
) -> tuple[str, Tried | None]:
    """Write the reference of a function; return its text, and the result of its trial if it was tried.

    Numbers stay parameters of the op; other values are fixed by tracing.

    Raises:
        UsageError: the function has no such parameter, or needs one that the example lacks.
    """
    parameters = inspect.signature(function).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for name in case.names:
            if name not in parameters:
                raise unknown(f"parameter of {function.__name__}", name, parameters)
    starred = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [n for n, p in parameters.items() if p.kind not in starred and p.default is p.empty]
    if missing := [name for name in needed if name not in case.names]:
        lacks = f"the example lacks {', '.join(missing)}"
        raise UsageError(f"{lacks}: write {missing[0]}=bf16[3,64], or {missing[0]}=NUMBER")
    numbers = {n: v for n, v in case.params.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    fixed = {n: v for n, v in case.params.items() if n not in numbers}
    case = Case(case.op, case.tensors, numbers, case.seed)
    example = Example(dict(build(case, "cpu").tensors), numbers, fixed)
    made = write_reference(case.op, function, example, source, steps=steps)
    return made.text, tried(made, function, case, fixed) if steps else None
