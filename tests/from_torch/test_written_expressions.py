"""What single expressions of torch become in a reference, to the letter, and what is said of those that cannot."""

# ruff: noqa: E501 - an expression stands in one line with what it becomes

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

from lastbit.case import parse_case
from lastbit.errors import UsageError
from lastbit.from_torch.reference_file import write_reference
from lastbit.from_torch.tracing import Example
from lastbit.inputs import build

# torch has no fused kernel for a tracer's norm, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")

EXAMPLES = {
    "x": "x=fp32[3,4,8]",
    "x, w": "x=bf16[3,8] w=bf16[8]",
    "x, i": "x=fp32[4,8] i=int64[4]",
    "y": "y=bf16[3,8]",
}
"""Parameters of the functions below → what they are traced with."""

WRITTEN = {
    "x": {
        "x.transpose(0, 1)": "x.permute(-2, -3, -1)",
        "x.transpose(-1, 1)": "x.transposed",
        "x.mT": "x.transposed",
        "x.permute(2, 0, 1)": "x.permute(-1, -3, -2)",
        "x.permute((0, 2, 1))": "x.transposed",
        "x.unsqueeze(0)": "x[None, ...]",
        "x.unsqueeze(-1)": "x[..., None]",
        "x[:, :1].squeeze(1)": "x[:, :1][:, 0, ...]",
        "x.reshape(3, 32)": "x.reshape(3, 32)",
        "x.view(-1, 8)": "x.reshape(-1, 8)",
        "x.flatten()": "x.reshape(-1)",
        "x.flatten(1)": "x.joined()",
        "x.flatten(0, 1)": "x.reshape(-1, *x.shape[-1:])",
        "x.unflatten(-1, (-1, 4))": "x.in_groups(4)",
        "x.unflatten(-1, (2, 4))": "x.reshape(*x.shape[:-1], 2, 4)",
        "x.unflatten(1, (2, 2))": "x.reshape(*x.shape[:-2], 2, 2, *x.shape[-1:])",
        "x.expand(2, 3, 4, 8)": "x.expand(2, 3, 4, 8)",
        "x.reshape_as(x)": "x.reshape(*x.shape)",
        "x.contiguous()": "x",
        "x[..., :4]": "x[..., :4]",
        "x[0]": "x[0, ...]",
        "x[:, None]": "x[:, None]",
        "x[1:, ..., ::2]": "x[1:, ..., ::2]",
        "x.shape[-1] * x": "x.shape[-1] * x",
        "x.size(0) * x": "x.shape[0] * x",
        "torch.cat([x, x], -1)": "concatenate(x, x)",
        "torch.cat([x, x])": "concatenate(x, x, dim=-3)",
        "torch.stack([x, x], -1)": "stack(x, x)",
        "torch.stack([x, x])": "stack(x, x).permute(-1, -4, -3, -2)",
        "torch.stack([x, x], 1)": "stack(x, x).permute(-4, -1, -3, -2)",
        "x.chunk(2, -1)[1] * 2.0": "x[..., x.shape[-1] // 2:] * 2.0",
        "x.split(4, -1)[0] + x.split(4, -1)[1]": "x[..., :4] + x[..., 4:]",
        "x.split([1, 3], 1)[1] * 2.0": "x[..., 1:, :] * 2.0",
        "x.unbind(1)[2] * 2.0": "x[..., 2, :] * 2.0",
        "x.unbind()[1] * 2.0": "x[..., 1, :, :] * 2.0",
        "x.tensor_split(3)[2] * 2.0": "x[..., 2 * x.shape[-3] // 3:, :, :] * 2.0",
        "x.sum(-1)": "total(x)[..., 0]",
        "x.sum(-1, keepdim=True)": "total(x)",
        "x.sum(1)": "total(x.transposed)[..., 0]",
        "x.sum(1, keepdim=True)": "total(x.transposed).transposed",
        "x.sum((-2, -1))": "total(x.joined())[..., 0]",
        "x.mean(-1)": "mean(x)[..., 0]",
        "x.mean(0)": "mean(x.permute(-2, -1, -3))[..., 0]",
        "x.square().mean(-1, keepdim=True)": "output_square: x * x; mean(output_square)",
        "(x * x).sum(-1)": "output_product: x * x; total(output_product)[..., 0]",
        "x.amax(-1)": "amax(x)[..., 0]",
        "x.amax(0, keepdim=True)": "amax(x.permute(-2, -1, -3)).permute(-1, -3, -2)",
        "x.amin(-1, keepdim=True)": "amin(x)",
        "x.max(-1).values": "amax(x)[..., 0]",
        "x.min(1).values": "amin(x.transposed)[..., 0]",
        "x.softmax(-1)": "softmax(x)",
        "x.log_softmax(-1)": "log_softmax(x)",
        "x.logsumexp(-1)": "log_sum_exp(x)[..., 0]",
        "x.abs()": "abs(x)",
        "x.clamp(-1.0, 2.0)": "clamp(x, -1.0, 2.0)",
        "x.clamp(min=0.5)": "at_least(x, 0.5)",
        "x.clamp(max=0.5)": "minimum(x, 0.5)",
        "F.relu(x)": "at_least(x, 0.0)",
        "F.silu(x)": "_silu(x)",
        "F.gelu(x)": "_gelu(x)",
        "F.gelu(x, approximate='tanh')": "_gelu_tanh(x)",
        "F.softplus(x)": "_softplus(x)",
        "F.sigmoid(x)": "sigmoid(x)",
        "torch.maximum(x, -x)": "maximum(x, -x)",
        "torch.minimum(x, x * 2.0)": "output_product: x * 2.0; minimum(x, output_product)",
        "x * 2.0 * x": "output_product: x * 2.0; output_product * x",
        "x * 2.0 + x": "output_product: x * 2.0; output_product + x",
        "x - x * 3.0": "output_product: x * 3.0; x - output_product",
        "x * x * x": "output_product: x * x; output_product * x",
        "x ** 2": "x * x",
        "x ** 3": '_cube(x, stage.format_of("x"))',
        "x ** 0.5": "sqrt(x)",
        "x ** -0.5": "rsqrt(x)",
        "x ** -1": "1.0 / x",
        "1.0 / x": "1.0 / x",
        "x / 3.0": "x / 3.0",
        "x / (x + 1.0)": "output_sum: x + 1.0; x / output_sum",
        "-x * 2.0": "-x * 2.0",
        "-(x * 2.0)": "output_product: x * 2.0; -output_product",
        "2.0 - x": "2.0 - x",
        "x - 1.0 - 2.0": "output_difference: x - 1.0; output_difference - 2.0",
        "x - (1.0 - x)": "output_difference: 1.0 - x; x - output_difference",
        "x.rsqrt()": "rsqrt(x)",
        "x.exp()": "exp(x)",
        "torch.addcmul(x, x, x, value=0.5)": "multiply_add((x * x), 0.5, x)",
        "torch.add(x, x, alpha=2.0)": "multiply_add(x, 2.0, x)",
        "torch.sub(x, x, alpha=2.0)": "multiply_add(-x, 2.0, x)",
        "torch.where(x > 0.0, x, 0.0)": "where(x > 0.0, x, 0.0)",
        "torch.where((x > 0.0) & (x <= 1.0), x, -x)": "where((x > 0.0) & (x <= 1.0), x, -x)",
        "torch.where(~(x >= 0.0) | (x < -1.0), x, x * 2.0)": "output_product: x * 2.0; where((~(x >= 0.0)) | (x < -1.0), x, output_product)",
        "x.masked_fill(x < 0.0, 0.0)": "where(x < 0.0, 0.0, x)",
        "x * (x.shape[-1] ** -0.5)": "x * x.shape[-1] ** -0.5",
        "x * (x.shape[0] // 2)": "x * (x.shape[0] // 2)",
        "x * (x.shape[0] % 2)": "x * (x.shape[0] % 2)",
        "x @ x.mT": "dot(x, x.transposed)",
        "x.matmul(x.transpose(1, 2)) * 0.5": "output_dot: dot(x, x.transposed); output_dot * 0.5",
        "(x * 2.0) @ (x.mT + 1.0)": "output_product: x * 2.0; output_sum: x.transposed + 1.0; dot(output_product, output_sum)",
        "x * x * 2.0 + x": "output_product: x * x; output_product_2: output_product * 2.0; output_product_2 + x",
        "x * x - x * 2.0": "output_product: x * x; output_product_2: x * 2.0; output_product - output_product_2",
        "torch.reciprocal(x)": "1.0 / x",
        "F.rms_norm(x, (8,), eps=1e-6)": "x * rsqrt(mean_of_squares(x) + 1e-06)",
        "x - x.mean(-1, keepdim=True)": "output_mean: mean(x); x - output_mean",
        "(x - x.mean(-1, keepdim=True)).square().mean(-1)": "output_mean: mean(x); output_difference: x - output_mean; output_square: output_difference * output_difference; mean(output_square)[..., 0]",
        "x.bfloat16()": "x",
        "x.bfloat16().float() * 2.0": "x_rounded: x; x_rounded * 2.0",
        "x.half() + 1.7": 'x_rounded: x; x_rounded + _taken(1.7, FORMATS["fp16"], contract)',
        "x.to(torch.bfloat16) * x.bfloat16() + 2.0": "x_rounded: x; x_rounded_2: x; output_product: x_rounded * x_rounded_2; output_product + 2.0",
        "x * float('inf')": 'x * float("inf")',
        "x.dim() * x": "3 * x",
    },
    "x, w": {
        "x * w": "x * w",
        "x + w": "x + w",
        "x * w + x": "output_product: x * w; output_product + x",
        "F.rms_norm(x, (8,), w, 1e-6)": "product_in_any_order(x, rsqrt(mean_of_squares(x) + 1e-06), w)",
        "F.linear(x, w[None])": "dot(x, w[None, ...].transposed)",
        "x.float() * w.float()": "x * w",
        "(x.float() * w.float()).to(x.dtype)": "x * w",
        "F.layer_norm(x, (8,), w, w, 1e-5)": "_layer_norm(x, w, w, 1e-05)",
        "x + 1.7": 'x + _taken(1.7, stage.format_of("x"), contract)',
        "x + 1.5": "x + 1.5",
        "x ** 3": '_cube(x, stage.format_of("x"))',
        "x * -65504.0 * 3.3895313892515355e+38": 'output_product: x * -65504.0; output_product * stage.format_of("x").max',
        "F.silu(x) * w": "output_silu: _silu(x); output_silu * w",
        "x.sum(-1)": "total(x)[..., 0]",
        "x.softmax(-1)": "softmax(x)",
        "F.dropout(x, 0.0)": "x",
    },
    "x, i": {
        "x * i[:, None]": "x * Enclosure.point(i[:, None])",
        "torch.where((i == 2)[:, None], x, 0.0)": "where((i == 2)[:, None], x, 0.0)",
        "i + 1": "i + 1",
        "i.float()": "Enclosure.point(i)",
        "torch.where(i > 1, i, 0)": "i.where(i > 1, 0)",
        "torch.where(i > 1, 0, i)": "i.where(~(i > 1), 0)",
        "i.masked_fill(i < 0, 3)": "i.masked_fill(i < 0, 3)",
        "torch.isin(i, i)": "(i[..., None] == i.reshape(-1)).any(-1)",
        "i // 2 + i % 2": "i // 2 + i % 2",
        "i.sum(-1)": "i.sum(dim=-1)",
        "i.unsqueeze(-1) * x": "Enclosure.point(i.unsqueeze(-1)) * x",
        "~(i == 2)": "~(i == 2)",
        "(i == 2) & (i > 1)": "(i == 2) & (i > 1)",
        "i.reshape(2, 2)": "i.reshape(2, 2)",
        "x * (i != 3)[:, None]": "x * Enclosure.point((i != 3)[:, None])",
        "i.cumsum(-1)": "i.cumsum(-1)",
        "i - 1 < 2": "i - 1 < 2",
        "i.permute(0)": "i",
        "i.max(-1).values": "i.amax(dim=-1)",
    },
    "y": {
        "(y.float() * 2.0 * y.float()).to(y.dtype)": "y * 2.0 * y",
        "(y.float() * y.float() * y.float() + y.float()).to(y.dtype)": "output_sum = hull(multiply_add(y * y, y, y), multiply_add(y * y, y, y), multiply_add(y * y, y, y)); output_sum",
        "(y.float() * y.float() - y.float() * 2.0).to(y.dtype)": "hull(multiply_add(y, y, -(y * 2.0)), multiply_add(-y, 2.0, y * y))",
        "(y.float() * 2.0 + y.float() * 3.0).to(y.dtype)": "hull(multiply_add(y, 2.0, y * 3.0), multiply_add(y, 3.0, y * 2.0))",
        "(1.0 - y.float() * y.float()).to(y.dtype)": "multiply_add(-y, y, 1.0)",
        "(y.float() - y.float() * y.float() * 2.0).to(y.dtype)": "output_product = y * y; multiply_add(-output_product, 2.0, y)",
        "((y.float() * y.float() * y.float()).sum(-1)).to(y.dtype)": "total(product_in_any_order(y, y, y))[..., 0]",
        "(y.float() * y.float().square().mean(-1, keepdim=True).add(1e-6).rsqrt()).to(y.dtype)": "y * rsqrt(mean_of_squares(y) + 1e-06)",
        "((y.float() - y.float().mean(-1, keepdim=True)).square().mean(-1, keepdim=True)).to(y.dtype)": "output_mean = mean(y); variance_about(y, output_mean)",
        "((y.float() - y.float().mean(-1, keepdim=True)).square().sum(-1)).to(y.dtype)": "output_mean = mean(y); total_of_products(y - output_mean, y - output_mean)[..., 0]",
        "(y.float() * (y.float() * y.float() * 3.0)).to(y.dtype)": "output_product = y * y; y * (output_product * 3.0)",
        "(torch.addcmul(y.float(), y.float(), y.float())).to(y.dtype)": "multiply_add(y, y, y)",
        "(y.float() * y.float() / y.float()).to(y.dtype)": "y * y / y",
        "(F.silu(y.float()) * y.float()).to(y.dtype)": "hull(_silu(y) * y, product_in_any_order(y, sigmoid(y), y))",
        "(torch.exp2(y.float() * 1.4426950408889634)).to(y.dtype)": "exp2(y * 1.4426950408889634)",
        "((y.float() * 2.0).softmax(-1)).to(y.dtype)": "softmax(y * 2.0)",
        "(y.float().abs().amax(-1, keepdim=True) / 448.0).to(y.dtype)": "amax(abs(y)) / 448.0",
        "(y.float().square().sum((-2, -1))).to(y.dtype)": "total((y * y).joined())[..., 0]",
        "((y.float() + 1.0) * (y.float() + 2.0) * (y.float() + 3.0)).to(y.dtype)": "output_sum = y + 1.0; output_sum_2 = y + 2.0; product_in_any_order(output_sum, output_sum_2, y + 3.0)",
    },
}  # fmt: skip
"""Expression → stages by name, variables, and the result, separated by semicolons."""

REFUSED = {
    "x": {
        "x.var(-1, unbiased=False)": "var has no mapping",
        "x.var(-1)": "var has no mapping",
        "x.softmax(1)": "softmax is mapped over the last dimension only",
        "x.cumsum(-1)": "cumsum has no mapping",
        "x.cumsum(0)": "cumsum has no mapping",
        "x.norm(dim=-1)": "norm has no mapping",
        "x.argmax(-1)": "argmax has no mapping",
        "F.leaky_relu(x, 0.1)": "leaky_relu has no mapping",
        "F.normalize(x, dim=-1)": "normalize has no mapping",
        "x.std(-1)": "std has no mapping",
        "x.prod(-1)": "prod has no mapping",
        "x.floor()": "roundings to integers are not mapped; lastbit.numerics has floor, ceil, trunc and round_half_even",
        "x // 2.0": "floor division of numbers is not mapped",
        "x == 0.0": "== of numbers that are computed is not mapped",
        "x.sum()": "a reduction of all elements is not mapped; a loss over rows is written with sum_of_rows",
        "x.squeeze()": "squeeze of all dimensions is not mapped; name one",
        "x ** 4": "a power with exponent 4 is not mapped; 2, 3, 0.5, -0.5 and -1 are",
        "x.double()": "double has no mapping",
        "x[x > 0]": "an index that is a tensor is not mapped; lastbit.numerics has gather",
        "x.view(torch.int32)": "a view as another dtype is not mapped",
        "x.round()": "round has no mapping",
        "torch.sign(x)": "sign has no mapping",
        "torch.nan_to_num(x)": "nan_to_num has no mapping",
        "torch.lerp(x, x, 0.5)": "lerp has no mapping",
        "x.repeat(2, 1, 1)": "repeat has no mapping",
        "x.roll(1, -1)": "roll has no mapping",
        "x.flip(-1)": "flip has no mapping",
        "torch.outer(x[0, 0], x[0, 1])": "outer has no mapping",
        "x.numel() * x": "numel has no mapping",
    },
    "x, w": {
        "F.layer_norm(x, (8,), w)": "layer_norm is mapped over the last dimension, with weight and bias",
        "x @ w": "a product of tensors with 2 and 1 dimensions is not mapped; both need two",
        "torch.addmm(x[:, :3], x, x.mT)": "addmm has no mapping",
    },
    "x, i": {
        "i.clamp(0, 3) * 2": "clamp of integers is not mapped",
    },
}  # fmt: skip


def text_of(parameters: str, expression: str) -> str:
    function = eval(f"lambda {parameters}: {expression}", {"torch": torch, "F": F})
    inputs = build(parse_case(f"f {EXAMPLES[parameters]} seed=0"), "cpu").tensors
    return write_reference("f", function, Example(dict(inputs), {}, {}), "here").text


def statements(text: str) -> str:
    """Return the stages and variables of a reference, and its result."""
    body = text.split(") -> None:\n", 1)[1].split("\n\n\ndef ")[0]
    lines = [line.strip() for line in body.splitlines() if re.match(r" +(\w+ = |stage\()", line)]
    lines = [re.sub(r'^(\w+) = stage\("\1", (.*)\)$', r"\1: \2", line) for line in lines]
    return re.sub(r'stage\("output", (.*), result=True\)$', r"\1", "; ".join(lines))


@pytest.mark.parametrize(
    ("parameters", "expression", "written"),
    [(parameters, *pair) for parameters, pairs in WRITTEN.items() for pair in pairs.items()],
)
def test_expressions(parameters: str, expression: str, written: str) -> None:
    assert statements(text_of(parameters, expression)) == written


@pytest.mark.parametrize(
    ("parameters", "expression", "message"),
    [(parameters, *pair) for parameters, pairs in REFUSED.items() for pair in pairs.items()],
)
def test_expressions_without_a_mapping(parameters: str, expression: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message) + r"\Z"):
        text_of(parameters, expression)


@pytest.mark.parametrize(
    ("expression", "lines"),
    [
        ("x.bfloat16()", ['        "output": "bf16",']),
        ("x.half() + 1.7", ['        "x_rounded": "fp16",', '        "output": "fp16",']),
        ("x + 1.0", ['        "output": "x",']),
    ],
)
def test_formats_of_stages(expression: str, lines: list[str]) -> None:
    text = text_of("x", expression)
    assert [line for line in text.splitlines() if re.match(r'        "', line)] == lines
    assert ("scalars" in text) == ("1.7" in expression)


def test_inputs_that_must_be_alike_and_rows() -> None:
    alike = text_of("x, w", "x * w")
    assert 'raise ValueError("x, w must have one dtype, as in the trace")' in alike and 'rows=("x",),' in alike
    assert "must have one dtype" not in text_of("x, w", "x.float() * w.float()")
    whole = text_of("x", "x - x.sum(0)")
    assert "rows=()," in whole
    integers = text_of("x, i", "x * i[:, None]")
    assert '    integers=("i",),' in integers and "    i: Any," in integers and "from typing import Any" in integers
