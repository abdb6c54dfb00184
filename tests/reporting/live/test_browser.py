"""The live page in a real browser: what arrives is drawn, and what the reader chose stays."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest

from featlearn.record import RunWriter
from tests.explorer.test_browser import until
from tests.reporting.browser import CHROMIUM, DRIVER, Browser
from tests.reporting.live.serving import TOKEN, served
from tests.reporting.runs import HOSTILE, watched

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="chromium and chromedriver are not installed"),
]

KERNELS = "document.querySelector('#figure-kernels canvas')"
RANGE = "#figure-kernels .picture:last-child .range"
SHOWN = "document.getElementById('step-shown').textContent"
PROGRESS = "document.getElementById('runs').textContent"
SPECTRUM = "(({ scales: { x } }) => [x.min, x.max])(drawing.charts.find(({ box }) => box.id === 'chart-spectrum').plot)"


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with Browser() as found:
        yield found


@pytest.fixture
def browser(window: Browser, monkeypatch: pytest.MonkeyPatch) -> Browser:
    monkeypatch.setattr("featlearn.reporting.live.feed.REPORT_PERIOD", 0.3)
    window.devtools("Emulation.setDeviceMetricsOverride", width=1200, height=900, deviceScaleFactor=1, mobile=False)
    window.media()
    window.log()
    window.requests()
    return window


@contextmanager
def live(
    browser: Browser, path: Path, ready: str = "document.querySelector('#figure-kernels canvas')"
) -> Iterator[int]:
    """The page of runs, with all sections open; nothing may go wrong in it as long as it is served."""
    with served(path) as port:
        browser.visit(f"http://127.0.0.1:{port}/?token={TOKEN}")
        until(browser, ready)
        browser.script("document.querySelector('#tab-details')?.click()")
        browser.painted()
        yield port
        assert browser.log() == []
        browser.visit("about:blank")


class Growing:
    """A run with a loss, kernels and spectra."""

    def __init__(self, path: Path, **config: Any) -> None:
        self.writer = RunWriter(path, config)

    def measure(self, *steps: int) -> None:
        for step in steps:
            self.writer.scalars(step, {"loss": 1 / (3 + step), "gap/probe": step / 70, "gap/probe_error": 1 / 300})
            kernel = numpy.eye(5) + numpy.outer(range(5), range(5)) * step / 7
            self.writer.array("kernel", step, mean=kernel)
            self.writer.array("spectrum", step, eigenvalues=numpy.linalg.eigvalsh(kernel)[::-1].copy())


def at(browser: Browser, place: int) -> None:
    """Move the slider to the n-th step."""
    browser.script(
        "const slider = document.getElementById('step'); slider.value = arguments[0];"
        "slider.dispatchEvent(new Event('input'))",
        place,
    )
    browser.painted()


def words(browser: Browser, selector: str) -> str:
    return browser.script("return document.querySelector(arguments[0]).textContent", selector)


def test_a_new_step_is_shown_within_two_seconds(browser: Browser, tmp_path: Path):
    writer = RunWriter(tmp_path / "a", {"name": HOSTILE})
    writer.scalars(0, {"loss": 1.0})
    with live(browser, tmp_path / "a", f"{PROGRESS}.includes('step 0')") as port:
        for step in (1, 2, 3, 10):
            begun = time.monotonic()
            writer.scalars(step, {"loss": 1 / (1 + step)})
            until(browser, f"{PROGRESS}.includes('step {step}, loss {1 / (1 + step):.4g}')", 2)
            assert time.monotonic() - begun < 2.0
        assert browser.evaluate(PROGRESS).startswith(HOSTILE)
        asked = [one for one in browser.requests() if one.startswith(("http", "ws"))]
        assert asked
        assert all(one.startswith(f"http://127.0.0.1:{port}/") for one in asked)


def test_the_report_fits_a_phone(browser: Browser, tmp_path: Path):
    run = watched(tmp_path / "a", steps=30)
    with live(browser, run.path):
        assert browser.evaluate("document.querySelector('#verdict .headline') !== null")
        for scheme in ("light", "dark"):
            browser.media(scheme=scheme)
            browser.resize(390)
            browser.painted()
            assert browser.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_end_of_the_server_is_said(browser: Browser, tmp_path: Path):
    RunWriter(tmp_path / "a", {}).scalars(0, {"loss": 1.0})
    with served(tmp_path / "a") as port:
        browser.visit(f"http://127.0.0.1:{port}/?token={TOKEN}")
        until(browser, f"{PROGRESS}.includes('step 0')")
    until(browser, "document.getElementById('state').classList.contains('missing')", 10)
    assert "step 0" in browser.evaluate(PROGRESS)  # what was shown stays
    browser.visit("about:blank")


def test_at_the_end_the_report_opens_without_the_server(browser: Browser, tmp_path: Path):
    path = tmp_path / "a"
    run = Growing(path, name="a", settings={"steps": 9})
    run.measure(0, 1, 5)
    with served(path) as port:
        browser.visit(f"http://127.0.0.1:{port}/?token={TOKEN}")
        until(browser, "document.querySelector('#figure-gap canvas')")
        assert browser.evaluate("document.title").startswith("55%: a")
        for chart in ("gap", "training-loss"):  # in sight before scrolling
            assert (
                browser.evaluate(f"document.querySelector('#figure-{chart} canvas').getBoundingClientRect().bottom")
                < 800
            )
        run.measure(9)
        run.writer.describe(finished=True)
        run.writer.close()
        until(browser, "document.querySelector('#state a')", 20)
        browser.log()
    time.sleep(2.0)
    assert browser.log() == []  # nobody asks a server that has ended
    state = words(browser, "#state")
    assert state.startswith("Finished: open report.")
    assert browser.evaluate("document.title").startswith("Finished: a")
    assert browser.evaluate("document.querySelector('#figure-gap canvas') !== null")
    browser.visit(browser.evaluate("document.querySelector('#state a').href"))
    until(browser, "document.querySelector('#figure-gap canvas')")
    assert browser.evaluate("document.querySelectorAll('[role=tab]').length") == 4
    assert browser.log() == []
    browser.visit("about:blank")


def test_several_runs_are_a_table_with_a_line_each(browser: Browser, tmp_path: Path):
    for name in ("a", "b"):
        Growing(tmp_path / name, name=name).measure(0, 1, 5)
    with live(browser, tmp_path, "document.querySelectorAll('#runs polyline').length === 2"):
        points = browser.evaluate("document.querySelector('#runs polyline').getAttribute('points').split(' ').length")
        assert points == 3
        assert browser.evaluate("[...document.querySelectorAll('#runs th')].map((cell) => cell.textContent)") == [
            "a",
            "b",
        ]


def test_a_logarithmic_axis_becomes_linear_and_stays_so(browser: Browser, tmp_path: Path):
    run = Growing(tmp_path / "a")
    run.measure(0, 1, 5)
    distribution = "drawing.charts.find(({ box }) => box.id === 'chart-training-loss').plot.scales.y.distr"
    with live(browser, tmp_path / "a", "document.querySelector('#figure-training-loss .rescale')"):
        assert browser.evaluate(distribution) == 3
        charts = browser.evaluate("drawing.charts.length")
        browser.click("#figure-training-loss .rescale")
        assert browser.evaluate(distribution) == 1
        assert words(browser, "#figure-training-loss .rescale") == "Log axis"
        run.measure(20)
        until(browser, "document.getElementById('step').max >= 3")
        assert browser.evaluate(distribution) == 1
        assert browser.evaluate("drawing.charts.length") == charts


def test_an_error_of_a_run_is_shown(browser: Browser, tmp_path: Path):
    RunWriter(tmp_path / "a", {}).scalars(0, {"loss": 1.0})
    RunWriter(tmp_path / "b", {}).scalars(0, {"loss": 2.0})
    (tmp_path / "a" / "run.json").write_text("{")
    with live(browser, tmp_path, f"{PROGRESS}.includes('loss 2')"):
        assert "damaged" in words(browser, "#errors")
        assert browser.evaluate("document.querySelectorAll('#errors li').length") == 1


def test_the_slider_follows_until_it_is_moved_and_again_when_asked(browser: Browser, tmp_path: Path):
    run = Growing(tmp_path / "a", name="a")
    run.measure(0, 1, 5)
    with live(browser, tmp_path / "a"):
        assert browser.evaluate(SHOWN) == "step 5"
        run.measure(9)
        until(browser, f"{SHOWN} === 'step 9'")
        until(browser, f"document.querySelector('{RANGE}').textContent === 'step 9'")
        at(browser, 1)
        assert browser.evaluate(SHOWN) == "step 1"
        run.measure(12, 20)
        until(browser, "document.getElementById('step').max >= 5")
        assert browser.evaluate(SHOWN) == "step 1"
        assert browser.evaluate("Number(document.getElementById('step').value)") == 1
        assert words(browser, RANGE) == "step 1"
        browser.click("#step-back")
        assert browser.evaluate(SHOWN) == "step 20"
        run.measure(31)
        until(browser, f"{SHOWN} === 'step 31'")


def test_what_the_reader_set_stays_in_newer_reports(browser: Browser, tmp_path: Path):
    run = Growing(tmp_path / "a")
    run.measure(0, 1, 5, 9)
    with live(browser, tmp_path / "a"):
        browser.drag("#figure-spectrum .u-over", 0.2, 0.6)
        zoomed = browser.evaluate(SPECTRUM)
        browser.click("#figure-spectrum .legend button")
        browser.script(
            "document.querySelector('#figure-spectrum details').open = true;"
            "document.querySelector('#figure-power summary, #figure-spectrum summary').focus()"
        )
        toggles, charts = (browser.evaluate(f"drawing.{name}.length") for name in ("toggles", "charts"))
        run.measure(20)
        until(browser, "document.getElementById('step').max >= 4")
        assert browser.evaluate(SPECTRUM) == zoomed
        assert browser.evaluate("document.querySelector('#figure-spectrum .legend button').ariaPressed") == "false"
        shown = "drawing.charts.find(({ box }) => box.id === 'chart-spectrum').plot.series.map(({ show }) => show)"
        assert browser.evaluate(shown)[1:] == [False, True]
        assert browser.evaluate("document.querySelector('#figure-spectrum details').open")
        assert browser.evaluate("document.querySelector('#panel-details').checkVisibility()")  # the tab stays
        assert browser.evaluate("document.activeElement.tagName") == "SUMMARY"
        assert browser.evaluate("drawing.toggles.length") == toggles  # those of the older report are gone
        assert browser.evaluate("drawing.charts.length") == charts
