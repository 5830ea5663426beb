"""What the verdict on a kernel depends on, as names and hashes: two runs in which all of these agree judge it alike.

`Dependencies.of` has what is known when a plan is made: the kernel's file and all modules that it imports from outside
of installed packages, wherever it does so, its declaration and its cases; and around them lastbit's own text, the
project's, installed packages, processor, device, variables, settings. The files that the kernel's code has opened
besides, while it was loaded or called, `Dependencies.read_by` knows afterwards, from audit events
(https://peps.python.org/pep-0578).

In doubt a verdict is not kept, and the reason is said. What native code reads by itself nobody sees.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import platform
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from importlib.machinery import PathFinder
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from lastbit.branches.own_files import NOT_OWN
from lastbit.calibrate import load_premises
from lastbit.config import Config
from lastbit.devices import machine
from lastbit.files import hash_of, state_of
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

_ASKS = re.compile(
    r"l?exists|is_?(file|dir)|(is_?)?(sym)?link|is_?mount|[lf]?stat|get(size|[macg]time)|access|samefile|samestat|[ir]?glob"
    r"|listdir|scandir|iterdir|walk|which|find_(library|spec)|expanduser|home|gethostname|node|uname|mmap|open_code"
    r"|fork(server)?|get_context|Process(PoolExecutor)?|multiprocessing"
)
"""Names of what asks for files, or for the machine, without an audit event, or in processes that leave none here."""

_ENVIRONMENT = frozenset({"environ", "environb", "getenv", "getenvb", "expandvars"})
"""Names of what asks for variables, whose name may be put together."""

_HARMLESS = frozenset({"sys", "warnings", "logging"})
"""Modules whose functions a file may call for others, too: what `sys.path.insert` lets them import is seen."""

_BEYOND = {
    "subprocess.Popen": "starts a program",
    "os.system": "starts a program",
    "os.exec": "starts a program",
    "os.posix_spawn": "starts a program",
    "os.fork": "starts a process",
    "socket.__new__": "opens a socket",
    "sqlite3.connect": "opens a database",
    "ctypes.dlopen": "loads a library",
    **dict.fromkeys(("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink"), "changes files"),
    **dict.fromkeys(("os.truncate", "os.utime", "os.putenv", "os.unsetenv"), "changes files or variables"),
}
"""Audit event → what a kernel's code does there, whose verdict is not kept. What torch and Triton do themselves on its
behalf, such as to call a compiler, follows from its text."""

_COMPILERS = frozenset({"_inductor", "_dynamo", "triton"})
"""Folders of installed packages whose code compiles kernels."""

_COARSE = 20_000_000
"""Nanoseconds by which the times of files may be behind the clock."""


@dataclass(frozen=True)
class _Text:
    """What the text of a file says.

    Attributes:
        imports: dotted names of all that may be modules.
        unseen: it runs code that no import statement names.
        touches: it changes what others have, as `torch.backends.cudnn.enabled = False` does.
        names: everything that it calls by name.
    """

    imports: frozenset[str] = frozenset()
    unseen: bool = False
    touches: bool = False
    names: frozenset[str] = frozenset()


def _text_of(path: str) -> _Text:
    """Read a file; of what is no Python it is unknown what it imports."""
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, ValueError, SyntaxError):
        return _Text(unseen=True)
    folder, nodes = Path(path).parent, list(ast.walk(tree))
    imports, bound, used = set[str](), set[str](), set[str]()
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
            case ast.Name(id=name) | ast.Attribute(attr=name):
                used.add(name)
    changed = [n for n in nodes if isinstance(n, ast.Attribute | ast.Subscript) and not isinstance(n.ctx, ast.Load)]
    called = [n.value.func for n in _at_load(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call)]
    sets = [n for n in nodes if isinstance(n, ast.Attribute) and n.attr.startswith("set_")]
    touches = any(_root(n) in bound for n in (*changed, *sets)) or any(_root(n) in bound - _HARMLESS for n in called)
    plain = {node.id for node in nodes if isinstance(node, ast.Name)}
    every = frozenset(used | {part for name in imports for part in re.split(r"[./]", name)})
    unseen = bool(every & _UNSEEN_IMPORTS or plain & _UNSEEN_CODE)
    return _Text(frozenset(imports), unseen, touches or bool(plain & {"setattr", "delattr"}), every)


def _at_load(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what a module executes while it is loaded: all but the bodies of functions."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from _at_load(child)


def _is_lastbit(module: str) -> bool:
    return module.partition(".")[0] == "lastbit"


def _root(node: ast.expr) -> str:
    """Return the name that an attribute of an attribute, or an element, is of."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
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
    return is_installed(Path(path)) or _is_lastbits(path)


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


_HEARD = {"open", "os.listdir", "os.scandir", *_BEYOND}


class Dependencies:
    """What the kernels of a process depend on, which it loads and calls within `listening`."""

    def __init__(self, config: Config) -> None:
        self._config, self._began, self._before = config, time.time_ns(), frozenset(sys.modules)
        self._folders = [
            str(path if path.is_dir() else path.parent) for path in map(Path.resolve, kernel_folders(config))
        ]
        self._project = [Path(folder, name) for folder in config.projects for name in ("references", "cases")]
        self._run = f"{Path(config.folder).absolute()}{os.sep}"
        self._states, self._beyond, self._closures = dict[str, str](), dict[str, None](), dict[str, frozenset[str]]()
        self._asking, self._around_files = dict[str, set[str]](), set[str]()
        self._text_of, self._files_of = functools.cache(_text_of), functools.cache(_files_of)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take note of what the code of kernels reads within."""
        global _hear
        _hook()
        _hear = self._hear
        try:
            yield
        finally:
            _hear = None

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Take note of an event; nothing that goes wrong here reaches the code that reads."""
        if getattr(_hearing, "now", False):
            return
        _hearing.now = True
        try:
            self._note(event, arguments)
        except Exception as error:
            self._not_kept(f"does what lastbit does not understand: {error!r}", {""})
        finally:
            _hearing.now = False

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        first = arguments[0] if arguments else None
        path = os.path.abspath(os.fsdecode(first)) if isinstance(first, str | bytes | os.PathLike) else ""
        if event not in _BEYOND and not path:
            return  # it has been opened already
        if f"{os.sep}__pycache__{os.sep}" in f"{path}{os.sep}":
            return
        steps = [_absolute(frame.f_code.co_filename) for frame in _frames() if frame.f_code.co_filename != __file__]
        asking = {file for file in steps if self._is_own(file)}
        theirs = [file for file in steps if file not in asking and os.path.isabs(file)]
        if not asking and any(_is_lastbits(file) for file in theirs):
            return
        # Who asks is the innermost of a kernel's own code, a compiler of kernels, and lastbit.
        who = next((file for file in steps if file in asking or _compiles(file) or _is_lastbits(file)), "")
        makes = event in _BEYOND or (event == "open" and _writes(*arguments[1:3]))
        if _compiles(who) or (makes and _is_lastbits(who)):
            return
        installed = bool(path) and _is_others(path) and not self._is_own(path)
        if event == "ctypes.dlopen" and (first is None or (installed and os.sep in os.fsdecode(first))):
            return
        if makes:
            self._not_kept(_BEYOND.get(event, f"writes {path}"), asking or {""})
        elif not installed and not path.startswith(self._run):
            self._asking.setdefault(path, set()).update(asking or {""})
            self._states.setdefault(path, state_of(path))

    def _not_kept(self, reason: str, asking: set[str]) -> None:
        self._beyond[reason] = None
        self._asking.setdefault(reason, set()).update(asking)

    def _is_own(self, path: str) -> bool:
        """Return whether a file is neither installed nor lastbit's, or is where kernels are."""
        return os.path.isabs(path) and not (all(_is_others(path, folder) for folder in self._folders))

    def _around(self) -> dict[str, str]:
        """Return what every verdict of this process depends on."""
        return {
            "the code of lastbit": self._tree(NOT_OWN),
            "the ops and cases of the project": self._tree(self._project),
            "installed packages": _installed(),
            "Python": f"{sys.version} {platform.libc_ver()}",
            "torch": f"{torch.__version__} {hash_of(torch.__config__.show())} {torch.version.cuda} {torch.version.hip}",
            "processor": f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}",
            "threads": f"{torch.get_num_threads()} {torch.get_num_interop_threads()}",
            "devices": repr(machine().accelerators),
            "driver": hash_of(_driver()),
            "libraries and compilers of the system": _system(),
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
        found = [str(path) for path in sorted(files) if _PASSING.isdisjoint(path.parts)]
        self._around_files |= {*found}
        return hash_of([(path, state_of(path)) for path in found])

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
                states = {f"the file {path}": state_of(path) for path in sorted(files)}
                own = {**states, "its declaration": _declaration(item), **self._variables(files), **around}
                own |= {"its device": _device(device), "premises": hash_of(load_premises(device))}
                found[subject] = {"kernel": kernel.name, "device": str(device), "depends": own, "items": {}}
            found[subject]["items"][item.id] = _cases_of(item)
        return [*found.values()]

    def _closure(self, kernel: Kernel) -> frozenset[str]:
        """Return the files of a kernel: of its declaration, its function, the project, and of all that these import.

        All that are loaded belong to one that imports what its text does not name, and those that change what others
        have belong to all.
        """
        project = [str(path) for folder in self._project for path in folder.rglob("*.py")]
        roots = [os.path.abspath(path) for path in (kernel.file, kernel.source.rpartition(":")[0]) if path]
        folder = os.path.dirname(roots[0]) if roots else ""
        every = self._loaded
        left = [path for path in roots if self._is_own(path)] or [*every]
        left += [os.path.abspath(path) for path in project]
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

        Those are of Python, torch, their libraries and packages that its files import; all, if its own ask for any.
        """
        texts = [self._text_of(path) for path in files]
        packages = tuple({f"{name.partition('.')[0].upper()}_" for text in texts for name in text.imports})
        every = any(text.names & _ENVIRONMENT for text in texts)
        return {
            f"the variable {name}": hash_of(value)
            for name, value in sorted(os.environ.items())
            if every or _VARIABLES.match(name) or name.startswith(packages)
        }

    def read_by(self, kernel: str) -> tuple[dict[str, str], list[str]]:
        """Return what the code of a kernel has read, path → state, and why its verdict cannot be kept, if so."""
        files = self._closures[kernel]
        others = set().union(*self._closures.values()) - files
        own = {of for of, asking in self._asking.items() if not asking <= others}
        found = {path: state for path, state in self._states.items() if path in own}
        why = [reason for reason in self._beyond if reason in own]
        names = {name for path in files for name in self._text_of(path).names}
        why += [f"asks by {name}" for name in sorted(names) if _ASKS.fullmatch(name)]
        why += [f"has native code, {path}" for path in sorted(files) if not path.endswith(".py")]
        for path in (*files, *found, *self._around_files):
            with suppress(OSError):  # a folder is as its names are, and one that is not there was not written
                about = os.stat(path)
                if not os.path.isdir(path) and max(about.st_mtime_ns, about.st_ctime_ns) > self._began - _COARSE:
                    why.append(f"reads {path}, which was written during the run")
        return found, why


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


def _is_lastbits(file: str) -> bool:
    return any(file.startswith(f"{place}{os.sep}") for place in NOT_OWN)


def _compiles(file: str) -> bool:
    return not _COMPILERS.isdisjoint(file.split(os.sep)) and _is_others(file)


def _writes(mode: object = None, flags: object = 0) -> bool:
    """Return whether a file is opened to be written, by the arguments of the audit event."""
    if isinstance(mode, str):
        return not {*"wax+"}.isdisjoint(mode)
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def _declaration(item: Item) -> str:
    kernel = item.subject.kernel
    told = {one.name: getattr(kernel, one.name) for one in fields(kernel) if one.name not in ("call", "depth")}
    told["refuses"] = [f"{kind.__module__}.{kind.__qualname__}" for kind in kernel.refuses]
    told |= {"devices of the process": str(item.subject.device), "accepts": sorted(kernel.accepts)}
    return hash_of(
        {name: sorted(value) if isinstance(value, set | frozenset) else value for name, value in told.items()}
    )


def _cases_of(item: Item) -> str:
    """Hash what decides which cases an item runs, and how; drawing them takes nothing else but the seed."""
    group = item.group
    own = {one.name: getattr(item, one.name) for one in fields(item) if one.name not in ("subject", "group")}
    told = {one.name: getattr(group, one.name) for one in fields(group) if one.name not in ("strategy", "examples")}
    return hash_of((own, told, group.strategy is None, [str(case) for case in group.examples]))


def _installed() -> str:
    """Hash names and versions of all installed packages, and the lists of their files, which have their hashes."""
    found = []
    for folder in dict.fromkeys(filter(os.path.isdir, sys.path)):
        for about in sorted(Path(folder).glob("*-info")):
            record = about / "RECORD"
            found.append((about.name, state_of(str(record)) if about.is_dir() else state_of(str(about))))
    return hash_of(found)


def _processor() -> str:
    """Return the model and the instruction sets of the processor."""
    told = [platform.machine(), platform.processor()]
    with suppress(OSError):
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
        pairs = (line.partition(":") for line in first.splitlines())
        told += [v.strip() for k, _, v in pairs if k.strip() in ("model name", "flags", "Features", "CPU part")]
    return f"{told[2] if len(told) > 2 else told[0]} {hash_of(told)}"


def _device(device: torch.device) -> str:
    """Identify the model of an accelerator."""
    if device.type == "cpu":
        return "cpu"
    about = torch.get_device_module(device).get_device_properties(device)
    return f"{getattr(about, 'name', '')} {hash_of([str(getattr(about, name, None)) for name in _OF_DEVICE])}"


def _driver() -> list[str]:
    """Return what the system says of drivers of accelerators."""
    found = []
    for path in ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version", "/sys/module/xe/version"):
        with suppress(OSError):
            found.append(Path(path).read_text())
    return found


@functools.cache
def _system() -> str:
    """Identify compilers, and the libraries that the system knows, by place, size and time."""
    named = [os.environ.get("CXX", ""), os.environ.get("CC", ""), "g++", "gcc", "clang", "cc", "nvcc"]
    paths = [path for name in named if name and (path := shutil.which(name))] + ["/etc/ld.so.cache"]
    about = [(path, os.stat(path)) for path in map(os.path.realpath, paths) if os.path.exists(path)]
    return hash_of([(path, one.st_size, one.st_mtime_ns) for path, one in about])
