"""Count the branches of kernels that the cases of a run took, kernel by kernel.

    python docs/measurements/branches.py kernels/external --watch liger_kernel --watch fla --watch conch

The arguments are those of `lastbit verify`, which runs. Prints two tables in Markdown: a row for each kernel, and one
for each branch that handles inputs and that no kernel took.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lastbit.branches.branch_sites import NEVER, sites_of, unreached
from lastbit.cli import main as lastbit
from lastbit.interpret.decisions import Decision
from lastbit.reports.records import read
from lastbit.run import Run
from lastbit.verify import assemble


def ways_of(decided: Collection[Decision]) -> int:
    """Count the ways of the sites that some call came to, masks and refusals left out."""
    seen = {(file, line, column) for file, line, column, _ in decided}
    sites = ((file, site) for file in {file for file, _, _ in seen} for site in sites_of(file))
    return sum(
        not site.why.get(way)
        for file, site in sites
        if site.kind in NEVER and (file, site.line, site.column) in seen
        for way, _ in zip((1, 0), NEVER[site.kind], strict=False)
    )


def place(file: str) -> str:
    """Return a file without the folder that its packages, or its kernels, are in."""
    folders = [folder for folder in Path(file).parents if folder.name in ("site-packages", "kernels")]
    return str(Path(file).relative_to(folders[-1])) if folders else file


def rows_of(run: Run, taken: dict[str, set[Decision]]) -> list[str]:
    """Return a row for each kernel: verdict, cases, branches taken of those that it came to."""
    found = []
    for kernel, device in run.subjects():
        decided = taken.get(kernel, set())
        left = [one for one in unreached({kernel: decided}, len) or () if not one.why]
        total = ways_of(decided)
        verdict = run.verdict(kernel, device).name
        found.append(f"| `{kernel}` | {verdict} | {run.judged_cases([kernel])} | {total - len(left)} of {total} |")
    left = [one for one in unreached(taken, len) or () if not one.why]
    total = ways_of(set().union(*taken.values()))
    return [*found, f"| together | | {run.judged_cases(list(taken))} | {total - len(left)} of {total} |"]


def main(*arguments: str) -> None:
    """Verify kernels, and print both tables of the run."""
    taken, merged = dict[str, set[Decision]](), assemble.merged

    def keeping(told: Any) -> Any:
        """Keep which branches each kernel took: a run's records have those alone that none took."""
        taken.update(merged(told) or {})
        return dict(taken) or None

    with tempfile.TemporaryDirectory() as folder, patch.object(assemble, "merged", keeping):
        lastbit(["verify", *arguments, "--run-folder", folder])
        run = read(Path(folder))
    print("| kernel | verdict | cases | branches taken |\n| --- | --- | ---: | ---: |")
    print(*rows_of(run, taken), sep="\n")
    every = unreached(taken, len) or ()
    print("\n| place | branch | never | kernels that came there |\n| --- | --- | --- | ---: |")
    for one in every:
        if not one.why:
            text = one.text.replace("|", "\\|")
            print(f"| {place(one.file)}:{one.line} | `{text}` | {one.never} | {len(one.kernels)} |")
    marked = Counter(one.why for one in every if one.why)
    print("\nbesides, not counted:", ", ".join(f"{count} × {why}" for why, count in marked.items()))


if __name__ == "__main__":
    main(*sys.argv[1:])
