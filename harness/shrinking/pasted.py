"""A test to paste: it builds the tensors of a case, calls the kernel and asserts its contract."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from lastbit.case import Case, parse_case
from lastbit.inputs import build
from lastbit.tracing import traced
from lastbit.verify.worker import Workplace


def test_of(
    op: str,
    contract: str,
    case: Case,
    kernel: str,
    *,
    source: str = "",
    device: str = "cpu",
    interpreted: bool = False,
) -> str:
    """Write a pytest function that fails on `case` as long as the kernel does.

    It imports a function that is called like the kernel, without what stands in brackets, from the module that `source`
    (file:line) is for a test in the working directory; nobody knows how the reader's tests import it. Of an
    `interpreted` kernel, what it launches is interpreted in the test, too.
    """
    function = re.sub(r"\W+|^(?=\d)", "_", kernel.partition("[")[0].strip(" _")) or "kernel"
    file = Path(source.rpartition(":")[0])
    module = re.sub(r"\W", "_", file.stem) or "kernels"
    with suppress(ValueError):  # it lies elsewhere than below the working directory
        parts = file.resolve().relative_to(Path.cwd()).with_suffix("").parts
        if all(part.isidentifier() for part in parts):
            module = ".".join(parts) or "kernels"
    names = ["assert_contract", "build", *(["interpret_triton"] if interpreted else []), "parse_case"]
    begin = ["", "interpret_triton()  # on a CPU, before anything imports triton"] if interpreted else []
    return "\n".join(
        [
            f"from lastbit import {', '.join(names)}",
            *begin,
            f"from {module} import {function}  # {' of '.join(filter(None, (kernel, source)))}: import it as you do",
            "",
            "",
            f"def test_{function}_keeps_its_contract():",
            f"    case = parse_case({str(case)!r})",
            "",
            "    def arguments():  # the kernel may write to its own",
            f"        return {{**build(case, {device!r}).hand_out(), **case.params}}",
            "",
            f"    result = {function}(**arguments())",
            f"    assert_contract({op!r}, result, **arguments(), contract={contract!r}, kernel={function})",
            "",
        ]
    )


def is_interpreted(place: Workplace, name: str, line: str) -> bool:
    """Return whether a kernel launches an interpreted Triton kernel on a case."""
    subject = place.subjects[name]
    inputs = build(parse_case(line).gathered(), subject.device)
    with place.watch(line), traced({}) as log, suppress(Exception):
        subject.kernel.call(**inputs.hand_out(), **inputs.case.params)
    return bool(log.launches)
