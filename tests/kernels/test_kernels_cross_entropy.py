"""Kernels of cross entropy: arguments, layouts, stages, tiles, and what they give beside formulas in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lastbit.errors import UnsupportedCase
from lastbit.kernel import Kernel, load_file
from tests.faults.plant import without_faults
from tests.rms_norm_contract import DEVICE, FOLDER, needs_device  # installs the bit-faithful interpreter

pytestmark = needs_device

MODULES = without_faults().modules
KERNELS = {k.name: k for k in without_faults().kernels if k.op.startswith("cross_entropy")}
FORWARD, BACKWARD = KERNELS["triton[cross_entropy]"], KERNELS["triton[cross_entropy_backward]"]
ROWS, CLASSES = 7, 100


def problem(dtype: torch.dtype = torch.float32, classes: int = CLASSES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(classes, (ROWS,), generator=generator)
    labels[2] = -100
    logits = (torch.randn(ROWS, classes, generator=generator) * 3).to(dtype)
    return {"logits": logits.to(DEVICE), "labels": labels.to(DEVICE)}


def gradient() -> Tensor:
    return torch.randn(ROWS, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def of(kernel: Kernel) -> bool:
    return not kernel.devices or DEVICE in kernel.devices


LOSSES = [k for k in KERNELS.values() if k.op == "cross_entropy" and of(k)]
GRADIENTS = [k for k in KERNELS.values() if k.op == "cross_entropy_backward" and of(k)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1},
    {"reduction": "sum"},
    {"reduction": "mean", "label_smoothing": 0.3},
    {"reduction": "mean", "count": 11},
]


def in_fp64(logits: Tensor, labels: Tensor, **params: Any) -> Tensor:
    """torch's own function in fp64; a mean over `count` is a sum divided by it."""
    count = params.pop("count", None)
    params |= {"reduction": "sum"} if count else {}
    found = F.cross_entropy(logits.double(), labels, **{"reduction": "none", **params})
    return found / count if count else found


@pytest.mark.parametrize("params", OPTIONS, ids=str)
@pytest.mark.parametrize("kernel", LOSSES, ids=lambda k: k.name)
def test_losses_are_near_those_of_fp64(kernel: Kernel, params: dict[str, Any]) -> None:
    tensors = problem()
    found = kernel.call(**tensors, **params)
    (name,) = found
    wanted = in_fp64(**tensors, **params)
    assert name == ("losses" if wanted.ndim else "loss") and found[name].dtype == torch.float32
    torch.testing.assert_close(found[name].double(), wanted.reshape(found[name].shape), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("kernel", GRADIENTS, ids=lambda k: k.name)
def test_gradients_are_near_those_of_fp64(kernel: Kernel, smoothing: float) -> None:
    tensors, grad_output = problem(), gradient()
    leaf = tensors["logits"].double().requires_grad_()
    losses = F.cross_entropy(leaf, tensors["labels"], reduction="none", label_smoothing=smoothing)
    (wanted,) = torch.autograd.grad(losses, leaf, grad_output.double() / 5)
    found = kernel.call(**tensors, grad_output=grad_output, label_smoothing=smoothing, count=5)
    found = found["grad_logits"] if isinstance(found, dict) else found
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-7)


def test_scale_cap_and_z_loss_are_near_those_of_fp64() -> None:
    tensors, grad_output = problem(), gradient()
    params = {"logit_scale": 0.7, "softcap": 4.0, "z_loss": 0.05}
    leaf = tensors["logits"].double().requires_grad_()
    x = 4.0 * torch.tanh(leaf * 0.7 / 4.0)
    counted = tensors["labels"] != -100
    losses = F.cross_entropy(x, tensors["labels"], reduction="none") + counted * 0.05 * torch.logsumexp(x, -1) ** 2
    (wanted,) = torch.autograd.grad(losses, leaf, grad_output.double())
    for name in ("triton[cross_entropy]", "eager[cross_entropy]"):
        found = KERNELS[name].call(**tensors, **params)["losses"]
        torch.testing.assert_close(found.double(), losses.detach(), rtol=1e-6, atol=1e-6)
    for kernel in GRADIENTS:
        if {"softcap"} <= kernel.accepts:
            found = kernel.call(**tensors, grad_output=grad_output, **params)
            found = found["grad_logits"] if isinstance(found, dict) else found
            torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-7)


LAYOUTS = {
    "rows with a gap": lambda t: torch.cat([t, t], 1)[:, : t.shape[1]],
    "columns first": lambda t: t.t().contiguous().t(),
    "every second column": lambda t: torch.stack([t, t], -1).flatten(1)[:, ::2],
    "unaligned": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_layout_changes_a_bit(layout: str) -> None:
    tensors, grad_output = problem(torch.bfloat16), gradient()
    strided = {
        "logits": LAYOUTS[layout](tensors["logits"]),
        "labels": torch.stack([tensors["labels"]] * 3, -1).flatten()[::3],
    }
    assert torch.equal(FORWARD.call(**strided)["losses"], FORWARD.call(**tensors)["losses"])
    first = BACKWARD.call(**tensors, grad_output=grad_output)["grad_logits"]
    assert torch.equal(BACKWARD.call(**strided, grad_output=grad_output)["grad_logits"], first)
    assert first.is_contiguous()


def test_a_saved_lse_gives_the_bits_of_one_computed_anew() -> None:
    tensors, grad_output = problem(torch.bfloat16), gradient()
    lse = FORWARD.call(**tensors, stages=("lse",))["lse"]
    saved = BACKWARD.call(**tensors, grad_output=grad_output, lse=lse)
    anew = BACKWARD.call(**tensors, grad_output=grad_output, stages=("lse", "difference"))
    assert torch.equal(saved["grad_logits"], anew["grad_logits"]) and torch.equal(anew["lse"], lse)
    assert (set(saved), set(anew)) == ({"grad_logits"}, {"grad_logits", "lse", "difference"})


def test_one_gradient_for_all_rows_is_not_copied() -> None:
    tensors, one = problem(torch.bfloat16), torch.tensor([0.25], device=DEVICE)
    shared = BACKWARD.call(**tensors, grad_output=one.expand(ROWS))["grad_logits"]
    assert torch.equal(shared, BACKWARD.call(**tensors, grad_output=one.repeat(ROWS))["grad_logits"])


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_no_rows(reduction: str) -> None:
    logits, labels = torch.empty(0, 5, device=DEVICE), torch.empty(0, dtype=torch.int64, device=DEVICE)
    (found,) = FORWARD.call(logits, labels, reduction=reduction).values()
    wanted = {"none": torch.empty(0), "sum": torch.zeros(1), "mean": torch.full((1,), torch.nan)}[reduction]
    assert torch.equal(found.cpu().nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert BACKWARD.call(logits, labels, torch.empty(0, device=DEVICE))["grad_logits"].shape == (0, 5)


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"logits": torch.zeros(2, 3, 4)}, ValueError, r"logits has shape \(2, 3, 4\); it must be \[T, V\]"),
    ({"logits": torch.zeros(ROWS, 0)}, UnsupportedCase, "logits has 0 classes"),
    ({"logits": torch.zeros(ROWS, 4).double()}, TypeError, "logits is torch.float64"),
    ({"labels": torch.zeros(ROWS)}, TypeError, "labels is torch.float32; it must be torch.int64 or torch.int32"),
    ({"labels": torch.zeros(3).long()}, ValueError, r"labels has shape \(3,\)"),
    ({"labels": torch.zeros(ROWS, device="meta").long()}, ValueError, "labels is on meta"),
    ({"label_smoothing": 1.5}, ValueError, "label_smoothing=1.5 must be from 0 to 1"),
    ({"softcap": 0.0}, ValueError, "softcap=0.0 must be positive, or None"),
    ({"reduction": "average"}, ValueError, "reduction: 'average' is not one of 'none', 'sum', 'mean'"),
    ({"reduction": "sum", "count": 3}, ValueError, "count=3 with reduction='sum'"),
    ({"stages": ("probs",)}, ValueError, "stages: 'probs' is not one of 'lse', 'losses'"),
]


@pytest.mark.parametrize(("changed", "error", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_arguments_that_have_no_loss_are_refused(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    changed = {n: v.to(DEVICE) if isinstance(v, Tensor) and v.device.type != "meta" else v for n, v in changed.items()}
    with pytest.raises(error, match=message):
        FORWARD.call(**{**problem(), **changed})


def test_gradients_refuse_what_does_not_fit() -> None:
    tensors = problem()
    with pytest.raises(ValueError, match=r"grad_output has shape \(3,\)"):
        BACKWARD.call(**tensors, grad_output=gradient()[:3])
    with pytest.raises(TypeError, match=r"lse is torch\.float64"):
        BACKWARD.call(**tensors, grad_output=gradient(), lse=gradient().double())
    with pytest.raises(ValueError, match="count=0"):
        BACKWARD.call(**tensors, grad_output=gradient(), count=0)


def test_cases_reach_every_tile() -> None:
    """Every block, and one that a row is wider than; vectors and none."""
    rows, described = MODULES["cross_entropy_rows"], MODULES["described"].Described
    reached = set()
    for name in ("cross_entropy", "cross_entropy_backward"):
        groups = load_file(FOLDER.parent / "cases" / f"{name}.py").groups(
            KERNELS[f"triton[{name}]"].accepts, small=True
        )
        for spec in (case["logits"] for group in groups for case in group.examples):
            strides = spec.element_strides
            cut = rows.tile(described(spec.shape, strides, spec.torch_dtype, torch.device("cpu"), not spec.offset))
            reached |= {(cut.block, spec.shape[1] > cut.block), cut.aligned}
    assert reached >= {*((block, False) for block in rows.BLOCKS), (rows.BLOCKS[-1], True), True, False}
