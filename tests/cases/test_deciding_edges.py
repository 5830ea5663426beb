"""Edges tell apart what the few drawn cases of a short run may not: contracts of an op, in each format that it draws.

A right kernel is INCONCLUSIVE where no case of a run does. Which cases are drawn is chance; edges are always run.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from lastbit.config import Config
from lastbit.interpret import install
from lastbit.numerics import BY_CAPABILITY, Premises, TensorCores
from lastbit.verify.check import Subject, verify_case
from lastbit.verify.project import open_project

install()

PROJECT = open_project(Config(folder=""))
KERNELS = {kernel.name: kernel for kernel in PROJECT.kernels()}
CPU: TensorCores | None = None
H200 = BY_CAPABILITY[9, 0]
TILES = ("tiles_16", "tiles_32", "tiles_64", "tiles_128")


@pytest.mark.parametrize(
    ("name", "dtypes", "alternatives", "cores"),
    [
        ("eager[attention+flash]", "bf16", [f"flash+{tile}" for tile in TILES], H200),
        ("eager[attention+flash]", "fp16", [f"flash+{tile}" for tile in TILES], H200),
        ("triton[attention+flash]", "bf16", ["flash", *(f"flash+{tile}" for tile in TILES[1:])], H200),
        ("triton[attention+flash]", "bf16", ["flash+tiles_16+backwards"], H200),
        ("eager[fp32_products]", "fp16/fp32", ["rounded_products"], CPU),
        ("eager[rounded_products]", "fp16/fp32", ["fp32_products", "rounded_products+rounded_table"], CPU),
        ("eager[quotient]", "fp16", ["quotient+reciprocal_scale"], CPU),
        ("triton[inverted+half_away]", "fp16", ["inverted+reciprocal_scale+half_away"], CPU),
        ("triton[cross_entropy+rounded_losses]", "fp16", ["rounded_log_probs+rounded_losses"], CPU),
        ("eager[cross_entropy_backward]", "fp16/fp32", ["from_lse+rounded_gradient"], CPU),
        ("eager[rms_norm_quantize+per_group]", "bf16", ["per_token+inverted"], CPU),
        ("eager[all_reduce_rms_norm]", "fp16", ["fp32_sum+fp32_multiply+rounded_sum"], CPU),
        ("eager[moe_lora+eager]", "fp16/fp32/bf16", ["eager+fp32_weighted"], CPU),
    ],
)
def test_some_edge_tells_contracts_apart(
    name: str, dtypes: str, alternatives: list[str], cores: TensorCores | None
) -> None:
    kernel = KERNELS[name]
    subject = Subject(kernel, PROJECT.op(kernel.op), torch.device("cpu"), Premises(tensor_cores=cores))
    [edges] = [g for g in PROJECT.groups(kernel.op, kernel.accepts, small=True) if g.name == "edges"]
    seen = Counter[str]()
    for case in edges.examples:
        if case.dtypes == dtypes and not all(seen[one] for one in alternatives):
            seen.update(verify_case(subject, case, repeat=False).ruled_out)
    assert not [one for one in alternatives if not seen[one]], seen
