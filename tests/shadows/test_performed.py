"""What a kernel performs tells whether it computes the same on two devices."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lastbit.kernel import Kernel
from lastbit.shadows.performed import PerformedSteps, performed


def seen(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32, device: str = "cuda"
) -> PerformedSteps:
    x = torch.randn(4, 33, generator=torch.Generator().manual_seed(0)).to(dtype)
    return performed(Kernel("mine", "rms_norm", "", lambda x: function(x)), {"x": x}, {}, device)


def norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def by_numpy(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out.numpy()[:] = x.numpy()
    return out * 2


def test_the_same_text_is_the_same() -> None:
    own = seen(norm)
    assert len(own.steps) == 5 and not own.apart(seen(norm))


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (lambda x: F.rms_norm(x, x.shape[-1:]), "the kernel performs aten"),
        (lambda x: norm(x) + 1, "the kernel performs aten.add.Tensor in place of nothing there"),
        (lambda x: norm(x.double()).float(), "the kernel performs aten._to_copy.default in place of aten."),
        (lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5), "aten.add.Tensor of something else"),
    ],
)
def test_another_branch_is_told(other: Callable[[Tensor], Tensor], why: str) -> None:
    assert why in seen(norm).apart(seen(other))


def test_numbers_that_python_writes_down_are_compared() -> None:
    half, quarter = (seen(lambda x, n=n: x * torch.tensor(n)) for n in (0.5, 0.25))  # type: ignore[misc]
    assert "lift_fresh" in half.apart(quarter) and not half.apart(half)


def test_what_something_else_has_written_is_in_doubt() -> None:
    """An extension, say: what it computes on a GPU is not what was followed on the CPU."""
    own = seen(by_numpy)
    assert own.apart(own) == "a tensor was written by something that is no operation of PyTorch or Triton"


def test_operations_that_round_in_between_are_in_doubt() -> None:
    """The mean of numbers of bf16 is rounded before it is divided on the CPU; in fp32 nothing is rounded."""

    def mean(x: Tensor) -> Tensor:
        return (x * x).mean(-1)

    assert seen(mean, torch.bfloat16).doubts == ("aten.mean.dim may round elsewhere on another device",)
    assert not seen(mean).doubts


def test_a_softmax_of_16_bits_is_rounded_once_by_cuda_alone() -> None:
    logarithms = [seen(lambda x: F.log_softmax(x, -1), torch.bfloat16, device).doubts for device in ("cuda", "xpu")]
    assert logarithms == [(), ("aten._log_softmax.default may round elsewhere on another device",)]
