"""Write shown.json: which generated case shows each fault first, and which one if the kernel gives its results alone.

Run `python tests/faults/shown.py` after cases or faults changed: a test whose case shows nothing hunts for one. Words
after it choose the faults whose names contain one of them; what is written of others stays.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SLOW = 1.0  # seconds of the processor; a search for what explains the rows of a case may take ten


def first_shown(number: int) -> tuple[str, tuple[int, int]]:
    """Return a fault, and the numbers of the cases that show it first, with stages and without.

    Where judging these is slow, it is the smallest case that shows both by the names that the fault has.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path[:0] = [str(ROOT / "harness" / "checkout"), str(ROOT), str(ROOT / "tests")]
    from tests.faults import hunt
    from tests.faults.plant import alternatives, planted
    from tests.kernels.test_faults import CPU, SEEN, cases_for

    fault = SEEN[number]
    cases = list(cases_for(fault))
    with planted(fault) as kernel:
        alone = hunt.without_stages(kernel)
        exposed = hunt.hunt(kernel, cases, CPU)
        assert exposed is not None
        first = exposed.cases
        # The same results are judged with stages and without, so that it is not seen earlier without.
        hidden = hunt.hunt(alone, cases, CPU, start=first)
        assert hidden is not None
        if seconds(lambda: hunt.hunt(kernel, cases[:first], CPU, start=first)) > SLOW:
            for at in sorted(range(len(cases)), key=lambda n: math.prod(cases[n].tensors[0].shape)):
                seen = [hunt.hunt(one, cases[at : at + 1], CPU) for one in (kernel, alone)]
                names = alternatives(fault.exposed), alternatives(fault.hidden)
                if all(one and one.named in own for one, own in zip(seen, names, strict=True)):
                    return str(fault), (at + 1, at + 1)
    return str(fault), (first, hidden.cases)


def seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path[:0] = [str(ROOT / "harness" / "checkout"), str(ROOT), str(ROOT / "tests")]
    from tests.kernels.test_faults import SEEN

    path, words = Path(__file__).with_suffix(".json"), sys.argv[1:]
    chosen = [n for n, fault in enumerate(SEEN) if not words or any(word in str(fault) for word in words)]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        found = json.loads(path.read_text()) | dict(pool.map(first_shown, chosen))
    numbers = {name: tuple(found.get(name, (1, 1))) for name in map(str, SEEN)}
    lines = (f"{json.dumps(name)}: {json.dumps(own)}" for name, own in numbers.items() if own != (1, 1))
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
