"""A relation of a norm over groups of columns: a rank that has some of the groups gives their bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

from lastbit.relations import NotApplicable, Related, Tensors, at, relation

_COLUMNS = ("x", "z", "dy", "weight", "bias")
_STATISTICS = ("rstd", "mean")
_RESULTS = ("output", "dx", "dz", "dw", "db")


@relation("shards", "some of the groups of columns alone have the bits that they have in whole rows")
def shards(tensors: Tensors, params: Mapping[str, Any], random: Random) -> Iterator[Related]:
    width = tensors["x"].shape[-1]
    groups = tensors["rstd"].shape[-1] if "rstd" in tensors else width // params.get("group_size", width)
    if groups < 2:
        raise NotApplicable("the case has one group of columns; two are needed")
    middle = groups // 2
    for part in (slice(middle), slice(middle, groups)):
        start, end, _ = part.indices(groups)
        columns = ..., slice(start * width // groups, end * width // groups)
        cut = {n: t[columns] if n in _COLUMNS else t[..., part] if n in _STATISTICS else t for n, t in tensors.items()}
        yield Related(f"groups {start} to {end - 1} of {groups} alone", cut, at(_RESULTS, columns))
