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
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from importlib.machinery import PathFinder
from importlib.metadata import distributions
from pathlib import Path
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

_ASKS = re.compile(
    r"\.?(l?exists|is_?(file|dir)|(is_?)?(sym)?link|is_?mount|[lf]?stat|get(size|[macg]time)|access|samefile|samestat"
    r"|[ir]?glob|listdir|scandir|iterdir|walk|which|find_(library|spec)|expanduser|home|gethostname|node|uname|mmap"
    r"|open_code|fork(server)?|get_context|Process(PoolExecutor)?|multiprocessing)"
)
"""Names of what asks for files, or for the machine, without an audit event, or in processes that leave none here; an
attribute begins with a point."""

_RUNS = re.compile(r"exec|eval|\.?(__import__|import_module|run_(path|module)|(spec|module)_from_\w+|SourceFileLoader)")
"""Names of functions by which code comes to run that no import statement names; `.eval` is one of torch's modules."""

_ENVIRONMENT = re.compile(r"\.?(environb?|getenvb?|expandvars)")
"""Names of what asks for variables, whose name may be put together."""

_HARMLESS = frozenset({"lastbit", "sys", "warnings", "logging"})
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

_COMPILING = frozenset({"_inductor", "_dynamo", "triton"})
"""Folders of installed packages whose code compiles kernels."""

_PASSING = frozenset({"__pycache__", "golden"})
"""Folders of lastbit and of a project that no verdict depends on: verify compares nothing with goldens."""

_OF_DEVICE = ("major", "minor", "multi_processor_count", "total_memory", "gcnArchName", "L2_cache_size")
_DRIVERS = ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version", "/sys/module/xe/version")
_COMPILERS = ("g++", "gcc", "clang", "cc", "nvcc")
_LISTS = ("RECORD", "METADATA", "PKG-INFO", "")
"""Files that tell a package's files with their hashes, or where there is none, such as of Debian's, its version."""

_COARSE = 20_000_000
"""Nanoseconds by which the times of files may be behind the clock."""


@dataclass(frozen=True)
class _Text:
    """What the text of a file says.

    Attributes:
        imports: dotted names of all that may be modules, each with the folder that a relative one starts from.
        names: everything that it calls by name, attributes with a point before them.
        touches: it changes what others have, as `torch.backends.cudnn.enabled = False` does.
    """

    imports: frozenset[tuple[str, str]] = frozenset()
    names: frozenset[str] = frozenset()
    touches: bool = False


def _text_of(path: str) -> _Text:
    """Read a file; of one that Python cannot parse either, nothing runs."""
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, ValueError, SyntaxError):
        return _Text()
    imports, bound, names, nodes = set[tuple[str, str]](), dict[str, str](), set[str](), list(ast.walk(tree))
    for node in nodes:
        match node:
            case ast.Import(names=modules):
                imports |= {("", one.name) for one in modules}
                bound |= {(one.asname or one.name).partition(".")[0]: one.name for one in modules}
            case ast.ImportFrom(module=module, names=parts, level=level):
                start = os.path.normpath(os.path.join(path, *[os.pardir] * level)) if level else ""
                imports |= {(start, ".".join(filter(None, (module, one.name)))) for one in parts}
                bound |= {one.asname or one.name: module or "" for one in parts}
            case ast.Name(id=name):
                names.add(name)
            case ast.Attribute(attr=name):
                names.add(f".{name}")
    changed = [n for n in nodes if isinstance(n, ast.Attribute | ast.Subscript) and not isinstance(n.ctx, ast.Load)]
    changed += [n for n in nodes if isinstance(n, ast.Attribute) and n.attr.startswith("set_")]
    at_load = (n for top in tree.body if not isinstance(top, ast.FunctionDef) for n in ast.walk(top))
    called = [n.value.func for n in at_load if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call)]
    others = {name for name, module in bound.items() if module.partition(".")[0] not in _HARMLESS}
    touches = any(_root(n) in bound for n in changed) or any(_root(n) in others for n in called)
    touches |= not names.isdisjoint({"setattr", "delattr"})
    return _Text(frozenset(imports), frozenset(names.union(*(name.split(".") for _, name in imports))), touches)


def _root(node: ast.expr) -> str:
    """Return the name that an attribute of an attribute, or an element, is of."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _files_of(name: str, folder: str) -> Iterator[str]:
    """Yield the files that an import of a dotted name runs, of packages on the way, too, and import nothing.

    They are looked for in a folder and where Python itself looks.
    """
    top, *parts = name.split(".")
    specs = [PathFinder.find_spec(top, [folder])]
    with suppress(ImportError, ValueError, AttributeError):
        specs.append(importlib.util.find_spec(top))
    for spec in specs:
        for part in (*parts, None):
            if spec is None:
                break
            if spec.has_location and spec.origin:
                yield os.path.abspath(spec.origin)
            spec = PathFinder.find_spec(part, list(spec.submodule_search_locations or ())) if part else None


@functools.cache
def _is_others(path: str) -> bool:
    """Return whether a file is installed, or lastbit's own."""
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
        folders = (path if path.is_dir() else path.parent for path in map(Path.resolve, kernel_folders(config)))
        self._folders = tuple(f"{folder}{os.sep}" for folder in folders)
        self._project = [Path(folder, name) for folder in config.projects for name in ("references", "cases")]
        self._run = f"{Path(config.folder).absolute()}{os.sep}"
        self._read: dict[str, str] = {}
        self._asking: dict[str, set[str]] = {}  # of what was read, or why a verdict is not kept: the files that did it
        self._around_files, self._closures = set[str](), dict[str, frozenset[str]]()
        self._text_of = functools.cache(_text_of)
        self._files_of = functools.cache(lambda *named: [path for path in _files_of(*named) if self._is_own(path)])

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
            self._note(event, *arguments)
        except Exception as error:
            self._asking[f"does what lastbit does not understand: {error!r}"] = {""}
        finally:
            _hearing.now = False

    def _note(self, event: str, first: object = None, mode: object = None, flags: Any = 0, *_: object) -> None:
        path = os.path.abspath(os.fsdecode(first)) if isinstance(first, str | bytes | os.PathLike) else ""
        if event not in _BEYOND and not path:
            return  # it has been opened already
        if f"{os.sep}__pycache__{os.sep}" in f"{path}{os.sep}":
            return
        names = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(sys._getframe()))
        steps = [_absolute(name) for name in names if name != __file__]
        asking = {file for file in steps if self._is_own(file)}
        if not asking and any(map(_is_lastbits, steps)):
            return
        # Who asks is the innermost of a kernel's own code, a compiler of kernels, and lastbit.
        who = next((file for file in steps if file in asking or _compiles(file) or _is_lastbits(file)), "")
        makes = event in _BEYOND or (event == "open" and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if _compiles(who) or (makes and _is_lastbits(who)):
            return
        installed = bool(path) and not self._is_own(path)
        if (installed and event == "ctypes.dlopen") or (not makes and (installed or path.startswith(self._run))):
            return
        found = _BEYOND.get(event, f"writes {path}") if makes else path
        self._asking.setdefault(found, set()).update(asking or {""})
        if not makes:
            self._read.setdefault(path, state_of(path))

    def _is_own(self, path: str) -> bool:
        """Return whether a file is neither installed nor lastbit's, or is where kernels are."""
        return path.startswith(self._folders) or (os.path.isabs(path) and not _is_others(path))

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
            **{f"setting {name}": repr(value) for name, value in _told(self._config, *_NO_PART).items()},
            "setting small": repr(self._config.small),
        }

    def _tree(self, folders: Iterable[Path]) -> str:
        """Hash all files below folders."""
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
                files = self._closures[kernel.name] = self._closure(kernel)
                states = {f"the file {path}": state_of(path) for path in sorted(files)}
                own = {**states, "its declaration": _declaration(item), **self._variables(files), **around}
                own |= {"its device": _device(device), "premises": hash_of(load_premises(device))}
                found[subject] = {"kernel": kernel.name, "device": str(device), "depends": own, "items": {}}
            found[subject]["items"][item.id] = _cases_of(item)
        return [*found.values()]

    def _closure(self, kernel: Kernel) -> frozenset[str]:
        """Return the files of a kernel: of its declaration, its function, the project, and of all that these import.

        Those that change what others have belong to all.
        """
        roots = [os.path.abspath(path) for path in (kernel.file, kernel.source.rpartition(":")[0]) if path]
        folder = os.path.dirname(roots[0]) if roots else ""
        own = [path for path in roots if self._is_own(path)] or self._loaded
        project = [os.path.abspath(path) for place in self._project for path in place.rglob("*.py")]
        changing = [path for path in self._loaded if self._text_of(path).touches]
        found, left = set[str](), {*own, *project, *changing}
        while left:
            found |= left
            named = {(name, start or folder) for path in left for start, name in self._text_of(path).imports}
            left = {file for one in named for file in self._files_of(*one)} - found
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
        packages = tuple({f"{name.partition('.')[0].upper()}_" for text in texts for _, name in text.imports})
        every = any(_ENVIRONMENT.fullmatch(name) for text in texts for name in text.names)
        return {
            f"the variable {name}": hash_of(value)
            for name, value in sorted(os.environ.items())
            if every or _VARIABLES.match(name) or name.startswith(packages)
        }

    def read_by(self, kernel: str) -> tuple[dict[str, str], list[str]]:
        """Return what the code of a kernel has read, path → state, and why its verdict cannot be kept, if so."""
        files = self._closures[kernel]
        others = set().union(*self._closures.values()) - files
        own = [what for what, asking in self._asking.items() if not asking <= others]
        found = {what: self._read[what] for what in own if what in self._read}
        why = [what for what in own if what not in self._read]
        names = sorted({name for path in files for name in self._text_of(path).names})
        why += [f"asks by {name.lstrip('.')}" for name in names if _ASKS.fullmatch(name)]
        why += [f"runs code by {name.lstrip('.')}" for name in names if _RUNS.fullmatch(name)]
        why += [f"has native code, {path}" for path in sorted(files) if not path.endswith(".py")]
        for path in (*files, *found, *self._around_files):
            with suppress(OSError):  # a folder is as its names are, and one that is not there was not written
                about = os.stat(path)
                if not os.path.isdir(path) and max(about.st_mtime_ns, about.st_ctime_ns) > self._began - _COARSE:
                    why.append(f"reads {path}, which was written during the run")
        return found, why


@functools.cache
def _absolute(path: str) -> str:
    return os.path.normpath(path) if os.path.isabs(path) else path


def _is_lastbits(file: str) -> bool:
    return file.startswith(tuple(f"{place}{os.sep}" for place in NOT_OWN))


def _compiles(file: str) -> bool:
    return not _COMPILING.isdisjoint(file.split(os.sep)) and _is_others(file)


def _told(value: Any, *left_out: str) -> dict[str, Any]:
    """Return the fields of a dataclass by name."""
    return {one.name: getattr(value, one.name) for one in fields(value) if one.name not in left_out}


def _declaration(item: Item) -> str:
    kernel = item.subject.kernel
    told = _told(kernel, "call", "depth") | {"accepts": kernel.accepts, "devices of the process": item.subject.device}
    return hash_of({name: sorted(one) if isinstance(one, Set) else one for name, one in told.items()})


def _cases_of(item: Item) -> str:
    """Hash what decides which cases an item runs, and how; drawing them takes nothing else but the seed."""
    group = item.group
    own = _told(item, "subject", "group"), _told(group, "strategy", "examples")
    return hash_of((*own, group.strategy is None, [str(case) for case in group.examples]))


def _installed() -> str:
    """Hash what is installed in each folder that Python searches, in their order."""
    found = (distributions(path=[folder]) for folder in dict.fromkeys(sys.path))
    return hash_of([sorted(next(filter(None, map(one.read_text, _LISTS)), "") for one in some) for some in found])


def _processor() -> str:
    """Return the model and the instruction sets of the processor."""
    told = [platform.machine(), platform.processor()]
    with suppress(OSError):
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
        told += re.findall(r"^(?:model name|flags|Features|CPU part)\s*: (.*)$", first, re.MULTILINE)
    return f"{told[2] if len(told) > 2 else told[0]} {hash_of(told)}"


def _device(device: torch.device) -> str:
    """Identify the model of an accelerator."""
    if device.type == "cpu":
        return "cpu"
    about = torch.get_device_module(device).get_device_properties(device)
    return f"{getattr(about, 'name', '')} {hash_of([str(getattr(about, name, None)) for name in _OF_DEVICE])}"


def _driver() -> list[str]:
    """Return what the system says of drivers of accelerators."""
    return [state_of(path) for path in _DRIVERS]


def _system() -> str:
    """Identify compilers, and the libraries that the system knows."""
    named = (os.environ.get("CXX", ""), os.environ.get("CC", ""), *_COMPILERS)
    found = ["/etc/ld.so.cache", *filter(None, map(shutil.which, named))]
    return hash_of([(path, state_of(path)) for path in found])
