"""One word, one thing: no two files of harness/ and reports/ define a class of the same name."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_no_name_of_a_class_stands_for_two_things():
    files = defaultdict[str, set[str]](set)
    for folder in ("harness", "reports"):
        for file in (ROOT / folder).rglob("*.py"):
            if "templates" not in file.parts:
                tree = ast.parse(file.read_text(encoding="utf-8"))
                for node in ast.walk(tree):
                    if isinstance(node, ast.ClassDef):
                        files[node.name].add(str(file.relative_to(ROOT)))
    assert {name: sorted(found) for name, found in files.items() if len(found) > 1} == {}
