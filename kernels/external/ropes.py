"""Rotary embeddings of Transformers, liger-kernel and conch; read and identified for 5.23.0, 0.8.5 and 1.3.

The first two take a cosine for every column and no positions, so that the rows of the tables are looked up first, and
heads of which every column is rotated: the others are put behind, as the models do that have them.
"""

from __future__ import annotations

import torch
from norm_packages import refuse_elsewhere, upstream

from lastbit import kernel

AS_Q = {"tensors": "non-empty", "cos dtype": "q dtype", "sin dtype": "q dtype"}
"""Tables in the dtype of the heads, as Transformers casts them: of wider ones torch would make wider heads."""
NARROW = {**AS_Q, "q dtype": ("bf16", "fp16")}
"""Products of bf16 or fp16, of which a compiler contracts one, and the interpreter none."""
WIDE = {"tensors": "non-empty", "cos dtype": "fp32", "sin dtype": "fp32"}


def rotated(function, q, k, cos, sin, positions, interleaved=False):
    """Rotate by a function of heads [1, T, H, R] and tables [1, T, R]; append the columns that are not rotated."""
    refuse_elsewhere(q, k=k, cos=cos, sin=sin, positions=positions)
    width, heads = 2 * cos.shape[1], {"q": q} if k is None else {"q": q, "k": k}
    rows = (table[positions.reshape(-1)].unsqueeze(0) for table in (cos, sin))
    rows = [row.repeat_interleave(2, -1) if interleaved else torch.cat([row, row], -1) for row in rows]
    given = [x.reshape(1, -1, *x.shape[-2:])[..., :width] for x in (q, q if k is None else k)]
    found = zip(heads.items(), function(*given, *rows), strict=False)
    return {
        f"{name}_rotated": torch.cat([y.reshape(*x.shape[:-1], width), x[..., width:]], -1) for (name, x), y in found
    }


@kernel("rotary", contract="rounded_products", name="transformers[rope,llama]", takes=AS_Q)
def llama(q, cos, sin, positions, k=None):
    """Call `apply_rotary_pos_emb` of Llama, which most models there copy; it always takes a k."""
    function = upstream("transformers.models.llama.modeling_llama", "transformers").apply_rotary_pos_emb
    return rotated(lambda *given: function(*given, unsqueeze_dim=2), q, k, cos, sin, positions)


@kernel(
    "rotary", contract="rounded_products", name="transformers[rope,gptj]", takes={**AS_Q, "interleaved": True}
)  # fmt: skip
def gptj(q, cos, sin, positions, k=None, *, interleaved):
    """Call `apply_rotary_pos_emb` of GPT-J, which repeats each cosine for both numbers of a pair."""
    function = upstream("transformers.models.gptj.modeling_gptj", "transformers").apply_rotary_pos_emb
    each = lambda a, b, cosines, sines: [function(x, sines[..., ::2], cosines[..., ::2]) for x in (a, b)]  # noqa: E731
    return rotated(each, q, k, cos, sin, positions, interleaved=True)


def liger(q, cos, sin, positions, k):
    """Call `LigerRopeFunction`, which writes its results over contiguous inputs: it gets copies."""
    function = upstream("liger_kernel.ops.rope", "liger-kernel").LigerRopeFunction.apply

    def both(a, b, *tables):
        first, second = (x.clone(memory_format=torch.contiguous_format).transpose(1, 2) for x in (a, b))
        return [x.transpose(1, 2) for x in function(first, second, *(table.contiguous() for table in tables))]

    return rotated(both, q, k, cos, sin, positions)


@kernel("rotary", contract="fp32_products", name="liger[rope,fp32 tables]", takes=WIDE)
def liger_wide(q, cos, sin, positions, k=None):
    """Compute in the dtype of the table of sines: fp32."""
    return liger(q, cos, sin, positions, k)


@kernel("rotary", contract="contracted_x1_products", name="liger[rope,tables as q]", takes=NARROW, devices=("cuda",))
@kernel(
    "rotary", contract="rounded_products", name="liger[rope,tables as q,interpreted]", takes=NARROW, devices=("cpu",)
)  # fmt: skip
def liger_narrow(q, cos, sin, positions, k=None):
    """Compute in the dtype of q, which the tables of Transformers have. It loads the tables first, then x1 and x2."""
    return liger(q, cos, sin, positions, k)


def conch(q, cos, sin, positions, k):
    """Call `rotary_embedding` of conch, which looks positions up and writes its results over its inputs: copies."""
    refuse_elsewhere(q, k=k, cos=cos, sin=sin, positions=positions)
    function = upstream("conch.ops.embedding.rotary_embedding", "conch-triton-kernels").rotary_embedding
    heads = {"q": q} if k is None else {"q": q, "k": k}
    given = [
        x.reshape(positions.numel(), -1).clone(memory_format=torch.contiguous_format)
        for x in (q, q if k is None else k)
    ]
    found = function(positions.reshape(-1).contiguous(), *given, q.shape[-1], torch.cat([cos, sin], -1))
    return {f"{name}_rotated": y.reshape(x.shape) for (name, x), y in zip(heads.items(), found, strict=False)}


@kernel("rotary", contract="fp32_products", name="conch[rope,fp32 tables]", takes=WIDE)
def conch_wide(q, cos, sin, positions, k=None):
    """Compute in the wider of both dtypes: fp32."""
    return conch(q, cos, sin, positions, k)


@kernel("rotary", contract="contracted_products", name="conch[rope]", takes=NARROW, devices=("cuda",))
@kernel("rotary", contract="rounded_products", name="conch[rope,interpreted]", takes=NARROW, devices=("cpu",))
def conch_narrow(q, cos, sin, positions, k=None):
    """Compute in the dtype of q. It loads x1 and x2 first, then the tables."""
    return conch(q, cos, sin, positions, k)
