"""Which modules of Transformers become references: the table of docs/from_torch.md.

python3 docs/measurements/from_torch.py, in a checkout, where Transformers is installed (5.23.0). The `forward` of each
module is called with what it takes from `self` as inputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch.nn.functional as F

from lastbit.case import parse_case
from lastbit.commands.new import reference_of
from lastbit.errors import LastbitError


def of(model: str) -> Any:
    return import_module(f"transformers.models.{model}.modeling_{model}")


def llama_rms_norm(x, weight, *, eps):
    return of("llama").LlamaRMSNorm.forward(SimpleNamespace(weight=weight, variance_epsilon=eps), x)


def gemma2_rms_norm(x, weight, *, eps):
    own = SimpleNamespace(weight=weight, eps=eps)
    own._norm = lambda value: of("gemma2").Gemma2RMSNorm._norm(own, value)
    return of("gemma2").Gemma2RMSNorm.forward(own, x)


def qwen3_next_rms_norm_gated(x, gate, weight, *, eps):
    own = SimpleNamespace(weight=weight, variance_epsilon=eps, activation="silu")
    return of("qwen3_next").Qwen3NextRMSNormGated.forward(own, x, gate)


def mamba2_rms_norm_gated(x, gate, weight, *, eps, group_size):
    own = SimpleNamespace(weight=weight, variance_epsilon=eps, group_size=group_size)
    return of("mamba2").MambaRMSNormGated.forward(own, x, gate)


def llama_rotary(q, k, cos, sin):
    return of("llama").apply_rotary_pos_emb(q, k, cos, sin)


def deepseek_v3_rotary(q, k, cos, sin):
    return of("deepseek_v3").apply_rotary_pos_emb_interleave(q, k, cos, sin)


def llama_mlp(x, gate_proj, up_proj, down_proj):
    maps = {"gate_proj": gate_proj, "up_proj": up_proj, "down_proj": down_proj}
    own = SimpleNamespace(act_fn=F.silu, **{n: lambda y, w=w: F.linear(y, w) for n, w in maps.items()})
    return of("llama").LlamaMLP.forward(own, x)


def phi3_mlp(x, gate_up_proj, down_proj):
    own = SimpleNamespace(
        activation_fn=F.silu,
        gate_up_proj=lambda y: F.linear(y, gate_up_proj),
        down_proj=lambda y: F.linear(y, down_proj),
    )
    return of("phi3").Phi3MLP.forward(own, x)


def gpt_oss_gate(gate_up, *, alpha, limit):
    return of("gpt_oss").GptOssExperts._apply_gate(SimpleNamespace(alpha=alpha, limit=limit), gate_up)


def llama_attention(query, key, value, mask, *, scaling):
    own = SimpleNamespace(num_key_value_groups=2, training=False)
    return of("llama").eager_attention_forward(own, query, key, value, mask, scaling)


def gemma2_attention(query, key, value, mask, *, scaling, softcap):
    own = SimpleNamespace(num_key_value_groups=2, training=False)
    return of("gemma2").eager_attention_forward(own, query, key, value, mask, scaling=scaling, softcap=softcap)


def gpt_oss_attention(query, key, value, mask, sinks, *, scaling):
    own = SimpleNamespace(num_key_value_groups=2, training=False, sinks=sinks)
    return of("gpt_oss").eager_attention_forward(own, query, key, value, mask, scaling)


def new_gelu(x):
    return import_module("transformers.activations").NewGELUActivation.forward(None, x)


def bert_self_output(x, residual, weight, bias, norm_weight, norm_bias):
    own = SimpleNamespace(
        dense=lambda y: F.linear(y, weight, bias),
        dropout=lambda y: y,
        LayerNorm=lambda y: F.layer_norm(y, y.shape[-1:], norm_weight, norm_bias, 1e-12),
    )
    return of("bert").BertSelfOutput.forward(own, x, residual)


def llama_rotary_embedding(x, position_ids, inv_freq):
    own = SimpleNamespace(inv_freq=inv_freq, attention_scaling=1.0, rope_type="default")
    return of("llama").LlamaRotaryEmbedding.forward(own, x, position_ids)


def mixtral_router(x, weight):
    own = SimpleNamespace(hidden_dim=16, top_k=2, weight=weight)
    return of("mixtral").MixtralTopKRouter.forward(own, x)


def mixtral_experts(x, top_k_index, top_k_weights, gate_up_proj, down_proj):
    own = SimpleNamespace(num_experts=4, gate_up_proj=gate_up_proj, down_proj=down_proj, act_fn=F.silu)
    return inspect.unwrap(of("mixtral").MixtralExperts.forward)(own, x, top_k_index, top_k_weights)


def qwen3_next_recurrence(query, key, value, g, beta):
    return of("qwen3_next").torch_recurrent_gated_delta_rule(query, key, value, g, beta)[0]


_HEADS = "query=bf16[2,4,5,8] key=bf16[2,2,5,8] value=bf16[2,2,5,8] mask=bf16[2,1,5,5]:zeros scaling=0.35355339"
MODULES: dict[Callable[..., Any], str] = {
    llama_rms_norm: "x=bf16[3,64] weight=bf16[64] eps=1e-06",
    gemma2_rms_norm: "x=bf16[3,64] weight=bf16[64] eps=1e-06",
    qwen3_next_rms_norm_gated: "x=bf16[3,64] gate=bf16[3,64] weight=bf16[64] eps=1e-06",
    mamba2_rms_norm_gated: "x=bf16[3,64] gate=bf16[3,64] weight=bf16[64] eps=1e-06 group_size=16",
    llama_rotary: "q=bf16[2,4,5,8] k=bf16[2,2,5,8] cos=bf16[2,5,8] sin=bf16[2,5,8]",
    deepseek_v3_rotary: "q=bf16[2,4,5,8] k=bf16[2,1,5,8] cos=bf16[2,5,8] sin=bf16[2,5,8]",
    llama_mlp: "x=bf16[3,16] gate_proj=bf16[24,16] up_proj=bf16[24,16] down_proj=bf16[16,24]",
    phi3_mlp: "x=bf16[3,16] gate_up_proj=bf16[48,16] down_proj=bf16[16,24]",
    gpt_oss_gate: "gate_up=bf16[3,32] alpha=1.702 limit=7.0",
    llama_attention: _HEADS,
    gemma2_attention: f"{_HEADS} softcap=50.0",
    gpt_oss_attention: f"{_HEADS} sinks=bf16[4]",
    new_gelu: "x=bf16[3,64]",
    bert_self_output: "x=bf16[3,16] residual=bf16[3,16] weight=bf16[16,16] bias=bf16[16] norm_weight=bf16[16] "
    "norm_bias=bf16[16]",
    llama_rotary_embedding: "x=bf16[2,5,8] position_ids=int64[2,5]:experts_9 inv_freq=fp32[4]:pow2",
    mixtral_router: "x=bf16[3,16] weight=bf16[4,16]",
    mixtral_experts: "x=bf16[3,16] top_k_index=int64[3,2]:experts_4 top_k_weights=bf16[3,2] gate_up_proj=bf16[4,48,16] "
    "down_proj=bf16[4,16,24]",
    qwen3_next_recurrence: "query=bf16[1,4,2,8] key=bf16[1,4,2,8] value=bf16[1,4,2,8] g=fp32[1,4,2] beta=bf16[1,4,2]",
}
"""Function → what it is traced with."""


def main() -> None:
    for function, example in MODULES.items():
        try:
            _, found = reference_of(function, parse_case(f"{function.__name__} {example}"), function.__name__)
        except LastbitError as error:
            print(f"| `{function.__name__}` | no | {error} |")
            continue
        assert found is not None
        broken = "; ".join(found.broken.values())
        print(f"| `{function.__name__}` | {found.stages} stages | {found.elements:,}: {broken or 'all allowed'} |")


if __name__ == "__main__":
    main()
