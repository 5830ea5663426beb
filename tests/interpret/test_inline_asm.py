"""PTX of inline assembly against an H200's answers, against formulas, and what is not interpreted."""

from __future__ import annotations

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from lastbit.interpret import install
from lastbit.interpret.inline_asm import assembled
from tests import interpret_wild as wild
from tests.interpret_kernels import raw_bits, values
from tests.tensor_core_dots import tensor_cores

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore:tl.make_block_ptr")
H200 = np.load(Path(__file__).parents[1] / "interpret_wild_h200.npz")
QUESTIONS = dict(wild.questions())
ULPS = {
    "ex2": 2, "ex2 kept": 2, "ex2 bf16x2": 1, "rcp": 1, "rcp kept": 1, "rsqrt": 2, "rsqrt kept": 2, "sqrt": 1,
    "tanh": 2**14, "tanh f16x2": 1, "div": 2, "div full": 2,
}  # fmt: skip
"""Question → units in the last place by which an approximate instruction may be off, from the PTX ISA."""
LOGARITHMS = {"lg2": 2.0**-22, "softplus": 2.0**-21}
"""Question → absolute error of a logarithm that is near zero; relative where it is larger than one."""


@pytest.fixture(autouse=True, scope="module")
def faithful_interpreter() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("this process compiles Triton kernels (TRITON_INTERPRET is not 1)")
    install()


def of_h200(name: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(H200[name]).view(dtype)


@pytest.mark.parametrize("name", [n for n in H200 if wild.BLOCK_POINTERS or not n.startswith("block pointer")])
def test_answers_are_those_of_an_h200(name: str) -> None:
    with tensor_cores():
        out = QUESTIONS[name]()
    expected = of_h200(name, out.dtype)
    if name in LOGARITHMS:
        far = (out.double() - expected.double()).abs() > LOGARITHMS[name] * expected.double().abs().clamp(min=1)
        wrong = (far & expected.isfinite()) | (out.isnan() != expected.isnan())
    else:
        bits = [torch.from_numpy(raw_bits(x).astype(np.int64)) for x in (out, expected)]
        wrong = (bits[0] - bits[1]).abs() > ULPS.get(name, 0)
        if name.startswith(("mapped", "block")):  # ordinary arithmetic, where a NaN is a NaN
            wrong &= ~(out.isnan() & expected.isnan())
    assert not wrong.any(), f"{int(wrong.sum())} differ; first {out[wrong][0]}, H200 {expected[wrong][0]}"


def run(asm: str, constraints: str, types: list[tl.dtype], *inputs: np.ndarray, pack: int = 1) -> list[np.ndarray]:
    made = assembled(asm, constraints, types, pack)
    return [made.result(i, *inputs) for i in range(len(types))]


def test_the_example_of_tritons_documentation() -> None:
    asm = """
        {
            // Unpack `a` into `ai`.
            .reg .b8 tmp<4>;
            mov.b32 {tmp0, tmp1, tmp2, tmp3}, $8;
            cvt.u32.u8 $0, tmp0; cvt.u32.u8 $1, tmp1; cvt.u32.u8 $2, tmp2; cvt.u32.u8 $3, tmp3;
        }
        cvt.rn.f32.s32 $4, $0; cvt.rn.f32.s32 $5, $1; cvt.rn.f32.s32 $6, $2; cvt.rn.f32.s32 $7, $3;
        max.f32 $4, $4, $9; max.f32 $5, $5, $10; max.f32 $6, $6, $11; max.f32 $7, $7, $12;
    """
    a = np.arange(240, 256, dtype=np.uint8).reshape(2, 8)
    b = np.linspace(200, 300, 16, dtype=np.float32).reshape(2, 8)
    registers = "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r"
    whole, larger = run(asm, registers, [tl.int32, tl.float32], a, b, pack=4)
    assert (whole == a).all() and whole.dtype == np.int32
    assert (larger == np.maximum(a, b)).all()


def test_axes_of_programs_may_stand_in_front() -> None:
    x = np.random.default_rng(0).standard_normal((3, 2, 8)).astype(np.float16)
    y = np.float16([1, 2, 4, 8, 16, 32, 64, 128])
    (found,) = run("mul.f16x2 $0, $1, $2;", "=r,r,r", [tl.float16], x, y, pack=2)
    assert (found == x * y).all()


def test_fewer_elements_than_are_packed_are_repeated() -> None:
    (found,) = run("{shl.b32 $0, $1, 1;}", "=r,r", [tl.uint8], np.array([3], np.uint8), pack=4)
    assert found.tolist() == [6]


def test_fp4_conversions_round_to_nearest_and_saturate() -> None:
    x = np.concatenate([np.linspace(-9, 9, 145), [np.inf, -np.inf, np.nan, 0.25, 0.75]]).astype(np.float32)
    asm = "{.reg .b8 t; cvt.rn.satfinite.e2m1x2.f32 t, $2, $1; cvt.u32.u8 $0, t;}"
    (codes,) = run(asm, "=r,f,f", [tl.int32], x, x[::-1].copy())
    expected = np.where(np.isnan(x), 6, np.clip(x, -6, 6)).astype(np.float32).astype(ml_dtypes.float4_e2m1fn)
    assert (codes & 15 == expected.view(np.uint8)).all()
    assert (codes >> 4 == expected[::-1].view(np.uint8)).all()
    back = "{.reg .b8 t; cvt.u8.u32 t, $2; cvt.rn.f16x2.e2m1x2 $0, t; mov.b32 $1, 0;}"
    halves = run(back, "=r,=r,r", [tl.int32, tl.int32], codes)[0].view(np.float16).reshape(-1, 2)
    assert (halves[:, 0] == expected.astype(np.float16)).all()


def test_scales_are_powers_of_two() -> None:
    x = np.float32([1.0, 1.5, 2.0**-127, 2.0**-130, 3.0e38, np.inf, np.nan, 0.0])
    up, down = (f"cvt.{mode}.satfinite.ue8m0x2.f32 $0, 0.0, $1;" for mode in ("rp", "rz"))
    assert run(up, "=h,r", [tl.uint8], x)[0].tolist() == [127, 128, 0, 0, 254, 254, 255, 0]
    assert run(down, "=h,r", [tl.uint8], x)[0].tolist() == [127, 127, 0, 0, 254, 254, 255, 0]


def test_what_no_instruction_writes_is_all_ones() -> None:
    (found,) = run("griddepcontrol.wait; // dummy $0", "=r", [tl.int32], np.zeros(1, np.int32))
    assert found.tolist() == [-1]


@triton.jit
def places_kernel(out_ptr):
    at = out_ptr + 4 * tl.program_id(0)
    x = tl.inline_asm_elementwise("mov.u32 $0, %ctaid.x;", "=r", [], dtype=tl.int32, is_pure=True, pack=1)
    tl.store(at, x)
    tl.store(at + 1, tl.extra.cuda.smid())
    before = tl.extra.cuda.globaltimer()
    tl.extra.cuda.gdc_wait()
    tl.store(at + 2, (tl.extra.cuda.globaltimer() > before).to(tl.int32))


def test_special_registers() -> None:
    out = torch.zeros(3, 4, dtype=torch.int32)
    places_kernel[(3,)](out)
    assert out[:, :3].tolist() == [[0, 0, 1], [1, 0, 1], [2, 0, 1]]


@pytest.mark.parametrize(
    "asm",
    ["redux.sync.max.f32 $0, $1, 0xffffffff;", "cvt.rs.f16x2.f32 $0, $1, $1, $1;", "ld.global.b32 $0, [$1];",
     "again: add.f32 $0, $1, $1;", "add.f32.future $0, $1, $1;", "v_mul_f32 $0, $1, $1", ".shared .b8 smem[4];"],
)  # fmt: skip
def test_what_is_not_interpreted_is_named_with_its_line(asm: str) -> None:
    x = values("fp32")
    with pytest.raises(triton.runtime.errors.InterpreterError) as caught:
        wild.assembly_kernel[(1,)](x, x, x, x, N=wild.N, ASM=asm, REGISTERS="=f,f", COUNT=1, PACK=1)
    message = str(caught.value)
    assert f"`{asm.rstrip(';')}` is not interpreted" in message
    assert "interpret_wild.py:" in message and "in assembly_kernel: r = tl.inline_asm_elementwise" in message
    assert "--device cuda" in message
