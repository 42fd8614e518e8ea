"""The report in headless Chromium: it renders without a complaint, shows the result's numbers, and answers to its reader."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from result_example import example_result
from selenium.webdriver import ActionChains, Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from data.files import write_json
from distill.config.layout import RESULT
from distill.report.page import write_page

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not BROWSER or not DRIVER, reason="needs chromium and chromedriver (apt install chromium-driver)"
)
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-dev-shm-usage",
)
HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
TOKENS = """return [...document.querySelectorAll('.tokens')].map(group => [...group.querySelectorAll('.t')].map(
    token => [token.dataset.by, Number(token.dataset.id), Number(token.dataset.block)]))"""

COLOURS = """const paint = (one) => getComputedStyle(document.querySelector(one)); const page = paint('body').backgroundColor;
    return [page, [paint('h1').color, page], [paint('.setting').color, page],
    [paint('.outcome').color, paint('.outcome').backgroundColor], ...['draft', 'target', 'bonus'].map(by =>
    [paint(`.tokens [data-by=${by}]`).color, paint(`.tokens [data-by=${by}]`).backgroundColor])]"""


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    made = copy.deepcopy(example_result(responses=3))
    made["token_view"]["responses"][1]["prompt"] = HOSTILE
    made["token_view"]["responses"][1]["tokens"][4]["text"] = HOSTILE
    made["token_view"]["responses"][1]["tokens"][4]["draft_top"][0][0] = HOSTILE
    made["disagreements"][0]["context"] = HOSTILE
    return made


@pytest.fixture(scope="module")
def page(result: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("report")
    write_json(folder / RESULT, result)
    return write_page(folder).as_uri()


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    options = ChromeOptions()
    assert BROWSER is not None
    options.binary_location = BROWSER
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = Chrome(options=options, service=Service(DRIVER, log_output=subprocess.DEVNULL))
    # A window without the system's focus tells the page of no focus.
    started.execute_cdp_cmd("Emulation.setFocusEmulationEnabled", {"enabled": True})
    yield started
    started.quit()


@pytest.fixture
def browser(chromium: Chrome, page: str) -> Chrome:
    """The page newly opened: light, wide, on a screen."""
    chromium.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"media": "", "features": [{"name": "prefers-color-scheme", "value": "light"}]}
    )
    show_at(chromium, 1100)
    chromium.get(page)
    return chromium


def show_at(browser: Chrome, width: int) -> None:
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def tooltip(browser: Chrome) -> list[list[Any]] | None:
    """The two columns of the tooltip as (text, percent) and the first line; None when it is hidden."""
    return browser.execute_script(
        """const tip = document.getElementById('tooltip'); if (tip.hidden) return null;
        return [...tip.querySelectorAll('ol')].map(list => [...list.children].map(
            row => [row.children[0].textContent, row.children[1].textContent]))"""
    )


def shown_top(pairs: list[list[Any]]) -> list[list[str]]:
    signs = {" ": "␣", "\n": "↵", "\t": "⇥"}
    texts = [
        "".join(signs.get(c, c) for c in text) if not text.strip() else ("␣" + text[1:] if text[0] == " " else text)
        for text, _ in pairs
    ]
    return [[text, f"{100 * share:.1f} %"] for text, (_, share) in zip(texts, pairs, strict=True)]


def luminance(colour: str) -> float:
    channels = [int(part) / 255 for part in colour.strip("rgba()").split(",")[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_the_page_renders_asks_the_network_for_nothing_and_fits_any_screen(
    browser: Chrome, page: str, result: dict[str, Any]
) -> None:
    browser.get_log("browser")
    browser.get_log("performance")
    browser.get(page)
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = {event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"}
    assert page in asked, "the log is on"
    assert {url for url in asked if not url.startswith(("file:", "data:"))} == set()
    assert {url for url in asked if url.startswith("file:")} == {page}
    assert browser.title == "tiny: Pays off", "no text of a model has run"
    heading = browser.find_element(By.TAG_NAME, "h1")
    assert heading.text == result["verdict"]["headline"]
    assert heading.location["y"] < 300
    assert browser.find_element(By.CSS_SELECTOR, ".outcome").text == "Pays off", "a word, not only a colour"
    heights = browser.execute_script(
        "return [...document.querySelectorAll('figure img')].map(one => one.complete && one.getBoundingClientRect().height)"
    )
    assert len(heights) == 5
    assert min(heights) > 100
    for width in (320, 768):
        show_at(browser, width)
        browser.execute_script("for (const fold of document.querySelectorAll('details')) fold.open = true")
        sizes = browser.execute_script("return [document.scrollingElement.scrollWidth <= innerWidth, innerWidth]")
        assert sizes == [True, width], "nothing scrolls sideways"
    grounds = []
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": features})
        ground, *pairs = browser.execute_script(COLOURS)
        grounds.append(luminance(ground))
        for ink, paper in pairs:
            low, high = sorted((luminance(ink), luminance(paper)))
            assert (high + 0.05) / (low + 0.05) >= 4.5, f"{scheme}: {ink} on {paper} is hard to read (WCAG AA)"
    assert grounds[0] > 0.9
    assert grounds[1] < 0.05


def test_the_tokens_are_those_of_the_result_and_show_what_both_models_predicted(
    browser: Chrome, result: dict[str, Any]
) -> None:
    responses = result["token_view"]["responses"]
    assert browser.execute_script(TOKENS) == [
        [[t["by"], t["id"], t["block"]] for t in response["tokens"]] for response in responses
    ]
    token = browser.find_elements(By.CSS_SELECTOR, ".tokens")[0].find_elements(By.CSS_SELECTOR, ".t")[7]
    expected = responses[0]["tokens"][7]
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", token)
    assert tooltip(browser) is None
    ActionChains(browser).move_to_element(token).perform()
    assert tooltip(browser) == [shown_top(expected["target_top"]), shown_top(expected["draft_top"])]
    words = browser.find_element(By.ID, "tooltip").text
    assert f"id {expected['id']}" in words
    assert f"target {100 * expected['target_prob']:.1f} %, draft {100 * expected['draft_prob']:.1f} %" in words
    ActionChains(browser).move_to_element(browser.find_element(By.CSS_SELECTOR, "#tokens h2")).perform()
    assert tooltip(browser) is None
    # The same by keyboard.
    group = browser.find_elements(By.CSS_SELECTOR, ".tokens")[1]
    browser.execute_script("arguments[0].querySelector('[tabindex=\"0\"]').focus()", group)
    for _ in range(4):
        browser.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    shown = tooltip(browser)
    assert shown is not None
    assert shown[1][0][0] == HOSTILE, "as text"
    browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert tooltip(browser) is None
    assert browser.title == "tiny: Pays off", "no text of a model has run"
