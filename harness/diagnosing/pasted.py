"""A test to paste: it builds the tensors of a case, calls the kernel and asserts its contract."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lastbit.case import Case, TensorSpec, parse_case
from lastbit.inputs import bits_of, build
from lastbit.inputs.bits import NAN_BITS
from lastbit.inputs.given import MOST_GIVEN
from lastbit.interpret.numpy_formats import Array
from lastbit.interpret.watching import watched
from lastbit.verify.worker import Workplace

_FROM_LINE = {"build", "parse_case"}


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
    (file:line) is for a test in the working directory; nobody knows how the reader's tests import it. A case with more
    values than a line holds is built from its line. Of an `interpreted` kernel, what it launches is interpreted in the
    test, too.
    """
    function = re.sub(r"\W+|^(?=\d)", "_", kernel.partition("[")[0].strip(" _")) or "kernel"
    module = _module_of(Path(source.rpartition(":")[0])) or "kernels"
    listed = all(tensor.numel <= MOST_GIVEN for tensor in case.tensors)
    imports = ["import torch", ""] if listed else []
    names = {"assert_contract"} | ({"interpret_triton"} if interpreted else set()) | (set() if listed else _FROM_LINE)
    imports += [f"from lastbit import {', '.join(sorted(names))}"]
    imports += ["", "interpret_triton()  # on a CPU, before anything imports triton"] if interpreted else []
    return "\n".join(
        [
            *imports,
            f"from {module} import {function}  # {' of '.join(filter(None, (kernel, source)))}: import it as you do",
            "",
            "",
            f"def test_{function}_keeps_its_contract():",
            f'    """It fails as long as {kernel} does on',
            "",
            f"    {_raw(str(case))}",
            '    """',
            "",
            "    def arguments():  # the kernel may write to its own",
            *(_listed(case, device) if listed else _built(case, device)),
            "",
            f"    result = {function}(**arguments())",
            f"    assert_contract({op!r}, result, **arguments(), contract={contract!r}, kernel={function})",
            "",
        ]
    )


def _module_of(file: Path) -> str:
    """Return the module name of a file: its path below the working directory; elsewhere its stem."""
    with suppress(ValueError):
        parts = file.resolve().relative_to(Path.cwd()).with_suffix("").parts
        if all(part.isidentifier() for part in parts):
            return ".".join(parts)
    return re.sub(r"\W", "_", file.stem)


def is_interpreted(place: Workplace, name: str, line: str) -> bool:
    """Return whether a kernel launches an interpreted Triton kernel on a case."""
    subject, seen = place.subjects[name], _Launches()
    inputs = build(parse_case(line).gathered(), subject.device)
    with place.watch(line), watched(seen), suppress(Exception):
        subject.kernel.call(**inputs.hand_out(), **inputs.case.params)
    return seen.launches > 0


@dataclass
class _Launches:
    """Counter of interpreted launches."""

    launches: int = 0

    def chosen(self, programs: Array) -> Array:
        return programs

    def launch(self, function: Any, arguments: Mapping[str, Any]) -> AbstractContextManager[object]:
        self.launches += 1
        return nullcontext()

    def operation(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return function(*args, **kwargs)


def _raw(line: str) -> str:
    """Escape a case line for a Python string literal."""
    return line.replace("\\", "\\\\").replace('"', '\\"')


def _built(case: Case, device: str) -> Iterator[str]:
    yield f"        case = parse_case({str(case)!r})"
    yield f"        return {{**build(case, {device!r}).hand_out(), **case.params}}"


def _listed(case: Case, device: str) -> Iterator[str]:
    yield "        return {"
    for name, tensor in build(case.gathered(), "cpu").tensors.items():
        yield f"            {name!r}: {_expression(tensor, case[name], device)},"
    for name, value in case.params.items():
        yield f"            {name!r}: {_number(value)},"
    yield "        }"


def _expression(tensor: Tensor, spec: TensorSpec, device: str) -> str:
    """Write the Python expression that builds a tensor with the strides and offset of the case."""
    where = "" if device == "cpu" else f", device={device!r}"
    values = _values(tensor, where)
    if not spec.numel or (spec.strides is None and not spec.offset):
        return values + ("" if len(spec.shape) == 1 else f".reshape({spec.shape})")
    strides = spec.element_strides
    once = tuple(1 if not stride else size for size, stride in zip(spec.shape, strides, strict=True))
    if once != spec.shape:
        values = _values(tensor[tuple(slice(0, size) for size in once)], where)
    last = spec.offset + sum((size - 1) * stride for size, stride in zip(once, strides, strict=True))
    around = f"torch.full(({last + 1},), {_around(tensor.dtype)}, dtype={tensor.dtype}{where})"
    placed = f"{around}.as_strided({once}, {strides}, {spec.offset})"
    return f"{placed}.copy_({values}.reshape({once}))" + ("" if once == spec.shape else f".expand({spec.shape})")


def _around(dtype: torch.dtype) -> str:
    """Return the value for memory between the elements, so that a kernel that reads there gives another result."""
    if dtype.is_floating_point:
        return 'float("nan")'
    return "True" if dtype is torch.bool else str(torch.iinfo(dtype).max)


def _values(tensor: Tensor, where: str) -> str:
    """Write a vector of the elements in row-major order; by their bits where numbers would not determine these."""
    dtype, bits = tensor.dtype, bits_of(tensor)
    nan = tensor.isnan() if dtype.is_floating_point and dtype.itemsize > 1 else torch.tensor(False)
    mask = (1 << 8 * dtype.itemsize) - 1
    other = any((int(word) & mask) != NAN_BITS[dtype] for word in bits[nan].flatten()) if bool(nan.any()) else False
    if other or (dtype.is_floating_point and dtype.itemsize == 1):
        return f"torch.tensor({bits.flatten().tolist()}, dtype={bits.dtype}{where}).view({dtype})"
    numbers = (tensor.float() if dtype in (torch.bfloat16, torch.float16) else tensor).flatten().tolist()
    return f"torch.tensor([{', '.join(map(_number, numbers))}], dtype={dtype}{where})"


def _number(value: object) -> str:
    """Write a number as a Python literal."""
    special = isinstance(value, float) and not math.isfinite(value)
    return f'float("{value}")' if special else repr(value)
