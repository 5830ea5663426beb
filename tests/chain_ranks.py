"""All-reduce and RMSNorm of two processes: unfused, fused, and fused with the rounding of ROCm/aiter #2586 left out.

Every rank builds the tensors of a case line, which are the same on all, and takes its own. So what a rank gave is
judged in one process, as a result of that case.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from lastbit.calibrate import load_premises
from lastbit.case import parse_case
from lastbit.identifying.kept_contracts import Observed, identified
from lastbit.identifying.trials import TrialSample
from lastbit.inputs import build
from lastbit.judging.observation import Observation
from lastbit.judging.problem import Problem
from lastbit.judging.verdict import judge
from lastbit.kernel import Kernel
from lastbit.references.all_reduce_rms_norm import all_reduce_rms_norm
from lastbit.reports.identification import Identification
from lastbit.result import Judgement
from lastbit.verify.check import Subject

CPU = torch.device("cpu")
CLAIM = "native_multiply"
LINES = (
    "all_reduce_rms_norm x=bf16[16,256] peer_1=bf16[16,256] weight=bf16[256] residual=bf16[16,256] eps=1e-06 seed=1",
    "all_reduce_rms_norm x=bf16[3,65]:rows peer_1=bf16[3,65] weight=bf16[65] eps=1e-06 seed=2",
)

Results = dict[str, Tensor]
"""Result of the op → tensor."""


def normalized(value: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """RMSNorm of fp32 values, rounded to bf16 before and after the weight."""
    root = torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    return ((value * root).to(dtype) * weight).to(dtype)


def finish(total: Tensor, weight: Tensor, residual: Tensor | None, eps: float, dtype: torch.dtype) -> Results:
    """Return what follows the sum over the ranks, which is of fp32 or holds numbers of `dtype`."""
    if residual is None:
        return {"output": normalized(total.float(), weight, eps, dtype)}
    residual_sum = (total.float() + residual.float()).to(dtype)
    return {"output": normalized(residual_sum.float(), weight, eps, dtype), "residual_sum": residual_sum}


def summed(own: Tensor) -> Tensor:
    """Add the tensors of all ranks in fp32, by rank, as a kernel does that reads those of its peers."""
    tensors = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, own)
    total = tensors[0].float()
    for tensor in tensors[1:]:
        total = total + tensor.float()
    return total


def unfused(own: Tensor, weight: Tensor, residual: Tensor | None, eps: float) -> Results:
    """`dist.all_reduce` in the dtype of the tensors, then the norm: three kernels."""
    reduced = own.clone()
    dist.all_reduce(reduced)
    return finish(reduced, weight, residual, eps, own.dtype)


def fused(own: Tensor, weight: Tensor, residual: Tensor | None, eps: float) -> Results:
    """As aiter's one-stage kernel is since #2586: the fp32 sum is rounded before the residual is added."""
    return finish(summed(own).to(own.dtype), weight, residual, eps, own.dtype)


def planted(own: Tensor, weight: Tensor, residual: Tensor | None, eps: float) -> Results:
    """As it was before: the residual is added to the fp32 sum."""
    return finish(summed(own), weight, residual, eps, own.dtype)


WAYS: dict[str, Callable[..., Results]] = {"unfused": unfused, "fused": fused, "planted": planted}


def run(number: int, ranks: int, backend: str, lines: Sequence[str], folder: str) -> None:
    """Run as the process of a rank: each way on each case, with the results in a file of the folder."""
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", number)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=number, world_size=ranks)
    found: dict[str, list[Results]] = {way: [] for way in WAYS}
    for line in lines:
        case = parse_case(line)
        tensors = {name: tensor.to(device) for name, tensor in build(case, CPU).tensors.items()}
        own = tensors["x" if number == 0 else f"peer_{number}"].contiguous()
        for way, function in WAYS.items():
            results = function(own, tensors["weight"], tensors.get("residual"), float(case.params["eps"]))
            found[way].append({name: tensor.cpu() for name, tensor in results.items()})
    dist.destroy_process_group()
    torch.save(found, Path(folder) / f"{number}.pt")


def results_of(ranks: int, backend: str, lines: Sequence[str], folder: Path) -> list[dict[str, list[Results]]]:
    """Return what every rank gave: way → the results of each case, in the memory of the host.

    Raises:
        ProcessRaisedException: a rank has failed.
    """
    start_method = "fork" if backend == "gloo" else "spawn"  # CUDA does not survive a fork; imports do
    mp.start_processes(run, (ranks, backend, lines, str(folder)), nprocs=ranks, start_method=start_method)
    return [torch.load(folder / f"{number}.pt") for number in range(ranks)]


def problem_of(line: str, device: torch.device) -> Problem:
    """Evaluate what a rank on a device has to compute: on the host, within the error bounds of the device."""
    case, op = parse_case(line), all_reduce_rms_norm
    return Problem(op, op.contract(CLAIM), build(case, CPU).tensors, dict(case.params), load_premises(device))


def judged(line: str, results: Results, device: torch.device) -> Judgement:
    """Judge the results of a rank by the unfused chain."""
    return judge(problem_of(line, device), results)


def contracts_of(lines: Sequence[str], every: Sequence[Results], device: torch.device) -> Identification:
    """Return the contracts that allow all results of a rank."""
    samples = []
    for line, results in zip(lines, every, strict=True):
        samples.append(TrialSample(parse_case(line), Observation.of(problem_of(line, device), results)))
    kernel = Kernel("a rank", all_reduce_rms_norm.name, CLAIM, lambda: None)
    subject = Subject(kernel, all_reduce_rms_norm, device)
    return identified(subject, Observed(tuple(samples), {}, (), ()), most=0)
