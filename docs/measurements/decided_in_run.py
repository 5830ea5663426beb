"""What share of each result a run decided: elements that could not have been otherwise, and rows that were explained.

`python docs/measurements/decided_in_run.py RUN [RUN …]` prints a table with a column for the run in each folder.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "harness" / "checkout"), str(ROOT)]

from lastbit.reports import records  # noqa: E402 (of this checkout)

Key = tuple[str, str, str, str]


def shares(folder: Path) -> dict[Key, float]:
    """Map op, kernels' family, result and dtype to the share decided, over all counted cases."""
    numel, decided = defaultdict[Key, int](int), defaultdict[Key, int](int)
    for result in records.read(folder).results:
        for stage in result.stages:
            if stage.result and result.counted:
                key = (result.op, result.kernel.partition("[")[0], stage.name, stage.dtype)
                numel[key] += stage.cumulative.numel
                decided[key] += stage.decided
    return {key: decided[key] / count for key, count in numel.items() if count}


def main() -> None:
    runs = [shares(Path(folder)) for folder in sys.argv[1:]]
    print("| op | kernels | result | dtype |", " | ".join(sys.argv[1:]), "|")
    print("|---|---|---|---|" + "---|" * len(runs))
    for key in sorted(set().union(*runs)):
        print("|", " | ".join(key), "|", " | ".join(f"{100 * r[key]:.1f} %" if key in r else "–" for r in runs), "|")


if __name__ == "__main__":
    main()
