"""Small Triton kernels, one per number-format question, that run unchanged on a GPU and in the interpreter.

`python tests/interpret_kernels.py OUT.npz` writes the answer of this machine to every question: on a GPU without
TRITON_INTERPRET it makes the reference that `test_interpret.py` compares the interpreter with.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

N = 512
DTYPES = {
    "fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "i64": torch.int64, "i32": torch.int32,
    "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "u32": torch.uint32,
}  # fmt: skip


@triton.jit
def cast_kernel(x_ptr, out_ptr, N: tl.constexpr, ROUNDING: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.store(out_ptr + i, x.to(out_ptr.dtype.element_ty, fp_downcast_rounding=ROUNDING))


@triton.jit
def binary_kernel(x_ptr, y_ptr, out_ptr, N: tl.constexpr, OP: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    x = tl.load(x_ptr + i)
    y = tl.load(y_ptr + i)
    if OP == "add":
        r = x + y
    elif OP == "sub":
        r = x - y
    elif OP == "mul":
        r = x * y
    elif OP == "div":
        r = x / y
    elif OP == "floordiv":
        r = x // y
    elif OP == "mod":
        r = x % y
    elif OP == "shl":
        r = x << (y & 15)
    elif OP == "shr":
        r = x >> (y & 15)
    elif OP == "max":
        r = tl.maximum(x, y)
    elif OP == "min":
        r = tl.minimum(x, y)
    elif OP == "max_nan":
        r = tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "min_nan":
        r = tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "clamp":
        r = tl.clamp(x, tl.minimum(y, 1.0), tl.maximum(y, 2.0))
    elif OP == "clamp_nan":
        r = tl.clamp(x, tl.minimum(y, 1.0), tl.maximum(y, 2.0), propagate_nan=tl.PropagateNan.ALL)
    elif OP == "div_rn":
        r = tl.div_rn(x, y)
    elif OP == "umulhi":
        r = tl.umulhi(x, y)
    elif OP == "lt":
        r = (x < y).to(tl.int8)
    elif OP == "where":
        r = tl.where(x < y, x, y)
    elif OP == "ne":
        r = (x != y).to(tl.int8)
    tl.store(out_ptr + i, r)


@triton.jit
def fma_kernel(x_ptr, y_ptr, z_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    r = tl.fma(tl.load(x_ptr + i), tl.load(y_ptr + i), tl.load(z_ptr + i))
    tl.store(out_ptr + i, r)


@triton.jit
def unary_kernel(x_ptr, out_ptr, N: tl.constexpr, OP: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    if OP == "neg":
        r = -x
    elif OP == "abs":
        r = tl.abs(x)
    elif OP == "sqrt":
        r = tl.sqrt(x)
    elif OP == "sqrt_rn":
        r = tl.sqrt_rn(x)
    elif OP == "rsqrt":
        r = tl.rsqrt(x)
    elif OP == "recip":
        r = 1.0 / x
    elif OP == "exp":
        r = tl.exp(x)
    elif OP == "exp2":
        r = tl.exp2(x)
    elif OP == "log":
        r = tl.log(x)
    elif OP == "log2":
        r = tl.log2(x)
    elif OP == "floor":
        r = tl.floor(x)
    elif OP == "ceil":
        r = tl.ceil(x)
    elif OP == "times_tenth":
        r = x * 0.1
    elif OP == "times_tie":
        r = x * 1.0004883408546448
    elif OP == "plus_int":
        r = x + 3
    elif OP == "isnan":
        r = (x != x).to(tl.int8)
    tl.store(out_ptr + i, r)


@triton.jit
def libdevice_kernel(x_ptr, y_ptr, out_ptr, N: tl.constexpr, OP: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    y = tl.load(y_ptr + i)
    if OP == "rsqrt":
        r = libdevice.rsqrt(x)
    elif OP == "rsqrt_rn":
        r = libdevice.rsqrt_rn(x)
    elif OP == "rcp_rn":
        r = libdevice.rcp_rn(x)
    elif OP == "sqrt_rn":
        r = libdevice.sqrt_rn(x)
    elif OP == "div_rn":
        r = libdevice.div_rn(x, y)
    elif OP == "div_rz":
        r = libdevice.div_rz(x, y)
    elif OP == "add_rd":
        r = libdevice.add_rd(x, y)
    elif OP == "mul_rz":
        r = libdevice.mul_rz(x, y)
    elif OP == "rint":
        r = libdevice.rint(x)
    elif OP == "round":
        r = libdevice.round(x)
    elif OP == "trunc":
        r = libdevice.trunc(x)
    elif OP == "fma_rn":
        r = libdevice.fma_rn(x, y, x)
    elif OP == "fma_rz":
        r = libdevice.fma_rz(x, y, x)
    elif OP == "isnan":
        r = libdevice.isnan(x).to(tl.int32)
    elif OP == "isinf":
        r = libdevice.isinf(x).to(tl.int32)
    elif OP == "finitef":
        r = libdevice.finitef(x).to(tl.int32)
    elif OP == "tanh":
        r = libdevice.tanh(x)
    elif OP == "erf":
        r = libdevice.erf(x)
    elif OP == "pow":
        r = libdevice.pow(tl.abs(x), y)
    elif OP == "exp":
        r = libdevice.exp(x)
    elif OP == "log1p":
        r = libdevice.log1p(tl.abs(x))
    tl.store(out_ptr + i, r)


@triton.jit
def scalar_kernel(x_ptr, out_ptr, s, n, wide: tl.float64, flag, N: tl.constexpr, OP: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    if OP == "mul":
        r = x * s
    elif OP == "add_wide":
        r = x + wide
    elif OP == "square":
        r = x + s * s
    elif OP == "int_wrap":
        r = x + n * n
    elif OP == "loop":
        r = tl.zeros([N], dtype=tl.int64)
        for k in range(0, 40000, 20000):
            r += k * 131072 + x
    elif OP == "loop_i8":
        r = x
        total = tl.zeros([N], dtype=tl.int32)
        for k in range(100, 102):
            total += x + k
        r = total
    elif OP == "accumulate":
        r = tl.zeros([N], dtype=tl.float32)
        for _k in range(0, 50):
            r += x * s
    elif OP == "if":
        r = x
        if n > 3 and flag:
            r = x * 2
    elif OP == "full":
        r = x + tl.full([N], 0.1, out_ptr.dtype.element_ty)
    tl.store(out_ptr + i, r)


@triton.jit
def largest_magnitude(a, b):
    first = tl.abs(a) > tl.abs(b) or (tl.abs(a) == tl.abs(b) and a > b)
    return tl.where(first, a, b)


@triton.jit
def welford(mean_a, m2_a, count_a, mean_b, m2_b, count_b):
    delta = mean_b - mean_a
    count = count_a + count_b
    share = count_b / count
    return mean_a + delta * share, m2_a + m2_b + delta * delta * count_a * share, count


@triton.jit
def reduce_kernel(x_ptr, out_ptr, N: tl.constexpr, OP: tl.constexpr):
    rows = tl.arange(0, 16)
    i = rows[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + i)
    if OP == "sum":
        r = tl.sum(x, axis=1)
    elif OP == "max":
        r = tl.max(x, axis=1)
    elif OP == "min":
        r = tl.min(x, axis=1)
    elif OP == "argmax":
        r = tl.argmax(x, axis=1)
    elif OP == "argmin":
        r = tl.argmin(x, axis=1)
    elif OP == "custom":
        r = tl.reduce(x, 1, largest_magnitude)
    elif OP == "welford":
        mean, m2, _count = tl.reduce((x, x * 0, x * 0 + 1), 1, welford)
        r = mean + m2
    elif OP == "xor":
        r = tl.xor_sum(x, axis=1)
    elif OP == "all":
        r = tl.full([16], 1, tl.float32) * tl.sum(x)
    tl.store(out_ptr + rows, r)


@triton.jit
def scan_kernel(x_ptr, out_ptr, N: tl.constexpr, OP: tl.constexpr):
    i = tl.arange(0, 16)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + i)
    if OP == "cumsum":
        r = tl.cumsum(x, axis=1)
    elif OP == "reverse":
        r = tl.cumsum(x, axis=1, reverse=True)
    elif OP == "axis0":
        r = tl.cumsum(x, axis=0)
    elif OP == "custom":
        r = tl.associative_scan(x, 1, largest_magnitude)
    elif OP == "sort":
        r = tl.sort(x)
    tl.store(out_ptr + i, r)


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr, M: tl.constexpr, PRECISION: tl.constexpr):
    i = tl.arange(0, M)[:, None] * M + tl.arange(0, M)[None, :]
    r = tl.dot(tl.load(a_ptr + i), tl.load(b_ptr + i), input_precision=PRECISION)
    tl.store(out_ptr + i, r)


@triton.jit
def atomic_kernel(x_ptr, out_ptr, N: tl.constexpr, BINS: tl.constexpr, OP: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    if OP == "add":
        tl.atomic_add(out_ptr + i % BINS, x)
    elif OP == "max":
        tl.atomic_max(out_ptr + i % BINS, x)


def _float_bits() -> np.ndarray:
    """512 fp32 patterns: signed zeros, infinities, NaN, ties and neighbours at every format's edge, then random."""
    rng = np.random.Generator(np.random.Philox(7))
    edges = [
        0.0,
        2.0**-149,
        2.0**-133,
        2.0**-134,
        2.0**-126,
        2.0**-24,
        2.0**-25,
        2.0**-16,
        2.0**-17,
        2.0**-14,
        2.0**-9,
        2.0**-10,
        2.0**-6,
        1.0,
        1.00390625,
        1.01171875,
        1.0625,
        1.1875,
        1.125,
        1.375,
        1.00048828125,
        1.00146484375,
        448.0,
        464.0,
        480.0,
        57344.0,
        61440.0,
        65504.0,
        65520.0,
        65536.0,
        3.3895313892515355e38,
        3.4e38,
        np.inf,
    ]
    near = np.array([edges, -np.array(edges)], dtype=np.float32).ravel().view(np.int32)
    near = np.concatenate([near, near + 1, near[np.abs(near.view(np.float32)) > 0] - 1, [0x7FC00000, 0x7F800001]])
    narrow = rng.integers(0, 1 << 16, 100).astype(np.int32) << 16 | 0x8000
    small = (rng.standard_normal(100) * 4.0 ** rng.integers(-8, 8, 100)).astype(np.float32).view(np.int32)
    bits = np.concatenate([near.astype(np.int64), narrow, small, rng.integers(-(1 << 31), 1 << 31, N)])[:N]
    return bits.astype(np.int32)


def values(dtype: str, shift: int = 0) -> torch.Tensor:
    """Make the inputs of every question, as `dtype`: fp32 patterns rounded or reinterpreted, rotated by `shift`."""
    bits = np.roll(_float_bits(), shift)
    if dtype == "fp64":
        rng = np.random.Generator(np.random.Philox(11))
        nudge = rng.integers(-1, 2, N) * rng.integers(1, 1 << 28, N)
        return torch.from_numpy((bits.view(np.float32).astype(np.float64).view(np.int64) + nudge).view(np.float64))
    if dtype == "fp32":
        return torch.from_numpy(bits.view(np.float32).copy())
    if dtype in ("e4m3", "e5m2"):
        return torch.from_numpy(np.roll(np.arange(N), shift * 7).astype(np.uint8)).view(DTYPES[dtype])
    if dtype in ("bf16", "fp16"):
        return torch.from_numpy((bits >> (16 if dtype == "bf16" else 5)).astype(np.int16)).view(DTYPES[dtype])
    rng = np.random.Generator(np.random.Philox(13 + shift))
    wide = rng.integers(-(1 << 63), (1 << 63) - 1, N) >> rng.integers(0, 62, N)
    return torch.from_numpy(wide).to(DTYPES[dtype])


def rows(dtype: str, special: bool) -> torch.Tensor:
    """16 rows of 128 small integers; `special` puts NaN, infinities and signed zeros into the first rows."""
    rng = np.random.Generator(np.random.Philox(17))
    x = torch.from_numpy(rng.integers(-8, 9, (16, 128)).astype(np.float32))
    if special:
        x[0], x[1], x[2, ::2], x[2, 1::2], x[3] = float("nan"), -0.0, -0.0, 0.0, -float("inf")
        x[4, 5], x[5, 64], x[6, 127], x[7, 0] = float("nan"), float("inf"), float("nan"), float("nan")
    return x.to(DTYPES[dtype])


def _run(kernel: object, inputs: list[torch.Tensor], out: torch.Tensor, *args: object, **meta: object) -> torch.Tensor:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out = out.to(device)
    # A fused multiply-add is a freedom of the compiler that the interpreter does not take.
    kernel[(1,)](*(x.to(device) for x in inputs), out, *args, **meta, enable_fp_fusion=False)
    return out.cpu()


def _empty(dtype: str, *shape: int) -> torch.Tensor:
    return torch.zeros(shape or (N,), dtype=DTYPES[dtype])


Question = tuple[str, Callable[[], torch.Tensor]]
FLOATS = ("fp64", "fp32", "fp16", "bf16", "e4m3", "e5m2")
INTEGERS = ("i64", "i32", "i16", "i8", "u8", "u32")
LIBDEVICE = [
    "rsqrt", "rsqrt_rn", "rcp_rn", "sqrt_rn", "div_rn", "div_rz", "add_rd", "mul_rz", "rint", "round", "trunc",
    "fma_rn", "fma_rz", "isnan", "isinf", "finitef", "tanh", "erf", "pow", "exp", "log1p",
]  # fmt: skip


def questions() -> Iterator[Question]:
    """Every question: its name, and what answers it."""
    yield from _casts()
    yield from _binaries()
    yield from _functions()
    yield from _scalars()
    yield from _reductions()
    yield from _scans()
    yield from _dots()
    yield from _atomics()


def _casts() -> Iterator[Question]:
    pairs = [(a, b) for a in FLOATS for b in FLOATS if a != b]
    pairs += [(a, b) for a in ("i64", "i32", "i8", "u8", "u32") for b in FLOATS[:4]]
    pairs += [(a, b) for a in FLOATS[:4] for b in INTEGERS]
    pairs += [("i32", "i8"), ("i8", "i32"), ("u8", "i32"), ("i32", "u32"), ("i64", "i32")]
    for a, b in pairs:
        yield f"cast {a} {b}", lambda a=a, b=b: _run(cast_kernel, [values(a)], _empty(b), N=N, ROUNDING=None)
    toward_zero = ["fp32 bf16", "fp32 fp16", "fp32 e5m2", "fp32 e4m3", "fp16 e5m2", "fp64 bf16", "bf16 e5m2"]
    for a, b in map(str.split, toward_zero):
        yield f"cast {a} {b} rtz", lambda a=a, b=b: _run(cast_kernel, [values(a)], _empty(b), N=N, ROUNDING="rtz")


def _binary(op: str, a: str, b: str, out: str) -> Question:
    return f"{op} {a} {b} {out}", lambda: _run(binary_kernel, [values(a), values(b, 3)], _empty(out), N=N, OP=op)


def _binaries() -> Iterator[Question]:
    for a in ("bf16", "fp16", "fp32"):
        for op in ["add", "sub", "mul", "max", "min", "max_nan", "min_nan", "clamp", "clamp_nan", "where"]:
            yield _binary(op, a, a, a)
        yield _binary("lt", a, a, "i8")
        yield _binary("ne", a, a, "i8")
        yield _binary("div", a, a, "fp32")
    mixed = [
        "bf16 fp32",
        "bf16 fp16",
        "bf16 bf16",
        "bf16 i32",
        "e4m3 e5m2",
        "e4m3 bf16",
        "e4m3 e4m3",
        "e4m3 fp32",
        "e5m2 e5m2",
    ]
    for a, b in map(str.split, mixed):
        yield _binary("mul", a, b, "fp32")
    yield _binary("lt", "e4m3", "e4m3", "i8")
    yield _binary("div_rn", "fp32", "fp32", "fp32")
    for op in ["add", "mul", "floordiv", "mod", "shl", "shr", "umulhi", "max", "min"]:
        yield _binary(op, "i32", "i32", "i32")
    yield _binary("mul", "i8", "i8", "i32")
    yield _binary("mul", "i64", "i32", "i64")
    yield _binary("shr", "u32", "u32", "u32")
    yield _binary("umulhi", "i64", "i64", "i64")


def _functions() -> Iterator[Question]:
    for a in ("fp32", "bf16", "fp16", "fp64"):
        yield f"fma {a}", lambda a=a: _run(fma_kernel, [values(a), values(a, 3), values(a, 8)], _empty(a), N=N)
    pairs = [
        (op, a)
        for a in ("fp32", "bf16", "fp16")
        for op in ["neg", "abs", "times_tenth", "times_tie", "plus_int", "isnan"]
    ]
    pairs += [
        (op, "fp32") for op in ["sqrt", "sqrt_rn", "rsqrt", "recip", "exp", "exp2", "log", "log2", "floor", "ceil"]
    ]
    for op, a in pairs:
        out = "i8" if op == "isnan" else a
        yield f"{op} {a}", lambda a=a, op=op, out=out: _run(unary_kernel, [values(a)], _empty(out), N=N, OP=op)
    for op in LIBDEVICE:
        inputs, out = [values("fp32"), values("fp32", 3)], "i32" if op in ("isnan", "isinf", "finitef") else "fp32"
        yield (
            f"libdevice.{op}",
            lambda op=op, inputs=inputs, out=out: _run(libdevice_kernel, inputs, _empty(out), N=N, OP=op),
        )


def _scalars() -> Iterator[Question]:
    cases = (
        "mul bf16 fp32|mul fp32 fp32|mul fp16 fp32|mul i32 fp32|add_wide fp32 fp64|square fp32 fp32|int_wrap i32 i64|"
        "loop i32 i64|loop_i8 i8 i32|accumulate fp32 fp32|if fp32 fp32|full bf16 bf16|full fp32 fp32"
    )
    for op, a, out in map(str.split, cases.split("|")):
        yield (
            f"scalar {op} {a}",
            lambda op=op, a=a, out=out: _run(
                scalar_kernel, [values(a)], _empty(out), 0.1, 123457, 0.1, True, N=N, OP=op
            ),
        )


def _reduction(op: str, a: str, x: torch.Tensor, out: str) -> Question:
    name = f"reduce {op} {a}" if a else f"reduce {op}"
    return name, lambda: _run(reduce_kernel, [x], _empty(out, 16), N=x.shape[1], OP=op)


def _reductions() -> Iterator[Question]:
    for a in ("fp32", "bf16", "fp16"):
        for op in ("max", "min"):
            yield _reduction(op, a, rows(a, True), "fp32")
        for op in ("custom", "sum"):
            yield _reduction(op, a, rows(a, False), "fp32")
        for op in ("argmax", "argmin"):
            yield _reduction(op, a, rows(a, False), "i32")
    yield _reduction("welford", "", rows("fp32", False), "fp32")
    yield _reduction("all", "", rows("fp32", False), "fp32")
    for op, a in (("xor", "i32"), ("sum", "i8"), ("max", "i8"), ("argmax", "i32")):
        yield _reduction(op, a, values(a).reshape(16, -1), "i32")


def _scans() -> Iterator[Question]:
    for op in ("cumsum", "reverse", "axis0", "custom", "sort"):
        for a in ("fp32", "bf16", "fp16"):
            yield (
                f"scan {op} {a}",
                lambda op=op, a=a: _run(scan_kernel, [rows(a, False)], _empty("fp32", 16, 128), N=128, OP=op),
            )


def _dots() -> Iterator[Question]:
    cases = ["bf16 None", "fp16 None", "e4m3 None", "e5m2 None", "fp32 tf32", "fp32 ieee", "fp32 tf32x3", "i8 None"]
    for m in (16, 64):
        for a, precision in map(str.split, cases):
            if a in ("e4m3", "e5m2", "i8") and m == 16:
                continue  # 8-bit operands need at least 32 columns
            yield f"dot {a} {precision} {m}", lambda a=a, p=precision, m=m: _dot(a, p, m)


def _dot(dtype: str, precision: str, m: int) -> torch.Tensor:
    identity, out = torch.eye(m).to(DTYPES[dtype]), _empty("i32" if dtype == "i8" else "fp32", m, m)
    return _run(
        dot_kernel, [dot_left(dtype, m), identity], out, M=m, PRECISION=None if precision == "None" else precision
    )


def _atomics() -> Iterator[Question]:
    for op, a in (("add", "fp32"), ("add", "bf16"), ("add", "fp16"), ("add", "i32"), ("max", "fp32"), ("max", "i32")):
        yield (
            f"atomic {op} {a}",
            lambda op=op, a=a: _run(atomic_kernel, [rows(a, False).reshape(-1)], _empty(a, 32), N=N, BINS=32, OP=op),
        )
    for a in ("bf16", "fp16"):
        yield (
            f"atomic once {a}",
            lambda a=a: _run(atomic_kernel, [values(a)], values(a, 3).clone(), N=N, BINS=N, OP="add"),
        )


def dot_left(dtype: str, m: int) -> torch.Tensor:
    """Make a finite left operand with full significands, so that a product with the identity shows its rounding."""
    rng = np.random.Generator(np.random.Philox(19))
    x = torch.from_numpy(rng.uniform(-9, 9, (m, m)).astype(np.float32))
    return x.to(DTYPES[dtype])


def raw_bits(out: torch.Tensor) -> np.ndarray:
    return out.view({1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}[out.element_size()]).numpy()


def answers() -> dict[str, np.ndarray]:
    """Raw bits of every answer; a question that does not compile answers with a zero-size array."""
    found: dict[str, np.ndarray] = {}
    for name, ask in questions():
        try:
            out = ask()
        except Exception as error:
            print(f"{name}: {type(error).__name__} {str(error).strip().splitlines()[-1][:150] if str(error) else ''}")
            found[name] = np.zeros(0, dtype=np.uint8)
            continue
        found[name] = raw_bits(out)
    return found


if __name__ == "__main__":
    np.savez_compressed(sys.argv[1], **answers())
