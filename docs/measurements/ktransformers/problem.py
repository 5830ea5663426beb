"""Problems for the classes of kt-kernel, and what they must give, in fp64."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "harness" / "checkout"), str(ROOT), str(ROOT / "kernels" / "external")]

from kt_experts import ADAPTERS, GROUP_SIZE, Experts, KtGradients  # noqa: E402

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
WIDER = {"AMXInt4_SFT_MOE": 256, "AMXInt4_KGroup_SFT_MOE": 256}
"""What H and I must be multiples of, if not of 32."""


@dataclass(frozen=True)
class KtProblem:
    """A layer and a batch, as kt-kernel takes them, and its base weights as numbers.

    Attributes:
        base: base weights and their scales, in the layout of the class.
        dense: projection → its base weights, fp64.
        ids: [T, k], int64; ids outside [0, E) are skipped.
    """

    name: str
    base: Mapping[str, Tensor]
    dense: Mapping[str, Tensor]
    adapters: Mapping[str, Tensor]
    x: Tensor
    ids: Tensor
    weights: Tensor
    grad_output: Tensor
    scaling: float = 2.0

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return what the op `moe_lora` takes."""
        return {"x": self.x, "expert_ids": self.ids, "routing_weights": self.weights, **self.base, **self.adapters}

    def first(self, tokens: int) -> KtProblem:
        """Return the layer with fewer tokens."""
        parts = {key: getattr(self, key)[:tokens].contiguous() for key in ("x", "ids", "weights", "grad_output")}
        return replace(self, **parts)

    def layer(self, **options: int) -> Experts:
        """Build the layer in kt-kernel."""
        sizes = {"slots": self.ids.shape[1], "tokens": len(self.x), "scaling": self.scaling}
        return Experts(self.name, self.base, self.adapters, **{**sizes, **options})


def problem(
    name: str, *, tokens: int = 16, slots: int = 2, experts: int = 4, hidden: int = 64, width: int = 64, rank: int = 8,
    exact: bool = False, ids: list[list[int]] | None = None, seed: int = 0,
) -> KtProblem:  # fmt: skip
    """Draw numbers, the adapters weighing as much as the base; with `exact`, multiples of 1/8 with exact sums."""
    hidden, width = max(hidden, WIDER.get(name, 0)), max(width, WIDER.get(name, 0))
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, size: float = 0.2) -> Tensor:
        if exact:
            return (torch.randint(-4, 5, shape, generator=generator) / 8).bfloat16()
        return (torch.randn(*shape, generator=generator) * size).bfloat16()

    shapes = {"gate": (experts, width, hidden), "up": (experts, width, hidden), "down": (experts, hidden, width)}
    base, dense, adapters = {}, {}, {}
    for key, (_, outputs, inputs) in shapes.items():
        native, dense[key] = matrix(name, shapes[key], generator, exact=exact)
        base |= {f"{key}_{part}": tensor.contiguous() for part, tensor in native.items()}
        adapters[f"{key}_lora_a"] = draw(experts, rank, inputs)
        adapters[f"{key}_lora_b"] = draw(experts, outputs, rank)
    x, grad_output = draw(tokens, hidden), draw(tokens, hidden)
    drawn = torch.randint(0, experts, (tokens, slots), generator=generator)
    weights = torch.randint(1, 9, drawn.shape, generator=generator) / 8
    if not exact:
        weights = torch.rand(drawn.shape, generator=generator)
    chosen = drawn if ids is None else torch.tensor(ids)
    adapters = {key: adapters[key] for key in ADAPTERS}
    return KtProblem(name, base, dense, adapters, x, chosen, weights[: len(chosen)], grad_output)


def matrix(
    name: str, shape: tuple[int, ...], generator: torch.Generator, *, exact: bool
) -> tuple[dict[str, Tensor], Tensor]:
    """Draw base weights of a projection, and return them in the layout of the class and as numbers."""
    codes = torch.randint(0, 16, shape, generator=generator)
    if exact:
        codes = torch.where(torch.rand(shape, generator=generator) < 0.4, codes, 0)
    packed = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    groups = (*shape[:-1], shape[-1] // GROUP_SIZE)
    if name == "MXFP4_SFT_MOE":
        exponents = torch.full(groups, -3) if exact else torch.randint(-7, -4, groups, generator=generator)
        scale = 2.0 ** exponents.double()
        values = E2M1[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
        return {"proj": packed, "scale": scale.bfloat16()}, values * scale.repeat_interleave(GROUP_SIZE, -1)
    if name == "AMXInt4_KGroup_SFT_MOE":
        scale = (torch.rand(groups, generator=generator) * 0.02 + 0.01).bfloat16()
        values = (codes - 8) * scale.double().repeat_interleave(GROUP_SIZE, -1)
        return {"proj": packed, "scale": scale}, values.bfloat16().double()
    numbers = codes / 16 if exact else torch.randn(shape, generator=generator) * 0.08
    return {"proj": numbers.bfloat16()}, numbers.bfloat16().double()


def expected(p: KtProblem) -> dict[str, Tensor]:
    """Compute `moe_lora` and `moe_lora_backward` in fp64, the gradients by automatic differentiation."""
    variables = {"x": p.x, "weights": p.weights, **p.adapters}
    v = {key: t.double().requires_grad_() for key, t in variables.items()}
    inside = (p.ids >= 0) & (p.ids < len(p.adapters["gate_lora_a"]))
    ids = torch.where(inside, p.ids, 0)

    def project(rows: Tensor, key: str) -> Tensor:
        a, b = (v[f"{key}_lora_{part}"][ids] for part in "ab")
        middle = torch.einsum("tkrn,tkn->tkr", a, rows)
        base = torch.einsum("tkmn,tkn->tkm", p.dense[key][ids], rows)
        return base + p.scaling * torch.einsum("tkmr,tkr->tkm", b, middle)

    rows = v["x"][:, None].expand(-1, p.ids.shape[1], -1)
    gate, up = project(rows, "gate"), project(rows, "up")
    intermediate = gate * torch.sigmoid(gate) * up
    weighted = torch.where(inside, v["weights"], 0.0)[..., None] * project(intermediate, "down")
    output = torch.where(inside[..., None], weighted, 0.0).sum(1)
    gradients = torch.autograd.grad(output, list(v.values()), p.grad_output.double())
    names = ["grad_input", "grad_routing_weights", *(f"grad_{key}" for key in p.adapters)]
    return {"output": output.detach(), **dict(zip(names, gradients, strict=True))}


def named(output: Tensor | None, gradients: KtGradients) -> dict[str, Tensor]:
    """Name what a forward and its backward gave as the ops name their results."""
    results = {} if output is None else {"output": output}
    results |= {"grad_input": gradients.grad_input, "grad_routing_weights": gradients.grad_routing_weights}
    return results | {f"grad_{key}": tensor for key, tensor in gradients.adapters.items()}


def both(
    layer: Experts, p: KtProblem, written: Mapping[str, Tensor] | None = None, *, accumulate: bool = False
) -> dict[str, Tensor]:
    """Run forward and backward."""
    output = layer.forward(p.x, p.ids, p.weights, save=True)
    return named(output, layer.backward(p.grad_output, written, accumulate=accumulate))


def relative(actual: Tensor, exact: Tensor) -> float:
    """Compute ‖actual - exact‖ / ‖exact‖; the norm of actual where exact is zero."""
    size = exact.double().norm()
    return float((actual.double() - exact.double()).norm() / (size if size > 0 else 1.0))


def errors(actual: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> dict[str, float]:
    """Compute the relative error of each result that is in both."""
    return {key: relative(actual[key], exact[key]) for key in exact if key in actual}
