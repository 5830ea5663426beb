"""MoE-LoRA on quantised base weights: every bit is that of the same kernel on the weights that the codes stand for.

Compiled, a dot may add its products in another order when an operand comes from codes (on an H200 with Triton 3.6 it
does for int4 with zero points). So all weights but one in each row and column are zero there, and there is no order.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit.numerics.formats import cast, format_of
from lastbit.numerics.quantized import SCHEMES, dequantized, unpack
from tests.quantized_weights import STORED, every_storage, stored
from tests.quantizers import Quantized, pack
from tests.rms_norm_contract import BF16, DEVICE, FP16, INTERPRETED, LOADED, assert_bits, needs_device, normals

pytestmark = needs_device

KERNELS = {k.name: k for k in LOADED if k.op in ("moe_lora", "moe_lora_backward")}
FORWARD, BACKWARD = (KERNELS[f"triton[{op}+fused]"].call for op in ("moe_lora", "moe_lora_backward"))
TOKENS, SLOTS, EXPERTS, HIDDEN, WIDTH, RANK = 6, 2, 3, 64, 128, 4
PROJECTIONS = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}

every_kernel = pytest.mark.parametrize("name", sorted(KERNELS))
every_contract = pytest.mark.parametrize("contract", ["fused", "eager"])
every_dtype = pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)


def case(name: str, dtype: torch.dtype = BF16) -> dict[str, Any]:
    """Arguments of a kernel of either op, without its base weights."""
    columns = {"grad_output": (TOKENS, HIDDEN)}
    columns |= dict.fromkeys(("saved_gate", "saved_up", "intermediate"), (TOKENS, SLOTS, WIDTH))
    shapes = {"x": (TOKENS, HIDDEN), **(columns if "backward" in name else {})}
    for side, (n, k) in PROJECTIONS.items():
        shapes |= {f"{side}_lora_a": (EXPERTS, RANK, k), f"{side}_lora_b": (EXPERTS, n, RANK)}
    made = {part: normals(*shape, dtype=dtype, seed=seed) for seed, (part, shape) in enumerate(shapes.items())}
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, EXPERTS, (TOKENS, SLOTS), generator=generator).to(DEVICE)
    return made | {"expert_ids": ids, "routing_weights": normals(TOKENS, SLOTS, seed=99).abs(), "scaling": 0.5}


def codes(storage: str, seed: int = 0) -> dict[str, Tensor]:
    """Draw base weights of one scheme, by the names of the op."""
    found = {}
    for at, (side, (n, k)) in enumerate(PROJECTIONS.items()):
        weight = torch.randn(EXPERTS, n, k, generator=torch.Generator().manual_seed(seed + at)) / k**0.5
        quantized = stored(storage, weight) if INTERPRETED else thinned(STORED[storage][0], stored(storage, weight))
        parts = zip(("proj", "scale", "zero"), quantized, strict=True)
        found |= {f"{side}_{part}": t.to(DEVICE) for part, t in parts if t is not None}
    return found


def thinned(scheme: str, quantized: Quantized) -> Quantized:
    """Put the code of zero everywhere but in one place of each row and column, as far as there are both."""
    one = SCHEMES[scheme]
    own = unpack(quantized.codes, one.bits)
    nothing = torch.tensor(8 if scheme == "int4_symmetric" else 0)
    if quantized.zero is not None:
        nothing = quantized.zero.repeat_interleave(own.shape[-1] // quantized.zero.shape[-1], -1)
    kept = torch.zeros(own.shape[-2:], dtype=torch.bool)
    rows, columns = (
        torch.randperm(n, generator=torch.Generator().manual_seed(n))[: min(kept.shape)] for n in kept.shape
    )
    kept[rows, columns] = True
    return quantized._replace(codes=pack(torch.where(kept, own, nothing), one.words, one.bits))


def meant(coded: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the weights that codes stand for, in the dtype of the activations."""
    found = {}
    for side in PROJECTIONS:
        parts = (coded.get(f"{side}_{part}") for part in ("proj", "scale", "zero"))
        found[f"{side}_proj"] = cast(dequantized(*parts, fmt=format_of(dtype)).value, dtype)
    return found


def check(name: str, coded: dict[str, Tensor], arguments: dict[str, Any], **options: Any) -> None:
    """Equal bits from the codes and from what they stand for."""
    call = KERNELS[name].call
    actual = call(**arguments, **coded, **options)
    expected = call(**arguments, **meant(coded, arguments["x"].dtype), **options)
    assert actual.keys() == expected.keys()
    for result, value in expected.items():
        assert_bits(actual[result], value, f"{name}: {result}")
        assert value.isfinite().all() and value.count_nonzero() > value.numel() // 4


@every_storage
@every_kernel
def test_results_are_those_of_the_weights_that_the_codes_stand_for(name, storage):
    check(name, codes(storage), case(name))


@every_kernel
@every_storage
def test_shards_read_slices_of_the_codes(name, storage):
    check(name, codes(storage), case(name), shards=2)


@every_kernel
@pytest.mark.parametrize("storage", ["int4_symmetric", "mxfp4"])
def test_operands_in_fp16(name, storage):
    check(name, codes(storage), case(name, FP16))


@pytest.mark.parametrize("name", [name for name in sorted(KERNELS) if "triton" in name])
def test_stages_are_those_of_the_weights_that_the_codes_stand_for(name):
    check(name, codes("int4_asymmetric"), case(name), stages=KERNELS[name].stages)


@every_kernel
def test_each_projection_may_have_a_scheme_of_its_own(name):
    mixed = codes("int8") | {k: t for k, t in codes("mxfp4").items() if k.startswith("up")}
    mixed |= {k: t for k, t in codes("int4_symmetric").items() if k.startswith("down")}
    check(name, mixed, case(name))
    plain = {k: t for k, t in meant(mixed, BF16).items() if k == "gate_proj"}
    check(name, {k: t for k, t in mixed.items() if not k.startswith("gate")} | plain, case(name))


@every_kernel
@every_storage
def test_codes_scales_and_zero_points_may_have_any_strides(name, storage):
    strided = {
        k: torch.stack([t, t], -1)[..., 0].transpose(0, 1).contiguous().transpose(0, 1)
        for k, t in codes(storage).items()
    }
    assert not strided["gate_proj"].is_contiguous()
    check(name, strided, case(name), shards=2)


@pytest.mark.parametrize(("op", "call"), [("forward", FORWARD), ("backward", BACKWARD)])
def test_an_update_of_the_codes_is_seen_by_the_next_call(op, call):
    arguments, coded = case(op), codes("int4_asymmetric")
    call(**arguments, **coded, shards=2)
    for name, tensor in codes("int4_asymmetric", seed=7).items():
        coded[name].copy_(tensor)
    actual, expected = (call(**arguments, **weights, shards=2) for weights in (coded, meant(coded, BF16)))
    for name, value in expected.items():
        assert_bits(actual[name], value, name)


def test_gradients_of_the_input_depend_on_the_same_weights_as_the_output():
    """The seed-era backward read other weights than the forward; here a change of one scale shows in both."""
    coded = codes("int4_symmetric")
    changed = coded | {"down_scale": coded["down_scale"] * 2}
    forward, backward = case("forward"), case("backward")
    assert not torch.equal(FORWARD(**forward, **coded)["output"], FORWARD(**forward, **changed)["output"])
    before, after = (BACKWARD(**backward, **weights) for weights in (coded, changed))
    for name in ("grad_input", "grad_routing_weights", "grad_gate_lora_a"):
        assert not torch.equal(before[name], after[name])


# Errors.


@every_kernel
@pytest.mark.parametrize(
    ("storage", "changes", "error", "message"),
    [
        ("int4_symmetric", {"up_scale": None}, ValueError, r"up_scale is missing; up_proj is torch\.int32"),
        ("int4_asymmetric", {"down_zero": None}, TypeError, r"down_scale is torch\.float16; with int4_symmetric codes"),
        ("int8", {"gate_proj": None}, ValueError, r"gate_scale is given, but gate_proj is torch\.bfloat16"),
        (
            "mxfp4",
            {"gate_scale": torch.ones(EXPERTS, WIDTH, 0).byte()},
            ValueError,
            r"gate_scale has shape \(3, 128, 0\)",
        ),
        ("mxfp4", {"down_proj": torch.ones(EXPERTS, HIDDEN, 16).byte()}, ValueError, r"must be \(E, N, 64\)"),
        ("int8", {"shards": 3}, ValueError, "shards=3 does not divide"),
        ("mxfp4", {"shards": 8}, ValueError, "down_proj: 8 shards of its 128 columns would cut mxfp4 codes"),
        ("int4_asymmetric in bf16", {"shards": 4}, ValueError, "down_proj: 4 shards of its 128 columns"),
    ],
)
def test_codes_that_do_not_fit_are_refused(name, storage, changes, error, message):
    coded = codes(storage)
    plain = meant(coded, BF16)
    given = {k: plain[k] if k == "gate_proj" and v is None else v for k, v in changes.items()}
    given = {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in given.items()}
    with pytest.raises(error, match=message):
        KERNELS[name].call(**case(name), **(coded | given))


def test_every_scheme_is_tested():
    assert {scheme for scheme, *_ in STORED.values()} == {"int8", "int4_symmetric", "int4_asymmetric", "mxfp4"}
