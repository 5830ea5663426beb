"""Golden files: one safetensors file per kernel and kind of device, with the cases that it holds described in JSON.

A tensor is named `NUMBER/STAGE`, by the number of its case. The metadata of the file has one entry, `lastbit golden`:
a JSON object that begins with the version of the format and a checksum, the SHA-256 of the file with zeros in place of
the checksum, so that a change of any byte shows. docs/golden.md lists the fields.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from lastbit.dtypes import DTYPE_NAMES
from lastbit.errors import LastbitError
from lastbit.files import replace_file
from lastbit.inputs import fingerprint
from lastbit.inputs.bits import bits_of, bits_with_one_nan, distance
from lastbit.reports.golden import Change, Farthest, Figures, Index

FORMAT = 1
"""Version of the format; the frame, which is the key, the version and the checksum, is that of every version."""

SUFFIX = ".safetensors"

_KEY = "lastbit golden"
_ZEROS = b"0" * 64
_CHECKSUM = re.compile(rb"checksum\W{1,8}([0-9a-f]{64})")
_PLAIN = re.compile(r"[a-z0-9_]{1,80}")


@dataclass(frozen=True, eq=False)
class RecordedStage:
    """One stage of one case: its tensor, whether its bits may differ between calls, and how far from the contract."""

    values: Stored
    unordered: bool
    figures: Figures


@dataclass(frozen=True, eq=False)
class RecordedCase:
    """One case: its line, the fingerprint of its inputs, and its stages by name."""

    line: str
    inputs: str
    stages: Mapping[str, RecordedStage]


@dataclass(frozen=True, eq=False)
class Golden:
    """The results of a kernel on a kind of device, their contract, and their provenance.

    Attributes:
        properties: those that its bits had, each with the lines of cases; None if an older lastbit asked for none.
    """

    kernel: str
    op: str
    contract: str
    kind: str
    provenance: Mapping[str, str]
    cases: tuple[RecordedCase, ...]
    properties: Mapping[str, Sequence[str]] | None = None


def path_of(kernel: str, folder: Path) -> Path:
    """Return the file of a kernel in a folder of goldens: no two names share one, whatever characters they hold."""
    if _PLAIN.fullmatch(kernel):
        return folder / f"{kernel}{SUFFIX}"
    readable = re.sub(r"[^a-z0-9_]+", "-", kernel.lower()).strip("-")[:80]  # file systems take 255 bytes
    return folder / f"{readable}-{hashlib.sha256(kernel.encode()).hexdigest()[:8]}{SUFFIX}"


def write(golden: Golden, folder: Path) -> Path:
    """Write the file of a golden, whole or not at all, and return its path.

    Raises:
        LastbitError: a file of that name exists and is no golden, or the folder cannot be written to.
    """
    path = path_of(golden.kernel, folder)
    if path.exists():
        read(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(path, lambda beside: beside.write_bytes(_packed(golden)))
    except OSError as error:
        raise LastbitError(f"cannot write {path}: {error.strerror}") from error
    return path


def read(path: Path) -> Golden:
    """Read the golden that `write` left in a file.

    Raises:
        LastbitError: the file cannot be read, is damaged, of another program, or of a newer lastbit.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise LastbitError(f"cannot read golden {path}: {error.strerror}") from error
    document = _document(content, path)
    cases = []
    try:
        tensors = safetensors.torch.load(content)
        for number, described in enumerate(document["cases"]):
            stages = {}
            for name, d in described["stages"].items():
                values = Stored(tuple(d["shape"]), d["fingerprint"], tuple(d["blocks"]), tensors[f"{number}/{name}"])
                numel, mismatched, outside = (d["figures"][figure] for figure in ("numel", "mismatched", "outside"))
                # JSON has no infinity: numbers that may be one are text.
                rel_l2, bias = float(d["figures"]["rel_l2"]), float(d["figures"]["bias"])
                figures = Figures(numel, mismatched, outside, rel_l2, bias)
                stages[name] = RecordedStage(values, d["unordered"], figures)
            cases.append(RecordedCase(described["case"], described["inputs"], stages))
        kernel, op, contract, kind = (document[name] for name in ("kernel", "op", "contract", "kind"))
        return Golden(kernel, op, contract, kind, document["provenance"], tuple(cases), document.get("properties"))
    except (SafetensorError, *_MALFORMED) as error:
        raise LastbitError(f"golden {path} is malformed ({type(error).__name__}: {error}); {_REMEDY}") from error


_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, RecursionError)
"""What reading a file raises that is not as `write` leaves it; the last one, JSON that is nested too deeply."""

_REMEDY = "restore it from version control, or delete it and record it again; it was left as it is"


def _document(content: bytes, path: Path) -> dict[str, Any]:
    """Return the JSON object in the metadata of a file, after a check of its checksum and version."""
    end = 8 + int.from_bytes(content[:8], "little")
    try:
        header = dict(json.loads(content[8:end]))
        ends = (entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
        size = end + max(ends, default=0)
        metadata = dict(header.get("__metadata__", {}))
    except _MALFORMED as error:
        raise LastbitError(f"{path} is a damaged golden, or no safetensors file ({error}); {_REMEDY}") from error
    if _KEY not in metadata:
        raise LastbitError(f"{path} is a safetensors file, but no golden: it lacks the metadata {_KEY!r}; {_REMEDY}")
    if len(content) != size:
        raise LastbitError(f"golden {path} is damaged: it has {len(content):,} bytes, not {size:,}; {_REMEDY}")
    if (found := _CHECKSUM.search(content)) is None or found[1].decode() != _sum_of(content):
        raise LastbitError(f"golden {path} is damaged: its content does not fit its checksum; {_REMEDY}")
    try:
        document = dict(json.loads(metadata[_KEY]))
        version = document["format"]
    except _MALFORMED as error:
        raise LastbitError(f"golden {path} is malformed ({type(error).__name__}: {error}); {_REMEDY}") from error
    if version != FORMAT:
        raise LastbitError(
            f"golden {path} has format {version}, and this lastbit reads format {FORMAT}; use the lastbit "
            "that recorded it, or delete it and record it again; it was left as it is"
        )
    return document


def _sum_of(content: bytes) -> str:
    """Return the SHA-256 of a file with zeros in place of its checksum."""
    return hashlib.sha256(_with_checksum(content, _ZEROS)).hexdigest()


def _with_checksum(content: bytes, checksum: bytes) -> bytes:
    found = _CHECKSUM.search(content)
    assert found is not None
    return content[: found.start(1)] + checksum + content[found.end(1) :]


def _packed(golden: Golden) -> bytes:
    """Return the bytes of the file."""
    cases = list(enumerate(golden.cases))
    tensors = {f"{number}/{name}": stage.values.values for number, case in cases for name, stage in case.stages.items()}
    document = {
        "format": FORMAT,
        "checksum": _ZEROS.decode(),
        **{name: getattr(golden, name) for name in ("kernel", "op", "contract", "kind")},
        "provenance": dict(golden.provenance),
        "cases": [_described(case) for case in golden.cases],
        **({} if golden.properties is None else {"properties": dict(golden.properties)}),
    }
    content = safetensors.torch.save(tensors, {_KEY: json.dumps(document, allow_nan=False)})
    return _with_checksum(content, _sum_of(content).encode())


def _described(case: RecordedCase) -> dict[str, Any]:
    stages = {
        name: {
            "shape": list(stage.values.shape),
            "fingerprint": stage.values.fingerprint,
            "blocks": list(stage.values.blocks),
            "unordered": stage.unordered,
            "figures": {k: str(v) if isinstance(v, float) else v for k, v in asdict(stage.figures).items()},
        }
        for name, stage in case.stages.items()
    }
    return {"case": case.line, "inputs": case.inputs, "stages": stages}


# 4 KB of fp32 for each stage of a case; where a larger one changed, its hashes tell. They depend on the position of
# every element, so that exchanged rows and flipped signs change them.
WHOLE = 1024
"""Elements up to which a tensor is stored whole."""

_RUNS, _RUN = 16, 32  # a sample: so many stretches of so many consecutive elements
# Arbitrary: about 1 KB of a file, by which a change is placed within a thirtieth of the tensor.
_BLOCKS = 32  # hashes of a tensor that is not stored whole


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor as a golden holds it.

    Attributes:
        shape: of the tensor.
        fingerprint: of all its elements.
        blocks: fingerprints of its blocks, in order; none where it is whole.
        values: all elements, in its shape, or a sample, [elements]; on the CPU.
    """

    shape: tuple[int, ...]
    fingerprint: str
    blocks: tuple[str, ...]
    values: Tensor

    def __str__(self) -> str:
        name = DTYPE_NAMES.get(self.values.dtype, str(self.values.dtype))
        return f"{name}[{','.join(map(str, self.shape))}]"


def store(tensor: Tensor) -> Stored:
    """Return a tensor, on any device and with any strides, in the form in which a golden keeps it."""
    bits = bits_with_one_nan(tensor)
    whole = tensor.numel() <= WHOLE
    blocks = () if whole else tuple(fingerprint(bits.flatten()[block]) for block in _blocks(tensor.numel()))
    kept = tensor
    if not whole:  # taken as bits: not every torch indexes 8-bit floats on every device
        kept = bits_of(tensor).flatten()[_sampled(tensor.numel()).to(tensor.device)].view(tensor.dtype)
    values = kept.detach().cpu().clone(memory_format=torch.contiguous_format)
    return Stored(tuple(tensor.shape), fingerprint(bits), blocks, values)


def same(before: Stored, after: Stored) -> bool:
    """Return whether dtype, shape and all bits are equal."""
    return str(before) == str(after) and before.fingerprint == after.fingerprint


def change(stage: str, before: Stored | None, after: Stored | None) -> Change:
    """Return how the tensors of a stage differ; None where there is no such stage."""
    shown = str(before or ""), str(after or "")
    if before is None or after is None or shown[0] != shown[1]:
        return Change(stage, *shown)
    differing = bits_with_one_nan(before.values) != bits_with_one_nan(after.values)
    far = torch.where(differing, distance(before.values, after.values), -1.0).flatten()
    farthest = None
    if differing.any():
        at = int(far.argmax())
        position = int(_sampled(math.prod(before.shape))[at]) if before.blocks else at
        values = (float(stored.values.flatten()[at]) for stored in (before, after))
        farthest = Farthest(_index(position, before.shape), *values)
    return Change(
        stage,
        *shown,
        changed=int(differing.sum()),
        compared=differing.numel(),
        max_ulp=max(float(far.max()), 0.0) if far.numel() else 0.0,
        farthest=farthest,
        blocks=(sum(a != b for a, b in zip(before.blocks, after.blocks, strict=True)), len(before.blocks)),
        spans=tuple(_spans(before, after)),
    )


def _spans(before: Stored, after: Stored) -> Iterator[tuple[Index, Index]]:
    """Return first and last index of each stretch of blocks that differ."""
    stretch: list[int] = []
    for block, old, new in zip(_blocks(math.prod(before.shape)), before.blocks, after.blocks, strict=False):
        if old != new:
            stretch += [block.start, block.stop - 1]
        elif stretch:
            yield _index(stretch[0], before.shape), _index(stretch[-1], before.shape)
            stretch = []
    if stretch:
        yield _index(stretch[0], before.shape), _index(stretch[-1], before.shape)


def _sampled(numel: int) -> Tensor:
    """Return the sampled positions of a tensor that is not stored whole: stretches from the first to the last."""
    starts = torch.arange(_RUNS) * (numel - _RUN) // (_RUNS - 1)
    return (starts[:, None] + torch.arange(_RUN)).flatten()


def _blocks(numel: int) -> list[slice]:
    """Return the slice of each block of a tensor that is not stored whole, in logical order."""
    size = math.ceil(numel / _BLOCKS) or 1
    return [slice(start, min(start + size, numel)) for start in range(0, numel, size)]


def _index(position: int, shape: tuple[int, ...]) -> Index:
    """Return the index of the element at a position in logical order."""
    index = []
    for size in reversed(shape):
        position, remainder = divmod(position, size)
        index.append(remainder)
    return tuple(reversed(index))
