"""PyTorch functions that become references: what models do, in their own order of operations and casts."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def rms_norm_of_llama(x, weight, *, eps):
    dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + eps)
    return weight * x.to(dtype)


def rms_norm_of_gemma(x, weight, *, eps):
    normalized = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return (normalized * (1.0 + weight.float())).type_as(x)


def layer_norm(x, weight, bias, *, eps):
    value = x.float()
    mean = value.mean(-1, keepdim=True)
    centered = value - mean
    variance = centered.square().mean(-1, keepdim=True)
    normalized = centered * torch.rsqrt(variance + eps)
    return (normalized * weight + bias).to(x.dtype)


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotary(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    q_embed = q * cos + rotate_half(q) * sin
    k_embed = k * cos + rotate_half(k) * sin
    return q_embed, k_embed


def interleaved_rotary(x, cos, sin):
    pairs = x.unflatten(-1, (-1, 2))
    even, odd = pairs[..., 0].float(), pairs[..., 1].float()
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    return turned.flatten(-2).to(x.dtype)


def swiglu(x, gate_weight, up_weight, down_weight):
    gate, up = F.linear(x, gate_weight), F.linear(x, up_weight)
    return F.linear(F.silu(gate) * up, down_weight)


def swiglu_of_halves(gate_up, *, limit):
    gate, up = gate_up.split(gate_up.shape[-1] // 2, dim=-1)
    gate = gate.clamp(max=limit)
    up = up.clamp(min=-limit, max=limit)
    return F.silu(gate) * up


def geglu(gate, up):
    return F.gelu(gate, approximate="tanh") * up


def exact_gelu(x):
    return F.gelu(x)


def new_gelu(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def quick_gelu(x):
    return x * torch.sigmoid(1.702 * x)


def squared_relu(x):
    return F.relu(x).square()


def attention(query, key, value, *, scaling):
    weights = torch.matmul(query, key.transpose(2, 3)) * scaling
    weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = F.dropout(weights, p=0.0, training=False)
    return torch.matmul(weights, value).transpose(1, 2).contiguous()


def grouped_attention(query, key, value, *, scaling):
    batch, heads, length, size = key.shape
    groups = query.shape[1] // heads
    key = key[:, :, None].expand(batch, heads, groups, length, size).reshape(batch, heads * groups, length, size)
    value = value[:, :, None].expand(batch, heads, groups, length, size).reshape(batch, heads * groups, length, size)
    return attention(query, key, value, scaling=scaling)


def soft_cap(x, *, cap):
    return torch.tanh(x / cap) * cap


def masked(scores, mask):
    lowest = torch.finfo(scores.dtype).min
    return torch.where(mask, scores, lowest).float().softmax(-1).to(scores.dtype)


def linear_with_bias(x, weight, bias):
    return F.linear(x, weight, bias)


def modulated(x, shift, scale):
    return x * (1 + scale[:, None]) + shift[:, None]


def log_probabilities(logits):
    return logits.float().log_softmax(-1)


def decay(dt, dt_bias, a_log):
    return -a_log.float().exp() * F.softplus(dt.float() + dt_bias)


def per_token_codes(x):
    largest = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-10)
    scale = largest / 448.0
    return (x.float() / scale).clamp(-448.0, 448.0), scale


def shifted(x, *, shift):
    return (x + 1.7) * (shift - x)


def hyperbola(x):
    return 3.3 / (x.abs() + 1.0)


def heads_in_another_order(x, like):
    heads = x.view(x.size(0), 4, -1).permute(1, 0, 2)
    first, second, third, fourth = heads.unsqueeze(0).squeeze(0).unbind(0)
    turned = torch.stack([first, second, third, fourth], dim=1).flatten(1)
    return turned.view_as(like) * like.t().mT


def tiles(x, weight):
    tiled = x.unflatten(-1, (4, 2, -1)).flatten(-3, -2)
    one, two, three = tiled.split([1, 3, 4], dim=-2)
    largest = torch.cat([one, two, three], dim=-2).swapaxes(0, 1)
    return largest * weight[None, None].expand(largest.shape)


def extremes(x, y):
    between = torch.maximum(x, y).clamp_min(-0.5) - torch.minimum(x, y).clamp_max(0.5)
    return between.max(-1, keepdim=True).values + between.min(-1, keepdim=True)[0]


def sums_of_products(x, y):
    products = x.float() * y.float()
    return (x.float() * y.float()).sum(-1) + products.amax(-2).logsumexp(-1, keepdim=True)


def means(x, y):
    return x.float().mean(-2) * (x.float() * y.float()).mean(-2) + y.float().sum((-2, -1))[..., None]


def deviation(x):
    mean = x.float().mean(-1, keepdim=True)
    return (x.float() - mean).pow(2).mean(-1)


def norms_of_torch(x, weight, bias):
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-6), F.layer_norm(x, (x.shape[-1],), weight, bias, 1e-5)


def plain_norm(x):
    return F.rms_norm(x, (x.shape[-1],), eps=1e-6)


def shown(x, mask, ids, stops):
    there = torch.isin(ids, stops)
    x = x.masked_fill(mask, 0.0)
    count = torch.where(there, ids, 0).abs().sum(-1, keepdim=True)
    return torch.where(there, x, -x), ids.masked_fill(there, 0).amax(-1), count


def kept(x, mask, ids):
    return torch.where(~(x > 1.0), x, 1.0).masked_fill(~mask, 0.0), (~ids).amax(-1)


EXAMPLES = {
    rms_norm_of_llama: "x=bf16[3,64] weight=bf16[64] eps=1e-06",
    rms_norm_of_gemma: "x=bf16[3,64] weight=bf16[64] eps=1e-06",
    layer_norm: "x=bf16[3,64] weight=bf16[64] bias=bf16[64] eps=1e-05",
    rotary: "q=bf16[2,3,5,8] k=bf16[2,2,5,8] cos=bf16[2,5,8] sin=bf16[2,5,8]",
    interleaved_rotary: "x=bf16[4,8] cos=fp32[4,4] sin=fp32[4,4]",
    swiglu: "x=bf16[3,16] gate_weight=bf16[24,16] up_weight=bf16[24,16] down_weight=bf16[16,24]",
    swiglu_of_halves: "gate_up=bf16[3,16] limit=7.0",
    geglu: "gate=bf16[3,16] up=bf16[3,16]",
    exact_gelu: "x=bf16[3,16]",
    new_gelu: "x=bf16[3,16]",
    quick_gelu: "x=bf16[3,16]",
    squared_relu: "x=bf16[3,16]",
    attention: "query=bf16[2,3,5,8] key=bf16[2,3,5,8] value=bf16[2,3,5,8] scaling=0.3535",
    grouped_attention: "query=bf16[2,4,5,8] key=bf16[2,2,5,8] value=bf16[2,2,5,8] scaling=0.3535",
    soft_cap: "x=bf16[3,16] cap=30.0",
    masked: "scores=bf16[3,16] mask=bool[3,16]",
    kept: "x=bf16[3,16] mask=bool[3,16] ids=int64[3,16]",
    linear_with_bias: "x=bf16[3,16] weight=bf16[8,16] bias=bf16[8]",
    modulated: "x=bf16[2,5,16] shift=bf16[2,16] scale=bf16[2,16]",
    log_probabilities: "logits=bf16[3,16]",
    decay: "dt=bf16[3,4] dt_bias=fp32[4] a_log=fp32[4]",
    per_token_codes: "x=bf16[3,64]",
    shifted: "x=bf16[3,64] shift=0.3",
    hyperbola: "x=bf16[3,64]",
    heads_in_another_order: "x=bf16[3,16] like=bf16[3,16]",
    tiles: "x=bf16[3,5,32] weight=bf16[4]",
    extremes: "x=bf16[3,16] y=bf16[3,16]",
    sums_of_products: "x=bf16[3,4,16] y=bf16[3,4,16]",
    means: "x=bf16[2,5,16] y=bf16[2,5,16]",
    deviation: "x=bf16[3,16]",
    norms_of_torch: "x=bf16[3,16] weight=bf16[16] bias=bf16[16]",
    plain_norm: "x=bf16[3,16]",
    shown: "x=bf16[3,16] mask=bool[3,16] ids=int64[3,16]:below_9 stops=int64[2]:below_9",
}
"""Function → what it is traced with."""
