"""A chain as an op: what its parts have, under the names that they have in it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lastbit.chains.chain_parts import ChainReference, Link, Part, Passed, check_word, links_of
from lastbit.declared import check_contracts
from lastbit.errors import OpError, no_such
from lastbit.numerics.formats import DIRECTIONS, TARGETS, split_target
from lastbit.ops import REQUIRED, Latent, Op, Rounds, with_presets

_FP32 = "fp32"


def chain(
    name: str,
    *parts: Part,
    shared: tuple[str, ...] = (),
    returned: tuple[str, ...] = (),
    latent_of: str = "",
    presets: Mapping[str, str] | None = None,
) -> Op:
    """Make the op that computes the parts one after the other.

    Its inputs, parameters, axes and stages are those of the parts, less the inputs that are taken and what is fixed.
    Stages and options keep their names where only one part has them; otherwise the label of the part and an underscore
    stand before them. A result that is passed on is a stage of the chain and no result, unless `returned` names it.

    Args:
        name: of the op.
        parts: in the order in which they are computed.
        shared: inputs and parameters that several parts have, and that are one in the chain.
        returned: stages that are passed on and are results of the chain as well.
        latent_of: label of the part whose `Latent` the chain has, where several parts have one.
        presets: name → the text of a contract, as in `op`; a part's own are not taken over.

    Raises:
        OpError: the parts do not fit; the message says which name is wrong, or in the way of another.
    """
    frame = sys._getframe(1)
    origin = f"{frame.f_code.co_filename}:{frame.f_lineno}", str(frame.f_globals.get("__name__", ""))
    where = f"chain {name} ({origin[0]})"
    check_word(where, "name of a chain", name)
    made = _Chain(where, links_of(where, parts), shared, returned)
    inputs, axes, rounds = made.inputs(), made.axes(), made.rounds()
    found = Op(
        name=name,
        reference=ChainReference(name, *origin, made.links, made.passed(), tuple(inputs)),
        inputs=tuple(inputs),
        optional=frozenset(name for name, needed in inputs.items() if not needed),
        params=made.params(),
        rows=made.rows(),
        integers=made.of_inputs("integers"),
        plain=made.of_inputs("plain"),
        axes=axes,
        rounds=rounds,
        latent=made.latent(latent_of) if made.rows() else None,  # it explains rows, which must be independent
        optional_results=made.optional_results(),
        returns=made.returns(),
        stand_ins=made.stand_ins(),
    )
    targets = [*(name for name in found.inputs if name not in found.integers), *TARGETS]
    check_contracts(where, axes, presets or {}, rounds, targets, tuple(DIRECTIONS))
    return with_presets(found, where, presets or {})


@dataclass(frozen=True, eq=False)
class _Chain:
    """The parts of a chain, and how they are put together; `where` names it in errors."""

    where: str
    links: tuple[Link, ...]
    shared: tuple[str, ...]
    returned: tuple[str, ...]

    def __post_init__(self) -> None:
        owners: dict[str, list[str]] = {}
        kinds: dict[str, set[str]] = {}
        for link in self.links:
            for what in ("inputs", "params"):
                for own in getattr(link, what):
                    owners.setdefault(link.name(own), []).append(link.label)
                    kinds.setdefault(link.name(own), set()).add(what)
        for name, labels in owners.items():
            if len(labels) > 1 and (name not in self.shared or len(kinds[name]) > 1):
                raise OpError(
                    f"{self.where}: {' and '.join(labels)} have {name!r}; rename it in one of them "
                    f"(renamed={{{name!r}: …}}), fix it (fixed=…), or make it one for all: shared=({name!r},)"
                )
        for name in self.shared:
            if len(owners.get(name, ())) < 2:
                raise OpError(f"{self.where}: {no_such('name in shared, which two parts have:', name, owners)}")
        for number, link in enumerate(self.links):
            if number and not link.part.takes:
                raise OpError(f"{self.where}: {link.label} takes nothing of the parts before it; say what: takes=…")
            for stage in link.part.takes.values():
                self.giver(number, stage)
        taken = [stage for link in self.links for stage in link.part.takes.values()]
        for stage in self.returned:
            if stage not in taken:
                raise OpError(f"{self.where}: {no_such('stage in returned, which no part takes:', stage, taken)}")

    def giver(self, number: int, stage: str) -> tuple[Link, str]:
        """Find the part before that number that records a stage, and the part's own name of it.

        Raises:
            OpError: there is none.
        """
        for link in self.links[:number]:
            if (own := link.own_stage(stage)) is not None:
                return link, own
        label = self.links[number].label
        if late := [link.label for link in self.links[number:] if link.own_stage(stage) is not None]:
            raise OpError(
                f"{self.where}: {label} takes {stage!r} of {late[0]}, which is not computed before it; a chain has no "
                "cycle, and its parts stand in the order in which they are computed"
            )
        known = [name for link in self.links[:number] for name in link.stages]
        raise OpError(f"{self.where}: {no_such(f'stage that {label} takes:', stage, known)}")

    def inputs(self) -> dict[str, bool]:
        """Map inputs to whether a case must have them; required ones come first."""
        found: dict[str, bool] = {}
        for link in self.links:
            for own in link.inputs:
                found[link.name(own)] = found.get(link.name(own), False) or link.needs(own)
        return {name: needed for needed in (True, False) for name, n in found.items() if n is needed}

    def params(self) -> dict[str, Any]:
        """Map parameters to defaults; one that some part needs has none."""
        found: dict[str, Any] = {}
        for link in self.links:
            for own in link.params:
                name, default = link.name(own), link.op.params[own]
                if name in found and found[name] != default and REQUIRED not in (found[name], default):
                    raise OpError(
                        f"{self.where}: {name!r} has the defaults {found[name]!r} and {default!r} in its parts"
                    )
                found[name] = REQUIRED if REQUIRED in (default, found.get(name, default)) else default
        return found

    def of_inputs(self, what: str) -> frozenset[str]:
        """Collect the inputs that an attribute of the parts' ops names, such as `rows`."""
        named = [(link, getattr(link.op, what)) for link in self.links]
        return frozenset(link.name(own) for link, names in named for own in link.inputs if own in names)

    def rows(self) -> frozenset[str]:
        """Return the inputs of independent rows; none if a part has none, or takes a stage that its rows share."""
        independent = all(link.op.rows and link.op.rows.issuperset(link.part.takes) for link in self.links)
        return self.of_inputs("rows") if independent else frozenset()

    def rounded_to(self, link: Link, own: str) -> str | None:
        """Return the target to which a stage that is passed on is rounded in every contract: an input or a format.

        Raises:
            OpError: that depends on the contract.
        """
        of_options = [rounds for choices in link.op.axes.values() for rounds in choices.values()]
        if any(own in rounds for rounds in of_options):
            raise OpError(
                f"{self.where}: {own!r} of {link.label} is rounded as the contract says, so its dtype is open"
            )
        target = link.op.rounds.get(own)
        return None if target is None else self.target(link, target)

    def target(self, link: Link, own: str) -> str:
        """Translate the target of a part's rounding point to an input of the chain or a format, with its direction."""
        own, colon, direction = own.partition(":")
        if colon:
            return f"{split_target(self.target(link, own))[0]}:{direction}"
        if own in link.part.takes:
            giver, stage = self.giver(self.links.index(link), link.part.takes[own])
            return split_target(self.rounded_to(giver, stage) or _FP32)[0]
        if own in link.part.fixed:
            return self.target(link, link.op.stand_ins.get(own, link.op.inputs[0]))
        return link.name(own) if own in link.op.inputs else own

    def stand_ins(self) -> dict[str, str]:
        """Map optional inputs to what stands in for their dtype, where that is not the first input."""
        first = next(iter(self.inputs()))
        found = {
            link.name(own): self.target(link, link.op.stand_ins.get(own, link.op.inputs[0]))
            for link in self.links
            for own in link.inputs
            if own in link.op.optional
        }
        return {name: target for name, target in found.items() if target != first}

    def _of_part(self, link: Link, rounds: Rounds) -> dict[str, str]:
        return {link.stage(own): self.target(link, target) for own, target in rounds.items()}

    def passed(self) -> dict[str, Passed]:
        """Collect the stages that are passed on."""
        found = {}
        for number, link in enumerate(self.links):
            for stage in link.part.takes.values():
                target = self.rounded_to(*self.giver(number, stage))
                found[stage] = Passed(stage, target, stage in self.returned)
        return found

    def rounds(self) -> dict[str, str]:
        """Collect the rounding points of every contract; stages that are only passed on have theirs in their axes."""
        every = {stage: to for link in self.links for stage, to in self._of_part(link, link.op.rounds).items()}
        passed = self.passed()
        return {stage: to for stage, to in every.items() if stage not in passed or passed[stage].returned}

    def axes(self) -> dict[str, dict[str, dict[str, str]]]:
        """Collect the axes of the parts, each followed by one for each of its stages that is rounded and passed on."""
        found: dict[str, dict[str, dict[str, str]]] = {}
        for link in self.links:
            own: list[tuple[str, dict[str, dict[str, str]]]] = []
            for axis, choices in link.op.axes.items():
                options = {link.word(option): self._of_part(link, rounds) for option, rounds in choices.items()}
                own.append((link.word(axis), options))
            for stage, passed in self.passed().items():
                if passed.target is not None and link.own_stage(stage) is not None:
                    default = {} if passed.returned else {stage: passed.target}
                    own.append((f"passed_{stage}", {"": default, passed.option: {}}))
            for axis, options in own:
                if axis in found:
                    raise OpError(f"{self.where}: two axes are called {axis!r}; rename that of the part")
                found[axis] = options
        return found

    def optional_results(self) -> frozenset[str]:
        names = (link.stage(own) for link in self.links for own in link.op.optional_results)
        return frozenset(filter(self._is_result, names))

    def returns(self) -> tuple[str, ...]:
        """List the results of the parts in the order of their `returns`, the last part's first."""
        names = (link.stage(own) for link in reversed(self.links) for own in link.op.returns)
        return tuple(filter(self._is_result, names))

    def _is_result(self, name: str) -> bool:
        """Check whether a result of a part is one of the chain, too."""
        return name not in self.passed() or name in self.returned

    def latent(self, label: str) -> Latent | None:
        """Return the `Latent` of the part with that label, or of the only part that has one."""
        having = {link.label: link for link in self.links if link.op.latent is not None}
        if label and label not in having:
            raise OpError(f"{self.where}: {no_such('part with a Latent:', label, having)}")
        if not label and len(having) > 1:
            raise OpError(f"{self.where}: {' and '.join(having)} have a Latent; say whose it has: latent_of=…")
        link = having[label] if label else next(iter(having.values()), None)
        if link is None or (own := link.op.latent) is None:
            return None
        instead = {link.word(option): link.stage(stage) for option, stage in own.instead.items()}
        through, also = tuple(map(link.stage, own.through)), tuple(map(link.stage, own.also))
        return Latent(link.stage(own.stage), through, instead, also)
