"""Kernels in the judge, as their files declare them, without a line of these files having run there."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from lastbit.errors import KernelError, LastbitError
from lastbit.isolation import answers
from lastbit.isolation.answers import KernelProcessEnded, Raised, Unreadable
from lastbit.isolation.confinement import Confinement, cache_of
from lastbit.isolation.isolated import ProcessPair
from lastbit.isolation.limits import Limits
from lastbit.isolation.process import ForkServer, KernelProcess, Start
from lastbit.kernel import Kernel
from lastbit.of_file import Role
from lastbit.takes import of_text

# Arbitrary: a package with compiled extensions may take half a minute; what hangs is found that much later.
_LOADING = 120.0  # seconds that the files of a folder may take
# More than any tensor has elements; what a foreign process answers must have some bound.
_MOST_TERMS = 1 << 48
_KINDS = {kind.name: kind for kind in inspect._ParameterKind}


@dataclass(frozen=True)
class Elsewhere:
    """Stands in for the function of a kernel whose file is loaded in kernel processes alone.

    Attributes:
        path: the file.
        name: of the kernel, as the file declares it.
        parameters: those of the function, or why nobody knows them.
    """

    path: Path
    name: str
    parameters: tuple[inspect.Parameter, ...] | str

    @property
    def __signature__(self) -> inspect.Signature:
        if isinstance(self.parameters, str):
            raise ValueError(self.parameters)
        return inspect.Signature(self.parameters)

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise LastbitError(f"kernel {self.name!r} runs in processes of its own; it cannot be called in this one")


@dataclass(eq=False)
class Kernels:
    """Kernel processes on one type of device, and the kernels that they load.

    Attributes:
        server: forks them.
        device_type: where they run.
        limits: how much each may use.
        readable: folders that they can read beside those of their kernels.
        caches: a folder for what they compile, each file apart, to find it again; None for nothing to be found.
        printed: takes what a process printed, and whose it was.
        confinement: what the process that loaded a folder last was kept from.
        imported: name → file of the modules that the files of folders have imported.
    """

    server: ForkServer
    device_type: str = "cpu"
    limits: Limits = field(default_factory=Limits)
    readable: tuple[Path, ...] = ()
    caches: Path | None = None
    printed: Callable[[str, str], None] = lambda whose, text: None
    confinement: Confinement = field(default_factory=Confinement)
    imported: dict[str, Path] = field(default_factory=dict)
    _asked: dict[Path, KernelProcess] = field(default_factory=dict)

    def declared(self, path: Path) -> tuple[Kernel, ...]:
        """Return the kernels of a file or folder, as `load_kernels` finds them.

        Raises:
            LastbitError: what `load_kernels` raises, or the files ended the process that loaded them.
        """
        path = path.resolve()  # kernel processes have another working directory
        with self._process(path, bare=False) as process:
            self.confinement = process.confinement
            answer = _loaded(process, path)
            files = {file.name: file for file in (path.glob("*.py") if path.is_dir() else [path])}
            self.imported |= {
                name: Path(file) for name, file in answers.named(answer.get("imported"), answers.text_of).items()
            }
            return tuple(self._kernel(fields, files) for fields in answers.many(answer.get("kernels"), answers.mapping))

    @contextmanager
    def pair(self, kernel: Kernel, timeout: float) -> Iterator[ProcessPair]:
        """Yield a pair of processes for an item of a kernel, which have loaded it.

        Raises:
            LastbitError: they cannot load it now.
        """
        call = kernel.call
        assert isinstance(call, Elsewhere)
        with self._process(call.path, bare=False) as guarded, self._process(call.path, bare=True) as bare:
            for process in (guarded, bare):
                _loaded(process, call.path)
            yield ProcessPair(guarded, bare, call.name, timeout)

    @contextmanager
    def of_file(self, path: Path, role: Role, timeout: float) -> Iterator[tuple[Kernel, ProcessPair]]:
        """Yield the kernel of a file in a role, as the file declares it, and its processes for an item.

        Raises:
            LastbitError: the file ends the process that loads it, or raises, or no kernel in it has the role.
        """
        with self._process(path, bare=False) as guarded, self._process(path, bare=True) as bare:
            answer = _loaded(guarded, path, timeout, role=asdict(role))
            [fields] = answers.many(answer.get("kernels"), answers.mapping)[:1] or [{}]
            kernel = self._kernel(fields, {path.name: path}, timeout)
            plain = answers.name_of(answer.get("plain"))
            _loaded(bare, path, timeout, role=asdict(role), kernel=kernel.name, plain=plain)
            self._asked[path] = guarded
            try:
                yield kernel, ProcessPair(guarded, bare, kernel.name, timeout)
            finally:
                del self._asked[path]

    def begin(self) -> None:
        """Start the server and wait until it is up, so that the first kernel does not wait."""
        self.server.start(Start(device_type=self.device_type)).end()

    def run(
        self, path: Path, function: Callable[..., object], arguments: Mapping[str, Any], timeout: float
    ) -> Mapping[str, Any]:
        """Call a function of a module of lastbit in a process for a file; return its answer, the data of a stranger.

        Raises:
            LastbitError: it ended the process, or raised, or took longer than so many seconds.
        """
        message = {"module": function.__module__, "function": function.__name__, "arguments": dict(arguments)}
        with self._process(path, bare=False) as process:
            answer = process.ask({"do": "run", **message}, timeout)
            return next(iter(answers.many(answer.get("returned"), answers.mapping)), {})

    def asked(self, file: Path) -> KernelProcess:
        """Return a process that has loaded a file and answers questions about its kernels, until the server ends."""
        process = self._asked.get(file)
        if process is None or process.over:
            process = self._asked[file] = self.server.start(self._start(file, bare=False))
            _loaded(process, file)
        return process

    def _start(self, path: Path, *, bare: bool) -> Start:
        folder = path if path.is_dir() else path.parent
        cache = None if self.caches is None else cache_of(path, self.caches)
        return Start(bare, self.device_type, (folder.resolve(), *self.readable), self.limits, cache)

    @contextmanager
    def _process(self, path: Path, *, bare: bool) -> Iterator[KernelProcess]:
        process = self.server.start(self._start(path, bare=bare))
        try:
            yield process
        finally:
            process.end()
            if process.printed:
                self.printed(path.name, process.printed)

    def _kernel(self, fields: Mapping[str, Any], files: Mapping[str, Path], timeout: float = _LOADING) -> Kernel:
        """Return a kernel as its file declares it; `files` are those that it may come from."""
        file = files.get(answers.name_of(fields.get("file")))
        if file is None:
            raise Unreadable("the kernel process names a file that is not of the folder")
        name = answers.name_of(fields.get("name"))
        call = Elsewhere(file, name, _parameters(fields.get("parameters")))
        order = fields.get("order")
        return Kernel(
            name=name,
            op=answers.name_of(fields.get("op")),
            contract=answers.name_of(fields.get("contract")),
            call=call,
            stages=answers.many(fields.get("stages"), answers.name_of),
            mutates=answers.many(fields.get("mutates"), answers.name_of),
            devices=answers.many(fields.get("devices"), answers.name_of),
            depth=_Depth(self, call, timeout) if answers.flag(fields.get("depth")) else None,
            order=None if order is None else answers.integer(order, 1, _MOST_TERMS),
            placement=answers.name_of(fields.get("placement")),
            unordered=answers.many(fields.get("unordered"), answers.name_of),
            source=answers.text_of(fields.get("source")),
            held=answers.named(fields.get("held"), answers.name_of),
            invariant=answers.many(fields.get("invariant"), answers.name_of),
            arithmetic=answers.text_of(fields.get("arithmetic")),
            takes=of_text(answers.text_of(fields.get("takes")), f"kernel {name!r}"),
            file=str(file),
        )


@dataclass(eq=False)
class _Depth:
    """The height of the summation tree of a kernel, for which its file is asked.

    It is what the file says within what any sum can have: a height of at least that of a binary tree, of at most that
    of a sum from first to last.
    """

    kernels: Kernels
    call: Elsewhere
    timeout: float
    known: dict[int, int] = field(default_factory=dict)

    def __call__(self, terms: int) -> int:
        if terms not in self.known:
            message = {"do": "depth", "kernel": self.call.name, "terms": terms}
            answer = self.kernels.asked(self.call.path).ask(message, self.timeout)
            self.known[terms] = max(answers.integer(answer.get("depth"), 0, _MOST_TERMS), (terms - 1).bit_length())
        return self.known[terms]


def _loaded(process: KernelProcess, path: Path, timeout: float = _LOADING, **asked: Any) -> Mapping[str, Any]:
    try:
        return process.ask({"do": "load", "path": str(path), **asked}, timeout)
    except Raised as error:
        known = "UsageError" in error.kinds or "KernelError" in error.kinds
        raise KernelError(str(error) if known else f"{path} raised {error.kind} while it was loaded: {error}") from None
    except KernelProcessEnded as ended:
        raise KernelError(f"{path} cannot be loaded: {ended}") from None


def _parameters(given: object) -> tuple[inspect.Parameter, ...] | str:
    """Return the parameters of a function; those that it can do without have some default."""
    if isinstance(given, str):
        return answers.text_of(given)
    found = []
    for fields in answers.rows(given, 3):
        name, kind = answers.name_of(fields[0]), _KINDS.get(answers.name_of(fields[1]))
        required = answers.flag(fields[2])
        if kind is None or not name.isidentifier():
            raise Unreadable("the kernel process names a parameter that no function has")
        variadic = kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        default = inspect.Parameter.empty if required or variadic else ...
        found.append(inspect.Parameter(name, kind, default=default))
    return tuple(found)
