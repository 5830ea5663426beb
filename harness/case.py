"""A case: one fully fixed problem as data, printed and parsed as one line.

    rms_norm x=bf16[2048,32,128]@6144,128,1:rows weight=bf16[128]:normal eps=1e-06 seed=17

A tensor is `name=dtype[shape]`, then optionally `@strides` (elements), `+offset` (elements into its storage), `&tensor`
(in whose storage it lies, if not in one of its own), `~device` (where it is, if not on the device of the run) and
`:regime` (how its values are made). Everything else is a parameter of the op. Values follow from the regime, the seed
and the logical index of each element, or the line lists them:

    rms_norm x=bf16[1,3]:values(1.5,-2,0.0078125) eps=1e-06 seed=0

Here gate and up are the halves of rows of one tensor:

    swiglu x=bf16[4,64]@128,1 up=bf16[4,64]@128,1+64&x seed=3
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lastbit.dtypes import BY_NAME
from lastbit.errors import UsageError, unknown

if TYPE_CHECKING:
    import torch


SEED_BITS = 63
"""Of a seed that is drawn."""

PEER = "peer"
"""Device of a tensor: the next one of the same type as the run's."""

Param = bool | int | float | str
Option = Param | None
Choices = Mapping[str, tuple[Option, ...]]
Chosen = Mapping[str, Any]

_DEVICE = re.compile(r"[a-z]\w*(:\d+)?")
_TENSOR = re.compile(
    r"(?P<dtype>\w+)\[(?P<shape>[\d,]*)\](@(?P<strides>[\d,]+))?(\+(?P<offset>\d+))?"
    rf"(&(?P<memory>[A-Za-z_]\w*))?(~(?P<device>{_DEVICE.pattern}))?(:(?P<regime>\S+))?$"
)
_BARE_WORD = re.compile(r"[A-Za-z_]\w*$")


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Compute row-major strides of `shape`, in elements."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Description of one input.

    Attributes:
        name, dtype, shape: as the op and the kernel name them.
        strides, offset: in elements; None for contiguous.
        regime: how its values are made.
        device: a torch device or `PEER`; empty for the device that the run is on.
        memory: the tensor in whose storage it lies; empty for one of its own.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    offset: int = 0
    regime: str = "normal"
    device: str = ""
    memory: str = ""

    def __post_init__(self) -> None:
        if self.dtype not in BY_NAME:
            raise unknown("dtype", self.dtype, BY_NAME)
        if self.strides is not None and len(self.strides) != len(self.shape):
            raise UsageError(
                f"tensor {self.name!r} has {len(self.shape)} dimensions {self.shape} "
                f"but {len(self.strides)} strides {self.strides}"
            )
        if len(self.shape) > _MOST_DIMENSIONS:
            raise UsageError(f"tensor {self.name!r} has {len(self.shape)} dimensions; torch takes {_MOST_DIMENSIONS}")
        if self._bytes > _MOST_BYTES:
            raise UsageError(f"tensor {self.name!r} would take more than 2**62 bytes of memory, which no device has")
        if self.device and not _DEVICE.fullmatch(self.device):
            raise UsageError(f"device {self.device!r} of tensor {self.name!r} must be {PEER} or like cpu and cuda:1")
        if self.strides == contiguous_strides(self.shape):
            object.__setattr__(self, "strides", None)
        if self.memory == self.name:
            object.__setattr__(self, "memory", "")

    @property
    def owner(self) -> str:
        """The tensor whose storage it is in, which may be itself."""
        return self.memory or self.name

    @property
    def repeats(self) -> bool:
        """Return whether several elements share memory, along a stride of 0."""
        return self.strides is not None and any(n > 1 and not s for n, s in zip(self.shape, self.strides, strict=True))

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        dtype: torch.dtype = getattr(torch, BY_NAME[self.dtype].torch_name)
        return dtype

    @property
    def element_strides(self) -> tuple[int, ...]:
        """The strides in elements, also where they are the contiguous ones."""
        return contiguous_strides(self.shape) if self.strides is None else self.strides

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def _bytes(self) -> int:
        """Size of the storage that it needs, up to its last element."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.element_strides, strict=True))
        return (self.offset + last + 1) * BY_NAME[self.dtype].itemsize if 0 not in self.shape else 0

    def __str__(self) -> str:
        strides = "" if self.strides is None else "@" + ",".join(map(str, self.strides))
        offset = f"+{self.offset}" if self.offset else ""
        memory = f"&{self.memory}" if self.memory else ""
        device = f"~{self.device}" if self.device else ""
        regime = f":{self.regime}" if self.regime != "normal" else ""
        return f"{self.name}={self.dtype}[{','.join(map(str, self.shape))}]{strides}{offset}{memory}{device}{regime}"


@dataclass(frozen=True, slots=True)
class Case:
    """One problem: op name, tensors, parameters and the seed of every value. `str(case)` is its id."""

    op: str
    tensors: tuple[TensorSpec, ...]
    params: Mapping[str, Param] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        given: Mapping[str, object] = self.params
        if None in given.values():  # the option of a choice to leave a parameter out
            object.__setattr__(self, "params", {n: value for n, value in given.items() if value is not None})
        for tensor in self.tensors:
            if tensor.memory:
                _check_memory(tensor, self)

    def __getitem__(self, name: str) -> TensorSpec:
        for tensor in self.tensors:
            if tensor.name == name:
                return tensor
        raise unknown("tensor", name, (t.name for t in self.tensors))

    def __hash__(self) -> int:
        return hash((self.op, self.tensors, frozenset(self.params.items()), self.seed))

    @property
    def numel(self) -> int:
        """Elements of all its tensors."""
        return sum(tensor.numel for tensor in self.tensors)

    @property
    def names(self) -> frozenset[str]:
        """Names of everything a kernel is called with: tensors and parameters."""
        return frozenset(t.name for t in self.tensors) | frozenset(self.params)

    @property
    def dtypes(self) -> str:
        """The distinct dtypes of the inputs, in order: `bf16` or `bf16/fp32`.

        Vectors of one number are left out, and integers beside floating-point numbers.
        """
        several = [t for t in self.tensors if t.numel > 1 or len(t.shape) > 1] or self.tensors
        floats = [t for t in several if BY_NAME[t.dtype].floating] or several
        return "/".join(dict.fromkeys(t.dtype for t in floats))

    @property
    def displaced(self) -> tuple[str, ...]:
        """Names of the tensors with a device of their own."""
        return tuple(t.name for t in self.tensors if t.device)

    @property
    def shares_memory(self) -> bool:
        """Return whether some tensors lie in the storage of another one."""
        return any(tensor.memory for tensor in self.tensors)

    def apart(self) -> Case:
        """Give every tensor a storage of its own, where it has the strides and the offset that it had."""
        return replace(self, tensors=tuple(replace(t, memory="") for t in self.tensors)) if self.shares_memory else self

    def gathered(self) -> Case:
        """Move every tensor to the device of the run."""
        return replace(self, tensors=tuple(replace(t, device="") for t in self.tensors))

    def with_regime(self, regime: str) -> Case:
        """Draw the values of every floating-point tensor from `regime`."""
        floats = (BY_NAME[t.dtype].floating for t in self.tensors)
        redrawn = (replace(t, regime=regime) if f else t for t, f in zip(self.tensors, floats, strict=True))
        return replace(self, tensors=tuple(redrawn))

    def __str__(self) -> str:
        words = [self.op, *map(str, self.tensors)]
        words += [f"{name}={value if isinstance(value, str) else repr(value)}" for name, value in self.params.items()]
        return " ".join([*words, f"seed={self.seed}"])


@dataclass(frozen=True, eq=False)
class Group:
    """Cases that belong together, so that a run covers each kind: one test item per kernel and group.

    Attributes:
        name: unique within the op.
        strategy: a Hypothesis strategy of cases, or None; with `choices`, a function from what is chosen to one.
        examples: cases that are always run.
        choices: name → options of what cases choose from; see `lastbit.inputs.choices`.
        designed: what a design has chosen for this group, a case each.
        drawn: how many cases Hypothesis draws besides; None for as many as a run has per group.
        properties: the examples are what a kernel's bits are looked at with, see `lastbit.invariance`: many rows of
            ordinary values each.
        combination: the row of `combinations` that its cases have; groups with one share the cases of an op among them.
    """

    name: str
    strategy: Any = None
    examples: tuple[Case, ...] = ()
    choices: Choices = field(default_factory=dict)
    designed: tuple[Chosen, ...] = ()
    drawn: int | None = None
    properties: bool = False
    combination: Chosen = field(default_factory=dict)

    def left_to_draw(self, cases: int) -> int:
        """Return how many cases Hypothesis draws in a run with `cases` per group."""
        if self.strategy is None:
            return 0
        return cases if self.drawn is None else self.drawn


def parse_case(line: str) -> Case:
    """Parse a case line; `parse_case(str(case)) == case`.

    Raises:
        UsageError: the line is not a case; the message shows the offending word.

    >>> case = parse_case("rms_norm x=bf16[4,128] weight=bf16[128]:near_one eps=1e-06 seed=7")
    >>> case.tensors[0].shape, case.tensors[1].regime, case.params, case.seed
    ((4, 128), 'near_one', {'eps': 1e-06}, 7)
    """
    words = line.split()
    line = shortened(line)  # for messages
    if not words or "=" in words[0]:
        raise UsageError(f"case line {line!r} must start with the name of an op, such as 'OP x=bf16[4,128] seed=0'")
    if unprintable := [word for word in words if not word.isprintable()]:
        raise UsageError(f"cannot read {shortened(unprintable[0])!r} in case line {line!r}: a character is no text")
    tensors: list[TensorSpec] = []
    params: dict[str, Param] = {}
    for word in words[1:]:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier() or not value:
            blank = (
                "; a regime with parentheses holds no blank"
                if any("(" in before and ")" not in before for before in words)
                else ""
            )
            raise UsageError(f"cannot read {shortened(word)!r} in case line {line!r}: expected name=value{blank}")
        if name in params or any(t.name == name for t in tensors):
            raise UsageError(f"{shortened(name)!r} is given twice in case line {line!r}")
        if "[" in value and name != "seed":
            tensors.append(_parse_tensor(name, value, line))
        else:
            params[name] = _parse_param(value, word, line)
    seed = params.pop("seed", 0)
    if type(seed) is not int or not 0 <= seed < 2**63:
        raise UsageError(f"seed={seed!r} in case line {line!r} must be an integer from 0 to 2**63 - 1")
    return Case(words[0], tuple(tensors), params, seed)


def _parse_tensor(name: str, text: str, line: str) -> TensorSpec:
    match = _TENSOR.match(text)
    if match is None:
        raise UsageError(
            f"cannot read tensor {shortened(name)}={shortened(text)!r} in case line {line!r}: "
            "expected dtype[shape], then optionally @strides, +offset, &tensor, ~device and :regime, "
            "as in bf16[4,128]@256,1+8~cpu:rows"
        )
    strides = match["strides"]
    return TensorSpec(
        name,
        match["dtype"],
        _integers(match["shape"], line),
        _integers(strides, line) if strides is not None else None,
        _integers(match["offset"] or "0", line)[0],
        match["regime"] or "normal",
        match["device"] or "",
        match["memory"] or "",
    )


def _check_memory(tensor: TensorSpec, case: Case) -> None:
    """Raise a `UsageError` unless the tensor whose storage `tensor` lies in can have it."""
    own = case[tensor.memory]
    if own.memory:
        raise UsageError(
            f"tensor {tensor.name!r} lies in the storage of {own.name!r}, which lies in that of {own.memory!r}: "
            f"write &{own.memory} for both"
        )
    for what, here, there in (("dtype", tensor.dtype, own.dtype), ("device", tensor.device, own.device)):
        if here != there:
            raise UsageError(
                f"tensors {own.name!r} and {tensor.name!r} share a storage, but their {what}s are "
                f"{there or 'that of the run'} and {here or 'that of the run'}; they must be equal"
            )


def _integers(text: str, line: str) -> tuple[int, ...]:
    words = text.split(",") if text else []
    if not all(words):
        raise UsageError(f"cannot read the integers {shortened(text)!r} in case line {line!r}")
    for word in words:
        if len(word) > _MOST_DIGITS:
            raise UsageError(f"{shortened(word)} in case line {line!r} has {len(word):,} digits: no tensor is so large")
    return tuple(map(int, words))


def _parse_param(text: str, word: str, line: str) -> Param:
    if _BARE_WORD.match(text) and text not in ("True", "False", "None", "inf", "nan"):
        return text
    try:
        value = float(text) if text in ("inf", "-inf", "nan") else ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):  # the last two of a parser that nests too deeply
        value = None
    if not isinstance(value, bool | int | float):
        shown = shortened(word)
        raise UsageError(f"cannot read {shown!r} in case line {line!r}: expected a number, True, False or a word")
    return value


def shortened(text: str) -> str:
    """Shorten `text` for a message, which quotes no more of a long line than its ends."""
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} … {text[-_SHOWN // 2 :]}"


# Three lines of 100 characters: more hides what is wrong with the line.
_SHOWN = 300
# A number of 18 digits is below 2⁶³.
_MOST_DIGITS = 18
# Torch counts bytes of a storage in int64; half of that leaves room for a sum.
_MOST_BYTES = 1 << 62
# As torch has at most.
_MOST_DIMENSIONS = 64
