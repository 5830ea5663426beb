"""Which files are a kernel's own: those of the repository that it is in, or else those of its folder.

Installed packages, unless they are named, and lastbit itself are nobody's own.
"""

from __future__ import annotations

import functools
from pathlib import Path

from lastbit.files import BUILT_IN, PACKAGE
from lastbit.trees import checkout_of

NOT_OWN = (PACKAGE, *(BUILT_IN / name for name in ("references", "cases", "reports")))
INSTALLED = ("site-packages", "dist-packages")


@functools.cache
def root_of(file: Path) -> Path:
    """Return the folder in which all files of a kernel of `file` are its own, but for those that are nobody's."""
    file = file.resolve()
    checkout = None if not {*INSTALLED}.isdisjoint(file.parts) else checkout_of(file.parent)
    return checkout.root.resolve() if checkout else file.parent


@functools.cache
def is_own(file: str, root: Path, packages: tuple[Path, ...] = ()) -> bool:
    """Return whether a file is below a kernel's root and neither installed nor lastbit's, or in one of the packages."""
    path = Path(file).resolve()
    others = any(path.is_relative_to(place) for place in NOT_OWN) or not {*INSTALLED}.isdisjoint(path.parts)
    return (path.is_relative_to(root) and not others) or any(path.is_relative_to(place) for place in packages)
