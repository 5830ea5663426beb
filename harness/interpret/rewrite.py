"""Kernels rewritten so that Python runs them with the compiler's semantics.

Assigned numbers become tensors (as Triton's own rewriting does), and beyond it: `and`, `or`, `not` and chained
comparisons of tensors are logical operations on their elements, where Python would ask for one truth value, `min` and
`max` choose elementwise, and `range` counts in 32-bit tensors, which wrap, instead of Python integers, which do not.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import reduce
from linecache import getline
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import triton.language as tl
from triton.runtime.interpreter import interpreter_semantic

from lastbit.interpret.decisions import counted, decided, put_places
from lastbit.interpret.watching import Setting

SUBSTITUTES: dict[int, tuple[Any, Any]] = {}
"""id of a function of Triton's language → itself, and its interpreted form for kernels that imported it."""


class AmbiguousTruth(TypeError):
    """A block of several elements was used as one truth value or number, which the compiler rejects."""

    def __init__(self, values: Any) -> None:
        super().__init__(f"a block of shape {values.shape} has no single truth value")
        self.values = values


_uniform = Setting(False)


def uniform_blocks() -> AbstractContextManager[object]:
    """Let blocks whose elements are all equal be conditions and bounds of loops, as scalars are."""
    return _uniform.within(True)


def observed(tensor: Any, read: Callable[[Any], Any]) -> Any:
    """Return the value of a scalar, read by `bool` or `int`; `AmbiguousTruth` for a block of several values."""
    data = tensor.handle.data
    if data.size == 1:
        return interpreter_semantic.builder.observe(tensor.handle, read)
    if _uniform.now and (data == data.flat[0]).all():
        return read(data.flat[0].item())
    raise AmbiguousTruth(data)


class Rewriter(ast.NodeTransformer):
    """Rewrites one kernel's syntax tree; the names it puts in are those of `_HELPERS`."""

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        if len(node.targets) > 1:
            raise ValueError(f"line {node.lineno}: Triton has no chained assignment")
        node.value = ast.copy_location(_call("__lastbit_assigned", node.value), node.value)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        helper = "__lastbit_and" if isinstance(node.op, ast.And) else "__lastbit_or"
        return ast.copy_location(_call(helper, *(_delayed(value) for value in node.values)), node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        return ast.copy_location(_call("__lastbit_not", node.operand), node) if isinstance(node.op, ast.Not) else node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if len(node.ops) == 1:
            return node
        operands = [node.left, *node.comparators]
        links = [_link(operands[i], op, operands[i + 1]) for i, op in enumerate(node.ops)]
        return ast.copy_location(_call("__lastbit_and", *map(_delayed, links)), node)

    def visit_For(self, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.iter, ast.Call) and isinstance(node.iter.func, ast.Name) and node.iter.func.id == "range":
            node.iter.func.id = "__lastbit_range"
        node.iter = ast.copy_location(_call("__lastbit_counted", node.iter), node.iter)
        return node

    def _visit_test(self, node: Any) -> ast.AST:
        self.generic_visit(node)
        node.test = ast.copy_location(_call("__lastbit_truth", node.test), node.test)
        return node  # type: ignore[no-any-return]

    visit_If = visit_IfExp = visit_While = _visit_test


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])


def _delayed(value: ast.expr) -> ast.Lambda:
    return ast.Lambda(ast.arguments([], [], None, [], [], None, []), value)


def _link(left: ast.expr, operation: ast.cmpop, right: ast.expr) -> ast.Compare:
    """Return one comparison of a chain, at its own place in the text."""
    link = ast.copy_location(ast.Compare(left, [operation], [right]), left)
    link.end_lineno, link.end_col_offset = right.end_lineno, right.end_col_offset
    return link


class Meaning(NamedTuple):
    """The value that a name had; `owner.get(name)` gives its current one, or None if it has none."""

    owner: Any
    name: str
    value: Any


class _Computed(NamedTuple):
    """The attributes of a module that computes some."""

    module: ModuleType

    def get(self, name: str) -> Any:
        return getattr(self.module, name, None)


class Namespace(dict[str, Any]):
    """The globals of a rewritten kernel: the live globals of its module, its closure and the helpers.

    Triton's own rewriting copies its helpers into the kernel's module; this one leaves that module alone.
    """

    def __init__(self, function: Callable[..., Any], tree: ast.Module) -> None:
        super().__init__(_HELPERS)
        self.update(inspect.getclosurevars(function).nonlocals)
        self._module = function.__globals__
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
        local = {node.id for node in names if isinstance(node.ctx, ast.Store)}
        local |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        paths = {tuple(path) for node in ast.walk(tree) if (path := _path(node)) and path[0] not in local}
        self._paths = sorted(paths)

    def meanings(self) -> Iterator[Meaning]:
        """Yield the current values of all global names in the kernel, following modules to a value that is none."""
        for path in self._paths:
            owner: Any = self._module
            for name in path:
                yield (meaning := Meaning(owner, name, owner.get(name)))
                if not isinstance(meaning.value, ModuleType):
                    break
                module = meaning.value
                plain = type(module) is ModuleType and "__getattr__" not in vars(module)
                owner = vars(module) if plain else _Computed(module)

    def __missing__(self, name: str) -> Any:
        # Of a function of Triton's language the interpreted form, even if a second copy of its module holds it.
        value = self._module[name] if name in self._module else _BUILTINS[name]
        if id(value) in SUBSTITUTES:
            return SUBSTITUTES[id(value)][1]
        if isinstance(value, FunctionType) and str(value.__module__).startswith("triton.language."):
            return getattr(sys.modules.get(value.__module__), value.__qualname__, value)
        return value


def _path(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (above := _path(node.value)):
        return [*above, node.attr]
    return []


def compile_rewritten(self: Any, tree: ast.Module) -> Any:
    """Compile and execute a rewritten kernel; replaces `FunctionRewriter._compile_and_exec`."""
    # Move the columns of a function that was parsed without its indentation back to where they are in its file.
    definition = getline(self.filename, self.def_file_lineno)
    columns = len(definition) - len(definition.lstrip())
    nodes = {id(node): node for node in ast.walk(tree)} if columns else {}  # a chain has its middle operands twice
    for node in nodes.values():
        if isinstance(node, (ast.stmt, ast.expr, ast.arg, ast.keyword)):
            node.col_offset += columns
            node.end_col_offset = (node.end_col_offset or 0) + columns
    put_places(tree, self.filename, ("__lastbit_truth", "__lastbit_counted"))
    local = Namespace(self.fn, tree)  # defaults are looked up here, names in the body in the other one
    exec(compile(tree, self.filename, "exec"), Namespace(self.fn, tree), local)
    return local[self.fn.__name__]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, tl.tensor)


def _connect(method: str, absorbing: bool, operands: tuple[Callable[[], Any], ...]) -> Any:
    """Join operands of and or or as the compiler does: constants decide at once or drop out, tensors elementwise."""
    joined, value = None, None
    for operand in operands:
        value = operand()
        if not _is_tensor(value):
            if bool(value) is absorbing:
                return value
        else:
            joined = value if joined is None else getattr(joined, method)(value)
    return value if joined is None else joined


def _counting(*bounds: Any, **_: Any) -> Iterator[Any]:
    """Count like `range`, with tensors of the promoted type of its bounds; the compiler's hints are ignored."""
    tensors = [interpreter_semantic.to_tensor(bound) for bound in bounds]
    dtype = tensors[0].dtype
    for tensor in tensors:
        if not tensor.dtype.is_int():
            raise TypeError(f"range counts in integers, not {tensor.dtype}")
        dtype = interpreter_semantic.integer_promote_impl(dtype, tensor.dtype)
    dtype = interpreter_semantic.integer_promote_impl(dtype, tl.int32)
    first, stop, step = (tensors[0], tensors[1], tensors[2:]) if len(tensors) > 1 else (None, tensors[0], ())
    start = observed(first, int) if first is not None else 0
    width = observed(step[0], int) if step else 1
    for i in range(observed(stop, Iterations(start, width))):
        yield tl.tensor(interpreter_semantic.builder.get_number(start + i * width, dtype), dtype)


@dataclass(frozen=True)
class Iterations:
    """The number of iterations of a loop from `start` by `step`, as a function of its end."""

    start: int
    step: int

    def __call__(self, stop: int) -> int:
        return len(range(self.start, stop, self.step))


def counting_with_names(arg1: Any, arg2: Any = None, step: Any = None, **hints: Any) -> Iterator[Any]:
    """Count like `tl.range`, whose arguments may be passed by name."""
    return _counting(*((0, arg1) if arg2 is None else (arg1, arg2)), 1 if step is None else step)


def _truth(value: Any, place: tuple[str, int, int]) -> Any:
    """Return the condition of a branch or loop as a bool; Triton's interpreter takes every larger block for True."""
    truth = observed(value, bool) if _is_tensor(value) else value
    decided(place, int(bool(truth)))
    return truth


def _extreme(name: str, elementwise: str) -> Callable[..., Any]:
    """Return `min` or `max` as the compiler has it: elementwise as soon as one operand is a tensor."""
    builtin = getattr(builtins, name)

    def extreme(*values: Any) -> Any:
        return reduce(getattr(tl, elementwise), values) if any(map(_is_tensor, values)) else builtin(*values)

    return extreme


def print_in_every_program(*values: Any, **options: Any) -> None:
    """Print in every program."""
    interpreter_semantic.builder.give_up()
    print(*values, **options)


_BUILTINS: dict[str, Any] = {
    "print": print_in_every_program,
    "min": _extreme("min", "minimum"),
    "max": _extreme("max", "maximum"),
}

_HELPERS: dict[str, Any] = {
    "__lastbit_assigned": lambda value: interpreter_semantic.to_tensor(value, False),
    "__lastbit_and": lambda *operands: _connect("logical_and", False, operands),
    "__lastbit_or": lambda *operands: _connect("logical_or", True, operands),
    "__lastbit_not": lambda value: value.__not__() if _is_tensor(value) else not value,
    "__lastbit_range": _counting,
    "__lastbit_truth": _truth,
    "__lastbit_counted": counted,
}
