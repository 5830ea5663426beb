"""Sums of which no tree is told, and what is said of them instead."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from lastbit.errors import UsageError
from lastbit.orders.reveal import reveal
from lastbit.orders.search import search
from tests.correct_kernels.known_trees import (
    chain,
    kahan,
    normalized,
    squares_by,
    sum_by,
    welford,
    welford_lanes,
)
from tests.nested_trees import tree_of


@pytest.mark.parametrize("terms", [8, 64])
def test_compensated_sum_has_no_tree(terms: int) -> None:
    found = reveal(kahan, terms)
    assert found.tree is None and "random terms" in found.reason


def test_compensated_sum_of_squares_has_no_tree() -> None:
    found = reveal(normalized(squares_by(kahan)), 64, squares=True, tuned=True)
    assert found.tree is None and found.triples


@pytest.mark.parametrize("mean", [welford, welford_lanes])
def test_running_mean_has_no_tree(mean: Callable[[Tensor], Tensor]) -> None:
    """Of lanes of 8 terms, each a running mean, few pairs of columns show that M and -M do not cancel."""
    found = reveal(mean, 64)
    assert found.tree is None and "running mean" in found.reason


@pytest.mark.parametrize("times", [0, 2])
def test_a_term_that_is_not_counted_once(times: int) -> None:
    """Among 512 columns, random triples seldom meet it."""
    weights = torch.ones(512)
    weights[300] = times
    found = reveal(lambda x: (x.float() * weights).sum(-1), 512)
    assert found.tree is None and "not counted once" in found.reason


@pytest.mark.parametrize(("column", "said"), [(30, "do not count"), (63, "a term is left out")])
def test_a_square_that_is_left_out(column: int, said: str) -> None:
    """The last column is met while numbers are drawn; another one only where every column is asked."""
    norm = normalized(lambda x: x.float().index_fill(1, torch.tensor(column), 0.0).square().sum(-1))
    found = reveal(norm, 64, squares=True, tuned=True)
    assert found.tree is None and said in found.reason


def test_one_result_for_all_rows() -> None:
    assert "shape ()" in reveal(lambda x: x.float().sum(), 8).reason


def test_sum_in_fp64_loses_no_square() -> None:
    norm = normalized(lambda x: x.double().square().sum(-1).float())
    found = reveal(norm, 32, squares=True, tuned=True)
    assert found.tree is None and "more bits than fp32" in found.reason


@pytest.mark.parametrize(("dtype", "held"), [(torch.float64, "more"), (torch.bfloat16, "fewer")])
def test_what_the_sum_is_held_in(dtype: torch.dtype, held: str) -> None:
    def running(x: Tensor) -> Tensor:
        total, *rest = x.to(dtype).unbind(-1)
        for term in rest:
            total = total + term
        return total.float()

    found = reveal(running, 32)
    assert found.tree == tree_of(chain(range(32)))
    assert found.notes == (f"the sum is held in {held} bits than fp32 has",)


def test_results_that_show_nothing() -> None:
    signed = reveal(lambda x: torch.zeros(len(x)), 16)
    squares = reveal(lambda x, eps: torch.ones_like(x), 16, squares=True, tuned=True)
    assert not signed.visible and "no result shows" in signed.reason
    assert not squares.visible and "changed no result" in squares.reason


def test_three_columns_leave_none_to_read() -> None:
    found = reveal(normalized(squares_by(sum_by(chain(range(3))))), 3, squares=True, tuned=True)
    assert not found.visible and "give 4 or more" in found.reason


def test_results_that_change_from_call_to_call() -> None:
    random = np.random.default_rng(0)

    def atomic(x: Tensor) -> Tensor:
        return sum_by(chain(random.permutation(x.shape[1]).tolist()))(x)

    found = reveal(atomic, 32)
    assert found.tree is None
    assert "equal calls give different results" in found.notes and found.triples


def test_search_of_what_is_no_tree_ends() -> None:
    """Each question is answered at random."""
    random = np.random.default_rng(0)
    search(256, lambda triples: random.random(len(triples)) < 0.5)

    def shuffled(x: Tensor) -> Tensor:
        """Add in another order in each row."""
        order = torch.from_numpy(random.permuted(np.tile(np.arange(128), (len(x), 1)), axis=1))
        return sum_by(chain(range(128)))(x.gather(1, order))

    found = reveal(shuffled, 128)
    assert found.tree is None and found.asked > 1000


def test_order_that_depends_on_the_place_in_the_call() -> None:
    """The first row is added as in every other call, so that there is a tree, and the reader is told of which row."""

    def by_place(x: Tensor) -> Tensor:
        even, odd = sum_by(chain(range(16)))(x), sum_by(chain(range(16)[::-1]))(x)
        return torch.where(torch.arange(len(x)) % 2 == 0, even, odd)

    found = reveal(by_place, 16, rows=8)
    assert found.tree == tree_of(chain(range(16)))
    assert any("only the first row" in note for note in found.notes)


@pytest.mark.parametrize(("terms", "rows"), [(1, 8), (2, 8), (8, 0)])
def test_nothing_to_ask(terms: int, rows: int) -> None:
    with pytest.raises(UsageError, match=f"{terms} terms in {rows} rows"):
        reveal(lambda x: x.sum(-1), terms, rows=rows)
