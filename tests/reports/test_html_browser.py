"""The HTML report in a browser: it opens from disk, asks nobody for anything, and can be filtered, sorted and copied.

Headless Chromium opens the page. Without Chromium, chromedriver or selenium the tests are skipped, except where the
environment variable CI is set.
"""

import importlib.util
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lastbit.reports import html, summary
from lastbit.run import Run
from tests.reports.test_html import NASTY, full_run, passed

MISSING = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
MISSING += [] if importlib.util.find_spec("selenium") else ["selenium"]

pytestmark = pytest.mark.skipif(
    bool(MISSING) and not os.environ.get("CI"), reason=f"not installed: {', '.join(MISSING)}; CI must have it"
)

SHOWN = "return [...document.querySelectorAll(arguments[0])].filter((e) => e.checkVisibility()).map((e) => e.innerText)"

PALE = """
const context = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
function painted(...colours) {
  for (const colour of ["white", ...colours]) { context.fillStyle = colour; context.fillRect(0, 0, 1, 1); }
  const channels = [...context.getImageData(0, 0, 1, 1).data].map((value) => value / 255);
  const linear = channels.map((v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
  return .2126 * linear[0] + .7152 * linear[1] + .0722 * linear[2];
}
const found = [];
for (const element of document.querySelectorAll("body *:not(svg *, script, style, option)")) {
  const own = [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.textContent.trim());
  if (!own || !element.checkVisibility()) continue;
  const behind = [];
  for (let e = element; e; e = e.parentElement) behind.unshift(getComputedStyle(e).backgroundColor);
  const [low, high] = [painted(...behind), painted(...behind, getComputedStyle(element).color)].sort((a, b) => a - b);
  const contrast = (high + .05) / (low + .05);
  if (contrast < 4.5) found.push(`${element.outerHTML.slice(0, 80)}: ${contrast.toFixed(2)}`);
}
return found;
"""
"""Elements with text of which the contrast to what is behind is below 4.5, as WCAG 2 computes it."""

Browser = Any


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    assert not MISSING, f"not installed: {', '.join(MISSING)}"
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    with webdriver.Chrome(options=options, service=service) as browser:
        yield browser


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "run.html"
    path.write_text(html.page(full_run(), base=Run(full_run().results[:3])), encoding="utf-8")
    return path


@pytest.fixture
def browser(chromium: Browser, path: Path) -> Browser:
    emulate(chromium, width=1280, scheme="light")
    chromium.get(path.as_uri())
    for kind in ("browser", "performance"):
        chromium.get_log(kind)
    chromium.get(path.as_uri())
    return chromium


def emulate(browser: Browser, *, width: int, scheme: str) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def wait(browser: Browser, condition: str, *arguments: object) -> None:
    """Until the JavaScript expression holds."""
    from selenium.webdriver.support.wait import WebDriverWait

    WebDriverWait(browser, 20).until(
        lambda b: b.execute_script(f"return Boolean({condition})", *arguments), f"never true: {condition}"
    )


def draw_charts(browser: Browser) -> int:
    """Bring every chart into sight, and wait for it; how many there are."""
    figures = browser.find_elements("css selector", "figure")
    for figure in figures:
        browser.execute_script("arguments[0].scrollIntoView()", figure)
        wait(browser, "arguments[0].querySelector('svg .mark-rect path, svg .mark-symbol path')", figure)
    return len(figures)


def shown(browser: Browser, selector: str) -> list[str]:
    return [text.strip() for text in browser.execute_script(SHOWN, selector)]


def kernels(browser: Browser) -> list[str]:
    return [text.splitlines()[0] for text in shown(browser, "#kernels tbody th")]


def choose(browser: Browser, name: str, value: str) -> None:
    from selenium.webdriver.support.select import Select

    Select(browser.find_element("name", name)).select_by_visible_text(value)


def column(browser: Browser, name: str) -> Any:
    return browser.find_element("xpath", f"//section[@id='kernels']//th[normalize-space()='{name}']")


def keys(*names: str) -> list[str]:
    from selenium.webdriver.common.keys import Keys

    return [getattr(Keys, name) for name in names]


def press(browser: Browser, *names: str) -> None:
    """Keys in turn, to whatever has the focus."""
    for key in keys(*names):
        browser.switch_to.active_element.send_keys(key)


def test_no_error_and_no_request(browser: Browser, path: Path) -> None:
    assert draw_charts(browser) == 8
    assert [entry for entry in browser.get_log("browser") if entry["level"] != "INFO"] == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = {m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"}
    assert {url for url in sent if not url.startswith("data:")} == {path.as_uri()}
    assert browser.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)") == []


def test_policy_stops_what_a_name_could_start(browser: Browser) -> None:
    stopped = browser.execute_async_script("""
        const done = arguments[0], found = [];
        document.addEventListener("securitypolicyviolation", (event) => {
          found.push(event.effectiveDirective);
          if (found.length === 3) done(found.sort());
        });
        const script = document.createElement("script");
        script.textContent = "document.title = 'taken over'";
        const image = document.createElement("img");
        image.src = "http://127.0.0.1:9/image";
        document.body.append(script, image);
        fetch("http://127.0.0.1:9/").catch(() => {});
    """)
    assert stopped == ["connect-src", "img-src", "script-src-elem"]
    assert browser.title == "ERRORED – lastbit"


def test_filter_by_kernel(browser: Browser) -> None:
    draw_charts(browser)
    assert set(kernels(browser)) == {"good", "wrong", "vague", "blind", "masked", NASTY.strip()}
    choose(browser, "kernel", "wrong")
    wait(browser, "document.querySelector('output').textContent")
    assert kernels(browser) == ["wrong"]
    assert len(shown(browser, "#findings > .finding")) == 1
    assert shown(browser, "section.op > h2") == ["rms_norm"]
    heat_map = browser.find_element("css selector", "figure[data-chart=stages]")
    browser.execute_script("arguments[0].scrollIntoView()", heat_map)
    wait(browser, "!arguments[0].textContent.includes('good')", heat_map)
    assert "wrong" in heat_map.text
    browser.find_element("css selector", "#filter [type=reset]").click()
    wait(browser, "!document.querySelector('output').textContent")
    assert len(kernels(browser)) == 7
    wait(browser, "arguments[0].textContent.includes('good')", heat_map)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("op", "mask", ["masked"]),
        ("device", "cuda:0", ["good"]),
        ("dtype", "fp16", ["good"]),
        ("verdict", "FAILED", ["wrong"]),
    ],
)
def test_filters(browser: Browser, name: str, value: str, expected: list[str]) -> None:
    choose(browser, name, value)
    wait(browser, "document.querySelector('output').textContent")
    assert kernels(browser) == expected


def test_search_needs_every_word(browser: Browser) -> None:
    words = browser.find_element("name", "words")
    words.send_keys("GOOD cuda")
    wait(browser, "document.querySelector('output').textContent")
    assert kernels(browser) == ["good"]
    words.send_keys(" nowhere")
    wait(browser, "document.querySelector('output').textContent.startsWith('0 of ')")
    assert kernels(browser) == []
    assert "No row passes the filter." in shown(browser, "#kernels .none")
    assert "No finding passes the filter." in shown(browser, "#findings .none")


def test_chart_without_data_says_so(browser: Browser) -> None:
    draw_charts(browser)
    choose(browser, "kernel", NASTY)
    figure = browser.find_element("css selector", "figure")
    wait(browser, "arguments[0].querySelector('.none').hidden === false || arguments[0].closest('.op').hidden", figure)


def test_sort_by_keyboard(browser: Browser) -> None:
    header = column(browser, "outside")
    assert header.get_attribute("aria-sort") is None
    outside = "#kernels tbody tr td:nth-last-child(3)"
    button = header.find_element("tag name", "button")
    button.send_keys(keys("ENTER")[0])
    assert header.get_attribute("aria-sort") == "descending"
    assert shown(browser, outside) == ["7", "0", "0", "0", "0", "0", "0"]
    button.send_keys(keys("SPACE")[0])
    assert header.get_attribute("aria-sort") == "ascending"
    assert shown(browser, outside)[-1] == "7"
    column(browser, "kernel").find_element("tag name", "button").click()
    assert header.get_attribute("aria-sort") is None
    assert kernels(browser)[0] == "blind"


def test_copy_by_keyboard(browser: Browser) -> None:
    browser.execute_cdp_cmd(
        "Browser.grantPermissions", {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    )
    command = browser.find_element("css selector", "#findings .finding.failed .command")
    button = command.find_element("tag name", "button")
    assert button.accessible_name == "Copy the command"
    button.send_keys(keys("ENTER")[0])
    wait(browser, "arguments[0].textContent.includes('Copied')", command)
    copied = browser.execute_async_script("navigator.clipboard.readText().then(arguments[0], arguments[0])")
    assert copied == summary.repro_line(full_run().results[4], "--kernels mine")


def test_keyboard_reaches_everything_and_everything_has_a_name(browser: Browser) -> None:
    press(browser, "TAB")
    assert browser.switch_to.active_element.text == "Skip to the results"
    controls = browser.find_elements("css selector", "#filter input, #filter select, button, [tabindex], summary")
    assert len(controls) > 30
    visible = [control for control in controls if control.is_displayed()]
    assert [control.get_attribute("outerHTML") for control in visible if not control.accessible_name] == []
    assert all(control.get_attribute("tabindex") in (None, "0") for control in controls)


@pytest.mark.parametrize(("width", "height"), [(1280, 700), (390, 844)])
def test_first_screen_has_the_findings(browser: Browser, width: int, height: int) -> None:
    emulate(browser, width=width, scheme="light")
    selector = "h1, #findings h3, #findings .gist, #filter, #kernels h2"
    script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.getBoundingClientRect().bottom)"
    found = browser.execute_script(script, selector)
    assert len(found) == 7
    assert found == sorted(found)
    assert found[4] < height, "the verdict, and both findings with what is wrong"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phone_shows_the_page_without_scrolling_sideways(browser: Browser, scheme: str, tmp_path: Path) -> None:
    wide = tuple(passed(kernel=f"a_kernel_with_a_long_name[{number}]") for number in range(12))
    path = tmp_path / "wide.html"
    path.write_text(html.page(replace(full_run(), results=full_run().results + wide)), encoding="utf-8")
    emulate(browser, width=390, scheme=scheme)
    browser.get(path.as_uri())
    draw_charts(browser)
    for details in browser.find_elements("css selector", "details"):
        browser.execute_script("arguments[0].open = true", details)
    assert browser.execute_script("return document.documentElement.scrollWidth") == 390
    assert browser.execute_script(PALE) == []
    for content in browser.find_elements("css selector", "#op-1 .table, #op-1 figure[data-chart=stages] .scroll"):
        assert browser.execute_script("return arguments[0].scrollWidth > arguments[0].clientWidth", content)


def test_dark_mode(browser: Browser) -> None:
    draw_charts(browser)
    assert lightness(browser, "body", "background-color") > 0.9
    assert lightness(browser, "body", "color") < 0.2
    chart = "#op-1 figure[data-chart=ulps] .role-axis-label text"
    before = lightness(browser, chart, "fill")
    emulate(browser, width=1280, scheme="dark")
    assert lightness(browser, "body", "background-color") < 0.15
    assert lightness(browser, "body", "color") > 0.8
    browser.execute_script("document.querySelector('#op-1 figure[data-chart=ulps]').scrollIntoView()")
    wait(browser, f"getComputedStyle(document.querySelector({json.dumps(chart)})).fill === 'rgb(154, 166, 181)'")
    assert lightness(browser, chart, "fill") > before


def lightness(browser: Browser, selector: str, name: str) -> float:
    """Mean of red, green and blue of a colour of an element, from 0 to 1."""
    script = "return getComputedStyle(document.querySelector(arguments[0])).getPropertyValue(arguments[1])"
    channels = browser.execute_script(script, selector, name).partition("(")[2].rstrip(")").split(",")
    return sum(float(channel) for channel in channels[:3]) / 3 / 255
