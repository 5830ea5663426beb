"""Functions of libdevice: which of them flush subnormal numbers, and one that is not known."""

from __future__ import annotations

import numpy as np
import pytest

from lastbit.interpret.libdevice import evaluate

TINY = np.float32(1e-40)


@pytest.mark.parametrize(
    ("symbol", "operands", "value"),
    [
        ("__nv_copysignf", [TINY, np.float32(-1)], -TINY),
        ("__nv_fabsf", [-TINY], 0),
        ("__nv_fadd_rn", [TINY, TINY], 0),
        ("__nv_fadd_ru", [np.float32(1), np.float32(2**-30)], 1 + 2**-23),
        ("__nv_fadd_rd", [np.float32(1), np.float32(2**-30)], 1),
        ("__nv_frcp_rn", [np.float32(4)], 0.25),
        ("__nv_fsqrt_rz", [np.float32(9)], 3),
        ("__nv_frsqrt_rn", [np.float32(0.25)], 2),
        ("__nv_fmaf_rn", [np.float32(2), np.float32(3), np.float32(4)], 10),
        ("__nv_drcp_rn", [np.float64(4)], 0.25),
        ("__nv_fast_fdividef", [np.float32(1), np.float32(4)], 0.25),
        ("__nv_fast_expf", [np.float32(0)], 1),
    ],
)
def test_subnormal_numbers_are_flushed_where_a_gpu_flushes_them(
    symbol: str, operands: list[np.floating], value: float
) -> None:
    found = evaluate(symbol, [np.array([x]) for x in operands])
    assert found.tolist() == [float(value)] and found.dtype == operands[0].dtype


def test_operands_are_broadcast() -> None:
    found = evaluate("__nv_dadd_rn", [np.array([[1.0], [2.0]]), np.array([10.0, 20.0])])
    assert found.tolist() == [[11, 21], [12, 22]]


def test_what_is_not_known_is_named_beside_what_is() -> None:
    with pytest.raises(NotImplementedError, match=r"libdevice function 'nothing' is not interpreted; known: .*rsqrt"):
        evaluate("__nv_nothing", [np.ones(1)])
