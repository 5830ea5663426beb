"""Sums of fp32 in many orders, over the last dimension, which is kept with size 1."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Sum = Callable[[Tensor], Tensor]  # terms [..., N] → [..., 1]
Depth = Callable[[int], int]  # number of terms → most additions between a term and the sum


def _padded(terms: Tensor, multiple: int) -> Tensor:
    """Zeros added behind, up to a multiple."""
    return torch.nn.functional.pad(terms, (0, -terms.shape[-1] % multiple))


def library(terms: Tensor) -> Tensor:
    return terms.sum(-1, keepdim=True)


def running(terms: Tensor) -> Tensor:
    """One term after the other. (torch.cumsum adds fp32 in fp64 on the CPU.)"""
    first, *rest = terms.movedim(-1, 0).contiguous().unbind(0)
    total = first.clone()
    for term in rest:
        total += term
    return total.unsqueeze(-1)


def reversed_(terms: Tensor) -> Tensor:
    return running(terms.flip(-1))


def halves(terms: Tensor) -> Tensor:
    """Add the second half to the first, until one term is left."""
    size = terms.shape[-1]
    terms = _padded(terms, 1 << (size - 1).bit_length()) if size else terms
    while terms.shape[-1] > 1:
        first, second = terms.chunk(2, dim=-1)
        terms = first + second
    return terms


def neighbours(terms: Tensor) -> Tensor:
    """Each term added to the one beside it, until one is left."""
    while terms.shape[-1] > 1:
        terms = _padded(terms, 2)
        terms = terms[..., ::2] + terms[..., 1::2]
    return terms


def lanes(width: int) -> Sum:
    """`width` lanes, each adding every `width`-th term in turn, then a tree over the lanes."""

    def total(terms: Tensor) -> Tensor:
        terms = _padded(terms, width).unflatten(-1, (-1, width))
        return halves(running(terms.transpose(-2, -1)).squeeze(-1))

    return total


def chunks(size: int) -> Sum:
    """Chunks of `size` neighbours, each by torch, then the chunks in turn, as atomic additions make it."""

    def total(terms: Tensor) -> Tensor:
        return running(_padded(terms, size).unflatten(-1, (-1, size)).sum(-1))

    return total


def sorted_(descending: bool) -> Sum:
    """By size: the most and the least accurate order for terms of one sign."""

    def total(terms: Tensor) -> Tensor:
        return running(terms.sort(-1, descending=descending).values)

    return total


def tree(n: int) -> int:
    return (n - 1).bit_length()


SUMS: dict[str, tuple[Sum, Depth | None]] = {
    "library": (library, None),
    "running": (running, None),
    "reversed": (reversed_, None),
    "halves": (halves, tree),
    "neighbours": (neighbours, tree),
    "lanes32": (lanes(32), lambda n: math.ceil(n / 32) + 5),
    "lanes128": (lanes(128), lambda n: math.ceil(n / 128) + 7),
    "chunks256": (chunks(256), lambda n: math.ceil(n / 256) + 256),
    "chunks37": (chunks(37), lambda n: math.ceil(n / 37) + 37),
    "ascending": (sorted_(False), None),
    "descending": (sorted_(True), None),
}
"""Name → sum, and the height of its tree where it is less than the number of terms."""
