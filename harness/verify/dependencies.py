"""What the verdict on a kernel depends on, as names and hashes: two runs in which all of these agree judge it alike.

`Dependencies.of` has what is known when a plan is made: the kernel's file and all modules that it imports from outside
of installed packages, wherever it does so, its declaration and its cases; and around them lastbit's own text, the
project's, installed packages, processor, device, variables, settings. What the kernel's code has read besides, while it
was loaded or called, `Dependencies.read_by` knows afterwards.

What cannot be followed is said instead: then a verdict is not kept. Code that leaves neither imports nor an audit event
(https://peps.python.org/pep-0578) is native code that reads files itself, which nobody sees.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from importlib.machinery import PathFinder
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch

from lastbit.branches.own_files import NOT_OWN
from lastbit.calibrate import load_premises
from lastbit.calling.uses_compile import is_compiled
from lastbit.config import Config
from lastbit.devices import machine
from lastbit.files import state_of
from lastbit.kernel import Kernel
from lastbit.trees import is_installed
from lastbit.verify.plan import Item, Plan
from lastbit.verify.project import kernel_folders

_NO_PART = frozenset({"folder", "device_plan", "ops", "kernels", "kernel_folders", "kept", "fresh", "keep_going"})
"""Settings that say where, or of what: what they change of a kernel's verdict is in its file, its cases, its device;
`keep_going` changes what becomes of kernels that fail."""

_PREFIXES = (
    *("LASTBIT", "PYTHON", "TORCH", "PYTORCH", "INDUCTOR", "ATEN", "TRITON", "NUMPY", "NPY"),
    *("OMP", "KMP", "GOMP", "MKL", "OPENBLAS", "GOTO", "BLIS", "VECLIB", "DNNL", "ONEDNN", "XNNPACK", "GLIBC", "LD"),
    *("CUDA", "CUBLAS", "CUDNN", "CUTLASS", "NVIDIA", "NVCC", "NCCL", "GLOO", "PTXAS"),
    *("ROCM", "ROCR", "HIP", "HSA", "AMD", "MIOPEN", "GPU", "ROCBLAS", "SYCL", "ONEAPI", "ZE", "IGC", "ASCEND"),
    *("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CPATH", "LIBRARY"),
)
_VARIABLES = re.compile(rf"(?:{'|'.join(_PREFIXES)})(?:_|$)|PYTHON|TORCH|CUDA")
"""Names of variables that Python, torch, Triton, their libraries and compilers read."""

_UNSEEN_IMPORTS = frozenset({"__import__", "import_module", "spec_from_file_location", "run_path", "run_module"})
_UNSEEN_CODE = frozenset({"exec", "eval"})
"""Functions by which code comes to run that no import statement names."""

_HARMLESS = frozenset({"sys", "warnings", "logging"})
"""Modules whose functions a file may call for others, too: what `sys.path.insert` lets them import is seen."""

_BEYOND = {
    "subprocess.Popen": "starts a program",
    "os.system": "starts a program",
    "os.exec": "starts a program",
    "os.posix_spawn": "starts a program",
    "os.fork": "starts a process",
    "socket.connect": "connects to {0}",
    "sqlite3.connect": "opens a database",
    "ctypes.dlopen": "loads {0} from wherever the system has it",
}
"""Audit event → what a kernel's file does there, whose verdict cannot be kept. What torch and Triton do themselves on
its behalf, such as to call a compiler, follows from its text."""

_PROCESSES = ("multiprocessing", "ProcessPoolExecutor")
"""Words in a file whose processes read what this one does not see."""


def _hash(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class _Text:
    """What the text of a file says.

    Attributes:
        imports: dotted names of all that may be modules.
        unseen: it runs code that no import statement names.
        touches: it changes what others have, as `torch.backends.cudnn.enabled = False` does.
    """

    text: str = ""
    imports: frozenset[str] = frozenset()
    unseen: bool = False
    touches: bool = False


def _text_of(path: str) -> _Text:
    """Read a file; of what is no Python it is unknown what it imports."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (OSError, ValueError, SyntaxError):
        return _Text(unseen=not path.endswith(".so"))
    folder, nodes = Path(path).parent, list(ast.walk(tree))
    imports, bound, unseen = set[str](), set[str](), False
    for node in nodes:
        match node:
            case ast.Import(names=names):
                imports |= {one.name for one in names}
                bound |= {(one.asname or one.name).partition(".")[0] for one in names if not _is_lastbit(one.name)}
            case ast.ImportFrom(module=module, names=names, level=level):
                # A relative import is looked for where the file lies, under the path that leads there.
                start = "".join(f"{part}/" for part in [str(folder), *[".."] * (level - 1)]) if level else ""
                imports |= {f"{start}{'.'.join(filter(None, (module, one.name)))}" for one in names}
                imports |= {f"{start}{module}"} if module else set()
                bound |= {one.asname or one.name for one in names if not level and not _is_lastbit(module or "")}
            case ast.Name(id=name):
                unseen |= name in _UNSEEN_IMPORTS | _UNSEEN_CODE
            case ast.Attribute(attr=name):
                unseen |= name in _UNSEEN_IMPORTS
    changed = [n for n in nodes if isinstance(n, ast.Attribute | ast.Subscript) and not isinstance(n.ctx, ast.Load)]
    calls = (node.value for node in tree.body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
    called = [call.func for call in calls if isinstance(call.func, ast.Attribute)]
    touches = any(_root(n) in bound for n in changed) or any(_root(n) in bound - _HARMLESS for n in called)
    return _Text(text, frozenset(imports), unseen, touches)


def _is_lastbit(module: str) -> bool:
    return module.partition(".")[0] == "lastbit"


def _root(node: ast.expr) -> str:
    """Return the name that an attribute of an attribute, or an element, is of."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _files_of(name: str, folder: str) -> tuple[str, ...]:
    """Return the files that an import of a dotted name runs, those of packages on the way, too.

    `folder` is searched first, and nothing is imported. What is not there, or no file, has none.
    """
    start, _, dotted = name.rpartition("/")
    found, search = list[str](), [start] if start else [folder, *sys.path]
    parts = dotted.split(".")
    for place in range(1, len(parts) + 1):
        spec = None
        with suppress(ImportError, ValueError, AttributeError):
            spec = PathFinder.find_spec(".".join(parts[:place]), search)
            if spec is None and place == 1 and not start:  # of an editable installation, which has a finder of its own
                spec = importlib.util.find_spec(parts[0])
        if spec is None:
            break
        if spec.has_location and spec.origin:
            found.append(os.path.abspath(spec.origin))
        if place == 1 and found and _is_others(found[0], folder):
            return ()
        search = list(spec.submodule_search_locations or ())
    return tuple(found)


@functools.cache
def _is_others(path: str, folder: str = "") -> bool:
    """Return whether a file is installed, or lastbit's own, and not below `folder`."""
    if folder and path.startswith(f"{folder}{os.sep}"):
        return False
    return is_installed(Path(path)) or any(path.startswith(f"{place}{os.sep}") for place in NOT_OWN)


@dataclass
class _Readings:
    """What the code of kernels has read in this process, with the files of theirs that asked for it.

    Attributes:
        states: path → its state when it was first read.
        made: what this process has made itself.
        beyond: what cannot be followed.
    """

    states: dict[str, str] = field(default_factory=dict)
    asking: dict[str, set[str]] = field(default_factory=dict)
    made: set[str] = field(default_factory=set)
    beyond: dict[str, set[str]] = field(default_factory=dict)


_hear: Callable[[str, tuple[Any, ...]], None] | None = None
"""Takes audit events while code of kernels runs; a hook cannot be removed, so there is one, and it looks here."""
_hearing = threading.local()
"""Has a thread's `now` while it takes an event: what it reads itself meanwhile is none of the kernels'."""


@functools.cache
def _hook() -> None:
    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        if _hear is not None and event in _HEARD:
            _hear(event, arguments)

    sys.addaudithook(heard)


_HEARD = {"open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", *_BEYOND}


class Dependencies:
    """What the kernels of a process depend on, which it loads and calls within `listening`."""

    def __init__(self, config: Config) -> None:
        self._config, self._began, self._before = config, time.time_ns(), frozenset(sys.modules)
        self._folders = [
            str(path if path.is_dir() else path.parent) for path in map(Path.resolve, kernel_folders(config))
        ]
        named = {"TRITON_CACHE_DIR": Path.home() / ".triton"}
        named["TORCHINDUCTOR_CACHE_DIR"] = Path(tempfile.gettempdir(), f"torchinductor_{_user()}")
        passing = [Path(config.folder), *(Path(os.environ.get(name) or usual) for name, usual in named.items())]
        self._passing = (*(f"{path.absolute()}{os.sep}" for path in passing), "/proc/", "/sys/", "/dev/")
        self._seen, self._closures, self._told = _Readings(), dict[str, frozenset[str]](), dict[str, set[str]]()
        self._late, self._mapped = dict[str, None](), dict[str, str]()
        self._text_of, self._files_of = functools.cache(_text_of), functools.cache(_files_of)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take note of what the code of kernels reads within."""
        global _hear
        _hook()
        plain = os.stat

        def stat_of(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
            try:
                return plain(path, *args, **kwargs)
            except OSError:  # that something is not there decides as much as what is there
                if isinstance(path, str | bytes | os.PathLike):
                    self._hear("open", (os.fspath(path), "r", 0))
                raise

        alike = [group for group in (os.supports_fd, os.supports_dir_fd, os.supports_follow_symlinks) if plain in group]
        for group in alike:
            group.add(stat_of)
        _hear = self._hear
        try:
            with patch.object(os, "stat", stat_of):
                yield
        finally:
            _hear = None
            for group in alike:
                group.discard(stat_of)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Take note of an event; whatever goes wrong here must not reach the code that reads."""
        if getattr(_hearing, "now", False):
            return
        _hearing.now = True
        try:
            self._note(event, arguments)
        except Exception as error:
            self._seen.beyond.setdefault(f"reads what lastbit does not understand: {error!r}", set()).add("")
        finally:
            _hearing.now = False

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        first = arguments[1 if event == "os.rename" else 0] if arguments else ""
        if event in _BEYOND and not (event == "ctypes.dlopen" and os.sep in str(first or os.sep)):
            asking = self._asking()
            if asking and _is_own_step(self._is_own):
                address = arguments[1] if event == "socket.connect" else first
                self._seen.beyond.setdefault(_BEYOND[event].format(address), set()).update(asking)
            return
        if first is None or isinstance(first, int):
            return
        path = _source_of(os.path.abspath(os.fsdecode(first)))
        makes = event in ("os.mkdir", "os.rename") or (event == "open" and _writes(*arguments[1:3]))
        if makes and path not in self._seen.states:
            self._seen.made.add(path)
        elif not self._passes(path) and (asking := self._asking()):
            self._seen.asking.setdefault(path, set()).update(asking)
            if path not in self._seen.states:
                self._seen.states[path] = self._state(path)

    def _passes(self, path: str) -> bool:
        """Return whether nothing depends on a path besides what is told anyway."""
        return path.startswith(self._passing) or (_is_others(path) and not self._is_own(path))

    def _is_made(self, path: str) -> bool:
        return path in self._seen.made or any(str(above) in self._seen.made for above in Path(path).parents)

    def _is_own(self, path: str) -> bool:
        """Return whether a file is neither installed nor lastbit's, or is where kernels are."""
        return os.path.isabs(path) and not (all(_is_others(path, folder) for folder in self._folders))

    def _asking(self) -> set[str]:
        """Return the own files of which a function is under way."""
        return {file for frame in _frames() if self._is_own(file := _absolute(frame.f_code.co_filename))}

    def _state(self, path: str) -> str:
        """Return the state of a path; remember one that is younger than this process, and may have been read before."""
        self._look(path)
        return state_of(path)

    def _look(self, path: str) -> None:
        with suppress(OSError):
            if os.stat(path).st_mtime_ns >= self._began and not os.path.isdir(path):
                self._late[path] = None

    def _around(self) -> dict[str, str]:
        """Return what every verdict of this process depends on."""
        project = [Path(folder, name) for folder in self._config.projects for name in ("references", "cases")]
        return {
            "the code of lastbit": self._tree(NOT_OWN),
            "the ops and cases of the project": self._tree(project),
            "installed packages": _installed(),
            "Python": f"{sys.version} {platform.libc_ver()}",
            "torch": f"{torch.__version__} {_hash(torch.__config__.show())} {torch.version.cuda} {torch.version.hip}",
            "processor": f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}",
            "threads": f"{torch.get_num_threads()} {torch.get_num_interop_threads()}",
            "devices": repr(machine().accelerators),
            "driver": _hash(_driver()),
            "working folder": os.getcwd(),
            **{
                f"setting {one.name}": repr(getattr(self._config, one.name))
                for one in fields(self._config)
                if one.name not in _NO_PART
            },
            "setting small": repr(self._config.small),
        }

    def _tree(self, folders: Iterable[Path]) -> str:
        """Hash all files below folders; goldens, with which verify compares nothing, left out."""
        files = {path for folder in folders for path in folder.rglob("*") if path.is_file()}
        return _hash([(str(path), self._state(str(path))) for path in sorted(files) if _PASSING.isdisjoint(path.parts)])

    def of(self, plan: Plan) -> list[dict[str, Any]]:
        """List what the verdict on each `kernel` of a plan on a `device` `depends` on; its `items`, of which a run may
        choose, stand apart.
        """
        found: dict[tuple[str, str], dict[str, Any]] = {}
        around = self._around()
        for item in plan.items:
            kernel, device = item.subject.kernel, item.subject.device
            if (subject := (kernel.name, str(device))) not in found:
                if kernel.name not in self._closures:
                    self._closures[kernel.name] = self._closure(kernel)
                files = self._closures[kernel.name]
                states = {f"the file {path}": self._state(path) for path in sorted(files)}
                own = {**states, "its declaration": _declaration(item), **self._variables(files), **around}
                own |= {"its device": _device(device), "premises": _hash(load_premises(device))}
                if device.type != "cpu" or is_compiled(kernel.call):
                    own["compilers"] = _compilers()
                found[subject] = {"kernel": kernel.name, "device": str(device), "depends": own, "items": {}}
            found[subject]["items"][item.id] = _cases_of(item)
        return [*found.values()]

    def _closure(self, kernel: Kernel) -> frozenset[str]:
        """Return the files of a kernel: of its declaration, its function, and of all that these import.

        All that are loaded belong to one that imports what its text does not name, and those that change what others
        have belong to all.
        """
        roots = [os.path.abspath(path) for path in (kernel.file, kernel.source.rpartition(":")[0]) if path]
        folder = os.path.dirname(roots[0]) if roots else ""
        every = self._loaded
        left = [path for path in roots if self._is_own(path)] or [*every]
        left += [path for path in every if self._text_of(path).touches]
        found = set[str]()
        while left:
            if (path := left.pop()) in found:
                continue
            found.add(path)
            text = self._text_of(path)
            left += every if text.unseen else ()
            left += [file for name in text.imports for file in self._files_of(name, folder) if self._is_own(file)]
        return frozenset(found)

    @functools.cached_property
    def _loaded(self) -> list[str]:
        """The files where kernels are, and all that was loaded with them, as of when this is first asked."""
        found = {str(path) for place in self._folders for path in Path(place).glob("*.py")}
        modules = (module for name, module in list(sys.modules.items()) if name not in self._before)
        places = (getattr(module, "__file__", None) for module in modules)
        return sorted(found.union(os.path.abspath(path) for path in places if path and self._is_own(path)))

    def _variables(self, files: Collection[str]) -> dict[str, str]:
        """Return the variables of the environment that a kernel's numbers or code may depend on.

        Those are of Python, torch and their libraries, of packages that its files import, and those that they name.
        """
        texts = [self._text_of(path) for path in files]
        packages = {name.partition(".")[0].upper() + "_" for text in texts for name in text.imports}
        said = "\n".join(text.text for text in texts)
        return {
            f"the variable {name}": _hash(value)
            for name, value in sorted(os.environ.items())
            if _VARIABLES.match(name) or name.startswith(tuple(packages)) or f'"{name}"' in said or f"'{name}'" in said
        }

    def read_by(self, kernel: str) -> tuple[dict[str, str], list[str]]:
        """Return what the code of a kernel has read since the last call, path → state, and why its verdict cannot be
        kept, if so.
        """
        files, seen = self._closures[kernel], self._seen
        found = {
            path: state
            for path, state in seen.states.items()
            if not self._is_made(path) and not files.isdisjoint(seen.asking[path])
        }
        for path in _libraries() - self._mapped.keys():
            self._mapped[path] = "" if self._passes(path) or self._is_made(path) else self._state(path)
        found |= {path: state for path, state in self._mapped.items() if state}
        why = [reason for reason, asking in seen.beyond.items() if "" in asking or not files.isdisjoint(asking)]
        for path in (*files, *found):
            self._look(path)
        if any(word in self._text_of(path).text for path in files for word in _PROCESSES):
            why.append("starts processes")
        others = set().union(*self._closures.values(), seen.states) - files - found.keys()
        why += [f"reads {path}, which was written during the run" for path in self._late if path not in others]
        told = self._told.setdefault(kernel, set())
        new = {path: state for path, state in found.items() if path not in told}
        told |= new.keys()
        return new, why


_PASSING = frozenset({"__pycache__", "golden"})
_OF_DEVICE = ("major", "minor", "multi_processor_count", "total_memory", "gcnArchName", "L2_cache_size")


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


@functools.cache
def _absolute(path: str) -> str:
    return os.path.normpath(path) if os.path.isabs(path) else path


def _is_own_step(is_own: Callable[[str], bool]) -> bool:
    """Return whether what happens now is not of torch or Triton, which a kernel's file has called."""
    for frame in _frames():
        file = _absolute(frame.f_code.co_filename)
        if any(f"{os.sep}{name}{os.sep}" in file for name in ("_inductor", "_dynamo", "triton")):
            return False
        if is_own(file):
            return True
    return False


def _writes(mode: object = None, flags: object = 0) -> bool:
    """Return whether a file is opened to be written, by the arguments of the audit event."""
    if isinstance(mode, str):
        return not {*"wax+"}.isdisjoint(mode)
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def _source_of(path: str) -> str:
    """Return the source of what Python has compiled and kept, or else the path."""
    with suppress(ValueError, NotImplementedError):
        if path.endswith(".pyc"):
            return importlib.util.source_from_cache(path)
    return path


def _libraries() -> set[str]:
    """Return the shared libraries that this process has mapped."""
    with suppress(OSError):
        lines = Path("/proc/self/maps").read_text().splitlines()
        paths = {f"/{path}" for _, slash, path in (line.partition("/") for line in lines) if slash}
        return {path for path in paths if ".so" in path and not path.endswith("(deleted)")}
    return set()


def _declaration(item: Item) -> str:
    kernel = item.subject.kernel
    told = {one.name: getattr(kernel, one.name) for one in fields(kernel) if one.name not in ("call", "depth")}
    told["refuses"] = [f"{kind.__module__}.{kind.__qualname__}" for kind in kernel.refuses]
    told |= {"devices of the process": str(item.subject.device), "accepts": sorted(kernel.accepts)}
    return _hash({name: sorted(value) if isinstance(value, set | frozenset) else value for name, value in told.items()})


def _cases_of(item: Item) -> str:
    """Hash what decides which cases an item runs, and how; drawing them takes nothing else but the seed."""
    group = item.group
    own = {one.name: getattr(item, one.name) for one in fields(item) if one.name not in ("subject", "group")}
    told = {one.name: getattr(group, one.name) for one in fields(group) if one.name not in ("strategy", "examples")}
    return _hash((own, told, group.strategy is None, [str(case) for case in group.examples]))


def _installed() -> str:
    """Hash names and versions of all installed packages, and the lists of their files, which have their hashes."""
    found = []
    for folder in dict.fromkeys(filter(os.path.isdir, sys.path)):
        for about in sorted(Path(folder).glob("*-info")):
            record = about / "RECORD"
            found.append((about.name, state_of(str(record)) if about.is_dir() else state_of(str(about))))
    return _hash(found)


def _processor() -> str:
    """Return the model and the instruction sets of the processor."""
    told = [platform.machine(), platform.processor()]
    with suppress(OSError):
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
        pairs = (line.partition(":") for line in first.splitlines())
        told += [v.strip() for k, _, v in pairs if k.strip() in ("model name", "flags", "Features", "CPU part")]
    return f"{told[2] if len(told) > 2 else told[0]} {_hash(told)}"


def _device(device: torch.device) -> str:
    """Identify the model of an accelerator."""
    if device.type == "cpu":
        return "cpu"
    about = torch.get_device_module(device).get_device_properties(device)
    return f"{getattr(about, 'name', '')} {_hash([str(getattr(about, name, None)) for name in _OF_DEVICE])}"


def _driver() -> list[str]:
    """Return what the system says of drivers of accelerators."""
    found = []
    for path in ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version", "/sys/module/xe/version"):
        with suppress(OSError):
            found.append(Path(path).read_text())
    return found


@functools.cache
def _compilers() -> str:
    """Identify the compilers that torch and Triton would call, by place, size and time."""
    named = [os.environ.get("CXX", ""), os.environ.get("CC", ""), "g++", "gcc", "clang", "cc", "nvcc"]
    paths = [os.path.realpath(path) for name in named if name and (path := shutil.which(name))]
    return _hash([(path, (about := os.stat(path)).st_size, about.st_mtime_ns) for path in paths])


def _user() -> str:
    try:
        import getpass

        return re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (OSError, KeyError):
        return ""
