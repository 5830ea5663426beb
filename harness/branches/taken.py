"""The branches that calls of a kernel take: of Python by coverage.py, of interpreted programs by what these decide.

    with watching("norm", Path("norms.py")) as taken:
        with traced_call():
            call(…)
    taken.decisions()

A thread has one tracer. Where it has another one already, as under `coverage run` or in a debugger, nothing is known.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

from lastbit.branches.branch_sites import decisions_of_arcs
from lastbit.branches.own_files import INSTALLED, NOT_OWN, is_own, root_of
from lastbit.interpret import decisions
from lastbit.interpret.decisions import Decision
from lastbit.interpret.watching import Setting
from lastbit.trees import folders_of_package

if TYPE_CHECKING:
    from coverage import Coverage

_COMPILES = "torch._dynamo.convert_frame"
_QUIET = ("no-data-collected", "trace-changed", "module-not-measured", "no-ctracer", "no-sysmon-context")


class TakenBranches:
    """The branches that calls of one kernel took in its own files.

    Own are the files of the repository that it is in, or else those of its folder, and those of the installed packages
    that are named; not other installed ones, nor lastbit itself.

    Attributes:
        known: no other tracer was in the way of a call.
    """

    def __init__(self, kernel: str, file: Path, packages: tuple[str, ...] = (), *, compiles: bool = False) -> None:
        self.known = True
        self._kernel, self._root = kernel, root_of(file)
        self._packages = tuple(folder for package in packages for folder in folders_of_package(package))
        self._in_programs: set[Decision] = set()
        self._named = False
        if compiles:
            import_module(_COMPILES)  # as the first call would, which is traced

    def add(self, decided: Iterable[Decision]) -> None:
        """Add what interpreted programs decided."""
        self._in_programs.update(one for one in decided if is_own(one[0], self._root, self._packages))

    def decisions(self) -> set[Decision]:
        """Return all decisions of calls of this kernel in this process."""
        data = _tracer(self._root, self._packages).get_data()
        data.set_query_context(self._kernel)
        arcs = (
            (file, data.arcs(file) or ()) for file in data.measured_files() if is_own(file, self._root, self._packages)
        )
        return self._in_programs.union(*(decisions_of_arcs(file, pairs) for file, pairs in arcs))

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Trace Python within, but not the programs that it launches: these tell themselves what they decide."""
        monitoring = getattr(sys, "monitoring", None)
        # Somebody else traces this thread, or measures the coverage of this process.
        if sys.gettrace() is not None or bool(monitoring and monitoring.get_tool(monitoring.COVERAGE_ID)):
            self.known = False
            yield
            return
        tracer = _tracer(self._root, self._packages)
        tracer.start()
        try:
            if not self._named:
                tracer.switch_context(self._kernel)
                self._named = True
            with decisions.hiding_from(sys.gettrace()), _compiling_unseen():
                yield
        finally:
            tracer.stop()


_taken: Setting[TakenBranches | None] = Setting(None)


@contextmanager
def watching(
    kernel: str, file: Path, packages: tuple[str, ...] = (), *, compiles: bool = False
) -> Iterator[TakenBranches]:
    """Watch the calls of a kernel within, of which `file` has the source, in its files and those of `packages`.

    It `compiles` if torch does so in its first call.
    """
    taken = TakenBranches(kernel, file, packages, compiles=compiles)
    with _taken.within(taken), decisions.decisions_watched(taken.add):
        yield taken


def traced_call() -> AbstractContextManager[object]:
    """Trace a call of the kernel that is watched; nothing if none is."""
    return nullcontext() if _taken.now is None else _taken.now.tracing()


@contextmanager
def _compiling_unseen() -> Iterator[None]:
    """Hide the work of torch.compile from the tracer, which would take half as long again."""
    if (frames := getattr(sys.modules.get(_COMPILES), "ConvertFrame", None)) is None:
        yield
        return
    with patch.object(frames, "__call__", decisions.unseen(frames.__call__)):
        yield


@functools.cache
def _tracer(root: Path, packages: tuple[Path, ...]) -> Coverage:
    """Return what traces the files below folders; it holds what it has seen in memory."""
    from coverage import Coverage

    included = [f"{root}/*", *(f"{place}/*" if place.is_dir() else str(place) for place in packages)]
    omitted = [f"{place}/*" for place in NOT_OWN]
    omitted += [] if packages else [f"*/{name}/*" for name in INSTALLED]  # which would omit these, too
    own = Coverage(data_file=None, config_file=False, branch=True, include=included, omit=omitted, messages=False)
    own.set_option("run:core", "ctrace")  # which branches and contexts need
    own.set_option("run:disable_warnings", list(_QUIET))
    return own
