"""The orders of sums on a device: the kernels of this project, F.rms_norm, torch.sum and torch's products in bf16.

    python3 docs/measurements/orders.py [--device cuda] [--columns 1024,4096,8192] [--terms 512,4096,16384]

prints a paragraph per sum, as `lastbit order` does, and the seconds that each took.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
from torch import Tensor

from harness.config import Config
from harness.devices import plan_devices
from harness.errors import LastbitError
from harness.orders.form import form_of
from harness.orders.of_kernel import Probe, open_orders, order_of
from harness.orders.reveal import reveal
from harness.outcomes.order import Order
from reports.order import print_order
from reports.paper import line, make_console

KERNELS = {
    "triton[native_multiply+rounded_sum]": ("squares", ("bf16",)),
    "F.rms_norm": ("squares", ("bf16", "fp32")),
    "triton[single_rounding]": ("mean", ("bf16",)),
    "F.layer_norm": ("mean", ("bf16",)),
    "triton[gated_backward]": ("dw", ("bf16",)),
}
OUTPUTS = 4096
"""Columns of the weight of a product."""


def kernels(device: str, columns: tuple[int, ...], rows: int) -> Iterator[Order]:
    """The kernels of this project and of torch."""
    config = Config(folder="", device_plan=plan_devices(device), kernels=tuple(KERNELS))
    place = open_orders(config, lambda case: nullcontext(), lambda result: None)
    for kernel, (name, dtypes) in KERNELS.items():
        for dtype in dtypes:
            for terms in columns:
                try:
                    yield order_of(place, Probe(kernel, name, terms, rows, dtype))
                except LastbitError as error:
                    print(f"{kernel}, {terms} terms: {error}")


def functions(device: str, terms: tuple[int, ...], rows: int) -> Iterator[Order]:
    """torch.sum over rows and over columns in fp32, and a product with a weight of ones in bf16."""
    for number in terms:
        yield revealed("torch.sum(-1)", lambda x: x.sum(-1), number, rows, torch.float32, device)
    yield revealed("torch.sum(0)", lambda x: x.mT.contiguous().sum(0), terms[0], rows, torch.float32, device)
    for number in terms:
        weight = torch.ones(number, OUTPUTS, dtype=torch.bfloat16, device=device)
        yield revealed(f"x @ W, {OUTPUTS} outputs", weight.__rmatmul__, number, rows, torch.bfloat16, device)


def revealed(
    name: str, call: Callable[[Tensor], Tensor], terms: int, rows: int, dtype: torch.dtype, device: str
) -> Order:
    found = reveal(call, terms, rows=rows, dtype=dtype, device=device)
    return Order(
        kernel=name,
        op="torch",
        contract="",
        device=device,
        sum="sum",
        about="terms of a row",
        terms=terms,
        rows=rows,
        dtype=str(dtype).removeprefix("torch."),
        read=found.result,
        tree=found.tree,
        form=form_of(found.tree) if found.tree else None,
        reason=found.reason,
        triples=found.triples,
        asked=found.asked,
        calls=found.calls,
        checked=found.checked,
        contradicted=found.contradicted,
        notes=found.notes,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for option, default in (("--columns", "1024,4096,8192"), ("--terms", "512,4096,16384")):
        parser.add_argument(option, type=lambda text: tuple(map(int, text.split(","))), default=default)
    parser.add_argument("--rows", type=int, default=4096)
    options = parser.parse_args()
    console, began = make_console(), time.perf_counter()
    line(console, f"torch {torch.__version__}, {torch.cuda.get_device_name() if options.device != 'cpu' else 'cpu'}")
    for found in (
        kernels(options.device, options.columns, options.rows),
        functions(options.device, options.terms, options.rows),
    ):
        for order in found:
            print_order(order, console)
            line(console, f"  {time.perf_counter() - began:.1f} s")
            began = time.perf_counter()


if __name__ == "__main__":
    main()
