"""Make `harness`, lastbit's name up to version 0.1, a second name of the same modules; it goes with version 0.3."""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

import lastbit


class SameModules:
    """Find `harness.x`, and load `lastbit.x` in its place."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        ours = name.startswith("harness.") and name != "harness.__main__" and sys.modules.get("harness") is lastbit
        return spec_from_loader(name, cls) if ours else None

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        """Leave it to the import system to make a module, which nobody gets to see."""

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(module.__name__.replace("harness", "lastbit", 1))


warnings.warn("harness is called lastbit now: from lastbit import …", DeprecationWarning, stacklevel=2)
sys.meta_path.insert(0, SameModules)
sys.modules |= {
    name.replace("lastbit", "harness", 1): module
    for name, module in sys.modules.items()
    if name.partition(".")[0] == "lastbit"
}
