"""What the texts of generated Triton kernels are made of."""

from __future__ import annotations

FLOATS = ("float32", "bfloat16", "float16")
INTEGERS = ("int32", "int64")
DTYPES = (*INTEGERS, *FLOATS, "int1")

ATOMICS = {
    "int32": ("add", "max", "min", "xchg", "and", "or", "xor", "cas"),
    "int64": ("add", "max", "xchg", "cas"),
    "float32": ("add", "max", "min", "xchg", "cas"),
    "float16": ("add",),
    "bfloat16": ("add",),
}

FUNCTIONS = {
    "larger": "@triton.jit\ndef larger(a, b):\n    return tl.where(a > b, a, b)\n",
    "second": "@triton.jit\ndef second(a, b):\n    return b\n",
    "chosen": "@triton.jit\ndef chosen(a, b):\n    if a > b:\n        return a\n    return b\n",
    "both": "@triton.jit\ndef both(a, i, b, j):\n    return a + b, tl.where(a > b, i, j)\n",
}
"""What a kernel may reduce by, besides the language's own."""

BAD = (
    "tl.static_assert(False, 'stopped')",
    "tl.assume(False)",
    "missing(n)",
    "tl.zeros([4], tl.int32) + tl.zeros([8], tl.int32)",
    "tl.store(t0 + tl.arange(0, 4), n, mask=tl.arange(0, 8) > 1)",
    "tl.gather(tl.arange(0, 4), tl.arange(0, 4) + tl.program_id(0), 0)",
    "tl.store(t0, tl.gather(tl.arange(0, 4), tl.arange(0, 4) + n, 0).sum())",
    "tl.assume(tl.program_id(0) < 2)",
    "n if tl.arange(0, 4) > 2 else m",
    "for _ in range(0, 4, n - n): tl.debug_barrier()",
)
"""Statements that raise an error; Python does some of them, operations the others."""

UNARY = (
    "-{}",
    "tl.abs({})",
    "tl.exp({})",
    "tl.sqrt({})",
    "tl.rsqrt({})",
    "tl.floor({})",
    "tl.log2({})",
    "tl.sigmoid({})",
)
BINARY = {
    True: ("{} + {}", "{} * {}", "{} - {}", "{} / {}", "tl.maximum({}, {})", "tl.minimum({}, {})"),
    False: (
        "{} + {}",
        "{} * {}",
        "{} - {}",
        "{} & {}",
        "{} ^ {}",
        "{} // {}",
        "{} % {}",
        "{} | {}",
        "tl.minimum({}, {})",
    ),
}
APART = ("slot", "read", "turn", "once", "slot")
"""What a program may do with a tensor so that programs do not meet there: use a slot of its own, only read it, use
every 32nd element, or touch it in one place of the kernel. With `all` of them, it does what it likes."""
PROGRAMS = 32
"""Programs of a launch, at most."""

COMPARISONS = ("{} < {}", "{} == {}", "{} >= {}", "{} != {}")
