"""Rotary embeddings of Transformers and liger-kernel; read and identified for 5.23.0 and 0.8.5.

All take a cosine for every column and no positions, so that the rows of the tables are looked up first, and none takes
heads of which some columns are not rotated: these are put behind the others, as the models do that have them.
"""

from __future__ import annotations

import torch
from norm_packages import refuse_elsewhere, upstream

from lastbit import UnsupportedCase, kernel


def rotated(function, heads, cos, sin, positions, interleaved=False):
    """Rotate by a function of heads [B, T, H, R] and tables [B, T, R]; append the columns that are not rotated."""
    for name, x in heads.items():
        refuse_elsewhere(x, cos=cos, sin=sin, positions=positions)
        if not x.numel() or not cos.numel():
            raise UnsupportedCase(f"{name} has shape {tuple(x.shape)} and cos {tuple(cos.shape)}: nothing to rotate")
    tokens, width = positions.numel(), 2 * cos.shape[1]
    rows = (table[positions.reshape(-1)].unsqueeze(0) for table in (cos, sin))
    rows = [row.repeat_interleave(2, -1) if interleaved else torch.cat([row, row], -1) for row in rows]
    given = [x.reshape(1, tokens, *x.shape[-2:])[..., :width] for x in heads.values()]
    found = zip(heads.items(), function(*given, *rows), strict=True)
    return {
        f"{name}_rotated": torch.cat([y.reshape(*x.shape[:-1], width), x[..., width:]], -1) for (name, x), y in found
    }


def of_both(q, k):
    return {"q": q} if k is None else {"q": q, "k": k}


def refuse_promotion(q, *tables):
    """Raise UnsupportedCase where torch would promote the heads to a wider dtype of the tables."""
    for table in tables:
        if torch.promote_types(q.dtype, table.dtype) != q.dtype:
            raise UnsupportedCase(f"q is {q.dtype} and a table {table.dtype}: upstream's result has the table's dtype")


@kernel("rotary", contract="rounded_products", name="transformers[rope,llama]")
def llama(q, cos, sin, positions, k=None):
    """Call `apply_rotary_pos_emb` of Llama, which most models there copy; it always takes a k."""
    refuse_promotion(q, cos, sin)
    function = upstream("transformers.models.llama.modeling_llama", "transformers").apply_rotary_pos_emb

    def both(a, *rest):
        b, cosines, sines = rest if len(rest) == 3 else (a, *rest)
        return function(a, b, cosines, sines, unsqueeze_dim=2)[: len(rest) - 1]

    return rotated(both, of_both(q, k), cos, sin, positions)


@kernel("rotary", contract="rounded_products", name="transformers[rope,gptj]", takes={"interleaved": True})
def gptj(q, cos, sin, positions, k=None, *, interleaved):
    """Call `apply_rotary_pos_emb` of GPT-J, which repeats each cosine for both numbers of a pair."""
    refuse_promotion(q, cos, sin)
    function = upstream("transformers.models.gptj.modeling_gptj", "transformers").apply_rotary_pos_emb

    def each(*given):
        *heads, cosines, sines = given
        return [function(x, sines[..., ::2], cosines[..., ::2]) for x in heads]

    return rotated(each, of_both(q, k), cos, sin, positions, interleaved=True)


def liger(q, cos, sin, positions, k):
    """Call `LigerRopeFunction`, which writes its results over contiguous inputs: it gets copies."""
    function = upstream("liger_kernel.ops.rope", "liger-kernel").LigerRopeFunction.apply

    def both(a, *rest):
        b, cosines, sines = rest if len(rest) == 3 else (a, *rest)
        first, second = (x.clone(memory_format=torch.contiguous_format).transpose(1, 2) for x in (a, b))
        found = function(first, second, cosines.contiguous(), sines.contiguous())
        return [x.transpose(1, 2) for x in found[: len(rest) - 1]]

    return rotated(both, of_both(q, k), cos, sin, positions)


@kernel(
    "rotary", contract="fp32_products", name="liger[rope,fp32 tables]",
    takes={"cos dtype": "fp32", "sin dtype": "fp32"},
)  # fmt: skip
def liger_wide(q, cos, sin, positions, k=None):
    """Compute in the dtype of the table of sines: fp32."""
    return liger(q, cos, sin, positions, k)


NARROW = ("bf16", "fp16")


@kernel(
    "rotary", contract="rounded_products", name="liger[rope,tables as q]",
    takes={"q dtype": NARROW, "cos dtype": NARROW, "sin dtype": NARROW},
)  # fmt: skip
def liger_narrow(q, cos, sin, positions, k=None):
    """Compute in the dtype of q, which the tables of Transformers have."""
    if (cos.dtype, sin.dtype) != (q.dtype, q.dtype):
        raise UnsupportedCase(f"q is {q.dtype}, cos {cos.dtype}, sin {sin.dtype}: this one is for one narrow dtype")
    return liger(q, cos, sin, positions, k)
