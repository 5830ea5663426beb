"""Declarations of an op about a sum of its own, so that probing can reveal the order of its additions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Arguments = Callable[["Tensor", float], Mapping[str, Any]]
"""Terms [Q, N] and a tuning from 0 to 1 → inputs and parameters of a call that adds up the terms of each row."""


@dataclass(frozen=True)
class ProbedSum:
    """A sum that a kernel of the op computes, and how a probe of it is placed and read.

    Attributes:
        arguments: tensors and parameters of a call, by name, in which each of Q rows of N terms is a sum of its own.
            Terms are powers of two and a few bits more, zeros mostly; all of them reach the sum exactly. The function
            may let a parameter follow the tuning, so that results round elsewhere.
        results: result or stage → its dimension that counts the Q sums, the first choice first. Each is a function of
            the sum, and of no term but those at its own place.
        squares: what is added are the squares of the terms.
        dot: the sum is a dot, to which the declaration `order=` of a kernel applies.
        about: what is added, for a reader.
    """

    arguments: Arguments
    results: Mapping[str, int]
    squares: bool = False
    dot: bool = False
    about: str = ""
