"""What other ways to check a kernel see of planted faults of RMSNorm.

Run `python docs/measurements/other_checks.py [--device cuda] [--out FILE]`; it writes other_checks.md. With a GPU,
compute-sanitizer runs each faulty kernel too, a process for each fault and tool.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
KINDS = {
    "ROUNDING": "rounding: where, to what, how",
    "REDUCTION": "formula: eps, mean, columns left out",
    "MEMORY": "memory: strides, lanes beyond a row, writes",
    "STRIDES": "memory: strides, lanes beyond a row, writes",
    "WIDE": "edges: wide rows, no rows, NaN, overflow",
    "ROWS": "edges: wide rows, no rows, NaN, overflow",
    "VALUES": "edges: wide rows, no rows, NaN, overflow",
}
"""Name of a list of faults → what they are about."""
TOOLS = ("memcheck", "initcheck")
EPS = 1e-6
PARAMS = {
    "weight + 1 rounded": {"weight_offset": 1.0},
    "weight offset missing": {"weight_offset": 1.0},
    "variance_size ignored": {"variance_size": 64},
}
"""Faults of a parameter: every check is given it."""
USUAL = ((64, 1024),)
SEEDS = 8
"""One seed lets the correct kernel pass assert_close by luck in fp16, and a faulty copy fail by the same luck."""
OPINFO = ((1, 2), (1, 1), (8, 128), (4, 8, 32), (2, 16, 512), (4, 32, 1024))
HEAD = """# What other checks see

`{command}`, {date}: {versions}, {device}; {seconds:.0f} s.

The {count} planted faults of RMSNorm (`tests/faults`, those of FP8 left out), in bf16 and fp16, each check as its users
write it. A fault is seen if the check objects to the faulty copy in one of the two dtypes and not to the kernel without
the fault.

* **assert_close**: `torch.testing.assert_close` with its defaults against eager PyTorch of the same contract, on normal
  values of 64 × 1024, eight seeds.
* **OpInfo-style**: shapes of PyTorch's own samples for `nn.functional.rms_norm` (torch 2.13, `sample_inputs_rms_norm`
  and `sample_inputs_rms_norm_cutedsl`, normalized over one dimension), contiguous and not, values of `make_tensor`,
  against the formula in fp64 with the default tolerances of the dtype.
* **benchdnn-style**: oneDNN's way for layer normalization (`tests/benchdnn/lnorm/lnorm.cpp`): inputs of few bits whose
  statistics every order of summation gives exactly, compared with a threshold of 5e-7 times 2^(24 − significand bits):
  3.3 % in bf16, 0.41 % in fp16. On 64 × 1024.
* **compute-sanitizer**: memcheck and initcheck on the calls of the first two, without torch's caching allocator.
* **lastbit**: the cases that `lastbit verify` generates, results only.

| faults | {columns} |
|---|{rule}
"""


def chosen() -> list[tuple[str, Any]]:
    """Choose kinds and faults, leaving out what only FP8 results can show or what changes nothing."""
    from tests.faults import edges, rms_norm, rms_norm_memory

    modules = (rms_norm, rms_norm_memory, edges)
    named = [(kind, fault) for name, kind in KINDS.items() for m in modules for fault in vars(m).get(name, ())]
    distinct = {str(fault): (kind, fault) for kind, fault in named if fault.op == "rms_norm" and not fault.equivalent}
    return [(kind, fault) for kind, fault in distinct.values() if "scale" not in fault.name]


Tensors = dict[str, Any]


def usual(fault: Any, dtype: Any, device: Any) -> Iterator[Tensors]:
    import torch

    for seed, shape in product(range(SEEDS), USUAL):
        torch.manual_seed(seed)
        yield _tensors(fault, torch.randn, shape, dtype, device)


def opinfo(fault: Any, dtype: Any, device: Any) -> Iterator[Tensors]:
    import torch

    for shape in OPINFO:
        torch.manual_seed(0)
        made = _tensors(fault, partial(torch.testing.make_tensor, dtype=dtype, device="cpu"), shape, dtype, device)
        yield made
        yield {name: _apart(t) for name, t in made.items()}


def benchdnn(fault: Any, dtype: Any, device: Any) -> Iterator[Tensors]:
    import torch

    rows, columns = USUAL[0]
    bits = 3 if dtype == torch.bfloat16 else 5
    index = torch.arange(columns) + torch.arange(rows)[:, None] * 478
    x = torch.where(index % 2 == 0, 1.0, -1.0) * (index // 2 * 1637 % 2**bits) / 2**bits
    weight = 2.0 ** (torch.arange(columns) % 7) / 8
    made = {"x": x, "weight": weight} | ({"residual": x.flip(0)} if fault.options == "residual" else {})
    yield {name: t.to(device, dtype) for name, t in made.items()}


def _tensors(fault: Any, values: Callable[..., Any], shape: tuple[int, ...], dtype: Any, device: Any) -> Tensors:
    sizes = {"x": shape, "weight": shape[-1:]} | ({"residual": shape} if fault.options == "residual" else {})
    return {name: values(size).to(device, dtype) for name, size in sizes.items()}


def _apart(tensor: Any) -> Any:
    """Put a gap after each value."""
    import torch

    return torch.stack([tensor, torch.zeros_like(tensor)], -1)[..., 0]


def outputs(kernel: Any, tensors: Tensors, params: dict[str, Any]) -> Tensors:
    """Return results by name; the kernel gets copies at the same strides."""
    given = {name: _apart(t) if not t.is_contiguous() else t.clone() for name, t in tensors.items()}
    returned = kernel.call(**given, **params)
    return returned if isinstance(returned, dict) else {"output": returned}


def formula(tensors: Tensors, params: dict[str, Any]) -> Tensors:
    """Compute RMSNorm in fp64, and the sum with the residual."""
    x, weight = tensors["x"].double(), tensors["weight"].double() + params.get("weight_offset", 0.0)
    total = x + tensors["residual"].double() if "residual" in tensors else x
    mean = total[..., : params.get("variance_size")].square().mean(-1, keepdim=True)
    found = {"output": total * (mean + params["eps"]).rsqrt() * weight}
    return found | ({"residual_sum": total} if "residual" in tensors else {})


def close(actual: Tensors, wanted: Tensors) -> bool:
    import torch

    try:
        for name, tensor in wanted.items():
            torch.testing.assert_close(actual[name].to(actual["output"].dtype), tensor.to(actual["output"].dtype))
    except AssertionError:
        return False
    return True


def within_threshold(actual: Tensors, wanted: Tensors) -> bool:
    import torch

    dtype = actual["output"].dtype
    digits = 8 if dtype == torch.bfloat16 else 11
    limit = 5e-7 * 2.0 ** (24 - digits)
    for name, tensor in wanted.items():
        difference, size = (actual[name].double() - tensor).abs(), tensor.abs()
        error = torch.where(size > 1e-5, difference / size, difference)
        if not bool((error <= limit).all()):
            return False
    return True


def objects(check: str, kernel: Any, eager: Any, fault: Any, dtype: str, device: Any) -> bool:
    """Return whether a check objects to a kernel."""
    from lastbit.dtypes import DTYPES as TORCH
    from lastbit.inputs import guarded_allocations

    make = {"assert_close": usual, "OpInfo-style": opinfo, "benchdnn-style": benchdnn}[check]
    for tensors in make(fault, TORCH[dtype], device):
        params = _params(fault, tensors)
        try:
            with guarded_allocations(0):
                actual = outputs(kernel, tensors, params)
        except Exception:
            return True
        wanted = outputs(eager, tensors, params) if check == "assert_close" else formula(tensors, params)
        if not (within_threshold if check == "benchdnn-style" else close)(actual, wanted):
            return True
    return False


def _params(fault: Any, tensors: Tensors) -> dict[str, Any]:
    columns = tensors["x"].shape[-1]
    own = PARAMS.get(fault.name, {})
    return {
        "eps": EPS,
        **{name: min(value, columns) if name == "variance_size" else value for name, value in own.items()},
    }


CHECKS = ("assert_close", "OpInfo-style", "benchdnn-style")


def seen(number: int, device_name: str) -> dict[str, tuple[bool, bool]]:
    """Check → whether it sees the fault, and whether it objects to the kernel without it."""
    import torch

    from tests.faults import hunt
    from tests.faults.plant import planted

    device = torch.device(device_name)
    _, fault = chosen()[number]
    clean, eager = hunt.clean(fault), hunt.clean(fault, "eager")
    dtypes = [d for d in fault.dtypes if d != "fp32"]
    found = {}
    with planted(fault) as kernel:
        for check in CHECKS:
            false = {d: objects(check, clean, eager, fault, d, device) for d in dtypes}
            true = {d: objects(check, kernel, eager, fault, d, device) for d in dtypes}
            found[check] = (any(true[d] and not false[d] for d in dtypes), any(false.values()))
        cases = [case for seed in (0, 1) for case in hunt.cases_for(fault, dtypes[0], 60, seed)]
        hidden = hunt.without_stages(kernel)
        found["lastbit"] = (hunt.hunt(hidden, cases, device) is not None, False)
    return found


def sanitized(number: int) -> bool:
    """Return whether memcheck or initcheck reports something in a process that calls the faulty kernel and no other."""
    from lastbit.sanitize.tool import Sanitizer, installed

    sanitizer: Sanitizer = installed(os.environ)
    for tool in TOOLS:
        with TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            command = [*sanitizer.launcher(tool, log), sys.executable, __file__, "--call", str(number)]
            environ = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "TRITON_INTERPRET": "0"}
            subprocess.run(command, env=environ, capture_output=True, check=False, timeout=500)
            text = log.read_text() if log.exists() else ""
            if any(word in text for word in ("Invalid __", "Uninitialized __", "out of bounds")):
                return True
    return False


def call(number: int) -> None:
    """Call the faulty kernel on what the first two checks give it."""
    import torch

    from tests.faults.plant import planted

    device = torch.device("cuda")
    _, fault = chosen()[number]
    with planted(fault) as kernel:
        for make in (usual, opinfo):
            for tensors in make(fault, torch.bfloat16, device):
                outputs(kernel, tensors, _params(fault, tensors))
                torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--limit", type=int)
    parser.add_argument("--call", type=int)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    options = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "1" if options.device == "cpu" and options.call is None else "0"
    sys.path[:0] = [str(ROOT / "harness" / "checkout"), str(ROOT)]
    if options.call is not None:
        call(options.call)
        return
    if options.device == "cpu":
        from lastbit.interpret import install

        install()
    began = time.perf_counter()
    faults = chosen()[: options.limit]
    with ProcessPoolExecutor(options.workers, get_context("spawn"), _prepare, (options.device,)) as pool:
        found = list(pool.map(seen, range(len(faults)), [options.device] * len(faults)))
    if options.device != "cpu":
        with ThreadPoolExecutor(options.workers) as threads:
            for result, report in zip(found, threads.map(sanitized, range(len(faults))), strict=True):
                result["compute-sanitizer"] = (report, False)
    options.out.write_text(_page(faults, found, options, time.perf_counter() - began))
    print(options.out.read_text())


def _prepare(device: str) -> None:
    os.environ["TRITON_INTERPRET"] = "1" if device == "cpu" else "0"
    sys.path[:0] = [str(ROOT / "harness" / "checkout"), str(ROOT)]
    import torch

    torch.set_num_threads(1)
    if device == "cpu":
        from lastbit.interpret import install

        install()


def _page(faults: list[Any], found: list[dict[str, tuple[bool, bool]]], options: Any, seconds: float) -> str:
    import torch
    import triton

    checks = [c for c in (*CHECKS, "compute-sanitizer", "lastbit") if c in found[0]]
    device = "CPU" if options.device == "cpu" else torch.cuda.get_device_name()
    text = HEAD.format(
        command="python docs/measurements/other_checks.py"
        + (f" --device {options.device}" * (options.device != "cpu")),
        date=time.strftime("%Y-%m-%d"),
        versions=f"torch {torch.__version__}, triton {triton.__version__}, Python {platform.python_version()}",
        device=device,
        seconds=seconds,
        count=len(faults),
        columns=" | ".join(checks),
        rule="---|" * len(checks),
    ).rstrip("\n")
    kinds = dict.fromkeys(kind for kind, _ in faults)
    for kind in kinds:
        own = [f for (k, _), f in zip(faults, found, strict=True) if k == kind]
        text += f"\n| {kind} | " + " | ".join(f"{sum(f[c][0] for f in own)} of {len(own)}" for c in checks) + " |"
    alarms = [sum(f[c][1] for f in found) for c in checks]
    text += "\n| objects to a kernel without a fault | " + " | ".join(map(str, alarms)) + " |"
    text += f"\n\n| fault: a copy of the kernel that … | {' | '.join(checks)} |\n|---|{'---|' * len(checks)}"
    for (_, fault), result in zip(faults, found, strict=True):
        text += f"\n| {fault.description} | {' | '.join(_cell(*result[c]) for c in checks)} |"
    return text + "\n"


def _cell(sees: bool, objects_to_both: bool) -> str:
    if sees:
        return "seen"
    return "objects to both" if objects_to_both else "–"


if __name__ == "__main__":
    main()
