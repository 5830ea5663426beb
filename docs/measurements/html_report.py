"""Size of the HTML report, and the time to make and to load it, for 1,000 and for 100,000 records.

Run `PYTHONPATH=harness/checkout python docs/measurements/html_report.py RUN`, where RUN is a folder that
`lastbit verify` left. The results of that run are drawn again and again, with other seeds and errors, as a longer run
would have them. It needs Chromium, chromedriver and selenium. The time to load is that from the start of the navigation
to the end of the load event, and to the first frame after it: the median of five loads of a page on disk, in a browser
without a window.
"""

from __future__ import annotations

import random
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from selenium import webdriver

from lastbit.reports import html, records
from lastbit.result import CaseResult, StageResult
from lastbit.run import Run

SIZES = (1_000, 100_000)
LOADS = 5

LOADED = """
const done = arguments[0];
requestAnimationFrame(() => setTimeout(() => {
  const [navigation] = performance.getEntriesByType("navigation");
  done([navigation.loadEventEnd, performance.now()]);
}));
"""


def grown(run: Run, count: int) -> Run:
    """Make a run with `count` results."""
    draw = random.Random(0)
    return replace(run, results=tuple(_varied(draw.choice(run.results), draw) for _ in range(count)))


def _varied(result: CaseResult, draw: random.Random) -> CaseResult:
    head, _, _ = result.case.rpartition(" seed=")
    stages = tuple(_varied_stage(stage, draw) for stage in result.stages)
    return replace(result, case=f"{head} seed={draw.getrandbits(40)}", stages=stages)


def _varied_stage(stage: StageResult, draw: random.Random) -> StageResult:
    seen = stage.cumulative
    return replace(stage, cumulative=replace(seen, squared_error=seen.squared_error * 10 ** draw.uniform(-2, 2)))


def loads(page: Path) -> list[tuple[float, float]]:
    """Time every load: seconds to the load event, and to the frame after it."""
    options, service = webdriver.ChromeOptions(), webdriver.ChromeService(shutil.which("chromedriver"))
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("--headless=new", "--no-sandbox"):
        options.add_argument(argument)
    with webdriver.Chrome(options=options, service=service) as browser:
        found = []
        for _ in range(LOADS):
            browser.get(page.as_uri())
            event, frame = browser.execute_async_script(LOADED)
            found.append((event / 1000, frame / 1000))
    return found


def main() -> None:
    run = records.read(Path(sys.argv[1]))
    print("| records | stage results | page | made in | load event | next frame |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for count in SIZES:
            larger = grown(run, count)
            start = time.perf_counter()
            text = html.page(larger)
            made = time.perf_counter() - start
            page = Path(folder) / f"{count}.html"
            page.write_text(text, encoding="utf-8")
            event, frame = (statistics.median(times) for times in zip(*loads(page), strict=True))
            stages = sum(len(result.stages) for result in larger.results)
            size = page.stat().st_size / 2**20
            print(
                f"| {count:,} | {stages:,} | {size:.2f} MiB | {made:.1f} s | {event:.2f} s | {frame:.2f} s |",
                flush=True,
            )


if __name__ == "__main__":
    main()
