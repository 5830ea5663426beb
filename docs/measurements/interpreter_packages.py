"""Which Triton kernels of public packages the interpreter runs on a CPU. Prints Markdown.

    pip download --no-deps -d WHEELS lmdeploy xformers fla-core liger-kernel …
    for w in WHEELS/*.whl; do unzip -q $w '*.py' '*METADATA' -d SOURCES/$(basename $w | cut -d- -f1); done
    TRITON_INTERPRET=1 PYTHONPATH=harness/checkout:OTHERS python docs/measurements/interpreter_packages.py SOURCES

Only the modules that hold kernels are imported: the packages that they lie in are stood for by empty ones. What else
they import lies in OTHERS: einops, transformers, pydantic, psutil, msgspec, orjson, pybase64, tqdm, nvidia-ml-py.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import torch
import torch.utils._triton

from docs.measurements.interpreter_package_kernels import Result, tries
from lastbit.interpret import install

WHOLE = ("fla_core",)
"""Folders whose packages are imported as they are, because their modules ask the package for its version."""


def imported(sources: Path, place: str) -> ModuleType:
    """Import a module by `folder/package.module`, its parents empty but where they hold what modules ask for."""
    folder, name = place.split("/")
    parts = name.split(".")
    if folder in WHOLE:
        sys.path.insert(0, str(sources / folder))
        return importlib.import_module(name)
    for i in range(1, len(parts)):
        parent = ".".join(parts[:i])
        if parent not in sys.modules:
            module = ModuleType(parent)
            module.__version__ = "0"  # type: ignore[attr-defined]
            module.__path__ = [str(sources / folder / Path(*parts[:i]))]
            module.__spec__ = ModuleSpec(parent, None, is_package=True)
            sys.modules[parent] = module
    return importlib.import_module(name)


def outcome(sources: Path, place: str, attempt: Callable[[ModuleType], Result]) -> str:
    try:
        actual, expected = (x.double() for x in attempt(imported(sources, place)))
    except BaseException as error:
        return f"{type(error).__name__}: {error}".replace("\n", " ").replace("|", "\\|")[:200]
    return f"runs, {float((actual - expected).abs().max() / expected.abs().max()):.1e}"


def main() -> None:
    sources = Path(sys.argv[1])
    print("| module | kernel | result |\n|---|---|---|")
    for place, name, attempt in tries():
        print(f"| `{place.split('/')[1]}` | {name} | {outcome(sources, place, attempt)} |", flush=True)


if __name__ == "__main__":
    install()
    torch.utils._triton.has_triton = lambda: True  # torchao asks, and there is, interpreted
    main()
