"""The report in headless Chromium: it renders without a complaint, shows the result's numbers, and answers to its reader."""

from __future__ import annotations

import base64
import copy
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from result_example import example_result
from selenium.webdriver import ActionChains, Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

from data.files import write_json
from distill.config.layout import RESULT
from distill.report.page import report_command
from speculative.measure.measured import DRAFT

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
    return report_command(folder).html.as_uri()


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


def test_it_renders_without_a_complaint_and_asks_for_nothing(
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
    assert len(heights) == 6
    assert min(heights) > 100


def test_a_script_error_would_be_seen(browser: Chrome, tmp_path: Path) -> None:
    browser.get_log("browser")
    (tmp_path / "bad.html").write_text("<script>missing.call()</script><img src='missing.png'>")
    browser.get((tmp_path / "bad.html").as_uri())
    seen: list[Any] = []  # They come when they come, and each is told once.
    until = time.monotonic() + 60
    while len(seen) < 2 and time.monotonic() < until:
        seen += [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert len(seen) == 2


def test_every_token_and_count_equals_the_result(browser: Chrome, result: dict[str, Any]) -> None:
    responses = result["token_view"]["responses"]
    assert browser.execute_script(TOKENS) == [
        [[t["by"], t["id"], t["block"]] for t in response["tokens"]] for response in responses
    ]
    shown = browser.execute_script(
        """return [...document.querySelectorAll('.response')].map(one => [one.dataset.key, Object.fromEntries(
            [...one.querySelectorAll('[data-count]')].map(count => [count.dataset.count, Number(count.textContent)]))])"""
    )
    for (key, counts), response in zip(shown, responses, strict=True):
        written = [token["by"] for token in response["tokens"]]
        assert key == response["key"]
        assert counts == {
            "tokens": response["tokens_count"],
            "blocks": response["blocks"],
            "accepted": response["accepted"],
            "drafted": response["drafted"],
            "target": written.count("target"),
            "bonus": written.count("bonus"),
        }
    legend = [item.text for item in browser.find_elements(By.CSS_SELECTOR, ".legend li")]
    every = [token["by"] for response in responses for token in response["tokens"]]
    assert [int(text.split()[-1]) for text in legend] == [every.count(by) for by in ("draft", "target", "bonus")]
    styles = browser.execute_script(
        """return ['draft', 'target', 'bonus'].map(by => getComputedStyle(
            document.querySelector(`.tokens [data-by=${by}]`)).textDecorationStyle)"""
    )
    assert styles == ["solid", "wavy", "double"], "writers differ without colour"


def test_pointing_at_a_token_shows_what_both_models_held_probable(browser: Chrome, result: dict[str, Any]) -> None:
    token = browser.find_elements(By.CSS_SELECTOR, ".tokens")[0].find_elements(By.CSS_SELECTOR, ".t")[7]
    expected = result["token_view"]["responses"][0]["tokens"][7]
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", token)
    assert tooltip(browser) is None
    ActionChains(browser).move_to_element(token).perform()
    assert tooltip(browser) == [shown_top(expected["target_top"]), shown_top(expected["draft_top"])]
    words = browser.find_element(By.ID, "tooltip").text
    assert f"id {expected['id']}" in words
    assert f"block {expected['block'] + 1}" in words
    assert f"target {100 * expected['target_prob']:.1f} %, draft {100 * expected['draft_prob']:.1f} %" in words
    assert token.get_attribute("aria-describedby") == "tooltip"
    ActionChains(browser).move_to_element(browser.find_element(By.CSS_SELECTOR, "#tokens h2")).perform()
    assert tooltip(browser) is None


def test_the_keyboard_reads_tokens_too(browser: Chrome, result: dict[str, Any]) -> None:
    tokens = result["token_view"]["responses"][1]["tokens"]
    group = browser.find_elements(By.CSS_SELECTOR, ".tokens")[1]
    browser.execute_script("arguments[0].querySelector('[tabindex=\"0\"]').focus()", group)
    assert tooltip(browser) == [shown_top(tokens[0]["target_top"]), shown_top(tokens[0]["draft_top"])]
    for _ in range(4):
        browser.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    shown = tooltip(browser)
    assert shown is not None
    assert shown[1][0][0] == HOSTILE, "as text"
    assert browser.title == "tiny: Pays off"
    browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert tooltip(browser) is None
    assert browser.execute_script("return arguments[0].querySelectorAll('[tabindex=\"0\"]').length", group) == 1


def test_a_tap_opens_the_tooltip_inside_a_phone(browser: Chrome, result: dict[str, Any]) -> None:
    show_at(browser, 360)
    token = browser.find_elements(By.CSS_SELECTOR, ".tokens")[0].find_elements(By.CSS_SELECTOR, ".t")[15]
    browser.execute_script(
        "arguments[0].scrollIntoView({block: 'center', behavior: 'instant'}); arguments[0].click()", token
    )
    expected = result["token_view"]["responses"][0]["tokens"][15]
    assert tooltip(browser) == [shown_top(expected["target_top"]), shown_top(expected["draft_top"])]
    box = browser.find_element(By.ID, "tooltip").rect
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 360


def cells(browser: Chrome) -> dict[tuple[str, int], float]:
    found = browser.execute_script(
        "return [...document.querySelectorAll('#given-table td')].map(c => [c.dataset.name, Number(c.dataset.gamma), c.dataset.value, c.textContent])"
    )
    assert all(text == f"{float(value):.2f}x" for _, _, value, text in found)
    return {(name, gamma): float(value) for name, gamma, value, _ in found}


def give(browser: Chrome, **values: str) -> None:
    for name, value in values.items():
        field = browser.find_element(By.ID, f"t-{name}")
        field.clear()
        field.send_keys(value)


def test_given_times_recompute_the_table(browser: Chrome, result: dict[str, Any]) -> None:
    drawn = browser.find_element(By.CSS_SELECTOR, "[data-figure=given]")
    assert drawn.is_displayed()
    give(browser, target="25", draft="3", verify="4")
    assert not drawn.is_displayed(), "the figure is of other times"
    curves = result["curves"]["rules"][0]["ways"]
    for (name, gamma), value in cells(browser).items():
        # Both are double precision; the sums may round differently in the last place.
        assert value == pytest.approx(curves[name]["tau"][gamma] / (gamma * 3 / 25 + 1 + gamma * 0.04), rel=1e-12)
    taus = curves[DRAFT]["tau"]
    speeds = [tau / (gamma * 0.12 + 1 + gamma * 0.04) for gamma, tau in enumerate(taus)]
    words = browser.find_element(By.ID, "given-best").text
    assert f"draft: {max(speeds):.2f}x at gamma {speeds.index(max(speeds))}" in words
    give(browser, target="1", draft="9")
    assert "draft: no gamma pays off" in browser.find_element(By.ID, "given-best").text


def test_another_rule_and_a_wrong_time(browser: Chrome, result: dict[str, Any]) -> None:
    browser.execute_script(
        "const s = document.getElementById('t-rule'); s.value = 'greedy-draft'; s.dispatchEvent(new Event('input', {bubbles: true}))"
    )
    give(browser, target="10", draft="1", verify="0")
    tau = result["curves"]["rules"][1]["ways"][DRAFT]["tau"][4]
    right = cells(browser)
    assert right[DRAFT, 4] == pytest.approx(tau / (4 * 0.1 + 1), rel=1e-12)
    give(browser, draft="0")
    assert cells(browser) == right, "the last right numbers stay"
    assert browser.find_element(By.ID, "t-draft").get_attribute("aria-invalid") == "true"
    assert "above 0" in browser.find_element(By.ID, "given-best").text


@pytest.mark.parametrize("width", [320, 360, 768])
def test_no_width_scrolls_sideways(browser: Chrome, width: int) -> None:
    show_at(browser, width)
    browser.execute_script("for (const fold of document.querySelectorAll('details')) fold.open = true")
    assert browser.execute_script("return [document.scrollingElement.scrollWidth <= innerWidth, innerWidth]") == [
        True,
        width,
    ]
    inside = browser.execute_script("return [...document.querySelectorAll('.scroll')].map(box => box.clientWidth)")
    assert max(inside) <= width, "tables scroll in a box of their own"


def test_dark_and_light(browser: Chrome) -> None:
    def luminance(colour: str) -> float:
        channels = [int(part) / 255 for part in colour.strip("rgba()").split(",")[:3]]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    look = """const paint = (one) => getComputedStyle(document.querySelector(one)); const page = paint('body').backgroundColor;
        return [page, [paint('h1').color, page], [paint('.setting').color, page],
        [paint('.outcome').color, paint('.outcome').backgroundColor], ...['draft', 'target', 'bonus'].map(by =>
        [paint(`.tokens [data-by=${by}]`).color, paint(`.tokens [data-by=${by}]`).backgroundColor])]"""
    pages = {}
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": features})
        pages[scheme], *pairs = browser.execute_script(look)
        for ink, ground in pairs:
            low, high = sorted((luminance(ink), luminance(ground)))
            assert (high + 0.05) / (low + 0.05) >= 4.5, f"{scheme}: {ink} on {ground} is hard to read (WCAG AA)"
    assert luminance(pages["light"]) > 0.9
    assert luminance(pages["dark"]) < 0.05


def test_it_prints_light_and_unfolded(browser: Chrome) -> None:
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": features})
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.execute_script("return getComputedStyle(document.querySelector('nav')).display") == "none"
    show_at(browser, 720)
    assert browser.execute_script("return document.scrollingElement.scrollWidth") <= 720, "tables fit on A4"
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
    printed = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"])
    assert printed.startswith(b"%PDF")
    assert printed.count(b"/Type /Page\n") >= 3


def test_commands_can_be_copied(browser: Chrome) -> None:
    block = browser.find_elements(By.CSS_SELECTOR, "#serve .copyable")[0]
    button = block.find_element(By.TAG_NAME, "button")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", button)
    button.click()
    # The clipboard answers later than the click.
    WebDriverWait(browser, 5).until(lambda _: button.text in ("copied", "selected"))
    command = block.find_element(By.TAG_NAME, "code").text
    assert command
    if button.text == "copied":
        browser.execute_cdp_cmd("Browser.grantPermissions", {"permissions": ["clipboardReadWrite"]})
        taken = browser.execute_async_script("navigator.clipboard.readText().then(arguments[0])")
    else:
        taken = browser.execute_script("return getSelection().toString()")
    assert taken.strip() == command.strip()


def test_what_a_page_without_javascript_has(chromium: Chrome, page: str, result: dict[str, Any]) -> None:
    chromium.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        chromium.get(page)
        assert not chromium.find_element(By.ID, "given-form").is_displayed()
        assert chromium.find_element(By.CSS_SELECTOR, '[data-figure="given"]').is_displayed()
        assert len(chromium.find_elements(By.CSS_SELECTOR, "#given-table tbody tr")) > 5
        assert "need JavaScript" in chromium.find_element(By.TAG_NAME, "noscript").text
    finally:
        chromium.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
