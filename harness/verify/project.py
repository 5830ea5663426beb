"""Discovery: an op is references/X.py, cases/X.py and kernels of any name; folders are searched, nothing is listed.

Files are loaded by path, so that another project's folders work like the ones that lastbit brings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from lastbit.case import Group
from lastbit.config import Config
from lastbit.errors import KernelError, LastbitError, OpError, UsageError, unknown
from lastbit.files import BUILT_IN, KERNELS
from lastbit.inputs.choices import check_choices
from lastbit.kernel import REVISION_MARK, Kernel, load_file, load_kernels
from lastbit.of_file import Role, kernel_of_file
from lastbit.ops import Op
from lastbit.run import NotRun
from lastbit.siblings import siblings
from lastbit.verify.case_files import read_cases
from lastbit.verify.declarations import check_kernel, check_op

Load = Callable[[Path], tuple[Kernel, ...]]
"""Finds the kernels of a file or folder; raises as `load_kernels` does."""

T = TypeVar("T")


class _Loaded(Mapping[str, T]):
    """The definitions in the Python files of folders of one name, by the stems of these; the last folder's go first.

    A file is loaded when it is first asked for: a case names one op, and others take as long as all the rest.
    """

    def __init__(self, load: Callable[[Path], T], folders: Iterable[Path], name: str) -> None:
        self._load, self._loaded = load, dict[str, T]()
        self._files = {path.stem: path for folder in folders for path in _modules(folder / name)}

    def __getitem__(self, stem: str) -> T:
        if stem not in self._loaded:
            self._loaded[stem] = self._load(self._files[stem])
        return self._loaded[stem]

    def __contains__(self, stem: object) -> bool:
        return stem in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


@dataclass(frozen=True)
class Project:
    """The ops, cases and kernels of a run.

    Attributes:
        ops: name → op.
        cases: op name → the module that makes its groups of cases.
        folders: the folders that were searched.
        kernel_folders: the files and folders that kernels are loaded from.
        revisions: label → folder of another revision's kernels, each of which is called `KERNEL@LABEL`.
        revision: label of the revision that these are of, which stands behind the names of their kernels.
        load: how the kernels of a folder are found.
    """

    ops: Mapping[str, Op]
    cases: Mapping[str, ModuleType]
    folders: tuple[Path, ...]
    kernel_folders: tuple[Path, ...]
    revisions: Mapping[str, Path]
    revision: str = ""
    load: Load = load_kernels

    def kernels(self, refused: dict[str, str] | None = None) -> tuple[Kernel, ...]:
        """Return every kernel of the kernel folders, those of other revisions left out.

        With `refused`, why a kernel cannot be called is noted there by its name, and raises nothing.

        Raises:
            UsageError: a kernel declares what its op does not have, or two kernels share a name.
        """
        found = [k for folder in self.kernel_folders for k in self._load(folder, self.revision, refused)]
        names = [k.name for k in found]
        if twice := sorted({n for n in names if names.count(n) > 1}):
            raise UsageError(f"kernel names must be unique; found twice: {', '.join(twice)}")
        return tuple(found)

    def kernels_of_revisions(self) -> tuple[tuple[Kernel, ...], tuple[NotRun, ...]]:
        """Load the kernels of other revisions; also return a note for each revision that cannot be loaded."""
        found: list[Kernel] = []
        lacking: list[NotRun] = []
        for label, folder in self.revisions.items():
            try:
                found += self._load(folder, label)
            except LastbitError as error:
                lacking.append(NotRun(f"the kernels of {label}", str(error).replace(f"{folder.parent}/", "")))
        return tuple(found), tuple(lacking)

    def _load(self, folder: Path, label: str, refused: dict[str, str] | None = None) -> tuple[Kernel, ...]:
        """Load the kernels of a folder, named after their revision; note in `refused` why one cannot be called."""
        named = []
        for kernel in self.load(folder):
            op, name = self.op(kernel.op), f"{kernel.name}{REVISION_MARK}{label}" if label else kernel.name
            try:
                check_kernel(kernel, op)
            except UsageError as error:
                if refused is None:
                    raise
                refused[name] = str(error)
            named.append(replace(kernel, name=name) if label else kernel)
        return tuple(named)

    def op(self, name: str) -> Op:
        if name not in self.ops:
            raise unknown("op", name, self.ops)
        return self.ops[name]

    def groups(self, op: str, accepts: frozenset[str], *, small: bool) -> list[Group]:
        """Make the groups of cases of `op` for a kernel with the given parameters, regressions first.

        Raises:
            UsageError: the op's file of cases raises, or its groups choose from names that the op does not have.
        """
        made: list[Group] = []
        files = [folder / "cases" / "regressions" / f"{op}.txt" for folder in self.folders]
        regressions = [case for file in files if file.is_file() for case in read_cases(file)]
        if fitting := tuple(case for case in regressions if case.names <= accepts):
            made.append(Group("regressions", examples=fitting))
        if op not in self.cases:
            return made
        try:
            own: list[Group] = list(self.cases[op].groups(accepts, small=small))
        except Exception as error:
            raise UsageError(f"groups() in cases/{op}.py raised {type(error).__name__}: {error}") from error
        for group in own:
            check_choices(group, self.op(op).inputs, self.op(op).params)
        return made + own


def open_project(config: Config) -> Project:
    """Open the project that `config` describes: lastbit's own folders, then those of `config.projects`."""
    config.check_places()
    projects = tuple(map(Path, config.projects))
    folders = (BUILT_IN, *projects)
    ops, cases = _Loaded(_op_of, folders, "references"), _Loaded(_cases_of, folders, "cases")
    for folder in projects:  # whose mistakes are told at once; tests load all of lastbit's own
        with siblings(folder / "references"):
            for path in _modules(folder / "references"):
                ops[path.stem]
        for path in [*_modules(folder / "cases"), *(folder / "cases" / "regressions").glob("*.txt")]:
            if path.stem not in ops:
                raise unknown(f"op of the cases in {path}:", path.stem, ops)
            if path.suffix == ".py" and not callable(getattr(cases[path.stem], "groups", None)):
                raise UsageError(f"{path} must define groups(accepts, *, small), which yields groups of cases")
    revisions = {label: Path(folder) for label, folder in config.revisions.items()}

    def load_or_plain(path: Path) -> tuple[Kernel, ...]:
        """Load kernels; from a file that declares none, make its function a kernel of the only op that is named."""
        try:
            return load_kernels(path)
        except UsageError as error:
            if not path.is_file() or "declares no kernel" not in str(error):
                raise
            if len(config.ops) != 1:
                raise UsageError(f"{error}, or name the op of a function without it: --op OP") from None
        function = config.kernels[0] if len(config.kernels) == 1 else ""
        return (kernel_of_file(path, Role(config.ops[0], function=function)),)

    load = load_or_plain if config.plain else load_kernels
    return Project(ops, cases, folders, kernel_folders(config), revisions, config.revision, load)


def kernel_folders(config: Config) -> tuple[Path, ...]:
    """Return the folders that kernels are loaded from: those that were named, or lastbit's and those of projects."""
    own = (folder for path in config.projects if (folder := Path(path, "kernels")).is_dir())
    return tuple(map(Path, config.kernel_folders)) or (KERNELS, *own)


def _modules(folder: Path) -> Iterable[Path]:
    return sorted(p for p in folder.glob("*.py") if not p.stem.startswith("_")) if folder.is_dir() else ()


def _own_once(load: Callable[[Path], T]) -> Callable[[Path], T]:
    """Decorate what loads a file: those of lastbit are loaded once in a process, as any package is imported."""
    known = cache(load)
    return lambda path: known(path) if path.is_relative_to(BUILT_IN) else load(path)


_cases_of = _own_once(load_file)


@_own_once
def _op_of(path: Path) -> Op:
    own = (
        ""
        if path.parent == BUILT_IN / "references"
        else "; --project is for a folder with references/ of ops of your own"
    )
    try:
        found = getattr(load_file(path), path.stem, None)
    except KernelError as error:
        raise KernelError(f"{error}{own}") from error
    if not isinstance(found, Op):
        must = f"{path} must define the op {path.stem!r}: a function of that name decorated with @op(...)"
        raise LastbitError(f"{must}{own}")
    if found.name != path.stem:
        raise OpError(f"{found.where} must be called {path.stem!r}, as its file {path} is")
    check_op(found)
    return found
