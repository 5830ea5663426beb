"""The branches that no case of a run took, from what its workers noted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from lastbit.branches.branch_sites import NEVER, Site, sites_of
from lastbit.interpret.decisions import ALL, NONE, SOME, Decision
from lastbit.run import EXTENT, Unreached


def merged(told: Iterable[tuple[str, Iterable[Sequence[Any]] | None]]) -> dict[str, set[Decision]] | None:
    """Return kernel → what its calls decided in all workers, as each told it; None if that of some is not known."""
    found: dict[str, set[Decision]] = {}
    for kernel, decided in told:
        if decided is None:
            return None
        found.setdefault(kernel, set()).update((file, line, column, way) for file, line, column, way in decided)
    return found or None


def unreached(
    taken: Mapping[str, Collection[Decision]] | None, cases: Callable[[Collection[str]], int], *, decides: bool = False
) -> tuple[Unreached, ...] | None:
    """List the branches that no kernel took, in the order of files and lines; `cases` counts those of some kernels.

    With `decides`, kernels are inconclusive for those that handle inputs.

    Only sites to which some call came are looked at: of what lies behind a branch that was not taken, that branch alone
    is told. What one kernel took, its file's other kernels need not.
    """
    if taken is None:
        return None
    ways: dict[tuple[str, int, int], dict[int, dict[str, None]]] = {}
    for kernel, decided in taken.items():
        for file, line, column, way in decided:
            ways.setdefault((file, line, column), {}).setdefault(way, {})[kernel] = None
    files = sorted({file for file, _, _ in ways})
    found = []
    for file in files:
        for site in sites_of(file):
            seen = ways.get((file, site.line, site.column), {})
            kernels = tuple(dict.fromkeys(kernel for some in seen.values() for kernel in some))
            for way, never, besides in _not_taken(site, seen):
                why, wanted = besides or site.why.get(way, ""), site.wanted.get(way, "")
                where = file, site.shown, site.function, site.text, never
                found.append(Unreached(*where, kernels, cases(kernels), why, wanted, decides and not why))
    return tuple(found)


def _not_taken(site: Site, seen: Collection[int]) -> Iterator[tuple[int, str, str]]:
    """Yield each way that nobody went, what is said of it, and why where it is no branch; nothing if nobody came there.

    Of a mask only the first that applies is told.
    """
    masked = site.kind == "mask"
    seen = {way for way in seen if (way >= NONE) is masked}
    if not seen:
        return
    if masked:
        said = {"true": seen == {NONE}, "false": seen == {ALL}, "partly true": SOME not in seen}
        never = next((never for never, missing in said.items() if missing), "")
        yield from [(int(never != "false"), never, EXTENT)] * bool(never)
        return
    missing = {1: max(seen) < 1, 0: 0 not in seen}
    yield from ((way, never, "") for way, never in zip((1, 0), NEVER[site.kind], strict=False) if missing[way])
    if site.kind == "for" and site.program and max(seen) == 1:
        yield 1, "ran twice", EXTENT
