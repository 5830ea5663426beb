"""Write shown.json: which generated case shows each fault first, and which one if the kernel gives its results alone.

Run `python tests/faults/shown.py` after cases or faults changed: a test whose case shows nothing hunts for one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SLOW = 3.0  # seconds; a search for what explains the rows of a case may take ten


def first_shown(number: int) -> tuple[str, tuple[int, int]]:
    """Return a fault, and the numbers of the cases that show it with stages and without: the first that is not slow."""
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path[:0] = [str(ROOT / "harness" / "checkout"), str(ROOT), str(ROOT / "tests")]
    from tests.faults import hunt
    from tests.faults.plant import planted
    from tests.kernels.test_faults import CPU, SEEN, cases_for

    fault = SEEN[number]
    cases = list(cases_for(fault))
    with planted(fault) as kernel:
        exposed = first = hunt.hunt(kernel, cases, CPU)
        while exposed is not None and seconds(lambda at=exposed.cases: hunt.hunt(kernel, cases, CPU, start=at)) > SLOW:
            exposed = hunt.hunt(kernel, cases, CPU, start=exposed.cases + 1)
        exposed = exposed or first
        assert exposed is not None
        # The same results are judged with stages and without, so that it is not seen earlier without.
        hidden = hunt.hunt(hunt.without_stages(kernel), cases, CPU, start=exposed.cases)
        assert hidden is not None
    return str(fault), (exposed.cases, hidden.cases)


def seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path[:0] = [str(ROOT / "harness" / "checkout"), str(ROOT), str(ROOT / "tests")]
    from tests.kernels.test_faults import SEEN

    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        found = dict(pool.map(first_shown, range(len(SEEN))))
    lines = (f"{json.dumps(name)}: {json.dumps(own)}" for name, own in found.items() if own != (1, 1))
    Path(__file__).with_suffix(".json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
