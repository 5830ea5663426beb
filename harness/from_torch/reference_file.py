"""The file of a reference that is made from a PyTorch function."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

import lastbit.numerics
from lastbit.errors import UsageError
from lastbit.from_torch.reduction_rules import FORMULAS
from lastbit.from_torch.tracing import Example, Traced, TypedTrace, followed
from lastbit.from_torch.writing import Body

# A line of 120 with a bracket or comma behind it.
_WIDTH = 119
_EXPORTED = frozenset(lastbit.numerics.__all__)


@dataclass(frozen=True)
class Written:
    """A reference, and what it was made from.

    Attributes:
        text: the file.
        followed: the trace.
        rows: inputs whose leading dimensions are independent rows.
        rounds: stage → the input or format to which it is rounded.
        stages: operation → the stage of its result.
    """

    text: str
    followed: TypedTrace
    rows: tuple[str, ...]
    rounds: dict[str, str]
    stages: dict[fx.Node, str]


def write_reference(
    name: str, function: Callable[..., Any], example: Example, source: str, *, steps: bool = True
) -> Written:
    """Write the reference of a function under the name of an op.

    Args:
        name: of the op.
        function: of tensors and numbers; it returns a tensor, several, or a mapping of them.
        example: what it is called with, small; leading dimensions that are rows need two elements.
        source: where the function is, for the docstring.
        steps: whether every operation rounds as torch rounds it; otherwise only the results do.

    Raises:
        UsageError: operations have no mapping, or no trace can follow the function; the message has file and line.
    """
    found = followed(function, example)
    body = Body(found, steps=steps)
    if body.unmapped:
        listed = "\n".join(f"  {line}" for line in dict.fromkeys(body.unmapped))
        raise UsageError(f"no reference can be written for {source}:\n{listed}")
    rows = independent_rows(found.traced, body.stages)
    return Written(_file(name, found, body, rows, source, steps), found, rows, body.rounds, body.stages)


def independent_rows(traced: Traced, stages: Sequence[fx.Node] | dict[fx.Node, str]) -> tuple[str, ...]:
    """Return the inputs with the leading dimensions of the first, if one row of these gives its row of every stage."""
    tensors = traced.example.tensors
    main = next(iter(tensors.values()))
    leading = main.shape[:-1]
    rows = tuple(n for n, t in tensors.items() if t.shape[:-1] == leading and t.ndim == main.ndim)
    if not leading or max(leading) < 2:
        return ()
    whole = traced.values
    for dim, size in enumerate(leading):
        for at in range(size):
            index = (*[slice(None)] * dim, slice(at, at + 1))
            try:
                part = traced.again({n: t[index] if n in rows else t for n, t in tensors.items()})
            except Exception:  # whatever an operation raises for fewer rows than the function expects
                return ()
            for own, all_rows in ((part[node], whole[node]) for node in stages):
                if all_rows.ndim < len(leading) or own.shape != (expected := all_rows[index]).shape:
                    return ()
                if own.is_floating_point():  # bits may differ, as orders of sums do
                    own, expected = own.double(), expected.double()
                    alike = torch.allclose(own, expected, rtol=2.0**-6, atol=2.0**-6, equal_nan=True)
                else:
                    alike = torch.equal(own, expected)
                if not alike:
                    return ()
    return rows


def _file(name: str, found: TypedTrace, body: Body, rows: tuple[str, ...], source: str, steps: bool) -> str:
    """Return the whole text of the file."""
    statements = []  # first those that refuse dtypes for which the function rounds elsewhere
    if len(found.alike) > 1:
        statements += [
            f"if len({{stage.format_of(name) for name in {_tuple(found.alike)}}}) > 1:",
            f'    raise ValueError("{", ".join(found.alike)} must have one dtype, as in the trace")',
        ]
    for one in found.only_fp32:
        statements += [f'if stage.format_of("{one}").name != "fp32":', f'    raise ValueError("{one} must be of fp32")']
    statements += body.lines
    code = "\n".join(part for line in statements for part in wrapped(f"    {line}"))
    used = [one for one in FORMULAS if re.search(rf"(?<!\w){one}\(", code)]
    formulas = "".join(f"\n{FORMULAS[one]}" for one in used)
    words = set(re.findall(r"\w+", re.sub(r'"[^"]*"|\.\w+', "", code + formulas)))
    known = words & _EXPORTED | ({"Enclosure"} if found.origins else set())
    imported = sorted(known, key=lambda word: (not word[0].isupper(), word))
    example, integers = found.traced.example, _integers(found)
    shapes = ", ".join(f"{n} {list(t.shape)}" for n, t in example.tensors.items())
    fixed = ", ".join(f"{n}={value!r}" for n, value in example.fixed.items())
    docstring = [f'    """Traced with {shapes}{f", and {fixed}" if fixed else ""}.']
    if "raise ValueError" in code:
        docstring += ["", "    Raises:", "        ValueError: what the function was not traced for.", '    """']
    else:
        docstring[0] += '"""'
    imports = [f"from lastbit.numerics import {', '.join(imported)}"] if imported else []
    if imported and len(imports[0]) > _WIDTH + 1:
        imports = ["from lastbit.numerics import (", *(f"    {one}," for one in imported), ")"]
    lines = [
        f'"""{name}: traced from {source}, an operation for each of its own.',
        "",
        *(_STEPS if steps else _ONCE),
        '"""',
        "",
        "from __future__ import annotations",
        "",
        *(["from math import pi"] if "pi" in words else []),
        *(["from typing import Any"] if integers else []),
        *([""] if "pi" in words or integers else []),
        "from lastbit import Contract, StageRecorder, op",
        *imports,
        "",
        "",
        *_declaration(found, body, rows),
        f"def {name}(",
        *(f"    {n}: {'Any' if n in integers else 'Enclosure'}," for n in example.tensors),
        "    *,",
        *(f"    {n}: {type(value).__name__}," for n, value in example.params.items()),
        "    contract: Contract,",
        "    stage: StageRecorder,",
        ") -> None:",
        *docstring,
        code,
    ]
    return "\n".join(lines) + "\n" + formulas


_STEPS = ("Every operation rounds to the dtype that PyTorch gives its result. What is computed in fp32 stays there.",)
_ONCE = ("Everything is computed in fp32, and the results are rounded once, as a fused kernel does.",)


def wrapped(line: str) -> list[str]:
    """Break a statement that is too long for one line: the arguments of its outermost call get a line each."""
    start = line.find("(")
    if len(line) <= _WIDTH or start < 0 or not line.endswith(")"):
        return [line]
    while _end_of(line, start) != len(line) - 1:  # a call before the outermost one, as in f(x)[0] + g(y)
        if (start := line.find("(", _end_of(line, start))) < 0:
            return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    arguments = _arguments(line[start + 1 : -1])
    lines = [part for a in arguments for part in wrapped(f"{indent}{a}")]
    ends = {sum(len(wrapped(f"{indent}{a}")) for a in arguments[: n + 1]) - 1 for n in range(len(arguments))}
    return [line[: start + 1], *(f"{t}," if n in ends else t for n, t in enumerate(lines)), f"{indent[4:]})"]


def _end_of(line: str, start: int) -> int:
    """Return the position where the bracket at `start` is closed."""
    depth = 0
    for at in range(start, len(line)):
        depth += (line[at] in "([{") - (line[at] in ")]}")
        if not depth:
            return at
    return len(line)


def _arguments(text: str) -> list[str]:
    """Split the text between the brackets of a call into its arguments."""
    found, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            found.append("")
        else:
            found[-1] += letter
    return [argument.strip() for argument in found]


def _integers(found: TypedTrace) -> list[str]:
    return [n for n, t in found.traced.example.tensors.items() if not t.is_floating_point()]


def _declaration(found: TypedTrace, body: Body, rows: tuple[str, ...]) -> list[str]:
    """Return the lines of the decorator."""
    lines = [f"    rows={_tuple(rows)},"]
    if integers := _integers(found):
        lines.append(f"    integers={_tuple(integers)},")
    if any("_taken(" in line for line in body.lines):
        lines.append('    axes={"scalars": {"fp32_scalars": {}, "rounded_scalars": {}}},')
    if body.rounds:
        lines += [
            "    rounds={",
            *(f'        "{stage}": "{target}",' for stage, target in body.rounds.items()),
            "    },",
        ]
    return ["@op(", *lines, ")"]


def _tuple(names: Sequence[str]) -> str:
    texts = ", ".join(f'"{name}"' for name in names)
    return f"({texts},)" if len(names) == 1 else f"({texts})"
