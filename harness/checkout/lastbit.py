"""Make `import lastbit` find the folders of this checkout, where it is not installed.

`python3 harness verify …` puts this folder on sys.path; `PYTHONPATH=harness/checkout python3 …` does it for a program.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

_ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = {"lastbit": _ROOT / "harness"}
_FOLDERS |= {f"lastbit.{name}": _ROOT / name for name in ("references", "cases", "reports")}


class Folders:
    """Find the packages that are called otherwise than their folders."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not (folder := _FOLDERS.get(name)):
            return None
        return spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])


sys.meta_path.insert(0, Folders)
sys.modules.pop("lastbit", None)  # this module, in whose place the next line puts the package
import_module("lastbit")
if __name__ == "__main__":  # python3 -m lastbit
    raise SystemExit(import_module("lastbit.cli").main())
