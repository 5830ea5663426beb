"""A caller's question about a kernel file: the contract that it must keep, and how much is done to find out."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from lastbit.case import SEED_BITS
from lastbit.command_line import command
from lastbit.config import LONGEST_TIMEOUT, PROFILES
from lastbit.errors import UsageError, unknown
from lastbit.kernel import PLACEMENTS

if TYPE_CHECKING:
    from lastbit.of_file import Role

RANDOM = "random"
"""The seed of a question whose cases get seeds that nobody knows before the kernel is loaded.

They follow from a number that is drawn then: `random:N` asks for the same cases again.
"""

LEAST_MEMORY = 1 << 29
"""Bytes of which a kernel process with torch and Triton has half before it does anything."""

PROFILE = "ci"
# Arbitrary: longer is waited by whoever judges many files, shorter explains fewer of them.
EXPLAIN = 15.0
"""Seconds in which the failure of a kernel is explained, unless the caller says otherwise or wants the first one."""


@dataclass(frozen=True, kw_only=True)
class JudgeQuestion:
    """A question about a kernel file. The contract is the caller's, whatever the file declares.

    Attributes:
        op, contract: what the kernel must compute; an axis that the contract does not name takes its default.
        function: the name of the kernel's function; empty where the file makes clear which one it is.
        mutates: inputs that the kernel may overwrite → the result that each holds afterwards, or nothing.
        unordered: results whose bits may differ between calls.
        placement: what the kernel does with tensors on other devices.
        profile: one of `PROFILES`.
        lines: case lines to judge it on instead, as they are.
        seed: `RANDOM`, which may be followed by what was drawn, or the seed that the cases are drawn from.
        fail_fast: the first failing case is the last one, and is not made small.
        explain: seconds in which a failure is explained, 0 for none; None for `EXPLAIN`, and none with `fail_fast`.
        forbid_torch_op: a kernel that calls torch's own operator for the whole op fails.
        may_decline: the kernel may raise `UnsupportedCase` for cases that its signature takes.
        strict: notices fail a case.
        speed: a kernel that passes is timed as well.
        beside: so is a kernel of the project that keeps the contract, in the same way.
        timeout: seconds that one case may take.
        memory: bytes that the process of the kernel may take; None for the default of isolation.
    """

    op: str
    contract: str = ""
    function: str = ""
    mutates: Mapping[str, str] = field(default_factory=dict)
    unordered: tuple[str, ...] = ()
    placement: str = "refuses"
    profile: str = PROFILE
    lines: tuple[str, ...] = ()
    seed: str = RANDOM
    fail_fast: bool = False
    explain: float | None = None
    forbid_torch_op: bool = False
    may_decline: bool = False
    strict: bool = False
    speed: bool = False
    beside: bool = False
    timeout: float = 120.0
    memory: int | None = None

    def __post_init__(self) -> None:
        if self.profile not in PROFILES:
            raise unknown("profile", self.profile, PROFILES)
        if self.placement not in PLACEMENTS:
            raise unknown("placement", self.placement, PLACEMENTS)
        if not 0 < self.timeout <= LONGEST_TIMEOUT:
            raise UsageError(
                f"timeout {self.timeout:g} must be a number of seconds above 0, at most {LONGEST_TIMEOUT:,}"
            )
        if self.memory is not None and self.memory < LEAST_MEMORY:
            raise UsageError(
                f"memory {self.memory:,} is less than Python and torch take; give {LEAST_MEMORY:,} or more"
            )
        if self.beside and not self.speed:
            raise UsageError("a kernel of the project is timed beside one that is timed: ask for speed as well")
        if self.seed != RANDOM and not self.seed.removeprefix(f"{RANDOM}:").isdecimal():
            raise UsageError(f"seed {self.seed!r} is neither {RANDOM}, {RANDOM}:N nor a whole number N from 0 on")

    @property
    def drawn(self) -> JudgeQuestion:
        """The question with a number drawn for the seeds of its cases, if they are random and have no number."""
        open_ = self.seed == RANDOM and not self.lines
        return replace(self, seed=f"{RANDOM}:{secrets.randbits(SEED_BITS)}") if open_ else self

    @property
    def role(self) -> Role:
        """The facts about the kernel itself that the question gives."""
        from lastbit.of_file import Role  # it imports torch, and the options of `lastbit judge` are asked for here

        return Role(self.op, self.contract, self.function, self.mutates, self.unordered, self.placement)

    @property
    def explaining(self) -> float:
        """Seconds in which a failure is explained."""
        return self.explain if self.explain is not None else 0.0 if self.fail_fast else EXPLAIN

    def repro(self, file: str, line: str, device: str) -> str:
        """Return the command that asks the same question about a file on one case."""
        words = ["--kernels", file, "--op", self.op]
        for option in ("contract", "function"):
            if value := getattr(self, option):
                words += [f"--{option}", value]
        for name, result in self.mutates.items():
            words += ["--mutates", f"{name}={result}" if result else name]
        for name in self.unordered:
            words += ["--unordered", name]
        if self.placement != "refuses":
            words += ["--placement", self.placement]
        for option in ("strict", "speed", "forbid_torch_op", "may_decline"):
            words += [f"--{option.replace('_', '-')}"] * getattr(self, option)
        return command("judge", case=line, options=shlex.join([*words, "--device", device]))
