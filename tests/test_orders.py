"""The trees of sums, revealed: sums whose tree is known, and what is no tree."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from orders.known_trees import (
    Nested,
    blocks,
    chain,
    fma_chain,
    halves,
    kahan,
    lanes,
    neighbours,
    normalized,
    squares_by,
    steps,
    sum_by,
    welford,
    welford_lanes,
)
from torch import Tensor

from harness.errors import UsageError
from harness.orders.form import form_of, progression
from harness.orders.reveal import reveal
from harness.orders.search import search
from harness.orders.tree import added, prefixes, tree_of, within
from reports.order import notation, tree_lines

TREES: dict[str, Nested] = {
    "chain": chain(range(64)),
    "from the last": chain(range(64)[::-1]),
    "neighbours": neighbours(range(64)),
    "of 37 columns": neighbours(range(37)),
    "halves": halves(range(64)),
    "lanes": lanes(64, 8),
    "blocks": blocks(96, 32),
    "two blocks and a rest": chain([neighbours(range(16)), neighbours(range(16, 32)), neighbours(range(32, 37))]),
    "steps": steps(48),
    "steps and a rest": steps(40),
    "one step": tuple(range(16)),
}


@pytest.mark.parametrize("nested", TREES.values(), ids=TREES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_signed_terms(nested: Nested, dtype: torch.dtype) -> None:
    """In the dtype of the terms: a sum that is rounded to 8 bits still shows a small term."""
    expected = tree_of(nested)
    found = reveal(lambda x: sum_by(nested)(x).to(dtype), expected.terms, dtype=dtype)
    assert found.tree == expected, (found.reason, found.triples)
    assert found.checked > 200 and not found.contradicted and not found.notes


@pytest.mark.parametrize("nested", [n for n in TREES.values() if n != tuple(range(16))], ids=[*TREES][:-1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_squares(nested: Nested, dtype: torch.dtype) -> None:
    """Nothing cancels, and all that is seen are normalized columns in the dtype of the terms."""
    expected = tree_of(nested)
    norm = normalized(squares_by(sum_by(nested)))
    found = reveal(norm, expected.terms, dtype=dtype, squares=True, tuned=True)
    assert found.tree == expected, (found.reason, found.triples)


@pytest.mark.parametrize("scale", [1.0, 0.3, 100.0])
def test_squares_of_every_scale_of_the_result(scale: float) -> None:
    norm = normalized(squares_by(sum_by(lanes(64, 8))))
    found = reveal(lambda x, eps: scale * norm(x, eps), 64, squares=True, tuned=True)
    assert found.tree == tree_of(lanes(64, 8)), found.reason


def test_fused_squares_are_a_chain() -> None:
    found = reveal(normalized(fma_chain), 48, squares=True, tuned=True)
    assert found.tree == tree_of(chain(range(48))), found.reason


def test_one_row_in_a_call() -> None:
    found = reveal(sum_by(lanes(16, 4)), 16, rows=1)
    assert found.tree == tree_of(lanes(16, 4))
    assert found.calls == found.asked


# What is no tree, or cannot be seen


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
        """The order is another one in each row."""
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


# Trees


@pytest.mark.parametrize("terms", [2, 3, 300])
def test_random_trees_are_found(terms: int) -> None:
    random = np.random.default_rng(terms)
    for _ in range(5):
        parts: list[Nested] = list(range(terms))
        while len(parts) > 1:
            chosen = random.choice(len(parts), min(len(parts), int(random.integers(2, 5))), replace=False).tolist()
            joined = tuple(parts[i] for i in chosen)
            parts = [part for i, part in enumerate(parts) if i not in chosen] + [joined]
        expected = tree_of(parts[0])
        assert search(terms, lambda asked, tree=expected: within(tree, *asked.T)) == expected


def test_questions_grow_little_faster_than_terms() -> None:
    asked = 0

    def count(triples: np.ndarray) -> np.ndarray:
        nonlocal asked
        asked += len(triples)
        return within(tree, *triples.T)

    for nested in (chain(range(1024)), neighbours(range(1024)), tuple(range(1024)), steps(1024)):
        tree, asked = tree_of(nested), 0
        assert search(1024, count) == tree
        assert asked < 30 * 1024


def test_equal_trees_have_equal_numbers() -> None:
    tree = tree_of(((0, 1), (2, 3)))
    assert tree == tree_of(((3, 2), (0, 1))) and tree.digest == tree_of(((3, 2), (1, 0))).digest
    assert tree != tree_of(((0, 2), (1, 3)))
    assert (tree.parents, tree.height, tree.nodes) == ((4, 4, 5, 5, 6, 6), 2, 7)


@pytest.mark.parametrize("nested", [(0, 2), (0, 0), ((0, 1), 3)])
def test_columns_that_are_no_tree(nested: Nested) -> None:
    with pytest.raises(UsageError, match="each once"):
        tree_of(nested)


def test_steps_are_said_as_one_accumulator() -> None:
    [said] = tree_lines(form_of(tree_of(steps(48))))
    assert said == "sum: 48 terms in 3 steps, one after the other: each adds 16 at once to the sum so far"


def test_prefixes_and_height() -> None:
    assert prefixes(tree_of(steps(48))) == {1, 16, 32, 48}
    assert prefixes(tree_of(chain(range(4)))) == {1, 2, 3, 4}
    assert prefixes(tree_of(chain(range(4)[::-1]))) == {1, 4}
    assert tree_of(steps(48)).height == 3


def test_terms_are_added_as_the_tree_says() -> None:
    terms = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(added(tree_of(lanes(64, 8)), terms), sum_by(lanes(64, 8))(terms))


# Forms


@pytest.mark.parametrize(
    ("nested", "expected"),
    [
        (chain(range(8)), "chain 8@1"),
        (chain(range(8)[::-1]), "chain 8@-1"),
        (neighbours(range(8)), "pairs 1,2,4"),
        (halves(range(8)), "pairs 4,2,1"),
        (lanes(64, 8), "pairs 4,2,1 of chain 8@8"),
        (blocks(96, 32), "chain 3@32 of pairs 4,2,1 of chain 4@8"),
        (steps(48), "steps 16 at once 48@1"),
        (tuple(range(16)), "at once 16@1"),
        (chain([0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]), "chain 2@1,2@8,4@2"),
        (chain([0, 1, 5, 2, 4, 3]), "chain 6@?"),
        (((0, 1), 2, 3), "steps 2 at once 4@1"),
        ((((0, 1), 2, 3), (4, 5), 6), "other of (1 × steps 2 at once 4@1, 1 × pairs 1, 1 × terms)"),
        (neighbours(range(13)), "chain of (1 × pairs 1,2,4, 1 × chain of (1 × pairs 1,2, 1 × terms))"),
        (TREES["two blocks and a rest"], "chain of (1 × pairs 1,2,4,8,16, 1 × chain of (1 × pairs 1,2, 1 × terms))"),
        (((0, 1), (2, (3, 4))), "chain of (3 × terms, 1 × pairs 1)"),
    ],
    ids=str,
)
def test_form(nested: Nested, expected: str) -> None:
    assert notation(form_of(tree_of(nested))) == expected


def test_form_in_words() -> None:
    assert list(tree_lines(form_of(tree_of(blocks(4096, 1024))))) == [
        "sum: 4 blocks of 1,024 terms one after the other, at distance 1,024",
        "  in each block: 8 lanes of 128 terms (column mod 8), joined in pairs over 3 levels, at distances 4, 2, 1",
        "    in each lane: 128 terms one after the other, at distance 8",
    ]


@pytest.mark.parametrize(
    ("starts", "expected"),
    [((5,), ()), ((0, 3, 6), ((3, 3),)), ((0, 1, 8, 9), ((2, 1), (2, 8))), ((0, 1, 3), ()), ((3, 2, 1), ((3, -1),))],
)
def test_progression(starts: tuple[int, ...], expected: tuple[tuple[int, int], ...]) -> None:
    assert progression(starts) == expected
