"""Attention: the kernels against fp64 in every layout and size, and torch's own function against a contract."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit.case import Case, parse_case
from lastbit.errors import UnsupportedCase
from lastbit.kernel import load_file, load_kernels
from lastbit.result import Verdict
from lastbit.verify.check import Subject, unsupported, verify_case
from tests.attention_formula import attention as formula
from tests.faults.hunt import op_of
from tests.rms_norm_contract import DEVICE, FOLDER, LOADED, needs_device  # installs the bit-faithful interpreter

pytestmark = needs_device

KERNELS = {k.name: k for k in LOADED if k.op == "attention"}
EXTERNAL = {k.name: k for k in load_kernels(FOLDER / "external") if k.op == "attention"}
CASES = load_file(FOLDER.parent / "cases" / "attention.py")
EDGES = [
    case
    for group in CASES.groups(frozenset({"q", "k", "v", "sinks", "scale", "causal", "cap"}), small=True)
    if group.name == "edges"
    for case in group.examples
]
EVERY = pytest.mark.parametrize("name", KERNELS)


def drawn(batch: int, queries: int, keys: int, heads: int, groups: int, width: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (batch, queries, heads, width), "k": (batch, keys, groups, width), "v": (batch, keys, groups, width)}
    return {n: torch.randn(shape, generator=generator).bfloat16().to(DEVICE) for n, shape in shapes.items()}


def output_of(name: str, tensors: dict[str, Tensor], **params: Any) -> Tensor:
    result = KERNELS[name].call(**tensors, **params)
    return result["output"] if isinstance(result, dict) else result


def check(name: str, tensors: dict[str, Tensor], **params: Any) -> None:
    """Near the formula: 16-bit roundings of weights and scores of about one."""
    wanted = formula(**{n: t.cpu() for n, t in tensors.items()}, **params)["output"]
    torch.testing.assert_close(output_of(name, tensors, **params).double().cpu(), wanted, rtol=0.03, atol=0.03)


@EVERY
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 65), (64, 64), (33, 70), (5, 129)])
def test_sizes_around_tiles(name: str, queries: int, keys: int) -> None:
    tensors = drawn(1, queries, keys, 4, 2, 24)
    check(name, tensors, scale=0.2)
    check(name, tensors, scale=0.2, causal=True)


@EVERY
@pytest.mark.parametrize("case", EDGES, ids=str)
def test_edges(name: str, case: Case) -> None:
    if not case.names <= KERNELS[name].accepts:
        pytest.skip("the kernel does not take this case")
    result = verify_case(Subject(KERNELS[name], op_of("attention"), torch.device(DEVICE)), case)
    assert result.verdict in (Verdict.PASSED, Verdict.INCONCLUSIVE), result.findings


@EVERY
def test_heads_first_and_other_strides_give_the_same_bits(name: str) -> None:
    tensors = drawn(2, 9, 21, 4, 2, 16)
    wanted = output_of(name, tensors, scale=0.25, causal=True)
    heads_first = {n: t.transpose(1, 2).contiguous().transpose(1, 2) for n, t in tensors.items()}
    spread = {n: torch.stack([t, t], -1)[..., 0] for n, t in tensors.items()}
    for changed in (heads_first, spread):
        assert torch.equal(output_of(name, changed, scale=0.25, causal=True), wanted)


def test_no_query_no_sequence_and_no_number() -> None:
    for name, kernel in KERNELS.items():
        for shape in ((2, 0, 4, 8), (0, 3, 4, 8), (1, 3, 4, 0)):
            width = shape[3] or 8
            q = torch.ones(shape[0], shape[1], 4, width, device=DEVICE)
            keys = torch.ones(shape[0], 5, 2, width, device=DEVICE)
            result = kernel.call(q, keys, keys[..., : shape[3]], scale=1.0)
            output = result["output"] if isinstance(result, dict) else result
            assert tuple(output.shape) == shape, name


def test_stages_of_the_eager_kernel() -> None:
    tensors = drawn(1, 3, 5, 2, 1, 8)
    shown = KERNELS["eager[attention+eager]"].call(**tensors, scale=0.5, stages=("products", "probabilities"))
    assert shown["products"].shape == shown["probabilities"].shape == (1, 2, 3, 5)
    assert shown["probabilities"].dtype == torch.bfloat16


REFUSED = [
    ({"q": torch.zeros(2, 3, 8)}, ValueError, r"q has shape \(2, 3, 8\); it must be \[batch, tokens, heads, numbers\]"),
    ({"k": torch.zeros(1, 3, 2, 8).half()}, TypeError, "k is torch.float16, q torch.float32"),
    ({"v": torch.zeros(1, 4, 2, 8)}, ValueError, r"v has shape \(1, 4, 2, 8\)"),
    ({"sinks": torch.zeros(3)}, ValueError, r"sinks has shape \(3,\); beside q \(1, 2, 4, 8\) it must be \(4,\)"),
    ({"v": torch.zeros(1, 3, 2, 8, device="meta")}, ValueError, "v is on meta"),
    ({"scale": -1.0}, ValueError, "scale=-1.0 must be positive and finite"),
    ({"v": torch.zeros(1, 3, 2, 300)}, UnsupportedCase, "256 numbers are supported"),
]


@EVERY
@pytest.mark.parametrize(("change", "error", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_arguments_without_attention_are_refused(
    name: str, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    keys = torch.zeros(1, 3, 2, 8)
    given = {"q": torch.zeros(1, 2, 4, 8), "k": keys, "v": keys, "scale": 1.0} | change
    if given.keys() <= KERNELS[name].accepts:
        with pytest.raises(error, match=message):
            KERNELS[name].call(**given)


LINE = "attention q=bf16[1,6,4,16] k=bf16[1,9,2,16] v=bf16[1,9,2,16] scale=0.25 causal=True seed=1"
NOTHING = "attention q=bf16[0,6,4,16] k=bf16[0,9,2,16] v=bf16[0,9,2,16] scale=0.25 seed=1"


def test_the_plain_path_of_torch_keeps_the_contract_math() -> None:
    kernel = EXTERNAL["F.scaled_dot_product_attention[math]"]
    for line in (LINE, LINE.replace("[1,9,", "[1,6,"), LINE.replace("bf16", "fp16").replace(" causal=True", "")):
        case = parse_case(line)
        assert verify_case(Subject(kernel, op_of("attention"), torch.device("cpu")), case).verdict is Verdict.PASSED
    assert kernel.contract == "math"


def test_what_torch_answers_otherwise_is_refused() -> None:
    tensors = drawn(1, 6, 4, 4, 2, 16)
    with pytest.raises(UnsupportedCase, match="6 queries and 4 keys"):
        EXTERNAL["F.scaled_dot_product_attention[math]"].call(**tensors, scale=0.25, causal=True)
    assert "non-empty" in unsupported(EXTERNAL["F.scaled_dot_product_attention[math]"], parse_case(NOTHING))
