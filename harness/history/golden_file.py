"""Golden files: one safetensors file per kernel and kind of device, with the cases that it holds described in JSON.

A tensor is named `NUMBER/STAGE`, by the number of its case. The metadata of the file has one entry, `lastbit golden`:
a JSON object that begins with the version of the format and a checksum, the SHA-256 of the file with zeros in place of
the checksum, so that a change of any byte shows. docs/golden.md lists the fields.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError

from lastbit.errors import LastbitError
from lastbit.files import replace_file
from lastbit.history.golden_values import Stored
from lastbit.reports.golden import Figures

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
