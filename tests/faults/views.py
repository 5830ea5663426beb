"""Faults of kernels that go by the storage of their inputs: only cases whose inputs lie in one storage expose them."""

from __future__ import annotations

from functools import partial

from tests.faults.plant import Edit, Fault

_swiglu = partial(Fault, op="swiglu", variant="swiglu+fp32_silu", options="edges", dtypes=("bf16",))
_pairs = partial(_swiglu, dtypes=("fp16",))
_gradient = partial(_swiglu, op="swiglu_backward", variant="swiglu_backward+fp32_silu")
_gradient_of_pairs = partial(_gradient, dtypes=("fp16",))
_attention = partial(Fault, op="attention", variant="attention+flash", options="edges", dtypes=("bf16",))
_norm = partial(Fault, options="edges", dtypes=("fp16",))
_gated = partial(Fault, op="layer_norm_gated", variant="single_rounding", options="edges", dtypes=("fp16",))
_gated_gradient = partial(_gated, op="layer_norm_gated_backward", variant="gated_backward")
_experts = partial(Fault, op="moe_lora", variant="moe_lora+fused", options="edges", dtypes=("bf16",))
_expert_gradient = partial(_experts, op="moe_lora_backward", variant="moe_lora_backward+fused")


def _together(first: str, second: str) -> str:
    return f"{first}.untyped_storage().data_ptr() == {second}.untyped_storage().data_ptr()"


def _placed(tensor: str, strides: str, start: str) -> str:
    return f"{tensor} = {tensor}.as_strided({tensor}.shape, {strides}, {start})"


_HALVES = "up is not None and up.data_ptr() == x.data_ptr() + x.shape[-1] * x.element_size()"
_PAIRS = "up is not None and up.data_ptr() == x.data_ptr() + x.element_size()"
_DENSE = "gate, up = (t.as_strided(t.shape, contiguous_like(t).stride()) for t in (gate, up))"
_DENSE_PAIRS = "gate, up = (t.as_strided(t.shape, (*contiguous_like(t).stride()[:-1], 2)) for t in (gate, up))"
_APART = "    gate, up = gate_and_up(x, up, interleaved=options.interleaved)\n"
_GRADIENTS_APART = '    gate, up = gate_and_up(x, there["up"], interleaved=options.interleaved)\n'


def _of_swiglu(when: str, then: str, apart: str = _APART, file: str = "swiglu.py") -> tuple[Edit, ...]:
    return (Edit(apart, f"    beside = {when}\n{apart}    if beside:\n        {then}\n", file),)


_of_gradient = partial(_of_swiglu, apart=_GRADIENTS_APART, file="swiglu_backward.py")

GATES = (
    _swiglu(
        "halves without a gap", "takes gate and up that are halves of rows for rows of I columns each",
        _of_swiglu(_HALVES, _DENSE), "silu", "output",
    ),
    _pairs(
        "pairs without a gap", "takes gate and up that alternate for rows of I columns together",
        _of_swiglu(_PAIRS, _DENSE_PAIRS), "silu", "output",
    ),
    _gradient(
        "halves without a gap", "takes gate and up that are halves of rows for rows of I columns each",
        _of_gradient(_HALVES, _DENSE), "silu", "grad_gate",
    ),
    _gradient_of_pairs(
        "pairs without a gap", "takes gate and up that alternate for rows of I columns together",
        _of_gradient(_PAIRS, _DENSE_PAIRS), "silu", "grad_gate",
    ),
)  # fmt: skip

_CHECKED = "        check_arguments(q, k, v, sinks, scale=scale, cap=cap)\n"


def _of_attention(start: str) -> tuple[Edit, ...]:
    then = f"        if {_together('k', 'v')}:\n            {_placed('v', 'v.stride()', start)}\n"
    return (Edit(_CHECKED, _CHECKED + then, "attention.py"),)


KEYS = (
    _attention(
        "values after the keys", "takes values in the storage of the keys to follow them, as in a cache",
        _of_attention("k.storage_offset() + k.numel()"), "output", "output",
    ),
    _attention(
        "values beside the keys", "takes values in the storage of the keys to follow those of their token",
        _of_attention("k.storage_offset() + k[0, 0].numel()"), "output", "output",
    ),
)  # fmt: skip

_WEIGHT = "    weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()\n"
_GATES_AFTER = f"    if z is not None and {_together('x', 'z')}:\n        " + _placed(
    "z", "contiguous_like(z).stride()", "x.storage_offset() + x.numel()"
)
_PLAN = "    plan = _plan((described(x), *map(described, others.values())), options, stages)\n"

ROWS = (
    _norm(
        "residual in the storage of x", "takes a residual in the storage of x for x",
        (Edit("    results = allocate_results(x, residual is not None, quant)\n",
              f"    if residual is not None and {_together('x', 'residual')}:\n        residual = x\n"
              "    results = allocate_results(x, residual is not None, quant)\n"),),
        "residual_sum", "residual_sum",
    ),
    _gated(
        "gates after the rows", "takes gates in the storage of x to follow its rows",
        (Edit(_WEIGHT, f"{_WEIGHT}{_GATES_AFTER}\n", "layer_norm_gated.py"),), "gate", "output",
    ),
    _gated_gradient(
        "gates after the rows", "takes gates in the storage of x to follow its rows",
        (Edit(_PLAN, f"    z = others['z']\n{_GATES_AFTER}\n    others = {{**others, 'z': z}}\n{_PLAN}",
              "layer_norm_gated_backward.py"),),
        "gate", "dz",
    ),
)  # fmt: skip


def _of_experts(file: str, matrix: str) -> tuple[Edit, ...]:
    gate, up = (f"weights.{name}_{matrix}" for name in ("gate", "up"))
    start = f"{gate}.storage_offset() + {gate}.numel()"
    moved = f"{up}.as_strided({up}.shape, {gate}.contiguous().stride(), {start})"
    route = "        routing = route(expert_ids, len(weights.gate_proj), first_expert)\n"
    parameters = "parameters" if file == "moe_lora.py" else "tensors"
    then = (
        f"        if {gate} is not None and {_together(gate, up)}:\n"
        f"            {parameters} = {{**{parameters}, 'up_{matrix}': {moved}}}\n"
    )
    return (Edit(route, then + route, file),)


EXPERTS = (
    _experts(
        "experts of up after those of gate", "takes the weights of up in the storage of gate's to follow all of these",
        _of_experts("moe_lora.py", "proj"), "up_base", "saved_up",
    ),
    _experts(
        "adapters of up after those of gate", "takes A of up in the storage of gate's to follow all of that",
        _of_experts("moe_lora.py", "lora_a"), "up_lora_mid", "saved_up",
    ),
    _expert_gradient(
        "experts of up after those of gate", "takes the weights of up in the storage of gate's to follow all of these",
        _of_experts("moe_lora_backward.py", "proj"), "grad_expert_input", "grad_input",
    ),
)  # fmt: skip

FAULTS = (*GATES, *KEYS, *ROWS, *EXPERTS)
