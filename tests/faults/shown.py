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
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SLOW = 0.3  # seconds of the processor; half of the faults take less
MOST = 10  # cases that are tried then: smaller ones come first, and few after these are faster
WORTH = 0.7  # of the time of the first case, which other faults share: its problem is judged once for all of them


def first_shown(number: int) -> tuple[str, tuple[int, int]]:
    """Return a fault, and the numbers of the cases that show it first, with stages and without.

    Where judging these is slow, it is the fastest of the smallest cases that shows both by the names of the fault.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path[:0] = [str(ROOT / "harness" / "checkout"), str(ROOT), str(ROOT / "tests")]
    from tests.faults import hunt
    from tests.faults.plant import alternatives, planted
    from tests.kernels.test_faults import CPU, SEEN, cases_for

    fault = SEEN[number]
    cases = list(cases_for(fault))
    smallest = sorted(range(1, len(cases) + 1), key=lambda n: sum(tensor.numel for tensor in cases[n - 1].tensors))
    with planted(fault) as kernel:
        alone = hunt.without_stages(kernel)

        def seconds(shown: tuple[int, int]) -> float:
            """Return the time in which cases show the fault, with stages and without; infinite if they do not."""
            began = time.process_time()
            seen = [hunt.hunt(one, cases[n - 1 : n], CPU) for one, n in zip((kernel, alone), shown, strict=True)]
            names = alternatives(fault.exposed), alternatives(fault.hidden)
            if not all(one and one.named in own for one, own in zip(seen, names, strict=True)):
                return math.inf
            return time.process_time() - began

        exposed = hunt.hunt(kernel, cases, CPU)
        assert exposed is not None
        # The same results are judged with stages and without, so that it is not seen earlier without.
        hidden = hunt.hunt(alone, cases, CPU, start=exposed.cases)
        assert hidden is not None
        first = exposed.cases, hidden.cases
        if (least := seconds(first)) > SLOW:
            times = {first: WORTH * least} | {(n, n): seconds((n, n)) for n in smallest[:MOST]}
            first = min(times, key=lambda shown: times[shown])
    return str(fault), first


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
