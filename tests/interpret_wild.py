"""Questions on what kernels use beyond arithmetic: inline assembly, mapped functions, block pointers, descriptors.

As `interpret_kernels.py`. `python tests/interpret_wild.py OUT.npz WORDS` writes this machine's answers to the questions
that have WORDS in their names; an error of a GPU spoils what the process asks afterwards, so descriptors go alone.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator

import numpy as np
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.interpret_kernels import DTYPES, N, raw_bits, values

BLOCK_POINTERS = triton.__version__.startswith(("3.6.", "3.7."))

Question = tuple[str, Callable[[], torch.Tensor]]

SNIPPETS = """
ex2            | ex2.approx.ftz.f32 $0, $1;              | =f,f   | fp32 | fp32 | 1
ex2 kept       | ex2.approx.f32 $0, $1;                  | =r,r   | fp32 | fp32 | 1
ex2 bf16x2     | ex2.approx.ftz.bf16x2 $0, $1;           | =r,r   | bf16 | bf16 | 2
lg2            | lg2.approx.ftz.f32 $0, $1;              | =f,f   | fp32 | fp32 | 1
rcp            | rcp.approx.ftz.f32 $0, $1;              | =f,f   | fp32 | fp32 | 1
rcp kept       | rcp.approx.f32 $0, $1;                  | =f,f   | fp32 | fp32 | 1
rcp rn         | rcp.rn.f32 $0, $1;                      | =f,f   | fp32 | fp32 | 1
rsqrt          | rsqrt.approx.ftz.f32 $0, $1;            | =f,f   | fp32 | fp32 | 1
rsqrt kept     | rsqrt.approx.f32 $0, $1;                | =f,f   | fp32 | fp32 | 1
sqrt           | sqrt.approx.ftz.f32 $0, $1;             | =f,f   | fp32 | fp32 | 1
sqrt rn        | sqrt.rn.f32 $0, $1;                     | =f,f   | fp32 | fp32 | 1
tanh           | tanh.approx.f32 $0, $1;                 | =f,f   | fp32 | fp32 | 1
tanh f16x2     | tanh.approx.f16x2 $0, $1;               | =r,r   | fp16 | fp16 | 2
div            | div.approx.ftz.f32 $0, $1, $2;          | =f,f,f | fp32 fp32 | fp32 | 1
div full       | div.full.f32 $0, $1, $2;                | =f,f,f | fp32 fp32 | fp32 | 1
div rn         | div.rn.f32 $0, $1, $2;                  | =r,r,r | fp32 fp32 | fp32 | 1
add rn         | add.rn.f32 $0, $1, $2;                  | =f,f,f | fp32 fp32 | fp32 | 1
add rz ftz     | add.rz.ftz.f32 $0, $1, $2;              | =f,f,f | fp32 fp32 | fp32 | 1
add sat        | add.sat.f32 $0, $1, $2;                 | =f,f,f | fp32 fp32 | fp32 | 1
sub rn         | sub.rn.f32 $0, $1, $2;                  | =f,f,f | fp32 fp32 | fp32 | 1
mul rn         | mul.rn.f32 $0, $1, $2;                  | =f,f,f | fp32 fp32 | fp32 | 1
mul rp         | mul.rp.f32 $0, $1, $2;                  | =f,f,f | fp32 fp32 | fp32 | 1
fma rn         | fma.rn.f32 $0, $1, $2, $3;              | =f,f,f,f | fp32 fp32 fp32 | fp32 | 1
fma ftz        | fma.rn.ftz.f32 $0, $1, $2, $3;          | =f,f,f,f | fp32 fp32 fp32 | fp32 | 1
fma bf16x2     | fma.rn.bf16x2 $0, $1, $2, $3;           | =r,r,r,r | bf16 bf16 bf16 | bf16 | 2
fma relu       | fma.rn.relu.f16x2 $0, $1, $2, $3;       | =r,r,r,r | fp16 fp16 fp16 | fp16 | 2
mul bf16x2     | mul.bf16x2 $0, $1, $2;                  | =r,r,r | bf16 bf16 | bf16 | 2
add f16x2      | add.f16x2 $0, $1, $2;                   | =r,r,r | fp16 fp16 | fp16 | 2
sub f16x2      | sub.f16x2 $0, $1, $2;                   | =r,r,r | fp16 fp16 | fp16 | 2
max nan        | max.NaN.f32 $0, $1, $2;                 | =f,f,f | fp32 fp32 | fp32 | 1
max            | max.f32 $0, $1, $2;                     | =f,f,f | fp32 fp32 | fp32 | 1
min ftz        | min.ftz.f32 $0, $1, $2;                 | =f,f,f | fp32 fp32 | fp32 | 1
min xorsign    | min.NaN.xorsign.abs.f32 $0, $1, $2;     | =r,r,r | fp32 fp32 | fp32 | 1
max xorsign    | max.xorsign.abs.f32 $0, $1, $2;         | =r,r,r | fp32 fp32 | fp32 | 1
max bf16x2     | max.NaN.bf16x2 $0, $1, $2;              | =r,r,r | bf16 bf16 | bf16 | 2
abs neg        | { abs.f32 $0, $1; neg.f32 $0, $0; }     | =f,f   | fp32 | fp32 | 1
copysign       | copysign.f32 $0, $1, $2;                | =f,f,f | fp32 fp32 | fp32 | 1
bf16x2         | cvt.rn.bf16x2.f32 $0, $1, $2;           | =r,r,r | fp32 fp32 | i32  | 1
bf16x2 relu    | cvt.rn.relu.bf16x2.f32 $0, $1, $2;      | =r,r,r | fp32 fp32 | i32  | 1
bf16 rz        | cvt.rz.bf16.f32 $0, $1;                 | =h,r   | fp32 | bf16 | 1
f16x2 rz       | cvt.rz.f16x2.f32 $0, $1, $2;            | =r,r,r | fp32 fp32 | i32  | 1
f16 rm         | cvt.rm.f16.f32 $0, $1;                  | =h,f   | fp32 | fp16 | 1
f16 sat        | cvt.rn.sat.f16.f32 $0, $1;              | =h,f   | fp32 | fp16 | 1
e4m3x2         | {.reg .b16 t; cvt.rn.satfinite.e4m3x2.f32 t, $1, $2; cvt.u32.u16 $0, t;} | =r,r,r | fp32 fp32 | i32 | 1
e5m2x2         | {.reg .b16 t; cvt.rn.satfinite.e5m2x2.f32 t, $1, $2; cvt.u32.u16 $0, t;} | =r,r,r | fp32 fp32 | i32 | 1
e4m3x2 relu    | {.reg .b16 t; cvt.rn.satfinite.relu.e4m3x2.f32 t, $1, $2; cvt.u32.u16 $0, t;} | =r,r,r | fp32 fp32 | i32 | 1
e4m3x2 f16x2   | cvt.rn.satfinite.e4m3x2.f16x2 $0, $1;   | =h,r   | fp16 | e4m3 | 2
f16x2 e4m3x2   | cvt.rn.f16x2.e4m3x2 $0, $1;             | =r,h   | e4m3 | fp16 | 2
f16x2 e5m2x2   | cvt.rn.f16x2.e5m2x2 $0, $1;             | =r,h   | e5m2 | fp16 | 2
tf32           | cvt.rna.tf32.f32 $0, $1;                | =r,f   | fp32 | fp32 | 1
rni            | cvt.rni.s32.f32 $0, $1;                 | =r,f   | fp32 | i32  | 1
rni ftz sat    | cvt.rni.ftz.s8.f32 $0, $1;              | =r,f   | fp32 | i32  | 1
rpi            | cvt.rpi.f32.f32 $0, $1;                 | =f,f   | fp32 | fp32 | 1
u32 to f32 rz  | cvt.rz.f32.u32 $0, $1;                  | =f,r   | u32  | fp32 | 1
s8             | cvt.s32.s8 $0, $1;                      | =r,r   | i32  | i32  | 1
sat s8         | cvt.sat.s8.s32 $0, $1;                  | =r,r   | i32  | i32  | 1
lop3           | lop3.b32 $0, $1, $2, $3, 0xE4;          | =r,r,r,r | i32 u32 i32 | i32 | 1
prmt           | prmt.b32 $0, $1, $2, $3;                | =r,r,r,r | i32 u32 i32 | i32 | 1
prmt signs     | prmt.b32 $0, $1, $2, 0xba98;            | =r,r,r | i32 u32 | i32 | 1
shf wrap       | shf.r.wrap.b32 $0, $1, $2, $3;          | =r,r,r,r | i32 u32 i32 | i32 | 1
shf clamp      | shf.l.clamp.b32 $0, $1, $2, $3;         | =r,r,r,r | i32 u32 i32 | i32 | 1
shl            | shl.b32 $0, $1, $2;                     | =r,r,r | i32 i8  | i32 | 1
shr            | shr.s32 $0, $1, $2;                     | =r,r,r | i32 i32 | i32 | 1
bfe            | bfe.u32 $0, $1, $2, $3;                 | =r,r,r,r | i32 i32 u32 | i32 | 1
bfe signed     | bfe.s32 $0, $1, $2, $3;                 | =r,r,r,r | i32 i32 u32 | i32 | 1
bfe signed 5 9 | bfe.s32 $0, $1, 5, 9;                   | =r,r   | i32 | i32 | 1
bfi            | bfi.b32 $0, $1, $2, $3, 7;              | =r,r,r,r | i32 u32 i32 | i32 | 1
brev           | brev.b32 $0, $1;                        | =r,r   | i32 | i32 | 1
popc           | popc.b32 $0, $1;                        | =r,r   | i32 | i32 | 1
clz            | clz.b32 $0, $1;                         | =r,r   | i32 | i32 | 1
mul hi         | mul.hi.s32 $0, $1, $2;                  | =r,r,r | i32 u32 | i32 | 1
mul wide       | mul.wide.u32 $0, $1, $2;                | =l,r,r | i32 u32 | i64 | 1
mad            | mad.lo.u32 $0, $1, 2, 0x00800080;       | =r,r   | i32 | i32 | 1
add sat s32    | add.sat.s32 $0, $1, $2;                 | =r,r,r | i32 u32 | i32 | 1
rem            | rem.s32 $0, $1, 7;                      | =r,r   | i32 | i32 | 1
setp selp      | {.reg .pred p; setp.ltu.f32 p, $1, $2; selp.b32 $0, $1, $2, p;} | =r,r,r | fp32 fp32 | fp32 | 1
predicate      | {.reg .pred p, q; setp.gt.f32 p|q, $1, 1.; @p mov.f32 $0, 0f40000000; @q add.f32 $0, $1, 0.1;} | =f,f | fp32 | fp32 | 1
setp f16x2     | {.reg .pred p<2>; .reg .b16 c<2>; mov.b32 {c0, c1}, $1; setp.lt.f16x2 p0|p1, $1, $2; selp.b16 c0, c0, 0, p0; selp.b16 c1, c1, 1, p1; mov.b32 $0, {c0, c1};} | =r,r,r | fp16 fp16 | fp16 | 2
unpack         | {.reg .b8 t<4>; mov.b32 {t0, t1, t2, t3}, $1; mov.b32 $0, {t3, t2, t1, t0};} | =r,r | u8 | u8 | 4
fp8 sums       | {.reg .b32 a, b; and.b32 a, $2, 0x0F0F0F0F; shr.u32 b, $2, 4; and.b32 b, b, 0x0F0F0F0F; add.u32 a, a, b; prmt.b32 $0, a, 0, 0x5140; prmt.b32 $1, a, 0, 0x7362;} | =r,=r,r | u8 | fp16 | 4
softplus       | {.reg .pred p; setp.gt.f32 p, $1, 15.; @p mov.f32 $0, $1; @!p ex2.approx.ftz.f32 $0, $1; @!p add.rn.f32 $0, $0, 1.0; @!p lg2.approx.ftz.f32 $0, $0;} | =r,r | fp32 | fp32 | 1
"""  # noqa: E501
"""Name, assembly, constraints, dtypes of operands and result, elements at a time."""


@triton.jit
def assembly_kernel(
    x_ptr, y_ptr, z_ptr, out_ptr, N: tl.constexpr, ASM: tl.constexpr, REGISTERS: tl.constexpr, COUNT: tl.constexpr,
    PACK: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    y = tl.load(y_ptr + i)
    z = tl.load(z_ptr + i)
    if COUNT == 1:
        r = tl.inline_asm_elementwise(ASM, REGISTERS, [x], out_ptr.dtype.element_ty, True, PACK)
    elif COUNT == 2:
        r = tl.inline_asm_elementwise(ASM, REGISTERS, [x, y], out_ptr.dtype.element_ty, True, PACK)
    else:
        r = tl.inline_asm_elementwise(ASM, REGISTERS, [x, y, z], out_ptr.dtype.element_ty, True, PACK)
    tl.store(out_ptr + i, r)


@triton.jit
def branches(x, y):
    if x > y:
        total = x * 2
    elif x != x:
        total = y
    else:
        total = x + y
    count = 0
    while (total > 100) & (count < 9):
        total = total / 4
        count += 1
    return total, count


@triton.jit
def swap(a, b, c, d):
    return b + c, a * d


@triton.jit
def mapped_kernel(x_ptr, y_ptr, out_ptr, N: tl.constexpr, PACK: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    y = tl.load(y_ptr + i)
    if PACK == 1:
        total, count = tl.map_elementwise(branches, x, y)
        r = total + count
    else:
        (r,) = tl.map_elementwise(swap, x, y, pack=PACK)
    tl.store(out_ptr + i, r)


@triton.jit
def pointer_kernel(x_ptr, out_ptr, rows, columns, M: tl.constexpr, K: tl.constexpr, PADDING: tl.constexpr):
    x = tl.make_block_ptr(x_ptr, (rows, columns), (columns, 1), (0, 0), (M, K), (1, 0))
    out = tl.make_block_ptr(out_ptr, (rows, columns), (columns, 1), (0, 0), (M, K), (1, 0))
    for _ in range(0, 3):
        r = tl.load(x, boundary_check=(0, 1), padding_option=PADDING)
        tl.store(out, r + tl.sum(r), boundary_check=(0, 1))
        x = tl.advance(x, (0, K))
        out = tl.advance(out, (0, K))


@triton.jit
def host_kernel(x, out, M: tl.constexpr, K: tl.constexpr, OP: tl.constexpr):
    for j in range(0, 3):
        if OP == "copy":
            out.store([0, j * K], x.load([0, j * K]))
        elif OP == "shift":
            r = x.load([4, j * K - 16])
            out.store([j * 2, j * K - 16], r + tl.sum(r, axis=1, keep_dims=True))
        elif OP == "add":
            r = x.load([4, j * K])
            out.atomic_add([j, 16], r)
            out.atomic_add([0, 16], r)
        else:
            out.atomic_max([j, 16], x.load([4, j * K]))


@triton.jit
def device_kernel(x_ptr, out_ptr, rows, columns, M: tl.constexpr, K: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [rows, columns], [columns, 1], [M, K])
    out = tl.make_tensor_descriptor(out_ptr, [rows, columns], [columns, 1], [M, K])
    r = x.load([rows - 3, 32])
    out.store([2, columns - 16], r)


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    row, column, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK)
    at = out_ptr + row[:, None] * N + column[None, :]
    total = tl.load(at)
    for start in range(0, K, BLOCK):
        a = tl.load(a_ptr + row[:, None] * K + (start + inner)[None, :])
        b = tl.load(b_ptr + (start + inner)[:, None] * N + column[None, :])
        total = tl.dot(a, b, total)
    tl.store(at, total)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _assembly(asm: str, registers: str, operands: list[str], out: str, pack: int) -> torch.Tensor:
    tensors = [values(name, 3 * i).to(_device()) for i, name in enumerate((operands * 3)[:3])]
    result = torch.zeros(N, dtype=DTYPES[out], device=_device())
    assembly_kernel[(1,)](*tensors, result, N=N, ASM=asm, REGISTERS=registers, COUNT=len(operands), PACK=pack)
    return result.cpu()


def _mapped(pack: int) -> torch.Tensor:
    x, y = (values("fp32", shift).to(_device()) for shift in (0, 3))
    out = torch.zeros(N, device=_device())
    mapped_kernel[(1,)](x, y, out, N=N, PACK=pack, enable_fp_fusion=False)
    return out.cpu()


def _matrix(dtype: str) -> torch.Tensor:
    rows, columns = 11, 80
    return (torch.arange(rows * columns).reshape(rows, columns) % 7 - 3).to(DTYPES[dtype]).to(_device())


def _pointers(dtype: str, padding: str) -> torch.Tensor:
    x = _matrix(dtype)
    out = torch.zeros_like(x)
    pointer_kernel[(1,)](x, out, *x.shape, M=16, K=32, PADDING=padding)
    return out.cpu()


def _host(dtype: str, op: str, padding: str = "zero") -> torch.Tensor:
    x = _matrix(dtype)
    out = torch.zeros_like(x)
    sides = [TensorDescriptor.from_tensor(t, [8, 32], padding) for t in (x, out)]
    host_kernel[(1,)](*sides, M=8, K=32, OP=op)
    return out.cpu()


def _made(dtype: str) -> torch.Tensor:
    x = _matrix(dtype)
    out = torch.zeros_like(x)
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=_device()))
    device_kernel[(1,)](x, out, *x.shape, M=8, K=32)
    return out.cpu()


DOTS = ("normal", "scales", "large", "tiny", "sum")


def factors(kind: str, dtype: str, m: int, k: int, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two matrices and what their product is added to."""
    rng = np.random.Generator(np.random.Philox(len(kind)))
    a, b, c = rng.standard_normal((m, k)), rng.standard_normal((k, n)), np.zeros((m, n))
    if kind == "scales":
        a, b = a * 2.0 ** rng.integers(-12, 1, a.shape), b * 2.0 ** rng.integers(-12, 1, b.shape)
    elif kind == "large":
        a, b = np.abs(a) * 2.0**-11, np.abs(b) * 2.0**-11.5
        a[:, 5] = b[5] = 1.0
    elif kind == "tiny":
        a, b = a * 2.0**-15, b * 2.0 ** rng.integers(-24, 4, b.shape)
    elif kind == "sum":
        c = rng.standard_normal((m, n)) * 2.0 ** rng.integers(-8, 9, (m, n))
    return (*(torch.from_numpy(x).float().to(DTYPES[dtype]) for x in (a, b)), torch.from_numpy(c).float())


def _dot(kind: str, dtype: str, m: int, block: int) -> torch.Tensor:
    a, b, out = (x.to(_device()) for x in factors(kind, dtype, m, 128, 16))
    dot_kernel[(1,)](a, b, out, M=m, N=16, K=128, BLOCK=block)
    return out.cpu()


def questions() -> Iterator[Question]:
    """Every question: its name, and what answers it."""
    for kind in DOTS:
        for dtype in ("bf16", "fp16"):
            yield f"dot {kind} {dtype} 64", lambda k=kind, d=dtype: _dot(k, d, 64, 64)
            yield f"dot {kind} {dtype} 16", lambda k=kind, d=dtype: _dot(k, d, 16, 32)
    for dtype in ("fp32", "e4m3", "e5m2"):
        yield f"dot normal {dtype} 64", lambda d=dtype: _dot("normal", d, 64, 64)
    for line in SNIPPETS.strip().splitlines():
        name, asm, registers, operands, out, pack = re.split(r"\s+\|\s+", line)
        yield name, lambda a=asm, r=registers, o=operands, t=out, p=int(pack): _assembly(a, r, o.split(), t, p)
    for pack in (1, 2):
        yield f"mapped {pack}", lambda pack=pack: _mapped(pack)
    for padding in ("zero", "nan"):
        if BLOCK_POINTERS:
            yield f"block pointer {padding}", lambda padding=padding: _pointers("fp32", padding)
        yield f"shifting descriptor {padding}", lambda padding=padding: _host("bf16", "shift", padding)
    for dtype in ("fp32", "bf16", "i32"):
        yield f"copying descriptor {dtype}", lambda dtype=dtype: _host(dtype, "copy")
        yield f"descriptor add {dtype}", lambda dtype=dtype: _host(dtype, "add")
        yield f"made descriptor {dtype}", lambda dtype=dtype: _made(dtype)
    yield "descriptor max u32", lambda: _host("u32", "max")


if __name__ == "__main__":
    answers = {}
    for name, answer in questions():
        try:
            answers |= {name: raw_bits(answer())} if sys.argv[2] in name else {}
        except Exception as error:
            print(f"no answer: {name}: {str(error)[:400]}")
    np.savez_compressed(sys.argv[1], **answers)
