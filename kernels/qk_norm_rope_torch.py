"""RMSNorm of heads and rotary embedding in PyTorch, one after the other, as before there is a fused kernel."""

from __future__ import annotations

from rms_norm_torch import multiply_fp32, multiply_native, normalize
from rotary_arguments import check_heads
from rotary_torch import rotated

from lastbit import kernel


@kernel(
    "qk_norm_rope", contract="native_multiply+rounded_products", stages=("output",), name="eager[qk_norm_rope]",
    invariant=("run to run",),
)  # fmt: skip
def as_in_models(x, cos, sin, positions, weight=None, *, eps, interleaved=False, stages=()):
    """Compute as Transformers does for Qwen3: every operation but the mean in the dtype of x."""
    check_heads(x, positions, cos=cos, sin=sin, weight=weight)
    output = multiply_native(normalize(x.float(), x.float(), eps, None), weight, x.dtype)
    found = rotated(output, cos, sin, positions, interleaved, "rounded_products")
    return {"q_rotated": found, "output": output} if stages else found


@kernel(
    "qk_norm_rope", contract="fp32_multiply", stages=("output",), name="eager[qk_norm_rope,two kernels]",
    invariant=("run to run",),
)  # fmt: skip
def two_kernels(x, cos, sin, positions, weight=None, *, eps, weight_offset=0.0, interleaved=False, stages=()):
    """Compute as two kernels in fp32 do: the normalized heads are stored between them."""
    check_heads(x, positions, cos=cos, sin=sin, weight=weight)
    output = multiply_fp32(normalize(x.float(), x.float(), eps, None), weight, x.dtype, weight_offset)
    found = rotated(output, cos, sin, positions, interleaved, "fp32_products")
    return {"q_rotated": found, "output": output} if stages else found
