"""Kernels that are followed whatever they do: what is not seen is never called another formula."""

import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lastbit.errors import UnsupportedCase
from lastbit.kernel import kernel
from lastbit.numerics.residues import Residues
from lastbit.shadows import aten_rules
from lastbit.shadows.following import Followed, follow


def followed(function: Callable[..., Tensor], rows: int = 12, columns: int = 330, eps: float = 1e-6) -> Followed:
    """Follow a norm of rows that are not weighted."""

    @kernel("rms_norm", contract="fp32_multiply")
    def norm(x: Tensor, *, eps: float) -> Tensor:
        return function(x, eps)

    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    declared = norm.lastbit_kernels[0]
    return follow(declared, {"x": x}, {"eps": eps}, ["output"], [eps, float(rows), float(columns)])


def right(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def differing(function: Callable[..., Tensor], **sizes: int) -> tuple[Followed, int]:
    found, own = followed(function, **sizes), followed(right, **sizes)
    return found, int(found.results["output"].differs(own.results["output"]).sum())


def guessed_root(x: Tensor) -> Tensor:
    y = 1.0 / (0.5 + 0.5 * x)
    for _ in range(8):
        y = y * (1.5 - 0.5 * x * y * y)
    return y


def by_a_root_of_its_own(x: Tensor, eps: float) -> Tensor:
    return x * guessed_root(x.square().mean(-1, keepdim=True) + eps)


@pytest.mark.parametrize(("eps_times", "all_equal"), [(1, True), (10, False)])
def test_a_python_function_stands_for_the_primitive_that_is_declared(eps_times: float, all_equal: bool) -> None:
    @kernel("rms_norm", contract="fp32_multiply", primitives={"guessed_root": "rsqrt"})
    def norm(x: Tensor, *, eps: float) -> Tensor:
        return by_a_root_of_its_own(x, eps_times * eps)

    x, own = torch.randn(4, 330, generator=torch.Generator().manual_seed(4)), followed(right, rows=4)
    found = follow(norm.lastbit_kernels[0], {"x": x}, {"eps": 1e-6}, ["output"], [1e-6, 4.0, 330.0])
    assert not found.opaque
    equal, differs = (getattr(own.results["output"], how)(found.results["output"]) for how in ("equal", "differs"))
    assert bool(equal.all()) == all_equal and bool(differs.any()) != all_equal
    assert followed(by_a_root_of_its_own, rows=4).results["output"].differs(own.results["output"]).any()
    assert guessed_root.__name__ == "guessed_root" and not hasattr(guessed_root, "__wrapped__")


def by_numpy(x: Tensor, eps: float) -> Tensor:
    return torch.from_numpy(right(x, eps).numpy() * 1)


def by_a_list(x: Tensor, eps: float) -> Tensor:
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * torch.tensor(scale.flatten().tolist())[:, None]


def in_a_thread(x: Tensor, eps: float) -> Tensor:
    out = torch.zeros_like(x)
    thread = threading.Thread(target=lambda: out.copy_(right(x, eps)))
    thread.start()
    thread.join()
    return out


def in_memory_of_numpy(x: Tensor, eps: float) -> Tensor:
    out = x.clone()
    array = out.numpy()
    array[:] = right(x, eps).numpy()
    return out


@pytest.mark.parametrize("function", [by_numpy, by_a_list, in_a_thread, in_memory_of_numpy])
def test_values_that_come_from_elsewhere_are_open(function: Callable[..., Tensor]) -> None:
    found, count = differing(function)
    assert not count and (found.opaque or function is by_a_list)
    assert not found.results["output"].open.logical_not().any()


def normalized(x: Tensor, eps: float) -> Tensor:
    n = x.shape[-1]
    longer = torch.cat([x, torch.full_like(x[:, :1], (eps * n) ** 0.5)], -1)
    return F.normalize(longer, dim=-1, eps=0.0)[:, :n] * n**0.5


def of_squares(x: Tensor, eps: float) -> Tensor:
    n = x.shape[-1]
    return x * n / torch.sqrt(n * x.square().sum(-1, keepdim=True) + n * n * eps)


def by_largest(x: Tensor, eps: float) -> Tensor:
    largest = x.abs().amax(-1, keepdim=True)
    return right(x / largest, eps / (largest * largest))  # type: ignore[arg-type]


def by_newton(x: Tensor, eps: float) -> Tensor:
    variance = x.square().mean(-1, keepdim=True) + eps
    root = torch.rsqrt(variance)
    return x * (root * (1.5 - 0.5 * variance * root * root))


def by_lerp(x: Tensor, eps: float) -> Tensor:
    mean = torch.zeros_like(x[:, :1])
    for i in range(x.shape[-1]):
        mean = torch.lerp(mean, x[:, i : i + 1].square(), 1 / (i + 1))
    return x * torch.rsqrt(mean + eps)


def by_hypot(x: Tensor, eps: float) -> Tensor:
    length = torch.full_like(x[:, :1], (eps * x.shape[-1]) ** 0.5)
    for i in range(x.shape[-1]):
        length = torch.hypot(length, x[:, i : i + 1])
    return x / length * x.shape[-1] ** 0.5


def by_unbiased_variance(x: Tensor, eps: float) -> Tensor:
    n, (variance, mean) = x.shape[-1], torch.var_mean(x, -1, keepdim=True)
    return x * torch.rsqrt(variance * ((n - 1) / n) + mean * mean + eps)


FORMS = normalized, of_squares, by_largest, by_newton, by_lerp, by_hypot, by_unbiased_variance


@pytest.mark.parametrize("function", FORMS)
@pytest.mark.parametrize("columns", [96, 330, 512])
def test_other_roots_and_constants_are_no_other_formula(function: Callable[..., Tensor], columns: int) -> None:
    assert differing(function, columns=columns)[1] == 0
    assert differing(lambda x, eps: function(x, 2 * eps), columns=columns)[1] or function is by_hypot


def test_sums_of_fixed_point_numbers_are_open() -> None:
    def by_integers(x: Tensor, eps: float) -> Tensor:
        whole = torch.round(x.double().square() * 2.0**30).long().sum(-1, keepdim=True)
        return x * torch.rsqrt((whole.double() / 2.0**30 / x.shape[-1]).float() + eps)

    assert differing(by_integers)[1] == 0


def raises(x: Tensor, eps: float) -> Tensor:
    raise ZeroDivisionError


def test_a_kernel_that_raises_once_more_is_not_followed() -> None:
    found = followed(raises)
    assert not found.results and "the kernel, called once more, raised ZeroDivisionError" in found.opaque[0]


def test_a_rule_that_raises_ends_the_following(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> Residues:
        raise IndexError("of the rule")

    monkeypatch.setitem(aten_rules.RULES, "rsqrt", fails)
    found = followed(right)
    assert not found.results and found.opaque
    assert "of the rule" in found.opaque[0]


def test_vmap_is_followed() -> None:
    found, count = differing(lambda x, eps: torch.vmap(lambda row: right(row, eps))(x))
    assert not found.opaque and not count
    assert differing(lambda x, eps: torch.vmap(lambda row: right(row, 10 * eps))(x))[1]


def test_a_kernel_that_refuses_the_case_once_more_is_not_followed() -> None:
    def refuses(x: Tensor, eps: float) -> Tensor:
        raise UnsupportedCase("no rows")

    found = followed(refuses)
    assert not found.results and "raised UnsupportedCase: no rows" in found.opaque[0]


IN_A_PROCESS_OF_ITS_OWN = """
import sys
import torch
from lastbit.kernel import kernel
from lastbit.shadows.following import follow

@kernel("rms_norm", contract="fp32_multiply")
def norm(x, *, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

found = follow(norm.lastbit_kernels[0], {"x": torch.ones(2, 8)}, {"eps": 1e-6}, ["output"], [1e-6, 2.0, 8.0])
print(*found.results, *found.opaque, "torch._dynamo" in sys.modules)
"""


def test_following_imports_no_compiler() -> None:
    """Dynamo takes seconds to import, of the time that a case may take."""
    done = subprocess.run([sys.executable, "-c", IN_A_PROCESS_OF_ITS_OWN], capture_output=True, text=True)
    assert done.stdout.split() == ["output", "False"], done.stderr
