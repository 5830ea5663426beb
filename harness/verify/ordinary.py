"""Ordinary cases, in which the stages of kernels that declare none are looked for: of such a kernel, one item does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from lastbit.case import Case, parse_case
from lastbit.dtypes import BY_NAME
from lastbit.kernel import REVISION_MARK
from lastbit.result import CaseResult, Verdict

if TYPE_CHECKING:
    from lastbit.verify.plan import Item

LEAST, MOST = 64, 1 << 16
"""Elements of the first input of a case on which stages are looked for: enough to say something, and soon traced."""

ORDINARY = frozenset({"normal", "uniform", "gates", "fan_in", "scale_random"})
"""Regimes whose values are neither extreme nor made for exact sums."""


def is_ordinary(case: Case) -> bool:
    """Check whether a case has contiguous tensors and ordinary numbers, neither few nor very many."""
    first, *_ = case.tensors
    contiguous = all(t.strides is None and not t.offset and not t.device for t in case.tensors)
    numbers = [t for t in case.tensors if BY_NAME[t.dtype].floating]
    return (
        contiguous and first in numbers and LEAST <= first.numel <= MOST and all(t.regime in ORDINARY for t in numbers)
    )


def plainest(results: Iterable[CaseResult]) -> list[Case]:
    """Choose the cases in which stages are looked for: of the ordinary ones that a kernel passed, one for each dtype of
    the first input of its op, with the fewest parameters and then the fewest elements.

    There are none if the kernel shows a stage other than its results.
    """
    found: dict[str, list[tuple[int, int, str, Case]]] = {}
    for result in results:
        if any(not stage.result for stage in result.stages):
            return []
        if result.counted and result.verdict is Verdict.PASSED and is_ordinary(case := parse_case(result.case)):
            first = case.tensors[0]
            found.setdefault(first.dtype, []).append((len(case.params), first.numel, result.case, case))
    return [min(entries, key=lambda entry: entry[:3])[3] for entries in found.values()]


def showing(items: Iterable[Item]) -> Iterator[Item]:
    """Yield the items; of each kernel on the CPU that declares no stages, one of them `shows` the kernel's stages.

    It is the first whose examples have ordinary cases of the most dtypes, or else the first that draws such cases.
    """
    items = list(items)
    best: dict[str, tuple[tuple[int, bool, bool], Item]] = {}
    known: dict[int, list[str]] = {}  # kernels have groups in common
    for item in items:
        kernel, group = item.subject.kernel, item.group
        if item.subject.device.type == "cpu" and not kernel.stages and REVISION_MARK not in kernel.name:
            if id(group) not in known:
                examples = dict.fromkeys(group.examples)
                known[id(group)] = [case.tensors[0].dtype if is_ordinary(case) else "" for case in examples]
            dtypes = {*item.own(known[id(group)])} - {""}
            draws = any(option in ORDINARY for options in group.choices.values() for option in options)
            worth = len(dtypes), draws, group.strategy is not None
            if worth > best.get(kernel.name, ((0, False, False), item))[0]:
                best[kernel.name] = worth, item
    chosen = {id(item) for _, item in best.values()}
    yield from (replace(item, shows=True) if id(item) in chosen else item for item in items)
