"""The store of premises: measured ones, and those that cover a device before anything has been measured on it.

There is one JSON file per device, Triton version and mode. Triton is not imported here: whoever reads premises may not
know yet whether it is to compile or to interpret.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from lastbit.errors import LastbitError
from lastbit.files import replace_file
from lastbit.numerics import BY_CAPABILITY, DOCUMENTED, LOOSEST, Bound, Premises


def documented_premises(device: torch.device) -> Premises:
    """Return the documented premises of `device`; if none covers it, the loosest ones that are here."""
    if device.type == "cpu":
        return Premises(device="documented primitives, dots in any order, rounded", tensor_cores=None)
    if device.type != "cuda" or torch.version.hip:
        lacking = f"premise is for {'AMD' if device.type == 'cuda' else device.type} devices"
    else:
        capability = torch.cuda.get_device_capability(device)
        if cores := BY_CAPABILITY.get(capability):
            return Premises(device=f"documented primitives, {cores}", tensor_cores=cores)
        lacking = f"model of compute capability {'.'.join(map(str, capability))} is here"
    dots = f"not covered: no {lacking}, these bounds are those of a V100"
    return Premises(device=f"documented primitives, {dots}", tensor_cores=LOOSEST)


SUBNORMAL_PRODUCTS = "an fp32 product may be subnormal"


@dataclass(frozen=True)
class MeasuredPremise:
    """The measured figure of one premise.

    Attributes:
        premise: what is claimed.
        primitive: the primitive whose bound it is about, or an empty string.
        worst: largest relative error, or the share of elements that break the claim.
        limit: the documented bound on `worst`.
        exhaustive: every significand was tried, so that `worst` is a bound itself.
    """

    premise: str
    primitive: str
    worst: float
    limit: float
    exhaustive: bool = False

    @property
    def holds(self) -> bool:
        return self.worst <= self.limit


def device_name(device: torch.device) -> str:
    """Name the device as its figures are filed: its model, and how Triton runs kernels there."""
    if device.type == "cpu":
        return f"{platform.machine()} CPU, triton {_triton()} interpreted"
    return f"{torch.get_device_module(device).get_device_name(device)}, triton {_triton()}"


def _triton() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "of an unknown version"


def folder() -> Path:
    """Return the user's folder for measured premises."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "lastbit" / "premises"


def save(device: torch.device, measurements: Iterable[MeasuredPremise]) -> Path:
    """Keep the measurements of `device` and return the file."""
    path = _path(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"device": device_name(device), "measurements": [asdict(m) for m in measurements]}
    replace_file(path, lambda beside: beside.write_text(json.dumps(content, indent=1)))
    return path


def load_premises(device: torch.device) -> Premises:
    """Load the premises of `device`: measured bounds where it has been calibrated, documented ones otherwise.

    A measured figure replaces the documented bound if every significand was tried, or if it is larger. How tensor cores
    add is not measured: it is looked up by the kind of GPU.
    """
    documented = documented_premises(device)
    path = _path(device)
    if not path.is_file():
        return documented
    try:
        content = json.loads(path.read_text())
        found = [MeasuredPremise(**m) for m in content["measurements"]]
    except (ValueError, KeyError, TypeError) as error:
        raise LastbitError(f"{path} cannot be read ({error}); remove it or run `lastbit calibrate` again") from error
    limits = {primitive: bound.relative for primitive, bound in DOCUMENTED.items()}
    limits["rsqrt"] = Premises().inverse_root  # measured in all the ways to compute it
    bounds: dict[str, Bound] = {}
    for primitive, limit in limits.items():
        own = [m for m in found if m.primitive == primitive]
        worst = max((m.worst for m in own), default=0.0)
        if own and (all(m.exhaustive for m in own) or worst > limit):
            bounds[primitive] = Bound(worst, f"measured on {content['device']}")
    primitives = f"{'primitives calibrated' if bounds else 'documented primitives, checked'} on {content['device']}"
    name = documented.device.replace("documented primitives", primitives, 1)
    flushes = any(m.premise == SUBNORMAL_PRODUCTS and not m.holds for m in found)
    return replace(documented, device=name, bounds=bounds, flushes_subnormals=flushes)


def _path(device: torch.device) -> Path:
    safe = "".join(c if c.isalnum() or c in ".-" else "_" for c in device_name(device))
    return folder() / f"{safe}.json"
