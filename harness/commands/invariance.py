"""`lastbit invariance`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lastbit.commands.options import NO_KERNEL, config_of
from lastbit.commands.running import worst_code
from lastbit.errors import LastbitError
from lastbit.property_result import PropertyResult
from lastbit.reports.invariance import Invariance, as_json, print_invariance, print_overview
from lastbit.reports.paper import line, make_console
from lastbit.reports.progress import doing
from lastbit.verify.asking import answer, askings
from lastbit.verify.processes import options_of
from lastbit.verify.worker import Worker, planned


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    config = config_of(options, ops=tuple(options.op))
    console, found = make_console(), list[Invariance]()
    with Worker(config) as worker:
        for item in {item.kernel: item for item in worker.do(planned)}.values():
            results, errors = list[PropertyResult](), dict[str, list[str]]()
            asked = worker.do(askings, item.kernel, quick=options.quick)
            with doing(f"asking {item.kernel} on {item.device}"):
                for asking in asked:
                    try:
                        results.append(worker.do(answer, item.kernel, asking, thorough=not options.quick))
                    except LastbitError as error:  # a question that ends the process loses only its own answer
                        errors.setdefault(str(error), []).append(asking.property)
            one = Invariance(
                kernel=item.kernel,
                op=item.op,
                contract=item.contract,
                device=item.device,
                cases=tuple(dict.fromkeys(asking.case for asking in asked)),
                results=tuple(results),
                errors=tuple(f"{', '.join(names)}: {error}" for error, names in errors.items()),
            )
            found.append(one)
            if not options.json:
                print_invariance(one, console, options_of(config))
    if options.json:
        print(as_json(found))
    elif not found:
        line(console, NO_KERNEL.format("these ops"))
    elif len(found) > 1:
        print_overview(found, console)
    return worst_code(one.exit_code for one in found)
