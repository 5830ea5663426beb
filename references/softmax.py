"""Softmax of scores, scaled and masked as attention has them.

Contracts as found in PyTorch 2.13 (`aten/src/ATen/native/cuda/SoftMax.cu`, `cpu/SoftMaxKernel.cpp`), Transformers 5.23
(`models/llama/modeling_llama.py`, `eager_attention_forward`), Liger 0.8.5 (`ops/softmax.py`) and TransformerEngine
(`common/fused_softmax`); docs/contracts/softmax.md lists who keeps which.
"""

from __future__ import annotations

import math

from lastbit import Contract, Latent, StageRecorder, op
from lastbit.numerics import Enclosure, Tensor, divide, exponentials, fusible_product, multiply_add, where
from lastbit.references._shapes import check_shapes, width_of


@op(
    rows=("x", "mask", "keep"),
    returns=("output",),
    integers=("keep",),
    axes={
        "scores": {"fp32_scores": {}, "rounded_scores": {"scaled": "x", "masked": "x"}},
        "base": {"": {}, "base2": {}},
        "empty": {"": {}, "zero_rows": {}},
    },
    rounds={"output": "x"},
    latent=Latent("total", through=("probabilities", "output")),
    torch_ops=("aten::softmax.int", "aten::_softmax", "aten::_safe_softmax"),
)
def softmax(
    x: Enclosure,
    mask: Enclosure | None = None,
    keep: Tensor | None = None,
    *,
    scale: float = 1.0,
    fp32_output: bool = False,
    contract: Contract,
    stage: StageRecorder,
) -> None:
    """y = exp(s) / sum(exp(s)) over the last dimension, s = x · scale + mask where `keep` is true, else -inf.

    x, mask, keep: [..., N]; keep: bool. A kernel may take any shift from s before exp, and add in any order. A row that
    keeps nothing is NaN, or zero under `zero_rows`. Under `base2`, s · log2(e) may be rounded before the shift. The
    result is `output`, in x's dtype, or with `fp32_output` the `probabilities`, in fp32.

    Raises:
        ValueError: tensors whose shapes do not fit, or no columns.
    """
    width = width_of("x", x)
    if not width:
        raise ValueError(f"x has shape {tuple(x.shape)}; a row must have at least one column")
    check_shapes({"mask": (mask, tuple(x.shape)), "keep": (keep, tuple(x.shape))})
    scores = x
    if contract.has("rounded_scores"):
        scores = stage("scaled", x * scale) if scale != 1.0 else x
        scores = stage("masked", scores + mask) if mask is not None else scores
    elif mask is not None:
        scores = multiply_add(x, scale, mask)
    elif scale != 1.0:
        scores = fusible_product(x, scale)
    if keep is not None:
        scores = where(keep, scores, -math.inf)
    shares = exponentials(scores, contract.has("base2"))
    terms, total = shares.shown
    total = stage("total", total)
    empty = 0.0 if contract.has("zero_rows") else math.nan
    y = stage("probabilities", shares.settled(divide(terms, total), empty), result=fp32_output)
    if not fp32_output:
        stage("output", y, result=True)
