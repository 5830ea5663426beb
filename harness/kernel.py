"""The decorator that makes a function a kernel under test, and the loader of files and folders of such functions.

    from lastbit.kernel import kernel

    @kernel("OP", contract="OPTION")
    def my_kernel(x, weight, *, eps): ...

A kernel is called with the tensors and parameters of a case by name, and only with cases that its signature can take.
It returns its result, or where the op has several a tuple in their order (`lastbit list ops`) or a mapping from their
names. Kernel files are loaded by path and never imported by name, so that two revisions can be loaded side by side, and
that a folder kernels/ is in the way of no package of that name.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import FrameType, MappingProxyType, ModuleType
from typing import Any, TypeVar

from lastbit.bundles import flat
from lastbit.declared import is_names, is_order, place_of
from lastbit.errors import KernelError, LastbitError, UnsupportedCase, UsageError, nearest, unknown
from lastbit.floating_point import kept_floating_point
from lastbit.in_place import Out, checked_outs, returning
from lastbit.refusals import is_refusals, refusing
from lastbit.siblings import siblings
from lastbit.takes import Takes, declared_takes

__all__ = ["Kernel", "Out", "UnsupportedCase", "declarations_of", "kernel", "load_kernels"]

Function = TypeVar("Function", bound=Callable[..., Any])

PLACEMENTS = ("refuses", "moves")

REVISION_MARK = "@"
"""What stands between the name of a kernel and that of the revision that it is of, in a run of several."""

PRIMITIVES = (
    "cos", "divide", "erf", "exp", "exp2", "expm1", "log", "log1p", "log2", "rsqrt", "sigmoid", "sin", "sqrt", "tanh"
)  # fmt: skip
"""What a function of a kernel's own may stand for."""

_ATTRIBUTE = "lastbit_kernels"


@dataclass(frozen=True)
class Kernel:
    """An implementation under test.

    Attributes:
        name: unique within a run.
        op: name of the op that it implements.
        contract: the contract that it claims, options joined by `+`; an axis that is not named takes its default.
        call: the function, as it is called with tensors and parameters by name, and returns its results.
        stages: stages that it can store; with any, its last call in a case gets `stages=` those names and returns a
            mapping that also holds them.
        mutates: inputs that it may overwrite, as an in-place kernel does.
        held: parameter → the result that it holds afterwards; an input that is overwritten, or one for a result alone.
        devices: device types that it runs on; empty for every device.
        depth: height of its summation tree for n terms, where it is known; tightens the bound of its sums.
        order: its dots take their terms from first to last, and after every so many terms one fp32 number holds the sum
            of all of them so far, also where a dot is over two matrices, one after the other; tightens the bound of
            long dots. None for any order, and where such dots are added.
        placement: what it does with a tensor on another device than its first one: `refuses` (a clear error before any
            launch) or `moves` (a copy and a warning, with `lastbit.placement.moved`).
        unordered: results whose bits may differ between two calls, because they are summed by atomic additions: in any
            order, and with subnormal numbers flushed to zero.
        invariant: properties that it promises, such as `rows`: see `lastbit.invariance`. It fails where one is broken.
        source: file and line where it is defined.
        file: the one whose execution declares it, which may be another.
        primitives: functions of its own that stand for a primitive, such as `{"inverse_root": "rsqrt"}` for a Newton
            step: where residues follow the kernel, such a function, a device function of Triton or one of Python in
            the module of the kernel, is taken for it; see docs/residues.md.
        arithmetic: the floating-point settings that executing its file left, if it changed them; restored since.
        refuses: types of errors by which it refuses a call before any launch: see `lastbit.refusals`.
    """

    name: str
    op: str
    contract: str
    call: Callable[..., Any]
    stages: tuple[str, ...] = ()
    mutates: Collection[str] = ()
    devices: tuple[str, ...] = ()
    depth: Callable[[int], int] | None = None
    order: int | None = None
    placement: str = "refuses"
    unordered: tuple[str, ...] = ()
    source: str = ""
    held: Mapping[str, str] = field(default_factory=dict, hash=False)
    invariant: tuple[str, ...] = ()
    arithmetic: str = ""
    takes: Takes = field(default_factory=dict, hash=False)
    primitives: Mapping[str, str] = field(default_factory=dict, hash=False)
    refuses: tuple[type[Exception], ...] = ()
    file: str = ""

    def __post_init__(self) -> None:
        if self.placement not in PLACEMENTS:
            raise unknown(f"placement of kernel {self.name!r}", self.placement, PLACEMENTS)
        for what in ("stages", "mutates", "devices", "unordered", "invariant"):
            if not is_names(given := getattr(self, what)):
                raise UsageError(f"{what}={given!r} of kernel {self.name!r} must be a tuple of names")
        if not is_refusals(self.refuses):
            given, example = self.refuses, "(RuntimeError, AssertionError)"
            raise UsageError(
                f"refuses={given!r} of {self.where} must be a tuple of types of errors, none of them Exception or "
                f"lastbit's, such as refuses={example}"
            )
        call: object = self.call
        if isinstance(call, type) or not callable(call):
            what = "a class" if isinstance(call, type) else f"no function but {call!r}"
            raise UsageError(f"kernel {self.name!r} is {what}; decorate a function, or an object that can be called")
        if self.depth is not None and not callable(self.depth):
            raise UsageError(f"depth={self.depth!r} of kernel {self.name!r} must be a function: terms → height")
        for own, standing in self.primitives.items():
            if standing not in PRIMITIVES:
                raise unknown(f"primitive that {own!r} of kernel {self.name!r} stands for", standing, PRIMITIVES)
        if not is_order(self.order):
            raise UsageError(f"order={self.order!r} of kernel {self.name!r} must be a number of terms, 1 or more")

    @property
    def where(self) -> str:
        """Name and place of the kernel, for messages about its declaration."""
        return f"kernel {self.name!r} ({self.source})" if self.source else f"kernel {self.name!r}"

    @cached_property
    def accepts(self) -> frozenset[str]:
        """Names of the tensors and parameters that the function takes."""
        parameters = inspect.signature(self.call).parameters.values()
        return frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)) - {"stages"}

    @cached_property
    def requires(self) -> frozenset[str]:
        """Names without which the function cannot be called."""
        parameters = inspect.signature(self.call).parameters.values()
        return frozenset(p.name for p in parameters if p.default is p.empty and p.name in self.accepts)


@dataclass(frozen=True)
class Declaration:
    """A kernel, and the module in whose execution it was declared: its name and its file."""

    kernel: Kernel
    module: str
    file: Path


_declared: list[Declaration] | None = None


def kernel(
    op: str = "",
    *,
    contract: str = "",
    name: str | None = None,
    stages: tuple[str, ...] = (),
    mutates: tuple[str, ...] | Mapping[str, str] = (),
    out: Mapping[str, str | Out] = MappingProxyType({}),
    devices: tuple[str, ...] = (),
    depth: Callable[[int], int] | None = None,
    order: int | None = None,
    placement: str = "refuses",
    unordered: tuple[str, ...] = (),
    invariant: tuple[str, ...] = (),
    takes: str | tuple[str, ...] | Mapping[str, Any] = (),
    primitives: Mapping[str, str] = MappingProxyType({}),
    refuses: tuple[type[Exception], ...] = (),
) -> Callable[[Function], Function]:
    """Declare a function to be a kernel for `op` that keeps `contract`; see `Kernel` for the other arguments.

    The function itself is returned, so that the file can also be used as an ordinary module. A parameter of it may be
    a dataclass of tensors, which stands for its fields: see `lastbit.bundles`. `mutates` may map inputs to the results
    that they hold after the call, and `out` maps parameters to the results that they receive: see `lastbit.in_place`.
    `takes` says what it takes in words or a mapping, `refuses` by which errors it refuses the rest before any launch:
    see `lastbit.takes` and `lastbit.refusals`.

    Raises:
        UsageError: no op is named, as by `@kernel` without parentheses, or what is decorated cannot be called, or its
            parameters are not what is declared of them.
    """
    named: object = op
    if callable(named):
        raise _without_op(named)

    def register(function: Function) -> Function:
        if not isinstance(named, str) or not named:
            raise _without_op(function)
        own, source = name or _name_of(function), place_of(function)
        made = Kernel(own, op, contract, function, stages, mutates, devices, depth, order, placement, unordered, source)
        made = replace(made, invariant=invariant, takes=declared_takes(takes, made.where), primitives=dict(primitives))
        made = replace(made, refuses=refuses)
        overwritten = mutates if isinstance(mutates, Mapping) else {}
        if not is_names(overwritten.values()):
            example = "{'x': 'output'}, or to ''"
            raise UsageError(f"mutates={overwritten!r} of {made.where} must map inputs to results, such as {example}")
        # Whatever way it is written, it is called with tensors by name, and returns every result.
        call = flat(refusing(made.call, made.refuses), made.where, error=UsageError)
        outs = checked_outs(call, made.where, out, overwritten)
        held = {name: result for name, result in overwritten.items() if result} | {n: o.result for n, o in outs.items()}
        made = replace(made, call=returning(call, overwritten, outs), mutates=tuple(made.mutates), held=held)
        with suppress(AttributeError, TypeError):  # objects that take no attribute
            setattr(function, _ATTRIBUTE, (*declarations_of(function), made))
        if _declared is not None:
            # Of the innermost module that is being executed; code from a string is of the file that runs it.
            frame: FrameType | None = sys._getframe()
            while frame is not None and (
                frame.f_code.co_name != "<module>" or frame.f_code.co_filename.startswith("<")
            ):
                frame = frame.f_back
            name_of, file = (
                ("", "") if frame is None else (frame.f_globals.get("__name__", ""), frame.f_code.co_filename)
            )
            _declared.append(Declaration(made, str(name_of), Path(file)))
        return function

    return register


def declarations_of(function: object) -> tuple[Kernel, ...]:
    """Return the kernels that a function was declared to be with `@kernel`, the innermost first."""
    found: tuple[Kernel, ...] = getattr(function, _ATTRIBUTE, ())
    return found


def _name_of(function: object) -> str:
    """Return a function's name; a partial one has that of what it calls, an object that of its class."""
    plain = getattr(function, "func", function)
    return str(getattr(plain, "__name__", type(plain).__name__))


def _without_op(function: Any) -> UsageError:
    place = f"{_name_of(function)!r} ({place_of(function)})" if callable(function) else repr(function)
    return UsageError(f'@kernel needs the op: write @kernel("OP", contract=…) above {place}')


def load_kernels(path: Path) -> tuple[Kernel, ...]:
    """Return all kernels that a Python file declares, or those of a folder, in order of file name.

    A file can import its siblings by name; they are private to this load of the folder. A kernel is of the file whose
    execution declares it: those of files elsewhere, which a file imports, are not of this file or folder.

    Raises:
        UsageError: the path does not exist or declares no kernel, two kernels share a name, or one holds an @.
        KernelError: a file raises while it is loaded.
    """
    check_path(path)
    return tuple(one.kernel for one in loaded_kernels(path))


def check_path(path: Path) -> None:
    """Raise `UsageError`, with the nearest path that exists, unless one is a Python file or a folder of some."""
    if path.is_file():
        if path.suffix != ".py":
            raise UsageError(f"{str(path)!r} is no Python file; kernels are in a file NAME.py, or a folder of these")
    elif path.is_dir():
        if not any(path.glob("*.py")):
            below = sorted({str(file.parent) for file in path.glob("*/*.py")})
            named = f"; name one of {', '.join(below)}" if below else ""
            why = f"it has no Python file, and folders in it are not searched{named}"
            raise UsageError(f"no file of {str(path)!r} declares a kernel: {why}")
    else:
        parent = next((folder for folder in path.parents if folder.is_dir()), Path())
        there = (str(one) for one in parent.iterdir() if one.is_dir() or one.suffix == ".py")
        raise UsageError(f"kernel file or folder {str(path)!r} does not exist{nearest(path, there)}")


def loaded_kernels(path: Path) -> tuple[Declaration, ...]:
    """Return the kernels of a folder, or those of a file alone, each with the file that declares it."""
    folder, files = (path, sorted(path.glob("*.py"))) if path.is_dir() else (path.parent, [path])
    left: dict[Path, str] = {}
    with _collect() as declared, siblings(folder):
        for file in files:
            known = getattr(sys.modules.get(file.stem), "__file__", None)
            if known is None or Path(known).resolve() != file.resolve():  # no other file of the folder has imported it
                module, left[file.resolve()] = load_kernel_file(file)
                sys.modules.setdefault(file.stem, module)
    found, modules = list[Declaration](), dict[Path, str]()
    for one in declared:  # of a file that was executed under two names, those of the first
        if one.file.parent.resolve() != folder.resolve() or modules.setdefault(one.file, one.module) != one.module:
            continue
        if path.is_dir() or one.file.resolve() == path.resolve():
            own = replace(one.kernel, arithmetic=left.get(one.file.resolve(), ""), file=str(one.file))
            found.append(replace(one, kernel=own))
    if not found:
        where = f"no file of {str(path)!r} declares a" if path.is_dir() else f"{str(path)!r} declares no"
        raise UsageError(f"{where} kernel; decorate a function with @kernel(op)")
    names = [one.kernel.name for one in found]
    for name in names:
        if REVISION_MARK in name:
            raise UsageError(
                f"kernel name {name!r} holds {REVISION_MARK!r}, after which the name of a revision follows"
            )
        if not name or not name.isprintable():
            raise UsageError(f"kernel name {name!r} must consist of characters that can be printed")
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise UsageError(f"kernel names must be unique; declared twice in {str(path)!r}: {', '.join(twice)}")
    return tuple(found)


@contextmanager
def _collect() -> Iterator[list[Declaration]]:
    global _declared
    outer, _declared = _declared, []
    try:
        yield _declared
    finally:
        _declared = outer


def load_kernel_file(path: Path) -> tuple[ModuleType, str]:
    """Execute a file as `load_file` does; return its module, and the floating-point settings that it left, if changed.

    They are restored: a library that was linked with -ffast-math makes all arithmetic after it flush to zero.
    """
    with kept_floating_point() as left:
        module = load_file(path)
    return module, "".join(left)


def load_file(path: Path) -> ModuleType:
    """Execute a Python file as a module of its own, whatever its name, and return it.

    Raises:
        KernelError: the file raises; the message names it.
    """
    unique = f"lastbit_{path.parent.name}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}.{path.stem}"
    spec = importlib.util.spec_from_file_location(unique, path)
    if spec is None or spec.loader is None:
        raise KernelError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module  # dataclasses and pickle look a class's module up by name
    try:
        spec.loader.exec_module(module)
    except LastbitError:
        raise
    except (Exception, SystemExit) as error:
        raise KernelError(f"{path} raised {type(error).__name__} while it was loaded: {error}") from error
    return module
