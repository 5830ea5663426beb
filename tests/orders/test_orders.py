"""The trees of sums, revealed: sums whose tree is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lastbit.orders.form import form_of, progression
from lastbit.orders.reveal import reveal
from lastbit.orders.search import added, prefixes, search, within
from lastbit.reports.order import notation, tree_lines
from tests.correct_kernels.known_trees import (
    Nested,
    blocks,
    chain,
    fma_chain,
    halves,
    lanes,
    neighbours,
    normalized,
    squares_by,
    steps,
    sum_by,
)
from tests.nested_trees import tree_of

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
    with pytest.raises(ValueError, match="each once"):
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
