"""Arguments of a launch as the kernel sees them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lastbit.interpret.arguments import Arguments, as_parameter, bind


def kernel(x_ptr, n, scale, half: Any = 0.5):
    pass


def annotated(x_ptr, wide, narrow, N):
    pass


annotated.__annotations__ = {"wide": "fp64", "narrow": "i8", "N": "tl.constexpr"}


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        *((0, "int32"), (2**31 - 1, "int32"), (2**31, "int64"), (-(2**31), "int32"), (-(2**31) - 1, "int64")),
        *((2**63 - 1, "int64"), (-(2**63), "int64"), (2**63, "uint64"), (2**64 - 1, "uint64")),
        *((True, "int1"), (False, "int1"), (1.5, "fp32"), (0.1, "fp32")),
    ],
)
def test_numbers_have_the_type_that_the_compiler_gives_them(value: float, dtype: str) -> None:
    found = as_parameter(value)
    assert str(found.dtype) == dtype
    [held] = found.handle.data.tolist()
    assert held == (float(np.float32(value)) if isinstance(value, float) else value)


def test_tensors_are_pointers() -> None:
    x = torch.zeros(3, dtype=torch.bfloat16)
    found = as_parameter(x)
    assert str(found.dtype) == "pointer<bf16>" and found.handle.data.tolist() == [x.data_ptr()]


def test_a_call_is_bound_as_python_binds_it() -> None:
    assert list(bind(kernel, (1, 2), {"scale": 3}).items()) == [("x_ptr", 1), ("n", 2), ("scale", 3), ("half", 0.5)]
    given = bind(kernel, (1,), {"half": 4, "scale": 3, "n": 2})
    assert list(given.items()) == [("x_ptr", 1), ("n", 2), ("scale", 3), ("half", 4)]
    for args, kwargs in (((1, 2), {}), ((1, 2, 3, 4, 5), {}), ((1, 2, 3), {"x_ptr": 1}), ((1, 2, 3), {"other": 1})):
        with pytest.raises(TypeError):
            bind(kernel, args, kwargs)


def test_what_a_course_depends_on_is_types_and_constants() -> None:
    x = torch.zeros(3)

    def of(n: Any, half: Any = 0.5, y: torch.Tensor = x) -> Arguments:
        return Arguments(kernel, bind(kernel, (y, n, 1.5, half), {}))

    assert of(5).key == of(6).key and of(5).key == of(5, y=torch.ones(9)).key
    assert of(5).key != of(2**40).key and of(5).key != of(5.0).key and of(5).key != of(5, y=x.half()).key
    assert [str(dtype) for dtype in of(5).dtypes] == ["pointer<fp32>", "int32", "fp32", "fp32"]
    assert of(5).arrays[1].tolist() == [5] and of(5).arrays[1] is not of(5).arrays[1]
    assert list(of(5).values) == ["x_ptr", "n", "scale", "half"]


def test_annotations_decide() -> None:
    found = Arguments(annotated, bind(annotated, (torch.zeros(1), 0.1, 300, 16), {}))
    assert [str(dtype) for dtype in found.dtypes[1:]] == ["fp64", "int8"]
    assert [array.tolist() for array in found.arrays[1:]] == [[0.1], [44]]
    assert found.values["N"] == 16 and found.key is not None
    assert found.key != Arguments(annotated, bind(annotated, (torch.zeros(1), 0.1, 300, 32), {})).key
