"""Places in the text of a kernel at which its operations stand."""

from __future__ import annotations

import os
import sys
import sysconfig
from functools import cache
from types import FrameType

from lastbit.interpret.places import Place, place_of

Places = tuple[Place, ...]


def places(frame: FrameType | None, upto: FrameType | None = None) -> Places:
    """Return the places in kernels at which a frame and its callers are, the innermost first.

    Frames of Python, torch, Triton, numpy and lastbit are left out, and all from `upto` on.
    """
    found: list[Place] = []
    delayed = None
    while frame is not None and frame is not upto:
        code = frame.f_code
        if is_of_a_kernel(code.co_filename):
            if delayed != code.co_filename:
                found.append(place_of(code, frame.f_lasti))
            delayed = code.co_filename if code.co_name == "<lambda>" else None
        frame = frame.f_back
    return tuple(found)


def is_lastbits_own(frame: FrameType | None) -> bool:
    """Return whether a frame is in lastbit itself, called by a kernel, as where lastbit guards its allocations."""
    while frame is not None:
        file = frame.f_code.co_filename
        if is_of_a_kernel(file):
            return False
        if file.startswith(_OWN) and not file.startswith(_HERE):
            return True
        frame = frame.f_back
    return False


@cache
def is_of_a_kernel(file: str) -> bool:
    """Return whether a file is none of Python's, torch's, Triton's, numpy's and lastbit's."""
    if file.startswith("<"):
        return False
    if file.startswith(_packages()):
        return False
    return "site-packages" in file or not file.startswith(_PYTHON)


_HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
_OWN = os.path.join(os.path.dirname(os.path.dirname(_HERE)), "")
_PYTHON = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")})


def _packages() -> tuple[str, ...]:
    """Return the folders of lastbit, and of torch, Triton and numpy as far as they are loaded."""
    files = (getattr(sys.modules.get(name), "__file__", None) for name in ("torch", "triton", "numpy"))
    return (_OWN, *(os.path.join(os.path.dirname(file), "") for file in files if file))
