"""Bundles: dataclasses of tensors, each of which stands for several inputs in the signature of a function.

    @dataclass(frozen=True)
    class Weights:
        gate: Tensor
        up: Tensor
        scale: Tensor | None = None

    def my_kernel(x: Tensor, weights: Weights, *, eps: float): ...

The inputs are x, gate, up and scale: cases, records and messages know nothing of the bundle. What a parameter with a
default stands for is there as a whole or not at all: `old: Weights | None = None`.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from lastbit.errors import LastbitError


@dataclass(frozen=True)
class _Bundle:
    """The dataclass that stands for several inputs in a parameter of a function.

    Attributes:
        kind: the dataclass.
        fields: a parameter for each of its fields.
        whole: it may be left out.
    """

    kind: type
    fields: tuple[inspect.Parameter, ...]
    whole: bool

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.fields)

    @property
    def parameters(self) -> list[inspect.Parameter]:
        """The parameters in the bundle's place; if the bundle may be left out, so may every tensor."""
        return [p.replace(default=None) for p in self.fields] if self.whole else [*self.fields]

    def put_together(self, name: str, arguments: dict[str, Any]) -> None:
        """Make its fields among the arguments one, under the name of the parameter.

        Raises:
            ValueError: it may be left out, and some tensors that it needs are given, but not all.
        """
        found = {field: arguments.pop(field) for field in self.names if field in arguments}
        if self.whole:
            given = [field for field, value in found.items() if value is not None]
            missing = [p.name for p in self.fields if p.default is p.empty and p.name not in given]
            if not given:
                return
            if missing:
                raise ValueError(f"{', '.join(given)} given, but not {', '.join(missing)}; give all of them or none")
        arguments[name] = self.kind(**found)


def flat(
    function: Callable[..., Any], where: str, tensors: tuple[type, ...] = (), *, error: type[LastbitError]
) -> Callable[..., Any]:
    """Return a function that is called with tensors by name: one parameter for each field of a bundle, in its place.

    Itself if it has no bundle. Parameters without a default come first, as Python wants it. `where` names the function
    in an `error`; `tensors` are types besides torch's that stand for tensors.

    Raises:
        LastbitError: a dataclass holds a tensor and something else, or two parameters share a name.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return function
    found = {name: _bundle(function, p, where, tensors, error) for name, p in parameters.items()}
    bundles = {name: bundle for name, bundle in found.items() if bundle is not None}
    if not bundles:
        return function
    each = [q for p in parameters.values() for q in (bundles[p.name].parameters if p.name in bundles else [p])]
    names = [p.name for p in each]
    if twice := [name for name in names if names.count(name) > 1]:
        raise error(f"{where} takes {twice[0]!r} twice: tensors in dataclasses are inputs by their own names")
    each.sort(key=lambda p: (p.kind, p.kind is _BY_PLACE and p.default is not p.empty))
    signature = inspect.Signature(each)

    @functools.wraps(function)
    def flattened(*args: Any, **arguments: Any) -> Any:
        if args:
            arguments |= signature.bind_partial(*args).arguments
        for name, bundle in bundles.items():
            bundle.put_together(name, arguments)
        return function(**arguments)

    flattened.__signature__ = signature  # type: ignore[attr-defined]
    return flattened


_BY_PLACE = inspect.Parameter.POSITIONAL_OR_KEYWORD


def _bundle(
    function: Callable[..., Any],
    parameter: inspect.Parameter,
    where: str,
    tensors: tuple[type, ...],
    error: type[LastbitError],
) -> _Bundle | None:
    """Return the bundle that a parameter stands for; None if the parameter stands for itself."""
    annotation = parameter.annotation
    if isinstance(annotation, str):  # it is resolved where the function was written
        plain = inspect.unwrap(getattr(function, "func", function))
        scope = getattr(plain if hasattr(plain, "__globals__") else type(plain).__call__, "__globals__", {})
        try:
            annotation = get_type_hints(types.SimpleNamespace(__annotations__={"": annotation}), scope)[""]
        except Exception:  # whatever a text may do
            return None
    kind = _without_none(annotation)
    if not isinstance(kind, type) or not is_dataclass(kind) or kind in tensors:
        return None
    try:
        hints = get_type_hints(kind)
    except Exception:  # whatever a text may do
        return None
    from torch import Tensor  # who wrote the annotation has imported it

    def is_tensor(kind: Any) -> bool:
        return isinstance(kind, type) and issubclass(kind, (Tensor, *tensors))

    others = [field for field in fields(kind) if not is_tensor(_without_none(hints[field.name]))]
    if len(others) == len(fields(kind)):
        return None  # a parameter of the kernel's own
    if others:
        told = f"{others[0].name}: {others[0].type}"
        raise error(
            f"{where}: its parameter {parameter.name!r} is a {kind.__name__}, which has tensors and {told!r}; a "
            "dataclass of inputs has tensors alone, so make that a parameter of its own"
        )
    each = []
    for field in fields(kind):
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        each.append(inspect.Parameter(field.name, _BY_PLACE, default=default, annotation=field.type))
    return _Bundle(kind, tuple(each), parameter.default is not parameter.empty)


def _without_none(kind: Any) -> Any:
    """Return X of `X | None`; any other annotation is itself."""
    if get_origin(kind) not in (Union, types.UnionType):
        return kind
    some = [part for part in get_args(kind) if part is not type(None)]
    return some[0] if len(some) == 1 else kind
