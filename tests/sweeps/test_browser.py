"""The page of a sweep in a real browser: nothing is fetched, cells lead to reports, and it fits a phone."""

from pathlib import Path

import pytest

import featlearn as fl
from featlearn import sweeps
from tests.reporting.browser import CHROMIUM, DRIVER, Browser
from tests.reporting.runs import HOSTILE
from tests.sweeps import functions

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="chromium and chromedriver are not installed"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("browser") / "a sweep"
    grid = {"gamma": [0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0], "width": [8, 32]}
    sweep = fl.sweep(functions.recorded, grid, out=out, seeds=2, executor=sweeps.Serial(), quiet=True)
    sweep.write_reports(quiet=True)
    return sweep.report(out / "sweep.html", title=HOSTILE, boundary={"theory": lambda gamma: 10 / gamma})


@pytest.fixture(scope="module")
def window():
    with Browser() as found:
        yield found


@pytest.fixture
def browser(window: Browser):
    window.devtools("Emulation.setDeviceMetricsOverride", width=1280, height=900, deviceScaleFactor=1, mobile=False)
    window.media()
    window.log()
    window.requests()
    return window


COLOR = "getComputedStyle(document.querySelector('{}')).{}"


def test_nothing_is_fetched_and_nothing_goes_wrong(browser: Browser, page: Path):
    browser.open(page)
    assert browser.log() == []
    assert [url for url in browser.requests() if not url.startswith("data:")] == [page.as_uri()]
    assert browser.evaluate("document.querySelector('h1').textContent") == HOSTILE


def test_cells_are_colored_by_their_regime_in_light_and_dark(browser: Browser, page: Path):
    for scheme in ("light", "dark"):
        browser.media(scheme=scheme)
        browser.open(page)
        seen = browser.evaluate(
            "[...document.querySelectorAll('.of-0 .map td')].map((td) => "
            "[td.textContent, getComputedStyle(td).backgroundColor])"
        )
        assert len(seen) == 16
        assert dict(seen) == {
            "lazy": "rgb(0, 114, 178)",
            "mixed": "rgb(240, 228, 66)",
            "rich": "rgb(213, 94, 0)",
        }
        paper = browser.evaluate(COLOR.format("body", "backgroundColor"))
        assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(22, 22, 24)"}[scheme]


def test_a_cell_opens_the_report_of_its_point(browser: Browser, page: Path):
    browser.open(page)
    browser.script("document.querySelector('#maps .map tbody tr:last-child td:last-child a').click()")
    for _ in range(100):
        if "report.html" in browser.evaluate("location.href"):
            break
        browser.painted()
    assert "gamma=10.0, width=8" in browser.evaluate("document.querySelector('h1').textContent")
    assert browser.evaluate("document.querySelector('.chip').textContent") == "rich"


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_does_not_scroll_sideways(browser: Browser, page: Path, width: int):
    browser.resize(width)
    browser.open(page)
    browser.script("for (const one of document.querySelectorAll('details')) one.open = true")
    browser.painted()
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate("document.querySelector('#maps .scroll').scrollWidth") > 300


def test_the_first_column_stays_in_sight_on_a_phone(browser: Browser, page: Path):
    browser.resize(390)
    browser.open(page)
    browser.script("document.querySelector('#maps .scroll').scrollLeft = 1000")
    browser.painted()
    place = "document.querySelector('#maps .map tbody th').getBoundingClientRect().left"
    assert browser.evaluate("document.querySelector('#maps .scroll').scrollLeft") > 50
    assert 0 <= browser.evaluate(place) < 60


def test_cells_are_reached_by_keyboard(browser: Browser, page: Path):
    browser.open(page)
    browser.script("document.querySelector('#maps .scroll').focus()")
    browser.keys("Tab")
    assert browser.evaluate("document.activeElement.closest('td') !== null")
    assert "gamma 0.003" in browser.evaluate("document.activeElement.title")


def test_a_button_shows_another_quantity_also_by_keyboard(browser: Browser, page: Path):
    browser.open(page)
    visible = "[...document.querySelectorAll('.quantity')].filter((one) => one.checkVisibility())"
    shown = f"{visible}.map((one) => one.className)"
    assert browser.evaluate(shown) == ["quantity of-0"]
    browser.click(".quantities label:nth-of-type(2)")
    assert browser.evaluate(shown) == ["quantity of-1"]
    browser.keys("ArrowRight")
    assert browser.evaluate(shown) == ["quantity of-2"]
