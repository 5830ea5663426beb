"""The kernel of a file that need not have been written for lastbit: found by name, and held to what the caller says.

What the file says of itself is trusted with nothing but what tightens a bound or says how to call the function.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from lastbit.errors import UsageError, no_such
from lastbit.kernel import Kernel, _collect, declarations_of, kernel, load_kernel_file
from lastbit.ops import Op
from lastbit.siblings import siblings
from lastbit.takes import told


@dataclass(frozen=True)
class Role:
    """The facts about a file's kernel that come from a caller who does not trust the file; see `Kernel`.

    Attributes:
        function: its name; empty where the file makes clear which it is.
        mutates: inputs that it may overwrite → the result that each holds afterwards, or an empty name.
    """

    op: str
    contract: str = ""
    function: str = ""
    mutates: Mapping[str, str] = field(default_factory=dict)
    unordered: tuple[str, ...] = ()
    placement: str = "refuses"


def role_of(fields: Mapping[str, Any]) -> Role:
    """Restore the role that `dataclasses.asdict` made into JSON."""
    return Role(**{**fields, "unordered": tuple(fields["unordered"])})


def plain_name(kernel: Kernel) -> str:
    """Return the name under which a kernel's function stands unwrapped in its file; empty if it is wrapped."""
    module = sys.modules.get(str(getattr(kernel.call, "__module__", "")))
    return next((name for name, value in vars(module).items() if value is kernel.call), "") if module else ""


def kernel_of_file(path: Path, role: Role) -> Kernel:
    """Load the kernel of a file as it is declared, or as its role declares a function without a declaration.

    It is the one that the role names, or the one that is declared for the op, or the function called like the op,
    or the only public function that the file defines. The file can import its siblings by name.

    Raises:
        UsageError: none of these is there, or several are; the message lists what there is.
        KernelError: the file raises while it is loaded.
    """
    with _collect() as declared, siblings(path.parent):
        module, left = load_kernel_file(path)
    own = [one.kernel for one in declared if one.file.resolve() == path.resolve() and one.kernel.op == role.op]
    file, public = Path(str(module.__file__)).name, _public(module)
    found: Kernel | None = None
    function: Any = None
    if role.function:  # the name of a declaration, or of a function of the file
        named = [k for k in own if k.name == role.function]
        function = vars(module).get(role.function)
        if not named and callable(function):
            named = [k for k in declarations_of(function) if k.op == role.op]
        elif not named:
            names = dict.fromkeys([*(k.name for k in own), *public])
            raise UsageError(no_such(f"function of {file}", role.function, names))
        found = named[0] if named else None
    elif len(own) > 1:
        names_of = ", ".join(k.name for k in own)
        raise UsageError(f"{file} declares several kernels of {role.op}: {names_of}; --function names one")
    elif own:
        found = own[0]
    elif role.op in public or len(public) == 1:
        function = public.get(role.op) or next(iter(public.values()))
    else:
        there = f"defines {', '.join(public)}" if public else "defines no public function"
        raise UsageError(f"{file} {there}; --function says which is the kernel, or call it {role.op!r}")
    if found is None:
        found = _declared(function, role)
    elif not found.held and any(role.mutates.values()):  # the file says nothing about which inputs hold results
        made = _declared(inspect.unwrap(found.call), role, found.refuses)
        found = replace(found, call=made.call, mutates=made.mutates, held=made.held)
    return replace(found, arithmetic=left)


def _public(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """Map names to the public functions that the file itself defines."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, FunctionType) and value.__module__ == module.__name__ and not name.startswith("_")
    }


def _declared(function: Callable[..., Any], role: Role, refuses: tuple[type[Exception], ...] = ()) -> Kernel:
    """Declare a function with `@kernel` as its role says."""
    declare = kernel(
        role.op,
        contract=role.contract,
        mutates=role.mutates,
        placement=role.placement,
        unordered=role.unordered,
        refuses=refuses,
    )
    with _collect() as made:
        declare(function)
    return made[0].kernel


def held_to(own: Kernel, role: Role, op: Op) -> tuple[Kernel, tuple[str, ...]]:
    """Return the kernel as the caller wants it judged, and a sentence for each differing declaration in its file."""
    held = {name: result for name, result in own.held.items() if name in role.mutates or name not in op.inputs}
    asked = replace(
        own,
        contract=role.contract,
        mutates=tuple(role.mutates),
        held=held,
        unordered=role.unordered,
        placement=role.placement,
        takes={},
    )
    try:
        contract = str(op.contract(own.contract))
    except UsageError:  # the op has no such contract
        contract = own.contract
    said = []
    if contract != (claimed := str(op.contract(asked.contract))):
        said.append(f"the file declares the contract {contract}; it is held to {claimed}")
    if more := sorted({*own.mutates} - {*asked.mutates}):
        said.append(f"the file declares that it overwrites {', '.join(more)}, which the caller does not allow")
    if more := sorted({*own.unordered} - {*asked.unordered}):
        said.append(f"the file declares {', '.join(more)} to be unordered, which the caller does not allow")
    if own.takes:
        said.append(f"the file declares {told(own.takes)}; it is judged on all that its signature takes")
    if own.placement != asked.placement:
        said.append(f"the file declares placement={own.placement!r}; it is held to {asked.placement!r}")
    return asked, tuple(said)
