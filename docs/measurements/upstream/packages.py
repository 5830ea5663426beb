"""Where the kernels of other packages come from: from whatever Python finds, unchanged.

Install mamba-ssm, fla-core and einops. Where mamba-ssm cannot be built, which takes CUDA, unpack its source archive and
put that folder on PYTHONPATH; for fla-core, its wheel serves as well. Of mamba-ssm a single file is executed, of
fla-core the modules are imported.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

from lastbit.errors import UsageError
from lastbit.kernel import load_file


def imported(module: str, distribution: str) -> ModuleType:
    """Import the module as usual; a UsageError says that it or something that it needs is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _missing(module, distribution, str(error)) from error


def executed(package: str, file: str, distribution: str) -> ModuleType:
    """Load a file of a package by itself: importing the package would need its compiled extensions.

    Raises:
        UsageError: there is no such package or file, or einops is missing.
    """
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec and spec.submodule_search_locations else []
    path = next((path for folder in folders if (path := Path(folder) / file).is_file()), None)
    if path is None:
        raise _missing(f"{package}/{file}", distribution, f"looked in {list(folders) or 'sys.path'}")
    imported("einops", "einops")
    return load_file(path)


def _missing(what: str, distribution: str, reason: str) -> UsageError:
    return UsageError(
        f"{what} cannot be loaded ({reason}). Install {distribution} and einops, or put the unpacked sources of "
        f"{distribution} on PYTHONPATH; docs/measurements/upstream/packages.py says how."
    )
