"""Which functions torch compiles, told by their text: in each process anew, which takes seconds."""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any

import torch

from lastbit.branches.size_constants import with_inner_code


def is_compiled(function: Any) -> bool:
    """Tell by the text of a function, and of those of its module that it names, whether torch compiles it."""
    left, seen = [function], set[int]()
    while left:
        one = inspect.unwrap(left.pop(), stop=_is_compiling)
        one = getattr(one, "func", one)  # of a partial one
        if _is_compiling(one):
            return True
        if id(one) in seen or not (code := getattr(one, "__code__", None)):
            continue
        seen.add(id(one))
        names = {name for part in with_inner_code(code) for name in part.co_names}
        known = getattr(one, "__globals__", {})
        if "compile" in names and any(known.get(name) is torch for name in names):
            return True
        named = [known[name] for name in names if name in known]
        for cell in getattr(one, "__closure__", None) or ():
            with suppress(ValueError):  # it is empty
                named.append(cell.cell_contents)
        left += [other for other in named if getattr(other, "__module__", "") == one.__module__ and callable(other)]
    return False


def _is_compiling(one: Any) -> bool:
    return hasattr(one, "_torchdynamo_orig_callable")
