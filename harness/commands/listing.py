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
from lastbit.commands.options import KERNEL, add_words, kernels_here
from lastbit.config import Config
from lastbit.errors import no_kernel, unknown
from lastbit.inputs import LAYOUTS, regimes
from lastbit.invariance.properties import properties_of
from lastbit.kernel import Kernel
from lastbit.ops import REQUIRED, Op
from lastbit.reports.paper import STANDARD_OUTPUT, line, make_console, paragraph, write_text
from lastbit.reports.summary import shown_path
from lastbit.verify.project import Project, open_project
from lastbit.verify.worker import prepare


def add_list(parser: argparse.ArgumentParser) -> None:
    """Make a parser that of the command."""
    parser.description = "List what a command line, a case line or a declaration can name."
    parser.set_defaults(command=_list)
    help = f"only these sections: {', '.join(SECTIONS)} (default: all of them); and ops and kernels: {KERNEL}"
    add_words(parser, "[SECTION …] [OP …] [KERNEL …]", help)
    parser.add_argument("--op", action="append", default=[], help="only this op and its kernels (repeatable)")
    parser.add_argument("--json", action="store_true", help="print JSON instead")


def _list(options: argparse.Namespace, rest: Sequence[str]) -> int:
    sections = [word for word in options.words if word in SECTIONS]
    options.words = [word for n, word in enumerate(options.words) if word not in SECTIONS or word in options.words[:n]]
    asked = read_words(options.words).without_case("list")
    config = Config(folder="", projects=tuple(options.project), kernel_folders=asked.paths)
    project = open_project(config)
    chosen = [section for section in SECTIONS if section in (sections or SECTIONS)]
    ops = [word for word in asked.kernels if _is_op(word, project, sections)]
    options.words = [word for word in options.words if word not in ops]
    if here := kernels_here(options):
        config = replace(config, **here)
        project = open_project(config)
    config = replace(config, ops=(*options.op, *ops), kernels=tuple(k for k in asked.kernels if k not in ops))
    if config.kernels and "kernels" not in chosen:
        what, known = ("op", project.ops) if "ops" in chosen else ("section", SECTIONS)
        raise unknown(what, config.kernels[0], [*known])
    listing = {section: tuple(SECTIONS[section](project, config)) for section in chosen}
    if options.json:
        write_text(
            STANDARD_OUTPUT, json.dumps({s: [asdict(e) for e in entries] for s, entries in listing.items()}) + "\n"
        )
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


def _is_op(word: str, project: Project, sections: Sequence[str]) -> bool:
    """Return whether a word that may name a kernel names an op; where ops are not asked for, kernels go first."""
    if word not in project.ops or "ops" in sections:
        return word in project.ops
    prepare(torch.device("cpu"))
    return word not in {kernel.name for kernel in project.kernels()}


def _ops(project: Project, config: Config) -> Iterator[Entry]:
    for op in map(project.op, config.ops or sorted(project.ops)):
        yield Entry(op.name, _first_line(sys.modules[op.module].__doc__), _facts_of(op))


def _facts_of(op: Op) -> Mapping[str, tuple[str, ...]]:
    inputs = (f"{name} (optional)" if name in op.optional else name for name in op.inputs)
    params = (name if default is REQUIRED else f"{name}={default}" for name, default in op.params.items())
    axes = {f"axis {axis}": tuple(_options(choices)) for axis, choices in op.axes.items()}
    presets = {f"preset {name}": tuple(filter(None, options)) for name, options in op.presets.items()}
    returns = op.in_order(dict.fromkeys([*op.returns, *sorted(op.optional_results)]))
    results = tuple(f"{name} (optional)" if name in op.optional_results else name for name in returns)
    given = {"results": results} if results else {}
    sums = {"sums": tuple(op.sums)} if op.sums else {}
    return {"inputs": tuple(inputs), "parameters": tuple(params), **given, **axes, **presets, **sums}


def _options(choices: Sequence[str] | Mapping[str, object]) -> Iterator[str]:
    """Yield the names of the options of an axis; one without a name changes nothing, and is left out."""
    for number, option in enumerate(choices):
        if option:
            yield option if number else f"{option} (default)"


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
            yield Entry(kernel.name, facts=_facts_of_kernel(kernel, project.op(kernel.op)))


def _facts_of_kernel(kernel: Kernel, op: Op) -> Mapping[str, tuple[str, ...]]:
    facts = {
        "op": (kernel.op,),
        "contract": (str(op.contract(kernel.contract)),),
        "devices": kernel.devices or ("any",),
        "stages": kernel.stages,
        "mutates": tuple(kernel.mutates),
        "holds": tuple(f"{result} in {name}" for name, result in kernel.held.items()),
        "invariant": kernel.invariant,
        "source": (kernel.source,),
    }
    return {label: values for label, values in facts.items() if values}


def _regimes(project: Project, config: Config) -> Iterator[Entry]:
    yield from (Entry(name, about) for name, about in regimes().items())


def _layouts(project: Project, config: Config) -> Iterator[Entry]:
    yield from (Entry(name, _first_line(rule.__doc__)) for name, rule in LAYOUTS.items())


def _properties(project: Project, config: Config) -> Iterator[Entry]:
    """Yield the properties of the ops, each name once, those of any op first."""
    known: dict[str, str] = {}
    for op in map(project.op, config.ops or sorted(project.ops)):
        for name, one in properties_of(op).items():
            known.setdefault(name, one.promise)
    yield from (Entry(name, promise) for name, promise in known.items())


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]


SECTIONS: Mapping[str, Callable[[Project, Config], Iterator[Entry]]] = {
    "ops": _ops,
    "kernels": _kernels,
    "regimes": _regimes,
    "layouts": _layouts,
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
            _print_block(entry, console) if entry.facts else _print_short(entry, width, console)
        line(console)


def _print_short(entry: Entry, width: int, console: Console) -> None:
    paragraph(console, Text(entry.about), label=f"  {entry.name:<{width}}  ", label_style="bold")


def _print_block(entry: Entry, console: Console) -> None:
    line(console, Text.assemble("  ", (entry.name, "bold")))
    if entry.about:
        paragraph(console, Text(entry.about), label="    ")
    width = max(map(len, entry.facts))
    for label, values in entry.facts.items():
        _print_fact(f"    {label:<{width}}  ", label, values, console)


def _print_fact(head: str, label: str, values: Sequence[str], console: Console) -> None:
    if label == "source":
        line(console, Text.assemble((head, "dim"), *map(shown_path, values)))
    else:
        paragraph(console, Text(", ".join(values) or "none"), label=head, label_style="dim")
