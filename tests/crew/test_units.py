"""Units of items, and how they are handed to actors: every item once, the dearest unit first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lastbit.crew.ledger import UnitQueue, units
from lastbit.verify.notes import Planned

CONTRACTS = ("exact", "loose")


def items(groups: int, kernels: int = 4, **others: int) -> list[Planned]:
    """Items of ops with so many groups, by kernel, as a plan has them: a case of the op `sum` costs 1, of others 10."""
    return [
        Planned(f"{op}{k}-{g}", f"{op}{k}", op, CONTRACTS[k % 2], "cpu", f"g{g}", f"{op}{k}", cases=1, cost=cost)
        for op, count, cost in (("sum", groups, 1), *((name, n, 10) for name, n in others.items()))
        for k in range(kernels)
        for g in range(count)
    ]


def named(planned: list[Planned], unit: list[int]) -> tuple[set[str], list[str]]:
    """Return the groups of a unit, and its contracts in order."""
    return {f"{planned[p].op}-{planned[p].group}" for p in unit}, [planned[p].contract for p in unit]


@pytest.mark.parametrize("workers", [1, 2, 8, 16])
@pytest.mark.parametrize("groups", [1, 3, 40])
def test_every_item_is_in_one_unit(workers: int, groups: int) -> None:
    planned = items(groups, dot=2)
    found = units(planned, workers)
    assert sorted(place for unit in found for place in unit) == list(range(len(planned)))


def test_kernels_that_get_the_same_cases_are_together_and_those_of_a_contract_adjacent() -> None:
    planned = items(40)
    found = units(planned, 2)
    assert len(found) == 40
    assert all(
        named(planned, unit) == ({f"sum-g{planned[unit[0]].group[1:]}"}, sorted(CONTRACTS * 2)) for unit in found
    )


def test_the_dearest_units_go_first() -> None:
    planned = items(40, dot=40)
    first = units(planned, 2)[:40]
    assert {planned[place].op for unit in first for place in unit} == {"dot"}


@pytest.mark.parametrize(("workers", "size"), [(1, 4), (2, 2), (16, 1)])
def test_a_unit_that_would_keep_one_worker_busy_is_cut(workers: int, size: int) -> None:
    """Four groups of four kernels with two contracts: whole groups, then contracts, then kernels."""
    found = units(items(4), workers)
    assert {len(unit) for unit in found} == {size}


def test_what_torch_compiles_goes_to_one_worker_first_whatever_it_costs() -> None:
    """Each process would compile it anew."""
    both = {"compiles": True, "source": "two contracts of one function"}
    planned = [replace(one, **both) if one.kernel in ("sum1", "sum2") else one for one in items(40)]  # type: ignore[arg-type]
    first, *rest = units(planned, 16)
    assert {planned[place].kernel for place in first} == {"sum1", "sum2"} and len(first) == 80
    assert sorted([*first, *(place for unit in rest for place in unit)]) == list(range(len(planned)))
    assert len(units(planned, 1)) == 40, "one worker has no other"


def test_one_worker_is_always_alone_and_shares_all_it_can() -> None:
    assert len(units(items(1), 1)) == 1


def test_nothing_to_run_has_no_units() -> None:
    assert units([], 4) == []


def test_a_queue_gives_every_item_once_whoever_comes_and_goes() -> None:
    queue = UnitQueue([[0, 1, 2], [3, 4]])
    assert [queue.next("a"), queue.next("b"), queue.next("a")] == [0, 3, 1]
    queue.leave("a")
    queue.put_back([1])
    assert [queue.next("b"), queue.last_of_another()] == [4, None]
    assert [queue.next("c"), queue.next("c"), queue.next("c")] == [1, 2, None]
