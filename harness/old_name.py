"""Let `from harness import …` find lastbit, whose name was `harness` up to version 0.1; it goes with version 0.3.

Importing lastbit puts `OldName` behind all other finders, so that a module `harness` of somebody else is never hidden.
"""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, spec_from_file_location, spec_from_loader
from pathlib import Path
from types import ModuleType

_OLD, _NEW = "harness", "lastbit"


class OldName(Loader):
    """Find `harness` as a module that has what lastbit has."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_from_loader(name, cls(), is_package=True) if name == _OLD else None

    @classmethod
    def module(cls, name: str) -> ModuleType:
        """Return the module, loaded."""
        spec = spec_from_loader(name, loader := cls(), is_package=True)
        assert spec
        loader.exec_module(made := module_from_spec(spec))
        return made

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to the import system to make a module."""

    def exec_module(self, module: ModuleType) -> None:
        warnings.warn(f"{_OLD} is called {_NEW} now: from {_NEW} import …", DeprecationWarning, stacklevel=2)
        module.__getattr__ = lambda name: getattr(import_module(_NEW), name)  # type: ignore[method-assign]
        sys.meta_path.insert(0, Parts)  # before finders that would load the files of lastbit.x a second time
        # What is there already is no submodule that an import would set: lastbit.kernel is the decorator, and stays it.
        parts = [part for part in sys.modules if part.startswith(f"{_NEW}.")]
        sys.modules.update({part.replace(_NEW, _OLD, 1): sys.modules[part] for part in parts})


class Parts(Loader):
    """Find `harness.x`, and load `lastbit.x` in its place."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith(f"{_OLD}.") or not isinstance(
            getattr(sys.modules.get(_OLD), "__loader__", None), OldName
        ):
            return None
        if name == f"{_OLD}.__main__":  # python3 -m harness
            return spec_from_file_location(name, Path(__file__).with_name("__main__.py"))
        return spec_from_loader(name, cls())

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to the import system to make a module, which nobody gets to see."""

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(module.__name__.replace(_OLD, _NEW, 1))
