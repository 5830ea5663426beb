"""The orders of sums on a device: the kernels of this project, F.rms_norm, torch.sum and torch's products in bf16.

    python3 docs/measurements/orders.py [--device cuda] [--columns 1024,4096,8192] [--terms 512,4096,16384]

prints a paragraph per sum, as `lastbit order` does, and the seconds that each took.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import product

import torch
from rich.console import Console
from torch import Tensor

from lastbit.config import Config
from lastbit.devices import plan_devices
from lastbit.errors import LastbitError
from lastbit.orders.form import form_of
from lastbit.orders.of_kernel import Probe, open_orders, order_of
from lastbit.orders.reveal import reveal
from lastbit.reports.order import Order, print_order
from lastbit.reports.paper import line, make_console
from lastbit.verify.worker import prepare

KERNELS = (
    ("triton[native_multiply+rounded_sum]", "squares", "bf16"),
    ("F.rms_norm", "squares", "bf16"),
    ("triton[single_rounding]", "mean", "bf16"),
    ("F.rms_norm", "squares", "fp32"),
    ("F.layer_norm", "mean", "bf16"),
    ("triton[gated_backward]", "dw", "bf16"),
)
OUTPUTS = 4096
"""Columns of the weight of a product."""
FEW_ROWS = 16
"""Of a product that fills few multiprocessors, so that a library may cut its terms into parts."""


def kernels(device: str, columns: tuple[int, ...], rows: int) -> Iterator[Order]:
    """Yield the kernels of this project and of torch."""
    names = tuple(dict.fromkeys(name for name, _, _ in KERNELS))
    config = Config(folder="", device_plan=plan_devices(device), kernels=names)
    place = open_orders(config, lambda case: nullcontext(), lambda result: None)
    for (kernel, name, dtype), terms in product(KERNELS, columns):
        try:
            yield order_of(place, Probe(kernel, name, terms, rows, dtype))
        except LastbitError as error:
            print(f"{kernel}, {terms} terms: {error}")


def functions(device: str, terms: tuple[int, ...], rows: int) -> Iterator[Order]:
    """Yield products with a weight of ones in bf16, of many rows and of few, and torch.sum over either axis in fp32."""
    for number, count in [*product(terms, (rows,)), (terms[1], FEW_ROWS)]:
        weight = torch.ones(number, OUTPUTS, dtype=torch.bfloat16, device=device)
        yield revealed(f"x @ W, {OUTPUTS} outputs", weight.__rmatmul__, number, count, torch.bfloat16, device)
    for number in terms:
        yield revealed("torch.sum(-1)", lambda x: x.sum(-1), number, rows, torch.float32, device)
    yield revealed("torch.sum(0)", lambda x: x.mT.contiguous().sum(0), terms[0], rows, torch.float32, device)


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
    prepare(torch.device(options.device))
    console = make_console()
    line(console, f"torch {torch.__version__}, {torch.cuda.get_device_name() if options.device != 'cpu' else 'cpu'}")
    run(functions(options.device, options.terms, options.rows), console)
    run(kernels(options.device, options.columns, options.rows), console)


def run(found: Iterator[Order], console: Console) -> None:
    """Print each order as it is found, with the seconds that it took."""
    began = time.perf_counter()
    for order in found:
        print_order(order, console)
        line(console, f"  {time.perf_counter() - began:.1f} s")
        sys.stdout.flush()
        began = time.perf_counter()


if __name__ == "__main__":
    main()
