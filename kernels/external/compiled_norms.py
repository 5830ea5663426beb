"""RMSNorm of vLLM and FlashInfer as their CUDA sources have it, plain and with a residual, from compiled libraries.

`docs/measurements/upstream/compile_norms.py` makes the libraries, and the environment variable LASTBIT_COMPILED_NORMS
names their folder. Contracts are read from the sources. vLLM 0.23.0 rounds before it multiplies by the weight; the
versions around it multiply in fp32. Its rms_norm reads vectors without asking whether addresses allow that.
"""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path

import torch
from norm_packages import refuse_elsewhere

from lastbit import UnsupportedCase, kernel

FOLDER = "LASTBIT_COMPILED_NORMS"
VECTOR_BYTES = 16
VLLM = {
    "0.22.1": "fp32_multiply",
    "0.23.0": "input_multiply",
    "0.24.0": "fp32_multiply",
    "0.33.0": "fp32_multiply",
}
FLASHINFER = "0.7.2.post1"


@functools.cache
def operations(package):
    """Load a library and return its operators in torch.ops; libraries that cannot be loaded stay unsupported."""
    name = package.replace("-", "_").replace(".", "_")
    path = Path(os.environ.get(FOLDER, "")) / f"{name}.so"
    if not path.is_file():
        raise UnsupportedCase(
            f"{path} is missing: docs/measurements/upstream/compile_norms.py makes it, and {FOLDER} names its folder"
        )
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise UnsupportedCase(f"{path} cannot be loaded ({error})") from error
    return getattr(torch.ops, name)


def rows_in_place(name, x):
    """Return x as [M, N] in its own memory, as the sources address rows."""
    if not x.numel():
        raise UnsupportedCase(f"{name} has shape {tuple(x.shape)}: no element, and upstream launches no block")
    try:
        rows = x.view(-1, x.shape[-1])
    except RuntimeError as error:
        raise UnsupportedCase(f"{name}: its rows are not equally far apart in memory ({error})") from error
    if rows.shape[-1] > 1 and rows.stride(-1) != 1:
        raise UnsupportedCase(f"{name}: its columns are {rows.stride(-1)} elements apart; upstream wants neighbours")
    return rows


def refuse_other_dtypes(x, dtypes, **tensors):
    if x.dtype not in dtypes:
        raise UnsupportedCase(f"x is {x.dtype}; upstream takes {dtypes}")
    for name, tensor in tensors.items():
        if tensor.dtype != x.dtype:
            raise UnsupportedCase(f"{name} is {tensor.dtype} and x {x.dtype}: upstream reads one dtype")


def refuse_unaligned(**tensors):
    """Raise UnsupportedCase unless vectors begin at multiples of their length, which is up to 16 bytes by the width."""
    for name, tensor in tensors.items():
        unit = math.gcd(VECTOR_BYTES // tensor.element_size(), tensor.shape[-1])
        apart = tensor.stride(0) if tensor.dim() > 1 and tensor.shape[0] > 1 else 0
        if tensor.data_ptr() % (unit * tensor.element_size()) or apart % unit:
            raise UnsupportedCase(f"{name}: rows do not begin at multiples of {unit} elements; upstream reads those")


def refuse_wide(x):
    """Raise UnsupportedCase if a row in fp32, which FlashInfer's FusedAddRMSNorm keeps, exceeds shared memory."""
    need = 4 * (x.shape[-1] + 32)
    if x.is_cuda and need > (room := torch.cuda.get_device_properties(x.device).shared_memory_per_block_optin):
        raise UnsupportedCase(f"upstream keeps a row in shared memory: {need:,} bytes of {room:,}")


def checked(x, dtypes, **tensors):
    """Return rows of x and of a residual, and the weight, contiguous."""
    refuse_elsewhere(x, **tensors)
    refuse_other_dtypes(x, dtypes, **tensors)
    rows = {name: rows_in_place(name, t) for name, t in {"x": x, **tensors}.items() if name != "weight"}
    return *rows.values(), tensors["weight"].contiguous()


def plain_norm(package, dtypes, x, weight, eps):
    """Run a library's norm without a residual, with a new tensor as its output."""
    library = operations(package)
    rows, weight = checked(x, dtypes, weight=weight)
    output = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    refuse_unaligned(x=rows, weight=weight, output=output)
    library.rms_norm(output, rows, weight, eps)
    return output.view(x.shape)


def declare_vllm(version, weight_rule):
    """Register both norms of one version of vLLM."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16)

    @kernel("rms_norm", contract=weight_rule, name=f"vllm-{version}[rms_norm]", devices=("cuda",))
    def rms_norm(x, weight, *, eps):
        return plain_norm(f"vllm-{version}", dtypes, x, weight, eps)

    @kernel(
        "rms_norm", contract=f"{weight_rule}+rounded_sum", name=f"vllm-{version}[fused_add_rms_norm]",
        mutates={"x": "output", "residual": "residual_sum"}, devices=("cuda",),
    )  # fmt: skip
    def fused_add_rms_norm(x, residual, weight, *, eps):
        library = operations(f"vllm-{version}")
        rows, others, weight = checked(x, dtypes, residual=residual, weight=weight)
        if not others.is_contiguous():
            raise UnsupportedCase("residual: upstream wants it contiguous")
        library.fused_add_rms_norm(rows, others, weight, eps)


def declare_flashinfer(version):
    """Register both norms of FlashInfer; its residual sum stays in fp32 for the squares and for the product."""
    dtypes = (torch.float16, torch.bfloat16)

    @kernel("rms_norm", contract="fp32_multiply", name="flashinfer[rmsnorm]", devices=("cuda",))
    def rmsnorm(x, weight, *, eps):
        return plain_norm(f"flashinfer-{version}", dtypes, x, weight, eps)

    @kernel(
        "rms_norm", contract="fp32_multiply+unrounded_sum", name="flashinfer[fused_add_rmsnorm]",
        mutates={"x": "output", "residual": "residual_sum"}, devices=("cuda",),
    )  # fmt: skip
    def fused_add_rmsnorm(x, residual, weight, *, eps):
        library = operations(f"flashinfer-{version}")
        rows, others, weight = checked(x, dtypes, residual=residual, weight=weight)
        refuse_unaligned(x=rows, residual=others, weight=weight)
        refuse_wide(x)
        library.fused_add_rms_norm(rows, others, weight, eps)


for numbered, rule in VLLM.items():
    declare_vllm(numbered, rule)
declare_flashinfer(FLASHINFER)
