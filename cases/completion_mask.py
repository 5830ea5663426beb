"""Cases of completion masks: shapes of real training steps, the smallest and empty ones, and any length in any layout.

The ids that end a sequence are 0 to K-1, counted or drawn with repetition, so that all, some or one of the end ids in
the rows (regime `sequences_K`) are asked for. A group fixes the dtype of the ids and the block of a kernel.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from hypothesis import strategies as st

from lastbit import (
    Case,
    Choices,
    Chosen,
    Group,
    Option,
    TensorSpec,
    chosen_tensor,
    combinations,
    layouts_like,
    least_rows,
    residues,
    tensor_choices,
    widths_with,
)
from lastbit.cases._edges import edges
from lastbit.cases._properties import properties

_SHAPES = tomllib.loads((Path(__file__).parent / "shapes.toml").read_text())["completion_mask"]
_DTYPES = ("int64", "int32")
_LENGTHS = {"L0to64": (0, 64), "L65to512": (65, 512), "L513to3000": (513, 3000)}
_AXES: dict[str, tuple[Option, ...]] = {
    "ids dtype": _DTYPES,
    "ids length": tuple(_LENGTHS),
    "eos_ids dtype": _DTYPES,
    "mask_truncated": (None, True),
}
_SMALLEST = ((1, 1), (0, 5), (5, 0), (0, 0), (1, 64), (3, 65), (1, 1025))
_MOST_ENDS = 4

_SMALL_ELEMENTS = 1 << 14  # of ids where a CPU takes part: a few dozen Triton programs
_LARGE_ELEMENTS = 1 << 22


def groups(accepts: frozenset[str], *, small: bool) -> Iterator[Group]:
    """Yield the groups for a kernel that takes the tensors and parameters `accepts`; `small` cuts the rows."""
    yield Group("real-shapes", examples=tuple(_real_shapes(accepts, small=small)))
    yield Group("edges", examples=(*_smallest(accepts), *edges("completion_mask", accepts, small=small)))
    yield from properties("completion_mask", accepts, small=small)
    most = _SMALL_ELEMENTS if small else _LARGE_ELEMENTS
    for row in combinations(_AXES, accepts=accepts):
        short, long = _LENGTHS[str(row["ids length"])]
        strategy, choices = partial(_cases, short, long, most), _choices(row, short, long, most // long, accepts)
        words = (f"{row['ids dtype']}-{row['ids length']}", f"ends_{row['eos_ids dtype']}")
        name = "-".join((*words, "mask_truncated") if row["mask_truncated"] else words)
        yield Group(name, strategy, choices=choices, combination=row)


def _choices(row: Mapping[str, Option], short: int, long: int, rows: int, accepts: frozenset[str]) -> Choices:
    """Map the tensors and parameters of a group to their options, where there may be that many rows."""
    dtypes = {name: (str(row[f"{name} dtype"]),) for name in ("ids", "eos_ids")}
    return {
        **tensor_choices("ids", dtypes["ids"], ("sequences_N",), layouts_like(min(rows, 2), 64)),
        **tensor_choices("eos_ids", dtypes["eos_ids"], ("counting", "below_N", "lookalikes_N"), layouts_like(64)),
        "ids columns % 64": residues(short, long),
        **({"mask_truncated": (row["mask_truncated"] is True,)} if "mask_truncated" in accepts else {}),
    }


@st.composite
def _cases(draw: st.DrawFn, short: int, long: int, most: int, chosen: Chosen) -> Case:
    length = draw(widths_with(chosen["ids columns % 64"], short, long))
    shape = draw(_rows(least_rows(chosen)[0], most // max(length, 1))), length
    ends = draw(st.integers(1, _MOST_ENDS))
    ids = chosen_tensor("ids", chosen, shape, ends)
    eos_ids = chosen_tensor("eos_ids", chosen, (draw(st.integers(1, _MOST_ENDS)),), ends)
    params = {"mask_truncated": chosen["mask_truncated"]} if "mask_truncated" in chosen else {}
    return Case("completion_mask", (ids, eos_ids), params, draw(st.integers(0, 2**32 - 1)))


def _rows(fewest: int, most: int) -> st.SearchStrategy[int]:
    """Draw few rows in half of the cases, which fill no program or a part of the last one."""
    return st.one_of(st.integers(fewest, min(most, 17)), st.integers(fewest, most))


def _real_shapes(accepts: frozenset[str], *, small: bool) -> Iterator[Case]:
    """Yield every shape of the table, truncated rows kept and masked."""
    turns = itertools.product(_SHAPES, (False, True))
    for seed, (shape, mask_truncated) in enumerate(turns):
        length, ends = shape["length"], shape["eos_ids"]
        rows = min(shape["rows"], max(1, _SMALL_ELEMENTS // length)) if small else shape["rows"]
        strides = tuple(shape["strides"]) if "strides" in shape else None
        ids = TensorSpec("ids", "int64", (rows, length), strides, shape.get("offset", 0), f"sequences_{ends}")
        yield _case(ids, TensorSpec("eos_ids", "int64", (ends,), regime="counting"), mask_truncated, seed, accepts)


def _smallest(accepts: frozenset[str]) -> Iterator[Case]:
    """Yield the smallest and empty shapes, and those beside a block of a kernel, with several kinds of rows each."""
    turns = itertools.product(_SMALLEST, (False, True), range(2))
    for seed, ((rows, length), mask_truncated, turn) in enumerate(turns):
        ids = TensorSpec("ids", _DTYPES[turn % 2], (rows, length), regime="sequences_2")
        yield _case(ids, TensorSpec("eos_ids", "int64", (2,), regime="counting"), mask_truncated, seed, accepts)


def _case(ids: TensorSpec, eos_ids: TensorSpec, mask_truncated: bool, seed: int, accepts: frozenset[str]) -> Case:
    params = {"mask_truncated": mask_truncated} if "mask_truncated" in accepts else {}
    return Case("completion_mask", (ids, eos_ids), params, seed)
