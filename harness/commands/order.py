"""`lastbit order`."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lastbit.command_line import read_words
from lastbit.commands.options import config_of
from lastbit.commands.running import worst_code
from lastbit.errors import UsageError
from lastbit.orders.form import form_of
from lastbit.orders.of_kernel import Probe, named, open_orders, order_of, sums_of
from lastbit.reports.order import Order, difference, from_json, print_differences, print_order, to_json
from lastbit.reports.paper import STANDARD_OUTPUT, line, make_console, write_text
from lastbit.reports.summary import grouped
from lastbit.verify.processes import environment_of
from lastbit.verify.worker import Worker

_COLUMNS, _COLUMNS_ON_CPU = (4096,), (128,)
_ROWS, _ROWS_ON_CPU = 4096, 256


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    if options.compare is not None:
        return _compared(options.compare)
    if not options.words:
        raise UsageError("no kernel is named; write lastbit order KERNEL, or --compare with two files")
    console, found = make_console(), list[Order]()
    asked = read_words(options.words).without_case("order")
    config = config_of(options, kernels=tuple(dict.fromkeys(asked.kernels)))
    on_cpu = config.devices[0] == "cpu"
    columns = options.columns or (_COLUMNS_ON_CPU if on_cpu else _COLUMNS)
    rows = options.rows or (_ROWS_ON_CPU if on_cpu else _ROWS)
    environment, wanted = environment_of(config), tuple(options.sum)
    with Worker(config, opening=open_orders) as worker:
        sums = [(kernel, name) for kernel in worker.do(named) for name in worker.do(sums_of, kernel, wanted)]
        for (kernel, name), terms in itertools.product(sums, columns):
            order = worker.do(order_of, Probe(kernel, name, terms, rows, options.dtype))
            found.append(replace(order, environment=environment))
            if not options.json:
                print_order(found[-1], console)
                line(console)
    if options.json:
        write_text(STANDARD_OUTPUT, to_json(found) + "\n")
    else:  # between neighbouring sizes of a kernel, and between kernels at one size
        of_kernels = grouped(((order.kernel, order.sum), order) for order in found)
        of_sizes = grouped(((order.sum, order.terms), order) for order in found)
        pairs = (pair for group in (*of_kernels.values(), *of_sizes.values()) for pair in itertools.pairwise(group))
        print_differences((difference(a, b) for a, b in pairs), console)
    return worst_code({order.exit_code for order in found})


def _compared(files: Sequence[Path]) -> int:
    """Say how the orders of two files differ; 1 if any two do, 3 if there are none to compare.

    Two orders are compared if they are of one sum and size, and of one kernel if both files have that.
    """
    first, second = (from_json(file.read_text(), str(file)) for file in files)
    first, second = ([replace(o, form=form_of(o.tree) if o.tree else None) for o in found] for found in (first, second))
    shared = {order.kernel for order in first} & {order.kernel for order in second}
    pairs = [
        (a, b)
        for a, b in itertools.product(first, second)
        if (a.sum, a.terms) == (b.sum, b.terms) and (not shared or a.kernel == b.kernel)
    ]
    names = (str(files[0]), str(files[1]))
    console = make_console()
    print_differences([difference(a, b, names) for a, b in pairs], console)
    if not pairs:
        line(console, f"{files[0]} and {files[1]} have no sum of the same name and number of terms")
    return worst_code({int(a.tree != b.tree or a.tree is None) for a, b in pairs})
