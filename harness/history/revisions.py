"""Commits of a git repository between two revisions, each checked out into a worktree of its own while it is measured.

`git bisect` keeps its state per worktree, so it works in one that has no files, and the user's checkout, index and
bisect are left alone. A folder per commit, because Python would take the bytecode of one file for that of another of
the same size and second.
"""

from __future__ import annotations

import functools
import os
import posixpath
import shlex
import subprocess
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lastbit.errors import LastbitError, UsageError
from lastbit.history.bisection import RevisionPlace
from lastbit.reports.bisection import Mark, Point, Recipe


@dataclass(frozen=True)
class Repository:
    """A git repository; commands run in `folder`."""

    folder: Path

    def git(self, *arguments: str, codes: Collection[int] = (0,)) -> str:
        """Run a git command, and return its output.

        Raises:
            LastbitError: git is not installed, or its exit status is not one of `codes`.
        """
        command = ["git", "-C", str(self.folder), "-c", "core.hooksPath=/dev/null", *arguments]
        try:
            done = subprocess.run(
                command, env=_environment() | _SETTINGS, capture_output=True, text=True, errors="replace"
            )
        except FileNotFoundError as error:
            raise LastbitError("git is not installed, or not on the PATH") from error
        if done.returncode not in codes:
            raise LastbitError(f"git {' '.join(arguments)} failed in {self.folder}: {done.stderr.strip()}")
        return done.stdout.strip("\n")

    def known(self, name: str) -> str:
        """Return the hash of the object of that name; empty if there is none."""
        return self.git("rev-parse", "--verify", "--quiet", name, codes=(0, 1, 128))


@functools.cache
def _local() -> frozenset[str]:
    """Return the variables by which a hook or an alias of git points its children to another repository or index."""
    return frozenset(subprocess.check_output(["git", "rev-parse", "--local-env-vars"], text=True).split())


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _local()}


_SETTINGS = {"GIT_LITERAL_PATHSPECS": "1", "GIT_TERMINAL_PROMPT": "0"}


@contextmanager
def open_revisions(folder: Path, good: str, bad: str, *, kernels: str, build: str = "") -> Iterator[Revisions]:
    """Yield the commits from `good` to `bad` of the repository of `folder`; their worktrees are gone afterwards.

    Args:
        kernels: the folder or file of kernels, from the root of the repository, or as the working directory has it.
        build: a shell command that is run in the root of each worktree before it is measured.

    Raises:
        UsageError: the folder is in no repository, an end is unknown or has no such kernels, `good` is no
            ancestor of `bad`, or nothing lies between them.
    """
    if not folder.is_dir():
        raise UsageError(f"--repository {str(folder)!r} does not exist or is not a folder")
    repository = Repository(folder)
    try:
        repository.git("rev-parse", "--git-dir")
    except LastbitError as error:
        raise UsageError(f"{error}. Name a git repository with --repository") from error
    named = posixpath.normpath(kernels)  # from the root of the repository, or else from the working directory or `/`
    root = repository.git("rev-parse", "--show-toplevel", codes=(0, 128))
    here = os.path.relpath(Path(kernels).resolve(), Path(root).resolve())
    path = next((folder for folder in (named, here) if _has(repository, bad, folder)), named)
    ends = [_end(repository, option, name, path) for option, name in (("--good", good), ("--bad", bad))]
    if repository.git("merge-base", *ends, codes=(0, 1)) != ends[0]:
        raise UsageError(
            f"--good {good} is no ancestor of --bad {bad}, so that no commit between them can be the first"
        )
    first, last = ends
    with tempfile.TemporaryDirectory(prefix="lastbit-bisect-") as temporary:
        control = Path(temporary, "log")
        with _worktree(repository, control, last, "--no-checkout"):
            git = Repository(control).git
            if not git("rev-list", "-1", last, f"^{first}"):
                raise UsageError("no commit lies between --good and --bad")
            git("bisect", "start", "--no-checkout", last, first)
            yield Revisions(repository, Repository(control), Path(temporary), first, last, path, build)


def _end(repository: Repository, option: str, name: str, kernels: str) -> str:
    commit = repository.known(f"{name}^{{commit}}")
    if not commit:
        raise UsageError(f"{option} {name} is no commit that git knows in {str(repository.folder)!r}")
    if not _has(repository, commit, kernels):
        raise UsageError(
            f"{option} {name} has no folder or file {kernels!r}; name it as in PATH::KERNEL, from the repository's root"
        )
    return commit


def _has(repository: Repository, commit: str, kernels: str) -> bool:
    """Return whether a commit has a folder of that name, or a Python file."""
    tree = "" if kernels == "." else kernels  # the root has no name in a commit
    found = "" if kernels.startswith(("/", "..")) else repository.known(f"{commit}:{tree}")
    kinds = ("tree", "blob") if kernels.endswith(".py") else ("tree",)
    return bool(found) and repository.git("cat-file", "-t", found) in kinds


@contextmanager
def _worktree(repository: Repository, folder: Path, commit: str, *options: str) -> Iterator[Path]:
    try:
        repository.git("worktree", "add", "--detach", *options, str(folder), commit)
        yield folder
    finally:
        if folder.exists():
            repository.git("worktree", "remove", "--force", str(folder), codes=(0, 128))


@dataclass(frozen=True)
class Revisions:
    """The `Space` of commits; see `open_revisions`.

    Attributes:
        repository: the user's.
        control: the worktree in which `git bisect` keeps its state.
        temporary: where worktrees are made.
        good, bad: hashes of the ends.
        kernels: the folder or file of kernels, relative to the root.
        build: the command that builds a worktree; empty for none.
    """

    repository: Repository
    control: Repository
    temporary: Path
    good: str
    bad: str
    kernels: str
    build: str

    what = "commit"

    def candidates(self) -> list[str]:
        """Return hashes, oldest first."""
        return self._left("--topo-order", "--reverse")

    def best(self, untried: Collection[str]) -> str:
        """Return the commit that divides the candidates best; `git bisect skip` would walk away from it at random."""
        ranked = (line.partition(" ")[0] for line in self._left("--bisect-all"))
        return next(commit for commit in ranked if commit in untried)

    def _left(self, *options: str) -> list[str]:
        ends = ("refs/bisect/bad", "--not", "--glob=refs/bisect/good-*")
        return self.control.git("rev-list", *options, *ends).splitlines()

    def mark(self, name: str, mark: Mark) -> None:
        """Tell `git bisect`, whose status is 2 where only skipped commits are left.

        It expects the commit that it chose itself; of any other, it would ask for merge bases to be tested once more.
        """
        self.control.git("update-ref", "BISECT_EXPECTED_REV", name)
        self.control.git("bisect", mark, name, codes=(0, 2))

    def point(self, name: str) -> Point:
        shown = self.control.git("log", "-1", "--no-show-signature", "--format=%h%n%as%n%s", name)
        short, date, title = shown.split("\n", 2)
        return Point(name, short, title, date)

    def key(self, name: str) -> str:
        """Return the hash of all files of the commit: kernels may import any of them."""
        return self.control.known(f"{name}^{{tree}}") or name

    @contextmanager
    def place(self, name: str) -> Iterator[RevisionPlace]:
        """Yield a worktree of the commit, built if that was asked for."""
        with _worktree(self.control, self.temporary / name, name) as root:
            _build(self.build, root)
            yield RevisionPlace(str(root), kernels=str(root / self.kernels))

    def change(self, name: str) -> str:
        """Return the difference that a commit made to its first parent."""
        return self.control.git("diff-tree", "-p", "-M", f"{name}^", name)

    def log(self) -> str:
        """Return the log that `git bisect replay` reads."""
        return self.control.git("bisect", "log")

    def recipe(self, name: str) -> Recipe:
        """Return the commands that make a worktree among the temporary files."""
        short = self.point(name).short
        folder = f"{tempfile.gettempdir()}/lastbit-{short}"
        where = "" if self.repository.folder == Path() else f" -C {shlex.quote(str(self.repository.folder))}"
        setup = f"git{where} worktree add --detach {folder} {short}"
        return Recipe(setup, options=f"--kernels {shlex.quote(posixpath.normpath(f'{folder}/{self.kernels}'))}")


def _build(command: str, root: Path) -> None:
    """Run the command that builds a worktree, if there is one."""
    if not command:
        return
    done = subprocess.run(
        command, shell=True, cwd=root, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        words = done.stdout.strip().splitlines()[-1:] or ["it printed nothing"]
        raise LastbitError(f"--build {command!r} ended with status {done.returncode}: {words[0]}")


@contextmanager
def kernels_at(revision: str, folders: Sequence[Path], *, asked: str = "", build: str = "") -> Iterator[RevisionPlace]:
    """Yield the folder of kernels at `revision` of its repository, in a worktree that is gone afterwards.

    There may be no such folder at that revision. `asked` is how the user asked for it, if not by --base; `build` is
    run in the root of the worktree.

    Raises:
        UsageError: there are several folders, the folder is in no repository, or the revision is unknown.
        LastbitError: the build fails.
    """
    asked = asked or f"--base {revision}"
    if len(folders) != 1:
        names = ", ".join(map(str, folders))
        raise UsageError(f"{asked} takes one folder of kernels, not {names}; name one, as in lastbit verify my_kernels")
    kernels = folders[0].resolve()
    repository = Repository(kernels if kernels.is_dir() else kernels.parent)
    try:
        root = Path(repository.git("rev-parse", "--show-toplevel"))
    except LastbitError as error:
        raise UsageError(f"{asked} needs kernels that are in a git repository: {error}") from error
    if not (commit := repository.known(f"{revision}^{{commit}}")):
        raise UsageError(f"{asked} is no commit that git knows in {str(root)!r}")
    with (
        tempfile.TemporaryDirectory(prefix="lastbit-base-") as temporary,
        _worktree(repository, Path(temporary, "base"), commit) as top,
    ):
        _build(build, top)
        yield RevisionPlace(str(top), str(top / kernels.relative_to(root.resolve())))
