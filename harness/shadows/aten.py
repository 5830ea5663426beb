"""Follow an unmodified PyTorch function on residues, operation by operation, automatic differentiation included."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from lastbit.numerics.formats import format_of
from lastbit.numerics.residues import Residues, constant, is_recognised
from lastbit.numerics.residues.numbers import MINUS_INFINITY
from lastbit.shadows.aten_rules import COMPLEX, EXACT, MOVES, RULES, is_fixed_point
from lastbit.shadows.shadow_memory import ShadowMemory

_HARNESS = Path(__file__).parents[1]
_TORCH = Path(torch.__file__).parent
_OF_FORM = {"set_", "resize_", "squeeze_", "unsqueeze_", "t_", "transpose_", "swapaxes_", "as_strided_", "detach_"}
_DRAWN = {"normal_", "uniform_", "bernoulli_", "exponential_", "random_", "log_normal_", "geometric_", "cauchy_"}

ONCE_ON_CUDA = frozenset(
    {"_log_softmax", "_log_softmax_backward_data", "_softmax", "nll_loss_backward", "nll_loss_forward"}
)
"""Operations that the CPU rounds in between, and CUDA only where the result is stored (SoftMax.cu, Loss.cu of ATen)."""

_DOUBT = 2.0**-20
"""How far, relatively, values of fp32 may be from the numbers: beside a power of two, exponents are then in doubt."""


class Opaque(NamedTuple):
    """An operation through which residues could not be followed, its place in the kernel's text, and the reason."""

    operation: str
    place: str
    reason: str

    def __str__(self) -> str:
        return f"{self.operation} at {self.place}: {self.reason}"


class UncompiledMode(TorchDispatchMode):
    """Dispatch mode of torch that does not import the compiler, which takes seconds; nothing is compiled within."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def decomposed(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a composite operation by its parts, as it arrives in inference mode; `NotImplemented` for others."""
        if func.namespace != "aten" or func.overloadpacket.__name__ in RULES:
            return NotImplemented
        with self:
            return func.decompose(*args, **kwargs)


class Following(UncompiledMode):
    """Keep the residues of every floating-point tensor that PyTorch's operations write while this is entered.

    Operations without a rule leave the residues of their values, OPEN, and are noted in `opaque`, once for each place.

    >>> memory, x = ShadowMemory(), torch.tensor([0.1, 0.7, 3.0])
    >>> with Following(memory) as following:
    ...     a, b, c = x * x - 1, (x + 1) * (x - 1), x * x + 1
    >>> memory.read(a).equal(memory.read(b)), memory.read(a).equal(memory.read(c)), following.opaque
    (tensor([True, True, True]), tensor([False, False, False]), [])
    """

    def __init__(
        self, memory: ShadowMemory, device_type: str = "cpu", may_compute: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory, self.device_type, self._may_compute = memory, device_type, may_compute
        self._noted: dict[Opaque, None] = {}
        self._bits: dict[int, int | None] = {}  # storage seen as integers → low bits that were cleared; None: moved
        self._constants: set[float] = set()
        self._overflown = False
        self._items: dict[float, Residues] = {}  # numbers that Python read from tensors

    @property
    def opaque(self) -> list[Opaque]:
        """The operations that could not be followed, in order."""
        return list(self._noted)

    def of(self, x: object) -> Residues:
        """Return the residues of an operand; a number written as a constant has those of what it stands for."""
        if isinstance(x, Tensor):
            if x.is_floating_point():
                return self.memory.read(x)
            if _base(x) not in self._bits:
                return Residues.of(x)
            self._note("view", "the bits of numbers are taken as integers")
            return Residues.of(x).opened
        if isinstance(x, (bool, int)):
            return Residues.of(torch.tensor(int(x)))
        if not isinstance(x, float):
            raise NotImplementedError(f"{type(x).__name__} as a number")
        if (found := self._items.get(x)) is not None:
            return found
        # Python may have made any number of what it read from a tensor.
        return constant(x).opened if self._items else constant(x)

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if (out := self.decomposed(func, args, kwargs)) is not NotImplemented:
            return out
        if name.startswith("_foreach_"):
            single = getattr(torch.ops.aten, name.removeprefix("_foreach_"))
            with self:
                found = [
                    single(*(x[k] if isinstance(x, (list, tuple)) else x for x in args), **kwargs)
                    for k in range(len(args[0]))
                ]
            return None if name.endswith("_") else found
        if func._schema.is_mutable:
            self._may_compute()
            return self._written(func, args, kwargs)
        out = self._computed(func, args, kwargs)
        given = tensors_in((args, kwargs))
        places = {_base(x) for x in tensors_in(out)} - {0}
        if any(_base(x) in places for x in given):
            self._seen_anew(func, out, given)
            return out
        self._may_compute()
        if name == "_local_scalar_dense" and isinstance(out, float) and out not in self._constants:
            self._items[out] = self.of(given[0]).moved(lambda n: n.reshape(4))
        results = tensors_in(out)
        if any((x.is_floating_point() or x.is_complex()) and x.numel() for x in results):
            for x, residues in zip(results, self._residues(func, name, args, kwargs, out, results), strict=True):
                if residues is not None and x.numel():
                    self.memory.write(torch.view_as_real(x) if x.is_complex() else x, residues)
        elif name == "_to_copy" and given and self._are_digits(given[0]):
            self._bits[_base(results[0])] = 0
        elif any(_base(x) in self._bits for x in given):
            self._integers(func, name, args, kwargs, results)
        return out

    def _are_digits(self, x: Tensor) -> bool:
        """Return whether floats are cut into digits of fixed-point numbers when they are converted to integers."""
        return x.is_floating_point() and bool(is_fixed_point(x, self.memory.read(x)).any())

    def _computed(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Compute an operation; where CUDA rounds only on storing, in fp32 with one rounding at the end."""
        narrow = next((x.dtype for x in tensors_in((args, kwargs)) if _is_narrow([x])), None)
        if narrow is None or self.device_type != "cuda" or func.overloadpacket.__name__ not in ONCE_ON_CUDA:
            return func(*args, **kwargs)
        wide = func(*_wide(args), **_wide(kwargs))
        return tree_map(lambda x: x.to(narrow) if isinstance(x, Tensor) else x, wide)

    # Results that are new

    def _residues(
        self,
        func: OpOverload,
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        out: Any,
        results: Sequence[Tensor],
    ) -> Iterator[Residues | None]:
        """Yield the residues of all results, None for integers."""
        if name in COMPLEX and results[0].is_complex():
            with self:
                yield self.of(COMPLEX[name](*args, **kwargs))
            return
        if any(x.is_complex() for x in results) or func.namespace not in ("aten", "prims"):
            yield from self._unfollowed(func, results, "no rule for it")
            return
        if name in EXACT:
            exact = [Residues.of(x) if x.is_floating_point() else None for x in results]
            yield from (own.opened if own is not None and "empty" in name else own for own in exact)
            return
        try:
            if name in MOVES:
                yield self._moved(func, args, kwargs)
                return
            rule = RULES.get(name)
            found = self._taken_apart(func, args, kwargs) if rule is None else rule(self, out, *args, **kwargs)
            found = [found] if isinstance(found, (Residues, Tensor)) else list(found)
            wide = (
                tensors_in(func(*_wide(args), **_wide(kwargs)))
                if _is_narrow(results) and name != "_to_copy"
                else results
            )
            if name == "_to_copy":
                wide = [torch.as_tensor(args[0])]  # under vmap, it makes tensors of numbers
        except NotImplementedError as why:
            yield from self._unfollowed(func, results, str(why))
            return
        for x, own, values in zip(results, found, wide, strict=True):
            if own is None or not x.is_floating_point():
                yield None
                continue
            rounded = self._rounded(x, self.of(own), own) if isinstance(own, Tensor) else self._rounded(x, own, values)
            if x.dtype.itemsize < 4 and _is_compiled():
                self._note("torch.compile", "the compiler may leave out roundings that the source has")
                rounded = rounded.opened
            yield rounded

    def _rounded(self, x: Tensor, residues: Residues, values: Tensor) -> Residues:
        """Return the residues of a result as its dtype stores them; `values` are those before they were rounded."""
        wide, values = (y.float() if y.dtype.itemsize == 1 else y for y in (x, values))  # fp8 has few operations
        if x.dtype.itemsize < 4:
            ends = values * (1 - _DOUBT), values * (1 + _DOUBT)
            residues = residues.rounded(format_of(x.dtype), values, ends)
        seen, below = residues.seen(wide), torch.isneginf(wide)
        if not bool(below.any()):
            return seen
        # The logarithm of 0 is -inf, and what follows from -inf, but not what overflows, nor what may follow from that.
        self._overflown |= bool((below & ~residues.open & (residues.numbers[2] != 0)).any())
        flags = seen.flags & ~MINUS_INFINITY if self._overflown else seen.flags
        return Residues(torch.stack([*seen.numbers[:3], flags]))

    def give(self, x: Tensor, residues: Residues) -> None:
        """Let a tensor have residues, rounded as its dtype stores them."""
        self.memory.write(x, self._rounded(x, residues, x))

    def _taken_apart(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """Compute an operation by PyTorch's decomposition, in fp32 or fp64, and return the results."""
        if (parts := decomposition_table.get(func)) is None:
            raise NotImplementedError("no rule for it")
        return tensors_in(self.apart(lambda: parts(*_wide(args), **_wide(kwargs))))

    def apart(self, parts: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function with its operations followed, and return its result."""
        with self:
            return parts(*args, **kwargs)

    def _moved(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Residues:
        """Move residues by the operation that moves their elements."""
        whole = {id(x): self.memory.read(_floats(x)) for x in tensors_in((args, kwargs)) if self._is_shadowed(x)}

        def plane(k: int) -> Tensor:
            off = int(k == 2)  # so that what is filled with zeros has no exponential, -1

            def own(x: object) -> object:
                if isinstance(x, float):
                    return int(self.of(x).numbers[k]) + off
                return whole[id(x)].numbers[k] + off if isinstance(x, Tensor) and id(x) in whole else x

            return torch.sub(func(*tree_map(own, args), **kwargs), off)

        if not whole:
            raise NotImplementedError("it mixes integers and numbers")
        return Residues(torch.stack([plane(k) for k in range(4)]))

    def _is_shadowed(self, x: Tensor) -> bool:
        return x.is_floating_point() or _base(x) in self._bits

    def _unfollowed(self, func: OpOverload, results: Sequence[Tensor], reason: str) -> list[Residues | None]:
        """Note an operation without a rule, and return the residues of its results' values, OPEN."""
        results = [torch.view_as_real(x) if x.is_complex() else x for x in results]
        self._note(str(func), reason)
        return [Residues.of(x).opened if x.is_floating_point() else None for x in results]

    def unseen(self) -> None:
        """Note a tensor whose values come from elsewhere."""
        self._note("tensor", "its values come from elsewhere: from NumPy, another thread or a call before")

    def _note(self, operation: str, reason: str) -> None:
        self._noted[Opaque(operation, place_of_kernel(), reason)] = None

    # What is written in place, and what is only seen in another way

    def _written(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation that writes to its arguments as a function without effects, and copy its results there."""
        name = func.overloadpacket.__name__
        names = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        bound = {a.name: x for a, x in zip(func._schema.arguments, args, strict=False)}
        bound |= kwargs
        targets = [x for x in tensors_in([bound.get(name) for name in names]) if x.numel()]
        if name in _OF_FORM:
            return func(*args, **kwargs)
        if name == "copy_":
            return self._copied(func, args[0], args[1], kwargs)
        plain = None  # the operation without effects whose result this one stores
        if name not in _DRAWN and func.namespace == "aten":
            stored = any(a.is_out for a in func._schema.arguments)
            named = getattr(torch.ops.aten, name.rstrip("_"), None) if name.endswith("_") else None
            plain = func.overloadpacket if stored else named
        if plain is None or not all(isinstance(bound[name], Tensor) for name in names):
            out = func(*args, **kwargs)
            if name not in _DRAWN:
                self._note(str(func), "no rule for writing in place")
            for x in targets:
                if x.is_floating_point():
                    self.memory.write(x, Residues.of(x) if name in _DRAWN else Residues.of(x).opened)
            return out
        written = [bound[name] for name in names]
        others = {a.name: kwargs[a.name] for a in func._schema.arguments if a.name in kwargs and not a.is_out}
        with self:
            for target, result in zip(written, tensors_in(plain(*args, **others)), strict=True):
                if target.shape != result.shape:
                    target.resize_(result.shape)
                target.copy_(result)
        return written[0] if len(written) == 1 else tuple(written)

    def _copied(self, func: OpOverload, target: Tensor, source: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
        residues, values = self.memory.read(_floats(source)) if self._is_shadowed(source) else None, source.clone()
        func(target, source, **kwargs)
        if target.is_floating_point() and target.numel():
            self.memory.write(target, self._rounded(target, self.of(values) if residues is None else residues, values))
        elif not source.is_floating_point() and (residues is not None or self._is_shadowed(target)):
            self._bits.setdefault(_base(target), self._bits.get(_base(source), 0))
            self.memory.write(_floats(target), self.of(values).opened if residues is None else residues)
        elif source.is_floating_point() and self._are_digits(source):
            self._bits.setdefault(_base(target), 0)
        return target

    def _seen_anew(self, func: OpOverload, out: Any, given: Sequence[Tensor]) -> None:
        """Record constants, such as a codebook of four bits with 16 numbers, and views of bits under another dtype."""
        if func.overloadpacket.__name__ == "lift_fresh" and out.is_floating_point() and 0 < out.numel() <= 16:
            written = out.double().flatten().tolist()
            self._constants.update(written)
            numbers = torch.stack([constant(x).numbers for x in written], -1).reshape(4, *out.shape)
            # A kernel may have read them from tensors, where they stand for nothing.
            known = Residues(numbers).open_where(torch.tensor(not all(map(is_recognised, written))))
            self.memory.write(out, known)
        if not isinstance(out, Tensor) or not given or out.dtype == given[0].dtype or out.is_complex():
            return
        source, base = given[0], _base(out)
        if source.is_floating_point():
            self.memory.register(source)
            self._bits.setdefault(base, None)
            if out.is_floating_point():
                self._note(str(func), "the bits of numbers are seen as those of another dtype")
                self.memory.write(out, Residues.of(out).opened)
        elif out.is_floating_point() and (cleared := self._bits.get(base)) is not None:
            # Powers of two by their exponents alone are exact numbers, as integers are.
            own = Residues.of(out)
            if cleared < format_of(out.dtype).precision - 1 and bool(self.memory.read(out).open.any()):
                self._note(str(func), "the bits of numbers were computed with")
                own = own.opened
            self.memory.write(out, own)

    def _integers(
        self, func: OpOverload, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], results: Sequence[Tensor]
    ) -> None:
        """Follow integers that are bits of floats: operations that only move them move their residues."""
        for x in results:
            if x.dtype != torch.bool and x.numel():
                own = self._moved(func, args, kwargs) if name in MOVES else Residues.of(x).opened
                self._bits[_base(x)] = None if name in MOVES else self._cleared(name, args)
                self.memory.write(_floats(x), own)

    def _cleared(self, name: str, args: tuple[Any, ...]) -> int:
        """Return the number of low bits that an operation on integers has cleared."""
        given, number = args[0], args[1] if len(args) > 1 else None
        if isinstance(number, Tensor) and number.numel() == 1:
            number = int(number)
        if not isinstance(number, int) or not number:
            return 0
        if name in ("bitwise_and", "__and__"):
            return (number & -number).bit_length() - 1
        before = self._bits.get(_base(given)) or 0
        return before + number if name in ("bitwise_left_shift", "__lshift__") else 0


def as_written() -> AbstractContextManager[object]:
    """Return a context in which functions that `torch.compile` would compile run as they are written.

    A kernel that needs the compiler has imported it when it was called before; importing it takes seconds.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def place_of_kernel() -> str:
    """Return the place, as `file.py:12`, of the innermost call outside of PyTorch and this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_absolute() and not file.is_relative_to(_TORCH) and not file.is_relative_to(_HARNESS):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _is_compiled() -> bool:
    """Return whether the call comes from a function that torch would compile."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "compile_wrapper":
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.endswith("eval_frame.py")


def tensors_in(tree: object) -> list[Tensor]:
    """Return the tensors among arguments or results, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return []
    return [x for each in tree for x in tensors_in(each)]


def _floats(x: Tensor) -> Tensor:
    """View a tensor of integers as floats of its width, which have residues in memory."""
    if x.is_floating_point():
        return x
    return x.view({1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[x.itemsize])


def _base(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _is_narrow(results: Sequence[Tensor]) -> bool:
    return any(x.is_floating_point() and x.dtype.itemsize < 4 for x in results)


def _wide(tree: Any) -> Any:
    """Replace narrower floating-point formats in arguments by fp32."""

    def own(x: object) -> object:
        if isinstance(x, Tensor):
            return x.float() if _is_narrow([x]) else x
        return torch.float32 if isinstance(x, torch.dtype) and x.is_floating_point and x.itemsize < 4 else x

    return tree_map(own, tree)
