"""Units of items, and how they are handed to workers: every item once, the dearest unit first, none again that died."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lastbit.verify.schedule import Schedule, UnitQueue, units

CONTRACTS = ("exact", "loose")


def items(groups: int, kernels: int = 4, **others: int) -> list[dict[str, Any]]:
    """Items of ops with so many groups, by kernel, as a plan has them: a case of the op `sum` costs 1, of others 10."""
    return [
        {"op": op, "kernel": f"{op}{k}", "device": "cpu", "group": f"g{g}", "contract": CONTRACTS[k % 2], "cost": cost}
        for op, count, cost in (("sum", groups, 1), *((name, n, 10) for name, n in others.items()))
        for k in range(kernels)
        for g in range(count)
    ]


def named(planned: list[dict[str, Any]], unit: list[int]) -> tuple[set[str], list[str]]:
    """Return the groups of a unit, and its contracts in order."""
    return {f"{planned[p]['op']}-{planned[p]['group']}" for p in unit}, [planned[p]["contract"] for p in unit]


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
        named(planned, unit) == ({f"sum-g{planned[unit[0]]['group'][1:]}"}, sorted(CONTRACTS * 2)) for unit in found
    )


def test_the_dearest_units_go_first() -> None:
    planned = items(40, dot=40)
    first = units(planned, 2)[:40]
    assert {planned[place]["op"] for unit in first for place in unit} == {"dot"}


@pytest.mark.parametrize(("workers", "size"), [(1, 4), (2, 2), (16, 1)])
def test_a_unit_that_would_keep_one_worker_busy_is_cut(workers: int, size: int) -> None:
    """Four groups of four kernels with two contracts: whole groups, then contracts, then kernels."""
    found = units(items(4), workers)
    assert {len(unit) for unit in found} == {size}


def test_what_torch_compiles_goes_to_one_worker_first_whatever_it_costs() -> None:
    """Each process would compile it anew."""
    planned = [{**one, "source": one["kernel"]} for one in items(40)]
    for one in planned:
        if one["kernel"] in ("sum1", "sum2"):
            one |= {"compiles": True, "source": "two contracts of one function"}
    first, *rest = units(planned, 16)
    assert {planned[place]["kernel"] for place in first} == {"sum1", "sum2"} and len(first) == 80
    assert sorted([*first, *(place for unit in rest for place in unit)]) == list(range(len(planned)))
    assert len(units(planned, 1)) == 40, "one worker has no other"


def test_one_worker_is_always_alone_and_shares_all_it_can() -> None:
    assert len(units(items(1), 1)) == 1


def test_nothing_to_run_has_no_units() -> None:
    assert units([], 4) == []


class Node:
    """A worker that remembers what it was told."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.shutting_down = False
        self.told: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.told += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def begun(found: list[list[int]], *nodes: Node) -> Schedule:
    names = [f"i{n}" for n in range(sum(map(len, found)))]
    schedule = Schedule(len(nodes), lambda: found)
    for node in nodes:
        assert not schedule.collection_is_completed
        schedule.add_node(node)
        schedule.add_node_collection(node, names)
    schedule.schedule()
    return schedule


def run(schedule: Schedule, node: Node, done: list[int]) -> None:
    """Let a worker do what it has been told, as in pytest-xdist: its last item waits for the next, or for the end."""
    while (left := [i for i in node.told if i not in done])[not node.shutting_down :]:
        done.append(left[0])
        schedule.mark_test_complete(node, left[0])


def test_workers_get_units_in_order_and_only_when_they_need_them() -> None:
    a, b = Node("a"), Node("b")
    schedule = begun([[0, 1, 2], [3, 4], [5], [6], [7]], a, b)
    assert (a.told, b.told) == ([0, 1], [3, 4]), "no more than the item at hand and the next, so that -x stops all soon"
    assert schedule.has_pending and not schedule.tests_finished
    schedule.mark_test_complete(b, 3)
    assert b.told == [3, 4, 5], "it needs to know the next item before it runs the last of a unit"
    schedule.mark_test_complete(a, 0)
    assert a.told == [0, 1, 2]
    done = [3, 0]
    run(schedule, b, done)
    run(schedule, a, done)
    assert sorted(done) == list(range(8))
    assert a.shutting_down and b.shutting_down and schedule.tests_finished


def test_the_item_that_a_worker_died_in_does_not_run_again_and_the_rest_does() -> None:
    a, b = Node("a"), Node("b")
    schedule = begun([[0, 1, 2], [3, 4]], a, b)
    schedule.mark_test_complete(a, 0)
    assert schedule.remove_node(a) == "i1"
    done = [0]
    run(schedule, b, done)
    replacement = Node("c")
    schedule.add_node(replacement)
    schedule.add_node_collection(replacement, [f"i{n}" for n in range(5)])
    schedule.schedule()
    run(schedule, replacement, done)
    assert sorted(done) == [0, 2, 3, 4]
    assert schedule.tests_finished


def test_the_last_item_of_a_run_may_be_the_one_that_ends_a_worker() -> None:
    a = Node("a")
    schedule = begun([[0]], a)
    assert a.shutting_down
    assert schedule.remove_node(a) == "i0"
    replacement = Node("b")
    schedule.add_node(replacement)
    schedule.add_node_collection(replacement, ["i0"])
    schedule.schedule()
    assert replacement.told == [] and replacement.shutting_down and schedule.tests_finished


def test_a_worker_that_ended_with_nothing_to_do_took_nothing_with_it() -> None:
    a = Node("a")
    schedule = begun([[0]], a)
    schedule.mark_test_complete(a, 0)
    assert schedule.remove_node(a) is None


def test_nothing_selected_ends_at_once() -> None:
    a = Node("a")
    assert begun([], a).tests_finished and a.shutting_down


def test_workers_that_collect_other_items_are_refused() -> None:
    a, b = Node("a"), Node("b")
    schedule = begun([[0]], a)
    schedule.add_node(b)
    with pytest.raises(RuntimeError, match="worker b has collected other items"):
        schedule.add_node_collection(b, ["j0"])


def test_a_queue_gives_every_item_once_whoever_comes_and_goes() -> None:
    queue = UnitQueue([[0, 1, 2], [3, 4]])
    assert [queue.next("a"), queue.next("b"), queue.next("a")] == [0, 3, 1]
    queue.leave("a", [1])
    assert [queue.next("b"), queue.last_of_another()] == [4, None]
    assert [queue.next("c"), queue.last_of_another(), queue.next("c")] == [1, 2, None]
    assert not queue
