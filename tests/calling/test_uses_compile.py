"""Which functions torch compiles, told by their text."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit.calling.uses_compile import is_compiled


def plain(x: Tensor) -> Tensor:
    return x * 2


compiled = torch.compile(plain, backend="eager")


def asks(x: Tensor) -> Tensor:
    return torch.compile(plain, backend="eager")(x)


def asks_within(x: Tensor) -> Tensor:
    def inner() -> Any:
        return torch.compile

    return inner()(x)


def names_one(x: Tensor) -> Tensor:
    return compiled(x)


def names_another(x: Tensor) -> Tensor:
    return names_one(x) if x.numel() else names_another(x)


def other_compile(x: Tensor) -> Any:
    return compile(str(x), "", "eval")  # Python's own


def uses_torch(x: Tensor) -> Tensor:
    return torch.exp(x)


def closing(function: Any) -> Any:
    def run(x: Tensor) -> Tensor:
        return function(x)

    return run


def wrapping(function: Any) -> Any:
    @functools.wraps(function)
    def run(x: Tensor) -> Tensor:
        return function(x)

    return run


def with_an_empty_cell() -> Any:
    def run(x: Tensor) -> Tensor:
        return later(x)

    found = is_compiled(run)
    later = compiled
    return found, is_compiled(run), later


def elsewhere(x: Tensor) -> Tensor:
    return pytest.raises(x)


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (plain, False),
        (compiled, True),
        (asks, True),
        (asks_within, True),
        (names_one, True),
        (names_another, True),
        (other_compile, False),
        (uses_torch, False),
        (closing(plain), False),
        (closing(compiled), True),
        (closing(asks), True),
        (closing(None), False),
        (wrapping(plain), False),
        (wrapping(compiled), True),
        (wrapping(asks), True),
        (functools.cache(plain), False),
        (functools.cache(asks), True),
        (functools.partial(plain), False),
        (functools.partial(asks), True),
        (functools.partial(compiled), True),
        (elsewhere, False),
        (len, False),
    ],
)
def test_what_torch_compiles(function: Any, wanted: bool) -> None:
    assert is_compiled(function) is wanted


def test_a_cell_that_is_not_filled_yet_names_nothing() -> None:
    assert with_an_empty_cell()[:2] == (False, True)


def test_functions_of_other_modules_are_not_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_compiled(names_one)
    monkeypatch.setattr(asks, "__module__", "another")

    def foreign(x: Tensor) -> Tensor:
        return asks(x)

    assert not is_compiled(foreign)
