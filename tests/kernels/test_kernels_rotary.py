"""The Triton kernels of rotary embeddings: arguments that do not fit, copies that are not made, and other packages."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from lastbit.errors import UnsupportedCase
from lastbit.kernel import load_kernels
from tests.faults.plant import FOLDER, without_faults
from tests.rms_norm_contract import DEVICE, needs_device  # installs the bit-faithful interpreter

pytestmark = needs_device

ROTARY = without_faults().modules["rotary"]
QK_NORM_ROPE = without_faults().modules["qk_norm_rope"]
WRITTEN_OUT = [k for k in load_kernels(FOLDER) if k.op in ("rotary", "qk_norm_rope") and k.name.startswith("eager")]
PACKAGES = {"liger": "liger_kernel", "conch": "conch", "transformers": "transformers"}
EXTERNAL = {k.name: k for k in load_kernels(FOLDER / "external") if k.op == "rotary"}


def arguments(**changed: Any) -> dict[str, Any]:
    given = {
        "q": torch.ones(3, 2, 8, device=DEVICE).bfloat16(),
        "cos": torch.ones(5, 4, device=DEVICE),
        "sin": torch.zeros(5, 4, device=DEVICE),
        "positions": torch.zeros(3, dtype=torch.int64, device=DEVICE),
    }
    return given | changed


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({"q": torch.ones(2, 8)}, ValueError, r"q has shape \(2, 8\); it must be \[\.\.\., H, D\]"),
        ({"q": torch.ones(3, 2, 8).double()}, TypeError, "q is torch.float64; it must be"),
        ({"positions": torch.zeros(3)}, TypeError, "positions are torch.float32; they must be int64 or int32"),
        (
            {"positions": torch.zeros(2, dtype=torch.int64)},
            ValueError,
            r"positions have shape \(2,\); q has the tokens",
        ),
        ({"cos": torch.ones(5, 5)}, ValueError, r"cos has shape \(5, 5\); it must be \[P, R / 2\] with R from 0 to 8"),
        ({"sin": torch.ones(4, 4)}, ValueError, r"sin has shape \(4, 4\); it must be \(5, 4\), as cos"),
        ({"sin": torch.ones(5, 4).double()}, TypeError, "sin is torch.float64"),
        ({"k": torch.ones(3, 2, 6).bfloat16()}, ValueError, r"k has shape \(3, 2, 6\); with q it must be \[3, G, D\]"),
        ({"k": torch.ones(3, 2, 8)}, TypeError, "k is torch.float32; it must be torch.bfloat16, as q is"),
        ({"cos": torch.ones(5, 4, device="meta")}, ValueError, "cos is on meta, but q is on"),
    ],
)
def test_arguments_that_do_not_fit(changed: dict[str, torch.Tensor], error: type[Exception], said: str) -> None:
    moved = {name: t if t.is_meta else t.to(DEVICE) for name, t in changed.items()}
    with pytest.raises(error, match=said):
        ROTARY.rotary(**arguments(**moved))


@pytest.mark.parametrize("name", [kernel.name for kernel in WRITTEN_OUT])
def test_tables_elsewhere_are_named(name: str) -> None:
    [call] = [kernel.call for kernel in WRITTEN_OUT if kernel.name == name]
    given = arguments(cos=torch.ones(5, 4, device="meta")) | ({"eps": 1e-6} if "qk_norm" in name else {})
    with pytest.raises(ValueError, match="cos is on meta, but q is on"):
        call(given.pop("q"), **given)


def test_a_weight_that_does_not_fit() -> None:
    given = arguments(weight=torch.ones(6, device=DEVICE), eps=1e-6)
    with pytest.raises(ValueError, match=r"weight has shape \(6,\); with heads of 8 columns it must be \(8,\)"):
        QK_NORM_ROPE.qk_norm_rope(given.pop("q"), **given)


def test_strided_heads_and_tables_are_not_copied() -> None:
    packed = torch.zeros(3, 6, 8, device=DEVICE).bfloat16()
    cache = torch.zeros(5, 8, device=DEVICE)
    given = arguments(q=packed[:, :4], cos=cache[:, :4], sin=cache[:, 4:])
    described = [ROTARY.described(given[name]) for name in ("q", "cos", "sin", "positions")]
    plan = ROTARY._plan(described[0], None, *described[1:], False, False, False)
    assert plan.copied == (False, False, False, False)
    by_columns = ROTARY.described(cache.t()[:5, :4])
    assert ROTARY._plan(described[0], None, by_columns, *described[2:], False, False, False).copied[2]


@pytest.mark.parametrize("name", sorted(EXTERNAL))
def test_other_packages_rotate_or_say_what_is_missing(name: str) -> None:
    package = PACKAGES[name.partition("[")[0]]
    dtype = torch.float32 if "fp32" in name else torch.bfloat16
    tables = {"cos": torch.zeros(5, 4, device=DEVICE, dtype=dtype), "sin": torch.ones(5, 4, device=DEVICE, dtype=dtype)}
    given = arguments(**tables) | ({"interleaved": True} if "gptj" in name else {})
    if importlib.util.find_spec(package) is None:
        with pytest.raises(UnsupportedCase, match="pip install"):
            EXTERNAL[name].call(**given)
        return
    turned = EXTERNAL[name].call(**given)["q_rotated"]
    wanted = [-1.0, 1.0] * 4 if "gptj" in name else [-1.0] * 4 + [1.0] * 4
    assert turned[0, 0].tolist() == wanted
