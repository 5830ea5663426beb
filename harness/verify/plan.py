"""The plan of a run: kernels by devices by groups of cases, and everything that does not run, with the reason.

On an accelerator, every kernel of several tensors gets a group of cases with tensors on other devices besides.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from lastbit.calibrate import load_premises
from lastbit.calling.uses_compile import is_compiled
from lastbit.case import Case, Chosen, Group, parse_case
from lastbit.config import Config
from lastbit.errors import UsageError, no_kernel
from lastbit.invariance.properties import check_names
from lastbit.kernel import REVISION_MARK, Kernel
from lastbit.ops import Contract
from lastbit.run import NotRun
from lastbit.stage_names import stage_names
from lastbit.trees import check_trees, imported
from lastbit.verify.check import Subject, check_line
from lastbit.verify.declarations import likely_slips
from lastbit.verify.notes import NO_ACCELERATOR, Planned
from lastbit.verify.ordinary import showing
from lastbit.verify.project import Load, Project, kernel_folders, open_project

C = TypeVar("C")

BRIEF = (
    "smoke meets each option once, deals fixed cases and promised properties among an op's kernels, and looks for no "
    "stages; ci does all"
)
SIZED = "sizes"
"""Name of the group of cases for the sizes of a kernel's source."""
NO_SIZES_LEFT = "sizes that a source names and no case is left for; a kernel that is verified alone has more"

_PROPERTIES = 6
"""Cases that take as long as one whose properties are asked, as measured on an H200 (invariance_h200.md)."""

# On an H200 four kernels of experts took 43 % of all workers' time, and attention begun late ran alone at the end.
_PRODUCTS = 4
"""Cases of other ops that take as long as one of an op with products of matrices."""


@dataclass(frozen=True)
class Item:
    """One kernel on one device with one group of cases.

    Attributes:
        asked: a reader gave the lines of the cases.
        properties: names of those that alone are asked, where the group asks; empty for those that a run asks.
        refused: why the kernel cannot be called for any case, by what it declares; empty if it can.
        share: which cases of the group they are: of (1, 3) the second, the fifth and so on; see `_shares`.
        shows: stages of the kernel, which declares none, are looked for in some of its cases.
        novel: it has an option, or dtypes together, that no combination of its kernel before it has, or is of none: the
            kernel is called with other values in some of its cases, too, and followed on residues. In a brief run one
            of none is not novel beside combinations.
        left: combinations that the kernel takes and the run leaves out; said once for each kernel.
    """

    subject: Subject
    group: Group
    asked: bool = False
    properties: tuple[str, ...] = ()
    refused: str = ""
    share: tuple[int, int] = (0, 1)
    shows: bool = False
    novel: bool = True
    left: tuple[Chosen, ...] = ()

    @property
    def id(self) -> str:
        return f"{self.subject.kernel.op}-{self.subject.kernel.name}-{self.subject.device}-{self.group.name}"

    def own(self, cases: Sequence[C]) -> Sequence[C]:
        """Return the item's share of the cases of its group."""
        start, step = self.share
        return cases[start::step]

    def planned(self, generated: int) -> Planned:
        """Return the item as data; `generated` is about the number of cases that a generating group has."""
        kernel, group = self.subject.kernel, self.group
        cases = len(self.own(range(len(group.examples) + len(group.designed) + group.left_to_draw(generated))))
        # A case costs by the number of stages, and whether there are products of matrices: tensors have about one size.
        known, products = stage_names(self.subject.op.reference), self.subject.op.flops is not None
        cost = (max(len(known.words), 1) if known else 1) * (_PRODUCTS if products else 1)
        return Planned(
            id=self.id,
            kernel=kernel.name,
            op=kernel.op,
            contract=str(self.subject.contract),
            device=str(self.subject.device),
            group=group.name,
            source=kernel.source,
            cases=cases,
            cost=cases * cost * (_PROPERTIES if group.properties else 1),
            choices=group.choices,
            combination=group.combination,
            left=self.left,
            compiles=is_compiled(kernel.call),
        )


@dataclass(frozen=True)
class Plan:
    """The items of a run in order, and everything left out."""

    items: tuple[Item, ...]
    not_run: tuple[NotRun, ...]
    cases_per_group: int

    @property
    def planned(self) -> tuple[Planned, ...]:
        """The items as data."""
        return tuple(item.planned(self.cases_per_group) for item in self.items)


def make_plan(
    config: Config,
    device_type: str,
    load: Load | None = None,
    modules: Callable[[], Mapping[str, Path]] = imported,
    *,
    refusing: bool = False,
    project: Project | None = None,
) -> Plan:
    """Return the plan for the devices of one type, `cpu` or an accelerator's.

    `project` is that of the configuration, if it is open already. `load` finds the kernels of a folder in place of the
    project's own; `modules` names what was imported meanwhile. With `refusing`, a kernel beside others that declares
    what its op does not have gets an item that says so.

    Raises:
        UsageError: an op, kernel, contract or case line is unknown or malformed.
            No kernel that was found is of the op of a case line.
        MixedTrees: kernels import a module of the repository that is not of their revision.
    """
    project = project or open_project(config)
    project = project if load is None else replace(project, load=load)
    others, lacking = project.kernels_of_revisions()
    refused: dict[str, str] = {}
    found = (*project.kernels(refused if refusing else None), *others)
    check_modules(config, modules())
    ops = sorted({kernel.op for kernel in found})
    for case in map(parse_case, config.lines):
        if project.op(case.op).name not in ops:
            has = f"of {', '.join(ops)}" if ops else "none"
            raise UsageError(f"no kernel of {case.op} is here, which '{case}' is a case of; there are kernels {has}")
    kernels = _selected(project, config, found)
    _check_lines(project, config, kernels)
    if kernels and all(kernel.name in refused for kernel in kernels):
        raise UsageError(refused[kernels[0].name])
    if config.properties:
        check_names(config.properties, tuple(project.ops.values()))
    devices = [d for d in map(torch.device, config.devices) if d.type == device_type]
    beside = None
    if device_type != "cpu" and not config.sanitize:
        from lastbit.verify.formula_check import Beside  # which imports this

        beside = Beside(config)
    shares = _shares(kernels) if config.shares else {}
    groups_for = _groups_for(project, config, len({kernel.source or kernel.name for kernel in kernels}))
    items: list[Item] = []
    not_run = [*lacking]
    not_run += [n for k in kernels if k.name not in refused for n in likely_slips(k, project.op(k.op))]
    not_run += _of_no_kernel(config, found, kernels, devices)
    for device in devices:
        for kernel in kernels:
            op, refusal = project.op(kernel.op), refused.get(kernel.name)
            if refusal is None and kernel.devices and device.type not in kernel.devices:
                not_run.append(NotRun(f"{kernel.name} on {device}", f"declared for {', '.join(kernel.devices)} only"))
                continue
            premises = load_premises(device)
            subject = Subject(kernel, op, device, premises, strict=config.strict, races=config.races)
            if refusal is not None:
                if not config.lines or kernel.op in {parse_case(line).op for line in config.lines}:
                    try:
                        op.contract(kernel.contract)
                    except UsageError:  # its result is of the default contract
                        subject = replace(subject, kernel=replace(kernel, contract=""))
                    items.append(Item(subject, Group("declaration"), refused=refusal))
                continue
            subject = replace(subject, beside=beside)
            groups, notes = groups_for(subject)
            items += _items_of(subject, groups, config, *shares.get(kernel.name, (0, 1)))
            not_run += [note for note in notes if note not in not_run]
    if device_type == "cpu" and not config.lines and any(i.subject.takes_several for i in items if not i.refused):
        alone = "the cpu alone has no other device to put a tensor on"
        reason = alone if torch.accelerator.is_available() else NO_ACCELERATOR
        not_run.append(NotRun("cases with a tensor on another device", reason))
    if config.brief:
        rows, before = sum(len(item.left) for item in items), sum(len(i.own(i.group.examples)) for i in items)
        items = [*_dealt(items)]
        fixed = before - sum(len(i.own(i.group.examples)) for i in items)
        if rows or fixed > 0:
            not_run.insert(0, NotRun(f"{rows:,} combinations and {fixed:,} fixed cases", BRIEF))
    if not (config.lines or config.isolate or config.revision or config.brief):
        items = [*showing(items)]
    items = [*_novel(items, brief=config.brief)] if config.shares else items
    of_sizes = [note for note in not_run if note.reason == NO_SIZES_LEFT]
    if len(of_sizes) > 1:
        not_run = [note for note in not_run if note not in of_sizes]
        not_run.append(NotRun(f"{len(of_sizes)} kernels", NO_SIZES_LEFT))
    return Plan(tuple(items), tuple(not_run), config.cases_per_group)


def _items_of(subject: Subject, groups: Sequence[Group], config: Config, place: int, parts: int) -> Iterator[Item]:
    """Yield an item for each group, with the cases that fall to the kernel at a place of so many that share them.

    Combinations that a brief run leaves out are told by the first item that has one.
    """
    left = [group for group in groups if config.brief and group.combination and not group.designed]
    for number, group in enumerate([group for group in groups if group not in left]):
        item = Item(subject, group, bool(config.lines), config.properties)
        if group.combination:
            item, left = replace(item, left=tuple(other.combination for other in left)), []
        most = parts
        if group.properties and subject.kernel.invariant and parts > 1:  # nobody else is asked what it promises
            most = min(parts, max(1, item.planned(config.cases_per_group).cases))
        item = replace(item, share=((place + number) % most, most))
        if parts == 1 or item.planned(config.cases_per_group).cases:
            yield item


def _dealt(items: Sequence[Item]) -> Iterator[Item]:
    """Deal the fixed cases of items among the kernels of an op on a device.

    Each case goes to the kernel that has the fewest so far, of those that take it. Each function has one at least of
    the sizes that its source names and, if it promises properties, one for these, under some contract. Properties that
    a kernel does not promise are not asked.
    """
    promises = (item.properties or item.subject.kernel.invariant if item.group.properties else () for item in items)
    items = [replace(item, properties=own) for item, own in zip(items, promises, strict=True)]
    together: dict[tuple[str, torch.device, str], list[Item]] = {}
    for item in items:
        if item.group.strategy is None and not item.refused and (item.properties or not item.group.properties):
            together.setdefault((item.subject.op.name, item.subject.device, item.group.name), []).append(item)
    dealt: dict[int, list[Case]] = {}
    for (_, _, name), sharing in together.items():
        taken: dict[Case, list[list[Case]]] = {}
        for item in sharing:
            own = dealt[id(item)] = []
            for case in item.group.examples:
                taken.setdefault(case, []).append(own)
        for case, takers in taken.items():
            min(takers, key=len).append(case)
        functions: dict[str, list[Item]] = {}
        for item in sharing if name == SIZED or sharing[0].group.properties else ():
            functions.setdefault(item.subject.kernel.source or item.subject.kernel.name, []).append(item)
        for first, *others in functions.values():
            if not any(dealt[id(item)] for item in (first, *others)):
                dealt[id(first)].append(first.group.examples[0])
    for item in items:
        own = dealt.get(id(item), [])
        if item.group.strategy is not None or item.refused:
            yield item
        elif own:
            yield replace(item, group=replace(item.group, examples=tuple(own)), share=(0, 1))


def _novel(items: Iterable[Item], *, brief: bool) -> Iterator[Item]:
    """Yield the items, and say of each whether it is novel among those of its kernel on its device."""
    items = list(items)
    known: dict[tuple[str, torch.device], set[object]] = {}
    combined = {(item.subject.kernel.name, item.subject.device) for item in items if brief and item.group.combination}
    for item in items:
        row, key = item.group.combination, (item.subject.kernel.name, item.subject.device)
        seen = known.setdefault(key, set())
        new = {*row.items(), frozenset(option for axis, option in row.items() if axis.endswith(" dtype"))}
        yield replace(item, novel=not new <= seen if row else key not in combined)
        seen |= new


# Arbitrary: fewer share less, more leave each kernel with too few cases to rule contracts out.
_MOST_PARTS = 4
"""Kernels that divide the cases of a group among them: of more, some have the same part, a quarter."""


def _shares(kernels: Iterable[Kernel]) -> dict[str, tuple[int, int]]:
    """Return the part of the cases of a group, as (place, parts), for each kernel that shares them with others.

    Kernels that are one function under several contracts have most of their text in common. Each case shows that to one
    of them; all of them together have every case, and each has enough to be told from the others. Variants under one
    contract differ in their text instead, and each has all.
    """
    families: dict[object, list[Kernel]] = {}
    for kernel in kernels:
        takes = tuple(sorted((name, str(told)) for name, told in kernel.takes.items()))
        alike = kernel.op, kernel.source, kernel.accepts, kernel.requires, kernel.devices, takes
        families.setdefault(alike, []).append(kernel)
    found: dict[str, tuple[int, int]] = {}
    for family in families.values():
        parts = min(len(family), _MOST_PARTS)
        if family[0].source and len({kernel.contract for kernel in family}) == len(family) > 1:
            found |= {kernel.name: (number % parts, parts) for number, kernel in enumerate(family)}
    return found


def _of_no_kernel(
    config: Config, found: Sequence[Kernel], chosen: Sequence[Kernel], devices: Sequence[torch.device]
) -> Iterator[NotRun]:
    """Yield the ops that were asked for, by name or by a case, without a kernel, and the named kernels of other ops."""
    asked = dict.fromkeys([*config.ops, *(parse_case(line).op for line in config.lines)])
    for op in asked:
        if not any(kernel.op == op for kernel in chosen):
            yield NotRun(op, "no kernel that was chosen is of this op")
    for kernel in found if asked else ():
        if kernel.op not in asked and kernel.name.partition(REVISION_MARK)[0] in config.kernels:
            reason = f"it is of {kernel.op}, which was not asked for"
            yield from (NotRun(f"{kernel.name} on {device}", reason, kernel.name, str(device)) for device in devices)


def _selected(project: Project, config: Config, kernels: Sequence[Kernel]) -> list[Kernel]:
    """Return the kernels that the run is restricted to; a name stands for the kernel in every revision."""
    own = {k: k.name.partition(REVISION_MARK)[0] for k in kernels}
    for name in config.ops:
        project.op(name)
    for name in config.kernels:
        if name not in own.values():
            raise no_kernel(name, own.values())
    return [
        k
        for k in kernels
        if (not config.ops or k.op in config.ops) and (not config.kernels or own[k] in config.kernels)
    ]


def _check_lines(project: Project, config: Config, kernels: Sequence[Kernel]) -> None:
    """Raise `UsageError` for a line that is no case of its op, under no contract: each option is asked for once.

    Of lines with the same tensors and parameters, whatever their sizes and values, the reference is asked for one.
    """
    known = set[object]()
    for case in map(parse_case, config.lines):
        op, contracts = project.op(case.op), list[Contract]()
        kind = case.op, tuple((t.name, t.dtype) for t in case.tensors), tuple(case.params.items())
        for kernel in kernels if kind not in known else ():
            with suppress(UsageError):  # a kernel that declares what there is not is told for itself
                contracts += [op.contract(kernel.contract)] if kernel.op == op.name else []
        if kind not in known:  # a line that a kernel's contract does not define is that kernel's result
            contracts += [op.contract(option) for options in op.axes.values() for option in options]
        check_line(op, case, contracts)
        known.add(kind)


def check_modules(config: Config, modules: Mapping[str, Path]) -> None:
    """Raise `MixedTrees` if a run's kernels have imported a module of their repository from another checkout."""
    folders = (*kernel_folders(config), *map(Path, config.revisions.values()))
    check_trees(folders, modules, revision=config.revision or config.tree, together=bool(config.revisions))


def later_imports(config: Config) -> Callable[[], None]:
    """Return a function that checks the modules imported since its last call, as `check_modules` does."""
    seen = set(sys.modules)

    def check() -> None:
        new = imported(seen)
        seen.update(sys.modules)
        check_modules(config, new)

    return check


def _groups_for(
    project: Project, config: Config, functions: int
) -> Callable[[Subject], tuple[Sequence[Group], Sequence[NotRun]]]:
    """Return a function that makes the groups of cases of a kernel on a device, and notes of what is left out."""
    if config.lines:
        cases = [parse_case(line) for line in config.lines]

        def of_lines(subject: Subject) -> tuple[Sequence[Group], Sequence[NotRun]]:
            own = tuple(case for case in cases if case.op == subject.kernel.op)
            return [Group("lines", examples=own, properties=bool(config.properties))] if own else [], ()

        return of_lines
    # It draws by Hypothesis, which takes as long to import as all of lastbit, and which lines of cases need not.
    from lastbit.verify.run_groups import groups_in_a_run

    return groups_in_a_run(project, config, functions)
