"""Kernels in plain torch whose bits depend on nothing but their rows, and what spoils that."""

import torch

from lastbit.case import parse_case
from lastbit.config import Config
from lastbit.errors import UnsupportedCase
from lastbit.kernel import Kernel
from lastbit.verify.check import Subject
from lastbit.verify.project import open_project
from lastbit.verify.property_checks import properties_on

CPU = torch.device("cpu")
PROJECT = open_project(Config(folder=""))
CONTRACTS = {"rms_norm": "fp32_multiply"}


def subject_of(function, line, invariant, **declared):
    """Make a function a kernel on the CPU, and a line a case."""
    case = parse_case(line)
    kernel = Kernel("planted", case.op, CONTRACTS.get(case.op, ""), function, invariant=invariant, **declared)
    return Subject(kernel, PROJECT.op(case.op), CPU), case


def found_on(function, line, name, *, thorough=True, invariant=None, **declared):
    """Check the property `name`, which the kernel declares unless `invariant` says otherwise."""
    subject, case = subject_of(function, line, (name,) if invariant is None else invariant, **declared)
    [found] = properties_on(subject, case, [name], thorough=thorough)
    return found


def found_in(function, rows, name="rows", *, width=16, layout="", **options):
    """Check the property on a case of that many rows, or of leading dimensions and width."""
    shape = rows if isinstance(rows, str) else f"{rows},{width}"
    line = f"rms_norm x=fp32[{shape}]{layout} weight=fp32[{width}] eps=1e-06 seed=3"
    return found_on(function, line, name, **options)


def rms_norm(x, weight, *, eps):
    """Add a row column by column: nothing depends on how many rows there are."""
    squares = x.square()
    total = torch.zeros(x.shape[:-1])
    for column in range(x.shape[-1]):
        total = total + squares[..., column]
    return x * torch.rsqrt(total / x.shape[-1] + eps)[..., None] * weight


def ahead(output):
    """Return the next numbers."""
    return torch.nextafter(output, torch.tensor(torch.inf))


def nudged(changes):
    """Make a kernel that gives the next number in the first element of the rows that `changes` picks, by x."""

    def kernel(x, weight, *, eps):
        if x.ndim != 2:
            raise UnsupportedCase("two dimensions")
        output = rms_norm(x, weight, eps=eps)
        output[:, 0] = torch.where(changes(x), ahead(output[:, 0]), output[:, 0])
        return output

    return kernel


def some(x, one_in):
    """Rows that their values single out, wherever they are."""
    return x[:, 0].view(torch.int32) % one_in == 0


GRADIENTS = (
    "layer_norm_gated_backward x=fp32[{rows},16] dy=fp32[{rows},16] weight=fp32[16] rstd=fp32[{rows},1]:near_one seed=3"
)


def gradients(x, dy, weight, rstd, **params):
    """Of a row alone, and a sum over rows, one row after the other."""
    normalized, d = x * rstd, dy * weight
    products, total, dw = normalized * d, torch.zeros(x.shape[:-1]), torch.zeros(x.shape[-1])
    for column in range(x.shape[-1]):
        total = total + products[..., column]
    for row in (dy * normalized).reshape(-1, x.shape[-1]):
        dw = dw + row
    return {"dx": (d - normalized * (total / x.shape[-1])[..., None]) * rstd, "dw": dw}
