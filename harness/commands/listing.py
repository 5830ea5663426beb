"""`lastbit list`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch
from rich.console import Console
from rich.text import Text

from lastbit.command_line import read_words
from lastbit.commands.options import kernels_here
from lastbit.commands.parsers import SECTIONS
from lastbit.config import Config
from lastbit.errors import no_kernel, unknown
from lastbit.inputs import LAYOUTS, regimes
from lastbit.invariance.properties import properties_of
from lastbit.ops import REQUIRED
from lastbit.reports.paper import STANDARD_OUTPUT, line, make_console, paragraph, write_text
from lastbit.reports.summary import shown_path
from lastbit.verify.project import Project, open_project
from lastbit.verify.worker import prepare


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    sections = [word for word in options.words if word in SECTIONS]
    options.words = [word for n, word in enumerate(options.words) if word not in SECTIONS or word in options.words[:n]]
    asked = read_words(options.words).without_case("list")
    config = Config(folder="", projects=tuple(options.project), kernel_folders=asked.paths)
    project = open_project(config)
    chosen = [section for section in SECTIONS if section in (sections or SECTIONS)]
    ops = [word for word in asked.kernels if word in project.ops]
    if ops and "ops" not in sections:  # where ops are not asked for, kernels go first
        prepare(torch.device("cpu"))
        kernels = {kernel.name for kernel in project.kernels()}
        ops = [word for word in ops if word not in kernels]
    options.words = [word for word in options.words if word not in ops]
    if here := kernels_here(options):
        config = replace(config, **here)
        project = open_project(config)
    config = replace(config, ops=(*options.op, *ops), kernels=tuple(k for k in asked.kernels if k not in ops))
    if config.kernels and "kernels" not in chosen:
        what, known = ("op", project.ops) if "ops" in chosen else ("section", SECTIONS)
        raise unknown(what, config.kernels[0], [*known])
    listing = {section: tuple(_ENTRIES[section](project, config)) for section in chosen}
    if options.json:
        text = json.dumps({section: [asdict(entry) for entry in entries] for section, entries in listing.items()})
        write_text(STANDARD_OUTPUT, f"{text}\n")
    else:
        print_listing(listing, make_console())
    return 0


@dataclass(frozen=True)
class Entry:
    """A name, and the facts about it.

    Attributes:
        name: as it is written on the command line, in a case line or in a declaration.
        about: what it is, in a sentence; empty where there is nothing to say.
        facts: label → what is to be known under it.
    """

    name: str
    about: str = ""
    facts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def _ops(project: Project, config: Config) -> Iterator[Entry]:
    for op in map(project.op, config.ops or sorted(project.ops)):
        params = (name if default is REQUIRED else f"{name}={default}" for name, default in op.params.items())
        facts = {
            "inputs": tuple(f"{name} (optional)" if name in op.optional else name for name in op.inputs),
            "parameters": tuple(params),
        }
        returns = op.in_order(dict.fromkeys([*op.returns, *sorted(op.optional_results)]))
        if results := tuple(f"{name} (optional)" if name in op.optional_results else name for name in returns):
            facts["results"] = results
        for axis, choices in op.axes.items():  # an option without a name changes nothing, and is left out
            named = ((number, option) for number, option in enumerate(choices) if option)
            facts[f"axis {axis}"] = tuple(option if number else f"{option} (default)" for number, option in named)
        facts |= {f"preset {name}": tuple(filter(None, options)) for name, options in op.presets.items()}
        if op.sums:
            facts["sums"] = tuple(op.sums)
        yield Entry(op.name, _first_line(sys.modules[op.module].__doc__), facts)


def _kernels(project: Project, config: Config) -> Iterator[Entry]:
    prepare(torch.device("cpu"))  # before a kernel's file imports Triton
    for name in config.ops:
        project.op(name)
    kernels = {kernel.name: kernel for kernel in project.kernels()}
    for name in config.kernels:
        if name not in kernels:
            raise no_kernel(name, [*kernels, *SECTIONS])
    for kernel in kernels.values():
        if (not config.ops or kernel.op in config.ops) and (not config.kernels or kernel.name in config.kernels):
            facts = {
                "op": (kernel.op,),
                "contract": (str(project.op(kernel.op).contract(kernel.contract)),),
                "devices": kernel.devices or ("any",),
                "stages": kernel.stages,
                "mutates": tuple(kernel.mutates),
                "holds": tuple(f"{result} in {name}" for name, result in kernel.held.items()),
                "invariant": kernel.invariant,
                "source": (kernel.source,),
            }
            yield Entry(kernel.name, facts={label: values for label, values in facts.items() if values})


def _properties(project: Project, config: Config) -> Iterator[Entry]:
    """Yield the properties of the ops, each name once, those of any op first."""
    known: dict[str, str] = {}
    for op in map(project.op, config.ops or sorted(project.ops)):
        for name, one in properties_of(op).items():
            known.setdefault(name, one.promise)
    yield from (Entry(name, promise) for name, promise in known.items())


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]


_ENTRIES: Mapping[str, Callable[[Project, Config], Iterator[Entry]]] = {
    "ops": _ops,
    "kernels": _kernels,
    "regimes": lambda project, config: (Entry(name, about) for name, about in regimes().items()),
    "layouts": lambda project, config: (Entry(name, _first_line(rule.__doc__)) for name, rule in LAYOUTS.items()),
    "properties": _properties,
}
"""Section → its entries."""


MEANINGS = {
    "regimes": "ways to choose the values of a tensor, :NAME in a case",
    "layouts": "ways to place a tensor in memory, which a case has as @STRIDES and +OFFSET",
    "properties": "things that the bits of a kernel do not depend on",
}
"""Section → what it lists, where its name does not say it."""


def print_listing(listing: Mapping[str, tuple[Entry, ...]], console: Console) -> None:
    """Print each section under a heading: entries with facts as blocks, and others a line each."""
    for section, entries in listing.items():
        line(console, f"{section.capitalize()}: {len(entries)}", "bold")
        if section in MEANINGS:
            paragraph(console, Text(MEANINGS[section], "dim"), label="  ")
        width = max((len(entry.name) for entry in entries if not entry.facts), default=0)
        for entry in entries:
            if not entry.facts:
                paragraph(console, Text(entry.about), label=f"  {entry.name:<{width}}  ", label_style="bold")
                continue
            line(console, Text.assemble("  ", (entry.name, "bold")))
            if entry.about:
                paragraph(console, Text(entry.about), label="    ")
            widest = max(map(len, entry.facts))
            for label, values in entry.facts.items():
                head = f"    {label:<{widest}}  "
                if label == "source":
                    line(console, Text.assemble((head, "dim"), *map(shown_path, values)))
                else:
                    paragraph(console, Text(", ".join(values) or "none"), label=head, label_style="dim")
        line(console)
