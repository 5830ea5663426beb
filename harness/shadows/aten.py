"""Follow an unmodified PyTorch function on residues, operation by operation, automatic differentiation included."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lastbit.numerics.formats import format_of
from lastbit.numerics.residues import Residues, constant
from lastbit.shadows.aten_rules import EXACT, MOVES, RULES
from lastbit.shadows.memory import ShadowMemory

_HARNESS = Path(__file__).parents[1]
_TORCH = Path(torch.__file__).parent
_OF_FORM = {"set_", "resize_", "squeeze_", "unsqueeze_", "t_", "transpose_", "swapaxes_", "as_strided_", "detach_"}
_DRAWN = {"normal_", "uniform_", "bernoulli_", "exponential_", "random_", "log_normal_", "geometric_", "cauchy_"}


class Opaque(NamedTuple):
    """An operation that residues could not be followed through, where the kernel's text has it, and the reason."""

    operation: str
    place: str
    reason: str

    def __str__(self) -> str:
        return f"{self.operation} at {self.place}: {self.reason}"


class Following(TorchDispatchMode):
    """Keep the residues of every floating-point tensor that PyTorch's operations write while this is entered.

    Operations without a rule leave the residues of their values, OPEN, and are noted in `opaque`, once for each place.

    >>> memory, x = ShadowMemory(), torch.tensor([0.1, 0.7, 3.0])
    >>> with Following(memory) as following:
    ...     a, b, c = x * x - 1, (x + 1) * (x - 1), x * x + 1
    >>> memory.read(a).equal(memory.read(b)), memory.read(a).equal(memory.read(c)), following.opaque
    (tensor([True, True, True]), tensor([False, False, False]), [])
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # which imports the compiler, for seconds

    def __init__(self, memory: ShadowMemory) -> None:
        super().__init__()
        self.memory = memory
        self._noted: dict[Opaque, None] = {}
        self._bits: dict[int, bool] = {}  # storage seen as integers → whether these were computed with
        self._constants: set[float] = set()
        self._items: dict[float, Residues] = {}  # numbers that Python read from tensors

    @property
    def opaque(self) -> list[Opaque]:
        """What could not be followed, in order."""
        return list(self._noted)

    def of(self, x: object) -> Residues:
        """Return the residues of an operand: those of a number that was written down are what it stands for."""
        if isinstance(x, Tensor):
            if x.is_floating_point():
                return self.memory.read(x)
            return _opened(Residues.of(x)) if _base(x) in self._bits else Residues.of(x)
        if isinstance(x, (bool, int)):
            return Residues.of(torch.tensor(int(x)))
        if not isinstance(x, float):
            raise NotImplementedError(f"{type(x).__name__} as a number")
        if (found := self._items.get(x)) is not None:
            return found
        # Python may have made any number of what it read from a tensor.
        return _opened(constant(x)) if self._items and not x.is_integer() else constant(x)

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if func.namespace == "aten" and name not in RULES:
            with self:  # composite operations arrive as such in inference mode
                if (out := func.decompose(*args, **kwargs)) is not NotImplemented:
                    return out
        if func._schema.is_mutable:
            return self._written(func, args, dict(kwargs))
        out = func(*args, **kwargs)
        given = _tensors((args, kwargs))
        if any(_shares(out, x) for x in given):
            self._seen_anew(func, out, given)
            return out
        if name == "_local_scalar_dense" and isinstance(out, float) and out not in self._constants:
            self._items[out] = self.of(given[0]).moved(lambda n: n.reshape(4))
        results = _tensors(out)
        if any((x.is_floating_point() or x.is_complex()) and x.numel() for x in results):
            for x, residues in zip(results, self._residues(func, name, args, kwargs, out, results), strict=True):
                if residues is not None and x.numel():
                    self.memory.write(x, residues)
        elif any(_base(x) in self._bits for x in given):
            self._integers(func, name, args, kwargs, results)
        return out

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
        if any(x.is_complex() for x in results) or func.namespace not in ("aten", "prims"):
            yield from self._unfollowed(func, results, "no rule for it")
            return
        if name in EXACT:
            yield from (Residues.of(x) if x.is_floating_point() else None for x in results)
            return
        try:
            if name in MOVES:
                yield self._moved(func, args, kwargs)
                return
            rule = RULES.get(name)
            found = self._taken_apart(func, args, kwargs) if rule is None else rule(self, out, *args, **kwargs)
            found = [found] if isinstance(found, (Residues, Tensor)) else list(found)
            wide = (
                _tensors(func(*_wide(args), **_wide(kwargs))) if _is_narrow(results) and name != "_to_copy" else results
            )
            if name == "_to_copy":
                wide = [args[0]]
        except NotImplementedError as why:
            yield from self._unfollowed(func, results, str(why))
            return
        for x, own, values in zip(results, found, wide, strict=True):
            yield _stored(x, self.of(own), own) if isinstance(own, Tensor) else _stored(x, own, values)

    def _taken_apart(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """Return the results of an operation by PyTorch's decomposition, in fp32 or fp64."""
        if (parts := decomposition_table.get(func)) is None:
            raise NotImplementedError("no rule for it")
        return _tensors(self.apart(parts, *_wide(args), **_wide(kwargs)))

    def apart(self, parts: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what a function returns, the operations of which are followed."""
        with self:
            return parts(*args, **kwargs)

    def _moved(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Residues:
        """Let an operation that only moves elements move their residues."""
        whole = {id(x): self.memory.read(_floats(x)) for x in _tensors((args, kwargs)) if self._is_shadowed(x)}
        numbers = [self.of(x).numbers for x in args if isinstance(x, float)]

        def plane(k: int) -> Tensor:
            left = iter(numbers)

            def own(x: object) -> object:
                if isinstance(x, Tensor):
                    return whole[id(x)].numbers[k] if id(x) in whole else x
                return int(next(left)[k]) if isinstance(x, float) else x

            return func(*tree_map(own, args), **kwargs)

        if not whole:
            raise NotImplementedError("it mixes integers and numbers")
        return Residues(torch.stack([plane(k) for k in range(4)]))

    def _is_shadowed(self, x: Tensor) -> bool:
        return x.is_floating_point() or _base(x) in self._bits

    def _unfollowed(self, func: OpOverload, results: Sequence[Tensor], reason: str) -> list[Residues | None]:
        """Note an operation, and return the residues of its values, OPEN."""
        self._noted[Opaque(str(func), place_of_kernel(), reason)] = None
        return [_opened(Residues.of(x)) if x.is_floating_point() else None for x in results]

    # What is written in place, and what is only seen in another way

    def _written(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that writes to its arguments: a function of them, the result of which is copied to one."""
        name = func.overloadpacket.__name__
        names = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        bound = {a.name: x for a, x in zip(func._schema.arguments, args, strict=False)} | kwargs
        targets = [x for x in _tensors([bound.get(name) for name in names]) if x.numel()]
        if name in _OF_FORM:
            return func(*args, **kwargs)
        if name == "copy_":
            return self._copied(func, args[0], args[1], kwargs)
        plain = None if name in _DRAWN or func.namespace != "aten" else _without_writing(func)
        if plain is None or len(names) != 1 or not isinstance(bound[names[0]], Tensor):
            out = func(*args, **kwargs)
            opened = [Residues.of(x) if x.is_floating_point() else None for x in targets]
            opened = opened if name in _DRAWN else self._unfollowed(func, targets, "no rule for writing in place")
            for x, residues in zip(targets, opened, strict=True):
                if residues is not None:
                    self.memory.write(x, residues)
            return out
        target = bound[names[0]]
        if names[0] in kwargs:  # out=
            kwargs.pop(names[0])
        with self:
            result = plain(*args, **kwargs)
            if target.shape != result.shape:
                target.resize_(result.shape)
            target.copy_(result)
        return target

    def _copied(self, func: OpOverload, target: Tensor, source: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
        if not self._is_shadowed(target) and not (self._is_shadowed(source) and not source.is_floating_point()):
            return func(target, source, **kwargs)
        residues, values = self.of(source), source.clone()
        func(target, source, **kwargs)
        if not target.is_floating_point():
            self._bits.setdefault(_base(target), False)
            residues = self.memory.read(_floats(source)) if self._is_shadowed(source) else _opened(residues)
            self.memory.write(_floats(target), residues)
        elif target.numel() and (rounded := _stored(target, residues, values)):
            self.memory.write(target, rounded)
        return target

    def _seen_anew(self, func: OpOverload, out: Any, given: Sequence[Tensor]) -> None:
        """Take note of constants, and of bits that are seen as those of another dtype."""
        if func.overloadpacket.__name__ == "lift_fresh" and out.is_floating_point() and 0 < out.numel() <= 16:
            written = out.double().flatten().tolist()
            self._constants.update(written)
            numbers = [constant(x) for x in written]
            self.memory.write(out, Residues(torch.stack([n.numbers for n in numbers], -1).reshape(4, *out.shape)))
        if not isinstance(out, Tensor) or not given or out.dtype == given[0].dtype or out.is_complex():
            return
        source, base = given[0], _base(out)
        if source.is_floating_point():
            self.memory.register(source)
            self._bits.setdefault(base, False)
            if out.is_floating_point():
                [opened] = self._unfollowed(func, [out], "the bits of numbers are seen as those of another dtype")
                self.memory.write(out, opened)
        elif out.is_floating_point() and self._bits.get(base) and bool(self.memory.read(out).open.any()):
            # Powers of two by their bits are exact numbers, as integers are.
            own = Residues.of(out)
            if not bool(((torch.frexp(out.double()).mantissa.abs() == 0.5) | (out == 0) | ~torch.isfinite(out)).all()):
                self._unfollowed(func, [], "the bits of numbers were computed with")
                own = _opened(own)
            self.memory.write(out, own)

    def _integers(
        self, func: OpOverload, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], results: Sequence[Tensor]
    ) -> None:
        """Follow integers that are bits of numbers: where they are only moved, their residues are."""
        for x in results:
            if x.dtype == torch.bool:
                continue
            own = self._moved(func, args, kwargs) if name in MOVES | {"clone"} else None
            self._bits[_base(x)] = own is None
            self.memory.write(_floats(x), _opened(Residues.of(x)) if own is None else own)


def place_of_kernel() -> str:
    """Return the file and line that the innermost call outside PyTorch and this package stands in, `file.py:12`."""
    frame = sys._getframe(1)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_absolute() and not file.is_relative_to(_TORCH) and not file.is_relative_to(_HARNESS):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def _stored(x: Tensor, residues: Residues | None, values: Tensor) -> Residues | None:
    """Return the residues of a result as its dtype stores them, None for integers; `values` are not rounded yet."""
    if residues is None or not x.is_floating_point():
        return None
    if x.dtype.itemsize == 1:  # operations on these are few
        x, values, fmt = x.float(), values.float(), format_of(x.dtype)
    elif x.dtype.itemsize == 2:
        fmt = format_of(x.dtype)
    else:
        return residues.seen(x)
    return residues.rounded(fmt, values).seen(x)


def _opened(residues: Residues) -> Residues:
    return residues.open_where(torch.ones((), dtype=torch.bool))


def _tensors(tree: object) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _floats(x: Tensor) -> Tensor:
    """Return a tensor as one of floats, which are what its memory has residues of."""
    if x.is_floating_point():
        return x
    return x.view({1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[x.itemsize])


def _base(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _shares(out: object, x: Tensor) -> bool:
    return any(bool(base := _base(o)) and base == _base(x) for o in _tensors(out))


def _is_narrow(results: Sequence[Tensor]) -> bool:
    return any(x.is_floating_point() and x.dtype.itemsize < 4 for x in results)


def _wide(tree: Any) -> Any:
    """Return arguments with fp32 in place of narrower formats."""

    def own(x: object) -> object:
        if isinstance(x, Tensor):
            return x.float() if _is_narrow([x]) else x
        return torch.float32 if isinstance(x, torch.dtype) and x.is_floating_point and x.itemsize < 4 else x

    return tree_map(own, tree)


def _without_writing(func: OpOverload) -> Any:
    """Return the function that an operation in place, or one with `out=`, writes the result of."""
    name = func.overloadpacket.__name__
    if name.endswith("_") and hasattr(torch.ops.aten, name := name.rstrip("_")):
        return getattr(torch.ops.aten, name)
    return func.overloadpacket if "out" in func._overloadname else None
