"""One word, one thing: no class outside of tests/ and no file of harness/ has the name of another one."""

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GIVEN = {"__init__.py", "__main__.py"}
"""Names that Python gives, and not we: of the file of a package, and of what `python3 -m` runs of it."""


def test_no_name_of_a_class_stands_for_two_things():
    files = defaultdict[str, set[str]](set)
    for folder in ("harness", "reports", "references", "cases", "kernels", "docs"):
        for file in (ROOT / folder).rglob("*.py"):
            if "templates" not in file.parts:
                text = file.read_text(encoding="utf-8")
                tree = ast.parse(text if re.search(r"^\s*class ", text, re.MULTILINE) else "")
                for node in ast.walk(tree):
                    if isinstance(node, ast.ClassDef):
                        files[node.name].add(str(file.relative_to(ROOT)))
    assert {name: sorted(found) for name, found in files.items() if len(found) > 1} == {}


def test_no_name_of_a_file_stands_for_two_modules():
    """The templates of an op are left out: its reference, cases and kernels are files of one name, that of the op."""
    files = defaultdict[str, list[str]](list)
    for file in sorted((ROOT / "harness").rglob("*.py")):
        if file.name not in GIVEN and "templates" not in file.parts:
            files[file.name].append(str(file.relative_to(ROOT)))
    assert files, f"no Python file in {ROOT / 'harness'}"
    assert {name: found for name, found in files.items() if len(found) > 1} == {}
