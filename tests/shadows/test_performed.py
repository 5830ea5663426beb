"""What a kernel performs tells whether it computes the same on two devices."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from lastbit.kernel import Kernel
from lastbit.shadows.performed import PerformedSteps, described, performed


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


# Launches of programs


@triton.jit
def halved(x):
    return x * HALF


@triton.jit
def program(x_ptr, out_ptr, n, BLOCK: tl.constexpr, scale=2.0):
    offsets = tl.arange(0, BLOCK)
    inside = offsets < n
    tl.store(out_ptr + offsets, halved(tl.load(x_ptr + offsets, inside)) * scale, inside)


@triton.jit
def asking(x_ptr, n):
    if n < 0:
        tl.store(x_ptr, tl.target_info.is_cuda())


HALF: tl.constexpr = tl.constexpr(0.5)


def launches(scale: float = 2.0, kept: int = 33) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        program[(1,)](x, out, kept, BLOCK=64, scale=scale)
        return out

    return run


@pytest.mark.parametrize(
    ("function", "is_last"),
    [
        (launches(), True),
        (norm, False),
        (lambda x: launches()(x) + 1, False),
        (lambda x: launches()(launches()(x)), False),
    ],
)
def test_whether_a_launch_is_followed_by_another_step(function: Callable[[Tensor], Tensor], *, is_last: bool) -> None:
    assert seen(function).end_with_the_only_launch is is_last


def test_a_launch_is_a_step_with_its_arguments_and_the_numbers_of_its_program() -> None:
    own = seen(launches())
    [step] = [step for step in own.steps if "program" in step]
    text, _, arguments = step.partition("(")
    first, second = text.split("; ")
    assert first.startswith(f"{__name__}.program:") and second.startswith(f"{__name__}.halved:")
    assert second.endswith(" with HALF=0.5") and " with " not in first
    assert arguments == "x_ptr=float32[4, 33], out_ptr=float32[4, 33], n=33, BLOCK=64, scale=2.0)"
    assert not own.doubts and not own.apart(seen(launches()))
    assert seen(launches(scale=3.0)).apart(own).endswith("of something else there")
    why = seen(launches(kept=32)).apart(own)
    assert why.endswith("of something else there") and f"{__name__}.program:" in why and "halved" not in why


def test_a_launch_that_is_left_out_is_told_in_both_directions() -> None:
    own, plain = seen(launches()), seen(torch.zeros_like)
    assert plain.apart(own).endswith(" in place of nothing there")
    assert own.apart(plain).startswith("the kernel performs nothing in place of ")


def test_what_follows_a_launch_reads_what_it_wrote() -> None:
    own = seen(lambda x: launches()(x) + 1)
    assert not own.doubts and own.steps[-1].startswith("aten.add.Tensor(")


def test_a_program_that_asks_for_the_device_is_in_doubt() -> None:
    def run(x: Tensor) -> Tensor:
        asking[(1,)](x, 3)
        return x + 1

    assert seen(run).doubts == ("asking asks for the device (is_cuda)",)


# Words and doubts


class Named:
    """Stands for a descriptor and a constexpr."""

    def __init__(self, **own: object) -> None:
        vars(self).update(own)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(2, 3, dtype=torch.bfloat16), "bfloat16[2, 3]"),
        (Named(base=torch.zeros(2)), "float32[2]"),
        (torch.device("cuda", 1), "device"),
        ({"dim": 1, "device": "cuda", "pin_memory": True, "x": torch.zeros(1)}, "(dim=1, x=float32[1])"),
        ([1, "two", (3.5, None)], "(1, two, (3.5, None))"),
        ((), "()"),
        (Named(value=7), "7"),
        (halved, "halved"),
        (True, "True"),
        (torch.float16, "torch.float16"),
    ],
)
def test_arguments_in_words_that_are_equal_on_every_device(value: object, words: str) -> None:
    assert described(value) == words


def test_doubts_are_told_where_the_steps_are_the_same() -> None:
    sure, own, other = (PerformedSteps(("a(1)",), doubts) for doubts in ((), ("x", "y"), ("z",)))
    assert (sure.apart(sure), own.apart(sure), sure.apart(other), own.apart(other)) == ("", "x", "z", "x")
    assert own.apart(PerformedSteps(("a(2)",), ())) == "the kernel performs a of something else there"


def test_doubts_are_told_once_each() -> None:
    twice = seen(lambda x: x.mean(-1, keepdim=True) + x.mean(-1, keepdim=True), torch.bfloat16)
    assert len(twice.doubts) == 1


def test_inputs_that_something_else_wrote_are_in_doubt_at_the_end() -> None:
    def spoils(x: Tensor) -> Tensor:
        out = x + 1
        x.numpy()[0] = 7
        return out

    assert seen(spoils).doubts == ("a tensor was written by something that is no operation of PyTorch or Triton",)


def test_numbers_of_integers_that_nothing_has_made_are_no_doubt() -> None:
    def outside(dtype: torch.dtype) -> PerformedSteps:
        made = torch.from_numpy(torch.ones(33).to(dtype).numpy().copy())
        return seen(lambda x: x * made)

    assert not outside(torch.int32).doubts
    assert outside(torch.float32).doubts


def test_views_and_moves_of_narrow_numbers_are_no_doubt() -> None:
    assert not seen(lambda x: x.t().reshape(-1)[3:].clone(), torch.bfloat16).doubts
    assert not seen(lambda x: x.clone().add_(1), torch.bfloat16).doubts  # in place, too
