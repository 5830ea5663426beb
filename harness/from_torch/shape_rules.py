"""Rules for operations that move numbers and change none (indices, shapes), for conversions, and for exact integers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch

from lastbit.from_torch.expressions import ATOM, RULES, SUM, UNARY, Unmapped, Value, call


def as_method(name: str, x: Value, *arguments: Value, **named: Value | None) -> Value:
    """Return an operation on exact integers, as torch's own method."""
    texts = [a.text for a in arguments]
    texts += [f"{key}={value.text}" for key, value in named.items() if value is not None and value.text != "None"]
    if any("torch." in text for text in texts):
        raise Unmapped(f"{name} of integers with {', '.join(texts)} is not mapped: a reference does not import torch")
    return Value(f"{x.within(ATOM)}.{name}({', '.join(texts)})", kind="integers", computed=True)


def negative(dim: int, rank: int) -> int:
    """Return a dimension counted from the last one."""
    return dim - rank if dim >= 0 else dim


def moved(x: Value, source: int, destination: int) -> Value:
    """Return the numbers with one dimension in another place."""
    order = [d for d in range(-x.rank, 0) if d != source]
    order.insert(destination + x.rank, source)
    return permuted(x, order)


def permuted(x: Value, order: Sequence[int]) -> Value:
    """Return the numbers with their dimensions, counted from the last one, in another order."""
    unchanged = list(range(-x.rank, 0))
    if list(order) == unchanged:
        return x
    own = x.within(ATOM)
    if x.kind == "integers":
        return Value(f"{own}.permute({', '.join(map(str, order))})", kind="integers")
    if list(order) == [*unchanged[:-2], -1, -2]:
        return Value(f"{own}.transposed")
    return Value(f"{own}.permute({', '.join(map(str, order))})")


@RULES("transpose", "swapaxes", "swapdims")
def transpose(x: Value, first: Value, second: Value) -> Value:
    order = list(range(-x.rank, 0))
    a, b = (negative(d.example, x.rank) for d in (first, second))
    order[a], order[b] = b, a
    return permuted(x, order)


@RULES("t", "adjoint")
def t(x: Value) -> Value:
    return permuted(x, [*range(-x.rank, 0)][::-1])


@RULES("permute")
def permute(x: Value, *dims: Value) -> Value:
    return permuted(x, [negative(d.example, x.rank) for d in _listed(dims)])


def _listed(items: Sequence[Value]) -> Sequence[Value]:
    """Return items that are given one by one, or as a sequence."""
    return items[0].items if len(items) == 1 and items[0].kind == "sequence" else items


@RULES("getattr")
def attribute(x: Value, name: Value) -> Value:
    if x.items and name.example in ("values", "indices"):
        one: Value = x.items[name.example == "indices"]
        return one
    if name.example == "shape":
        return Value(f"{x.within(ATOM)}.shape", kind="sequence")
    if (name.example in ("T", "mT") and x.rank == 2) or name.example == "mT":
        return permuted(x, [*range(-x.rank, -2), -1, -2])
    raise Unmapped(f"the attribute {name.example} of a tensor with {x.rank} dimensions is not mapped")


@RULES("size")
def size(x: Value, dim: Value | None = None) -> Value:
    shape = f"{x.within(ATOM)}.shape"
    return Value(shape, kind="sequence") if dim is None else Value(f"{shape}[{dim.text}]", kind="number")


@RULES("getitem")
def getitem(x: Value, index: Value) -> Value:
    if x.kind == "sequence":
        if x.items:
            item: Value = x.items[index.example]
            return item
        return Value(
            f"{x.within(ATOM)}[{index.text}]", kind="sequence" if isinstance(index.example, slice) else "number"
        )
    parts = index.items if index.kind == "sequence" else (index,)
    if any(part.kind in ("integers", "numbers", "truth") for part in parts):
        raise Unmapped("an index that is a tensor is not mapped; lastbit.numerics has gather")
    if all(part.example in (..., slice(None)) for part in parts):
        return x
    texts = [part.text for part in parts]
    if x.kind == "numbers" and len(texts) == 1:
        texts.append("...")  # an enclosure takes indices as a tuple
    return Value(f"{x.within(ATOM)}[{', '.join(texts)}]", kind=x.kind)


def _at(x: Value, dim: int, index: str) -> Value:
    """Return the numbers with an index at a dimension."""
    texts = [":"] * dim + [index, "..."] if dim >= 0 else ["...", index] + [":"] * (-dim - 1)
    return Value(f"{x.within(ATOM)}[{', '.join(texts)}]", kind=x.kind)


RULES("unsqueeze")(lambda x, dim: _at(x, dim.example, "None"))


@RULES("squeeze")
def squeeze(x: Value, dim: Value | None = None) -> Value:
    if dim is None:
        raise Unmapped("squeeze of all dimensions is not mapped; name one")
    return x if x.example.shape[dim.example] != 1 else _at(x, dim.example, "0")


@RULES("reshape", "view")
def reshape(x: Value, *shape: Value, method: str = "reshape") -> Value:
    if len(shape) == 1 and shape[0].kind == "sequence" and not shape[0].items:
        return Value(f"{x.within(ATOM)}.{method}(*{shape[0].text})", kind=x.kind)
    if len(shape) == 1 and isinstance(shape[0].example, torch.dtype):
        raise Unmapped("a view as another dtype is not mapped")
    return Value(f"{x.within(ATOM)}.{method}({', '.join(s.text for s in _listed(shape))})", kind=x.kind)


RULES("expand", "broadcast_to")(partial(reshape, method="expand"))


@RULES("view_as", "reshape_as")
def reshape_as(x: Value, other: Value) -> Value:
    return Value(f"{x.within(ATOM)}.reshape(*{other.within(ATOM)}.shape)", kind=x.kind)


@RULES("flatten")
def flatten(x: Value, start_dim: Value | None = None, end_dim: Value | None = None) -> Value:
    start = negative(0 if start_dim is None else start_dim.example, x.rank)
    end = negative(-1 if end_dim is None else end_dim.example, x.rank)
    if (start, end) == (-2, -1):
        return Value(f"{x.within(ATOM)}.joined()") if x.kind == "numbers" else as_method("flatten", x, Value("-2"))
    own = x.within(ATOM)
    before = f"*{own}.shape[:{start}], " if -start < x.rank else ""
    after = f", *{own}.shape[{end + 1}:]" if end < -1 else ""
    return Value(f"{own}.reshape({before}-1{after})", kind=x.kind)


@RULES("unflatten")
def unflatten(x: Value, dim: Value, sizes: Value) -> Value:
    at = negative(dim.example, x.rank)
    own, texts = x.within(ATOM), [s.text for s in sizes.items]
    if at == -1 and len(texts) == 2 and texts[0] == "-1" and x.kind == "numbers":
        return Value(f"{own}.in_groups({texts[1]})")
    before = f"*{own}.shape[:{at}], " if -at < x.rank else ""
    after = f", *{own}.shape[{at + 1}:]" if at < -1 else ""
    return Value(f"{own}.reshape({before}{', '.join(texts)}{after})", kind=x.kind)


@RULES("cat", "concat", "concatenate")
def cat(tensors: Value, dim: Value | None = None) -> Value:
    at = negative(0 if dim is None else dim.example, tensors.items[0].rank)
    if any(item.kind != "numbers" for item in tensors.items):
        raise Unmapped("concatenation of integers is not mapped")
    return call("concatenate", *tensors.items, *([] if at == -1 else [f"dim={at}"]))


@RULES("stack")
def stack(tensors: Value, dim: Value | None = None) -> Value:
    rank = tensors.items[0].rank + 1
    at = negative(0 if dim is None else dim.example, rank)
    made = call("stack", *tensors.items)
    return made if at == -1 else moved(Value(made.text, example=torch.empty((1,) * rank)), -1, at)


def cut(
    x: Value, how: Value | None = None, dim: Value | None = None, *, name: str, pieces: Sequence[torch.Tensor]
) -> Value:
    """Return the pieces of a tensor, each an index: of halves, quarters, … or of lengths that are given.

    pieces: those of the example.
    """
    own = x.within(ATOM)
    if name == "unbind":
        at = negative(0 if how is None else how.example, x.rank)
        return Value("", "sequence", items=tuple(_at(x, at, str(n)) for n in range(len(pieces))))
    at = negative(0 if dim is None else dim.example, x.rank)
    sizes = [int(p.shape[at]) for p in pieces]
    size = f"{own}.shape[{at}]"
    if name in ("chunk", "tensor_split") and len(set(sizes)) == 1:
        count = len(pieces)
        ends = [f"{n} * {size} // {count}" if n > 1 else f"{size} // {count}" for n in range(1, count)]
    elif how is not None and how.kind == "sequence" and how.items:
        ends = [" + ".join(i.within(SUM) for i in how.items[:n]) for n in range(1, len(pieces))]
    elif how is not None and how.kind == "number" and name == "split":
        ends = [f"{n} * {how.within(UNARY)}" if n > 1 else how.text for n in range(1, len(pieces))]
    else:
        raise Unmapped(f"{name} into pieces of {sizes} elements is not mapped")
    bounds = ["", *ends, ""]
    return Value("", "sequence", items=tuple(_at(x, at, f"{a}:{b}") for a, b in pairwise(bounds)))


@RULES("contiguous", "clone", "detach", "cpu", "cuda")
def same(x: Value, **kwargs: Value) -> Value:
    return x
