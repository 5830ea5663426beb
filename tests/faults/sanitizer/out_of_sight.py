"""Kernels of RMSNorm that give right results and touch memory as they must not; compute-sanitizer sees it on a GPU.

memcheck finds `over_reads`, which initcheck sees in gaps between rows, too; initcheck finds `reads_scratch` and
racecheck `races_in_a_block`.
"""

import torch
import triton
import triton.language as tl

from lastbit.kernel import kernel

NEVER = 123456789


@triton.jit
def norm_kernel(x, y, scratch, n, n_read, stride, eps, SCRATCH: tl.constexpr, NEVER: tl.constexpr, BLOCK: tl.constexpr):
    """Read `n_read` columns of a row and use `n`; use of scratch memory what is never there."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    read = tl.load(x + row * stride + columns, mask=columns < n_read, other=0.0).to(tl.float32)
    values = tl.where(columns < n, read, 0.0)
    normalized = values * tl.rsqrt(tl.sum(values * values, axis=0) / n + eps)
    if SCRATCH:
        normalized = tl.where(tl.load(scratch + row) == NEVER, normalized + 1.0, normalized)
    tl.store(y + row * n + columns, normalized.to(y.dtype.element_ty), mask=columns < n)


@triton.jit
def racing_norm_kernel(x, y, n, stride, eps, BLOCK: tl.constexpr):
    """Every thread stores to the first word of shared memory when the sum is done, and reads it back."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    values = tl.load(x + row * stride + columns, mask=columns < n, other=0.0).to(tl.float32)
    normalized = values * tl.rsqrt(tl.sum(values * values, axis=0) / n + eps)
    raced = tl.inline_asm_elementwise(
        "{ .reg .u32 a; mov.u32 a, 0; st.shared.f32 [a], $1; ld.shared.f32 $0, [a]; }",
        "=f,f",
        [normalized],
        dtype=tl.float32,
        is_pure=False,
        pack=1,
    )
    normalized = tl.where(raced == 12345.678, normalized + 1.0, normalized)
    tl.store(y + row * n + columns, normalized.to(y.dtype.element_ty), mask=columns < n)


def _rows(x):
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()


def _normalized(x, eps, *, beyond=0, scratch=False):
    rows, y = _rows(x), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    unwritten = torch.empty(len(rows), dtype=torch.int32, device=x.device)
    n = x.shape[-1]
    if rows.numel():
        block = max(triton.next_power_of_2(n + beyond), 128)
        norm_kernel[(len(rows),)](
            rows, y, unwritten, n, n + beyond, rows.stride(0), eps, SCRATCH=scratch, NEVER=NEVER, BLOCK=block
        )
    return y


@kernel("rms_norm", contract="fp32_multiply", devices=("cuda",))
def over_reads(x, *, eps):
    """One element beyond each row, which is beyond the tensor after the last."""
    return _normalized(x, eps, beyond=1)


@kernel("rms_norm", contract="fp32_multiply", devices=("cuda",))
def reads_scratch(x, *, eps):
    """Memory that nobody wrote, with no effect."""
    return _normalized(x, eps, scratch=True)


@kernel("rms_norm", contract="fp32_multiply", devices=("cuda",))
def does_neither(x, *, eps):
    return _normalized(x, eps)


@kernel("rms_norm", contract="fp32_multiply", devices=("cuda",))
def races_in_a_block(x, *, eps):
    rows, y = _rows(x), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    n = x.shape[-1]
    if rows.numel():
        block = max(triton.next_power_of_2(n), 128)
        racing_norm_kernel[(len(rows),)](rows, y, n, rows.stride(0), eps, BLOCK=block)
    return y
