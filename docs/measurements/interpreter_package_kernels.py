"""Kernels of public packages that `interpreter_packages.py` runs, each with a formula in torch of what it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

EPS = 1e-6
Result = tuple[torch.Tensor, torch.Tensor]
Try = tuple[str, str, Callable[[ModuleType], Result]]

generator = torch.Generator().manual_seed(0)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


X, W, Y, HALVES = normal(6, 256), normal(256), normal(6, 256), normal(6, 512)
SINGLE = normal(6, 256, dtype=torch.float32)


def rms(x: torch.Tensor, w: torch.Tensor, one: float = 0.0) -> torch.Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], w.float() + one, EPS)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    a, b = x.float().chunk(2, -1)
    return F.silu(a) * b


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Turn the halves of x [..., D] by angles [..., D / 2]."""
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


ANGLES = torch.arange(6)[:, None] / 10000 ** (torch.arange(32) / 32)
COS, SIN = (torch.cat([f(ANGLES)] * 2, -1) for f in (torch.cos, torch.sin))
QUERY = normal(6, 4, 64)


def filled(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[Callable[[torch.Tensor], Any]], torch.Tensor]:
    """Return the output tensor that a call fills."""

    def call(launch: Callable[[torch.Tensor], Any]) -> torch.Tensor:
        out = torch.empty(shape, dtype=dtype)
        launch(out)
        return out

    return call


def by_groups(quantised: tuple[torch.Tensor, ...], x: torch.Tensor) -> Result:
    """Restore numbers from codes and scales, and compare them with those that were quantised."""
    codes, scales = quantised[0].float(), quantised[1].float().reshape(x.shape[0], -1)
    return codes * scales.repeat_interleave(x.shape[1] // scales.shape[1], 1), x.float()


def cloned(call: Callable[..., Any], *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return what `call` makes of copies of tensors that it changes."""
    copies = [x.clone() for x in tensors]
    call(*copies)
    return copies


def tries() -> Iterator[Try]:
    """Map the folder of a package and module to what is tried, and how."""
    cuda, dim = "lmdeploy/lmdeploy.pytorch.kernels.cuda", (6, 256)
    yield f"{cuda}.rms_norm", "rms_norm", lambda m: (m.rms_norm(X, W, EPS), rms(X, W))
    yield f"{cuda}.rms_norm", "with residual", lambda m: (m.rms_norm(X, W, EPS, Y)[0], rms(X + Y, W))
    yield f"{cuda}.activation", "silu_and_mul", lambda m: (m.silu_and_mul(HALVES), swiglu(HALVES))
    yield f"{cuda}.apply_rotary_pos_emb", "rope", lambda m: (
        m.apply_rotary_pos_emb(QUERY, QUERY, COS, SIN)[0], rotated(QUERY, ANGLES[:, None])
    )  # fmt: skip
    yield f"{cuda}.blocked_gemm_fp8", "quant_fp8", lambda m: by_groups(m.quant_fp8(X, 128), X)
    yield f"{cuda}.w8a8_triton_kernels", "int8", lambda m: by_groups(m.per_token_quant_int8(X, EPS), X)
    yield f"{cuda}.awq_kernels", "awq_linear", _awq
    ops = "xformers/xformers.ops._triton"
    yield f"{ops}.rmsnorm_kernels", "rms_norm", lambda m: (m._rms_norm_forward(X, W, EPS), rms(X, W))
    yield f"{ops}.rmsnorm_kernels", "rms_norm_add", lambda m: (
        m._rms_norm_add_forward(X.clone(), Y, W, EPS), rms(X + Y, W)
    )  # fmt: skip
    yield from _conch(dim)
    yield from _liger()
    yield from _fla()
    yield from _flashinfer()
    yield from _assembly()
    yield from _others()


def _awq(m: ModuleType) -> Result:
    k, n = 128, 64
    codes, zeros = (torch.randint(0, 16, (r, n), generator=generator, dtype=torch.int32) for r in (k, 1))
    scales, x = normal(1, n, dtype=torch.float16), normal(4, k, dtype=torch.float16)
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7]) * 4
    packed = [(v.reshape(-1, n // 8, 8) << order).sum(-1).to(torch.int32) for v in (codes, zeros)]
    exact = x.double() @ ((codes - zeros) * scales.double())
    return m.awq_linear(x, packed[0], scales, packed[1]), exact


def _conch(dim: tuple[int, int]) -> Iterator[Try]:
    k = "conch_triton_kernels/conch.kernels"
    yield f"{k}.normalization.rms_norm", "rms_norm", lambda m: (
        filled(*dim)(lambda out: m.rms_norm_launcher(out, X, W, EPS)), rms(X, W)
    )  # fmt: skip
    yield f"{k}.normalization.rms_norm", "fused_add", lambda m: (
        cloned(lambda x, r: m.fused_add_rms_norm_launcher(x, r, W, EPS), X, Y)[0], rms(X + Y, W)
    )  # fmt: skip
    yield f"{k}.normalization.gemma_rms_norm", "gemma", lambda m: (
        cloned(lambda x: m.gemma_rms_norm_inplace_launcher(x, W, EPS), X)[0], rms(X, W, 1.0)
    )  # fmt: skip
    yield f"{k}.activation.silu_and_mul", "silu_and_mul", lambda m: (
        filled(*dim)(lambda out: m.silu_and_mul_launcher(out, HALVES)), swiglu(HALVES)
    )  # fmt: skip
    wide = HALVES.float()  # libdevice.tanh takes no bf16, on a GPU neither
    yield (
        f"{k}.activation.gelu_tanh_and_mul",
        "gelu_tanh_and_mul",
        lambda m: (
            filled(*dim, dtype=torch.float32)(lambda out: m.gelu_tanh_and_mul_launcher(out, wide)),
            F.gelu(wide[:, :256], approximate="tanh") * wide[:, 256:],
        ),
    )
    yield f"{k}.embedding.rotary_embedding", "rope", lambda m: (
        cloned(
            lambda q, k: m.rotary_embedding_launcher(
                torch.arange(6), q, k, 64, torch.cat([ANGLES.cos(), ANGLES.sin()], -1).bfloat16()
            ),
            QUERY.reshape(6, 256), QUERY.reshape(6, 256),
        )[0].reshape(6, 4, 64), rotated(QUERY, ANGLES[:, None]),
    )  # fmt: skip
    scale = torch.tensor([0.05])
    yield (
        f"{k}.quantization.fp8",
        "static fp8",
        lambda m: (
            filled(*dim, dtype=torch.float8_e4m3fn)(lambda o: m.static_scaled_fp8_quant_launcher(o, X, scale)).float(),
            X.float() / scale,
        ),
    )
    yield (
        f"{k}.quantization.int8",
        "static int8",
        lambda m: (
            filled(*dim, dtype=torch.int8)(lambda o: m.static_scaled_int8_quant_launcher(o, X, scale)).float(),
            (X.float() / scale).round(),
        ),
    )


def _liger() -> Iterator[Try]:
    o = "liger_kernel/liger_kernel.ops"
    yield f"{o}.rms_norm", "forward", lambda m: (m.rms_norm_forward(X, W, EPS, 0.0, "llama", None)[0], rms(X, W))
    yield f"{o}.layer_norm", "forward", lambda m: (
        m.layer_norm_forward(X, W, W, EPS)[0], F.layer_norm(X.float(), (256,), W.float(), W.float(), EPS)
    )  # fmt: skip
    yield f"{o}.swiglu", "forward", lambda m: (m.swiglu_forward(X, Y)[2], F.silu(X.float()) * Y)
    yield f"{o}.geglu", "forward", lambda m: (m.geglu_forward(X, Y)[2], F.gelu(X.float(), approximate="tanh") * Y)
    yield f"{o}.softmax", "forward", lambda m: (m._softmax_forward(SINGLE)[0], SINGLE.softmax(-1))
    yield (
        f"{o}.group_norm",
        "forward",
        lambda m: (
            m.group_norm_forward(SINGLE.reshape(6, 8, 32), 8, 4, torch.ones(8), torch.zeros(8), EPS)[0],
            F.group_norm(SINGLE.reshape(6, 8, 32), 4, eps=EPS),
        ),
    )
    yield f"{o}.fused_add_rms_norm", "forward", lambda m: (
        m.fused_add_rms_norm_forward(X, Y, W, EPS, 0.0, "llama")[0], rms(X + Y, W)
    )  # fmt: skip
    yield f"{o}.relu_squared", "forward", lambda m: (m.relu_squared_forward(SINGLE), SINGLE.relu() ** 2)
    yield (
        f"{o}.rope",
        "forward",
        lambda m: (
            m.rope_forward(
                QUERY.transpose(0, 1)[None].clone(), QUERY.transpose(0, 1)[None].clone(), COS[None], SIN[None]
            )[0],
            rotated(QUERY, ANGLES[:, None]).transpose(0, 1)[None],
        ),
    )
    yield f"{o}.cross_entropy", "forward", lambda m: (
        m.cross_entropy_forward(
            SINGLE.clone(), torch.arange(6), None, -100, 0.0, 0.0, "mean", None, False
        )[0], F.cross_entropy(SINGLE, torch.arange(6))
    )  # fmt: skip


def _fla() -> Iterator[Try]:
    f = "fla_core/fla"
    yield f"{f}.ops.utils.softmax", "forward", lambda m: (m.softmax_fwd(SINGLE), SINGLE.softmax(-1))
    yield f"{f}.ops.utils.logsumexp", "forward", lambda m: (m.logsumexp_fwd(SINGLE), SINGLE.logsumexp(-1))
    yield f"{f}.modules.activations.ops", "swiglu", lambda m: (m.swiglu_fwd(X, Y), F.silu(X.float()) * Y.float())
    yield f"{f}.modules.activations.ops", "logsigmoid", lambda m: (m.logsigmoid_fwd(SINGLE), F.logsigmoid(SINGLE))
    yield f"{f}.modules.rotary.ops", "rope", lambda m: (
        m.rotary_embedding_fwdbwd(QUERY.float()[None], ANGLES.cos(), ANGLES.sin())[0], rotated(QUERY, ANGLES[:, None])
    )  # fmt: skip
    yield f"{f}.modules.norm.layernorm", "rms_norm", lambda m: (m.rms_norm(X, W, None, eps=EPS), rms(X, W))
    yield f"{f}.modules.norm.l2norm", "l2norm", lambda m: (m.l2norm_fwd(SINGLE)[0], F.normalize(SINGLE, dim=-1))


def _flashinfer() -> Iterator[Try]:
    f = "flashinfer_python/flashinfer.triton"
    yield f"{f}.norm", "rms_norm", lambda m: (filled(6, 256)(lambda out: m.rms_norm(X, W, out, EPS)), rms(X, W))
    yield f"{f}.activation", "silu_and_mul", lambda m: (m.silu_and_mul(HALVES), swiglu(HALVES))
    for name in ("gemm_persistent", "gemm_descriptor_persistent"):
        yield f"{f}.sm_constraint_gemm", name, lambda m, name=name: _gemm(m, name)


def _gemm(m: ModuleType, name: str) -> Result:
    m.check_input = m.check_device = lambda x: None  # type: ignore[attr-defined] # which ask for tensors on a GPU
    a, b = normal(96, 128), normal(160, 128)
    found = getattr(m, name)(a, b if "descriptor" in name else b.T, torch.zeros(96, 160).bfloat16(), num_sms=4)
    return found[0] if isinstance(found, tuple) else found, a.double() @ b.double().T


def _others() -> Iterator[Try]:
    yield "torchao/torchao.kernel.blockwise_quantization", "fp8", lambda m: by_groups(m.fp8_blockwise_act_quant(X), X)
    s = "sglang/sglang.kernels.ops"
    yield f"{s}.layernorm.fused_rmsnorm", "rms_norm", lambda m: (m.fused_rmsnorm(X, W, EPS), rms(X, W))
    yield f"{s}.layernorm.minimax_m3_rmsnorm", "gemma", lambda m: (m.gemma_rmsnorm(X, W, EPS), rms(X, W, 1.0))
    yield f"{s}.quantization.int8_kernel", "per token", lambda m: by_groups(m.per_token_quant_int8(X), X)
    yield f"{s}.quantization.act_quant_triton", "fp8", lambda m: by_groups(m.act_quant(X), X)
    u = "unsloth/unsloth.kernels"
    yield f"{u}.swiglu", "forward", lambda m: (m.swiglu_fg_kernel(X[None], Y[None])[0], F.silu(X.float()) * Y)
    yield f"{u}.geglu", "forward", lambda m: (m.geglu_exact_forward_kernel(X[None], Y[None])[0], F.gelu(X.float()) * Y)
    yield f"{u}.rms_layernorm", "rms_norm", lambda m: (
        m.fast_rms_layernorm(SimpleNamespace(weight=W, variance_epsilon=EPS), X), rms(X, W)
    )  # fmt: skip
    yield "vllm/vllm.model_executor.layers.mamba.ops.layernorm_gated", "rms_norm", lambda m: (
        m.rms_norm_gated(X, W, None, eps=EPS), rms(X, W)
    )  # fmt: skip
    yield (
        "vllm/vllm.v1.sample.ops.topk_topp_triton",
        "top-k",
        lambda m: (
            m.apply_top_k_top_p_triton(SINGLE.clone(), torch.full((6,), 9), None).isfinite().sum(-1).float(),
            torch.full((6,), 9.0),
        ),
    )
    yield "flag_gems/flag_gems.ops.rms_norm", "rms_norm", lambda m: (m.rms_norm(X, (256,), W, EPS), rms(X, W))


@triton.jit
def one_kernel(x_ptr, out_ptr, F: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, F(tl.load(x_ptr + i)))


@triton.jit
def pairs_kernel(x_ptr, out_ptr, F: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, F(tl.load(x_ptr + 2 * i), tl.load(x_ptr + 2 * i + 1)))


@triton.jit
def tile_kernel(codes_ptr, scales_ptr, out_ptr, F: tl.constexpr, R: tl.constexpr, B: tl.constexpr):
    row, byte, group = tl.arange(0, R)[:, None], tl.arange(0, B)[None, :], tl.arange(0, B // 16)[None, :]
    x = F(tl.load(codes_ptr + row * B + byte), tl.load(scales_ptr + row * (B // 16) + group))
    tl.store(out_ptr + row * 2 * B + tl.arange(0, 2 * B)[None, :], x)


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _assembly() -> Iterator[Try]:
    yield (
        "fla_core/fla.ops.utils.softplus",
        "PTX",
        lambda m: (
            filled(256, dtype=torch.float32)(lambda out: one_kernel[(1,)](SINGLE, out, F=m.softplus_nv, N=256)),
            F.softplus(SINGLE[0], threshold=30.0),
        ),
    )
    yield "vllm/vllm.models.deepseek_v4.common.ops.fused_indexer_q", "PTX fp4", _fp4
    yield "unsloth_zoo/unsloth_zoo.mxfp4_gemm", "PTX fp4", _mxfp4


def _fp4(m: ModuleType) -> Result:
    out = torch.empty(128, dtype=torch.uint8)
    pairs_kernel[(1,)](SINGLE, out, F=m._fp32x2_to_fp4x2, N=128)
    found = FP4[torch.stack([out & 15, out >> 4], -1).long()].reshape(-1)
    return found, FP4[(SINGLE[0][:, None] - FP4).abs().argmin(-1)]


def _mxfp4(m: ModuleType) -> Result:
    codes = torch.randint(0, 256, (16, 32), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 150, (16, 2), generator=generator, dtype=torch.uint8)
    out = torch.empty(16, 64, dtype=torch.bfloat16)
    tile_kernel[(1,)](codes, scales, out, F=m._decode_mxfp4_tile_asm, R=16, B=32)
    exact = FP4[torch.stack([codes & 15, codes >> 4], -1).long()].reshape(16, 64)
    return out, exact.double() * 2.0 ** (scales.double() - 127).repeat_interleave(32, 1)
