"""The step slider, zoom and copying of the live page: what the reader chose stays while numbers arrive."""

import csv
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest

from featlearn.record import RunWriter
from tests.explorer.test_browser import until
from tests.live.serving import TOKEN, served
from tests.reporting.browser import CHROMIUM, DRIVER, Browser

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="chromium and chromedriver are not installed"),
]

SHOWN = "document.getElementById('step-shown').textContent"
SCALE = "(({ scales: { x } }) => [x.min, x.max])(drawing.charts.find(({ box }) => box.closest('[id=\"%s\"]')).plot)"
LOSS, SPECTRUM = SCALE % "curve-loss", SCALE % "figure-spectrum"


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with Browser() as found:
        yield found


@pytest.fixture
def browser(window: Browser, monkeypatch: pytest.MonkeyPatch) -> Browser:
    monkeypatch.setattr("featlearn.live.feed.LOOK", 0.3)
    window.devtools("Emulation.setDeviceMetricsOverride", width=1200, height=900, deviceScaleFactor=1, mobile=False)
    window.media()
    window.log()
    return window


@contextmanager
def live(
    browser: Browser, path: Path, ready: str = "document.querySelector('#figure-kernels canvas')"
) -> Iterator[None]:
    """The page of runs, with all sections open; nothing may go wrong in it as long as it is served."""
    with served(path) as port:
        browser.visit(f"http://127.0.0.1:{port}/?token={TOKEN}")
        until(browser, ready)
        browser.script("for (const one of document.querySelectorAll('details.fold')) one.open = true")
        browser.painted()
        yield
        assert browser.log() == []
        browser.visit("about:blank")


class Growing:
    """A run with a loss, kernels and spectra."""

    def __init__(self, path: Path, **config: Any) -> None:
        self.writer = RunWriter(path, config)
        self.losses: dict[int, float] = {}

    def measure(self, *steps: int, pictures: bool = True) -> None:
        for step in steps:
            self.losses[step] = 1 / (3 + step)
            self.writer.scalars(step, {"loss": self.losses[step], "gap/probe": step / 70, "gap/probe_error": 1 / 300})
            if pictures:
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


def test_the_slider_follows_until_it_is_moved_and_again_when_asked(browser: Browser, tmp_path: Path):
    run = Growing(tmp_path / "a", name="a")
    run.measure(0, 1, 5)
    with live(browser, tmp_path / "a"):
        assert browser.evaluate(SHOWN) == "step 5"
        run.measure(9)
        until(browser, f"{SHOWN} === 'step 9'")
        until(browser, "document.querySelector('#figure-kernels .range').textContent.startsWith('step 9:')")
        at(browser, 1)
        assert browser.evaluate(SHOWN) == "step 1"
        before = browser.evaluate("document.querySelector('#figure-kernels canvas').toDataURL()")
        run.measure(12, 20)
        until(browser, "document.querySelector('.facts').textContent.startsWith('step 20')")
        until(browser, "document.querySelectorAll('#figure-kernels tbody tr').length === 6")
        assert browser.evaluate(SHOWN) == "step 1"
        assert browser.evaluate("Number(document.getElementById('step').value)") == 1
        assert words(browser, "#figure-kernels .range").startswith("step 1:")
        assert browser.evaluate("document.querySelector('#figure-kernels canvas').toDataURL()") == before
        assert words(browser, "#figure-spectrum .legend button") == "step 1"
        assert words(browser, "#curve-loss .readout") == "step 1: a 0.25"
        assert browser.evaluate("document.querySelector('#curve-loss .step-line').checkVisibility()")
        browser.script("stepping.extend([0, 5, 20])")  # as where curves are thinned
        assert browser.evaluate(SHOWN) == "step 1"
        browser.click("#step-back")
        assert browser.evaluate(SHOWN) == "step 20"
        assert words(browser, "#figure-kernels .range").startswith("step 20:")
        assert browser.evaluate("document.querySelector('#curve-loss .step-line').hidden")
        run.measure(31)
        until(browser, f"{SHOWN} === 'step 31'")


def test_play_passes_the_steps_that_there_are(browser: Browser, tmp_path: Path):
    run = Growing(tmp_path / "a")
    run.measure(0, 2, 4, 6)
    with live(browser, tmp_path / "a"):
        browser.script("document.getElementById('step').focus()")
        browser.keys("Space")
        until(browser, f"{SHOWN} === 'step 2'")
        until(browser, "document.getElementById('play').textContent === 'Play'")
        assert browser.evaluate(SHOWN) == "step 6"


def test_a_zoom_survives_what_arrives(browser: Browser, tmp_path: Path):
    run = Growing(tmp_path / "a")
    run.measure(0, 1, 5, 9)
    with live(browser, tmp_path / "a"):
        browser.drag("#curve-loss .u-over", 0.3, 0.8)
        browser.drag("#figure-spectrum .u-over", 0.2, 0.6)
        zoomed = browser.evaluate(LOSS), browser.evaluate(SPECTRUM)
        assert zoomed[0][1] - zoomed[0][0] == pytest.approx(0.5, abs=0.02)  # half of log10(1 + 9)
        run.measure(20)
        run.measure(1000, pictures=False)  # a logarithmic axis from here on: the chart is built anew
        until(browser, "drawing.charts.find(({ box }) => box.closest('#curve-loss')).block.yAxis === 'log'")
        until(browser, "document.querySelectorAll('#figure-kernels tbody tr').length === 5")
        assert (browser.evaluate(LOSS), browser.evaluate(SPECTRUM)) == zoomed
        browser.keys("Escape")  # first the chart under the pointer, then all others
        browser.painted()
        assert browser.evaluate(LOSS) == zoomed[0]
        assert browser.evaluate(SPECTRUM) == pytest.approx([0, numpy.log10(5)])
        browser.keys("Escape")
        browser.painted()
        low, high = browser.evaluate(LOSS)
        assert (low, high) == pytest.approx((0, numpy.log10(1001)))


def test_what_the_reader_set_stays_in_newer_pictures(browser: Browser, tmp_path: Path):
    run = Growing(tmp_path / "a")
    run.measure(0, 1, 5)
    with live(browser, tmp_path / "a"):
        browser.click("#figure-spectrum .legend button")
        browser.script(
            "document.querySelector('#figure-kernels details').open = true;"
            "document.querySelector('#figure-power summary, #figure-spectrum summary').focus()"
        )
        toggles = browser.evaluate("drawing.toggles.length")
        run.measure(9)
        until(browser, "document.querySelectorAll('#figure-kernels tbody tr').length === 4")
        assert browser.evaluate("document.querySelector('#figure-spectrum .legend button').ariaPressed") == "false"
        shown = "drawing.charts.find(({ box }) => box.id === 'chart-spectrum').plot.series.map(({ show }) => show)"
        assert browser.evaluate(shown)[1:] == [False, True]
        assert browser.evaluate("document.querySelector('#figure-kernels details').open")
        assert browser.evaluate("document.activeElement.tagName") == "SUMMARY"
        assert browser.evaluate("drawing.toggles.length") == toggles  # those of the older ones are gone


def test_numbers_are_copied_in_full(browser: Browser, tmp_path: Path):
    run = Growing(tmp_path / "a", name="a")
    run.measure(0, 1, 5)
    with live(browser, tmp_path / "a"):
        browser.script("navigator.clipboard.writeText = async (text) => { window.caught = text; };")

        def copied(selector: str) -> list[list[str]]:
            browser.click(selector)
            until(browser, f"document.querySelector('{selector}').textContent === 'Copied'")
            return list(csv.reader(io.StringIO(browser.evaluate("caught"))))

        rows = copied("#curve-loss .copy")
        assert rows[0] == ["step", "a"]
        assert {int(step): float(value) for step, value in rows[1:]} == run.losses
        gap = copied('[id="curve-gap/probe"] .copy')
        assert gap[0] == ["step", "a", "a, standard error"]
        assert [[float(v) for v in row] for row in gap[1:]] == [[step, step / 70, 1 / 300] for step in (0, 1, 5)]
        at(browser, 1)
        kernel = copied("#figure-kernels figcaption .copy")
        expected = numpy.eye(5) + numpy.outer(range(5), range(5)) / 7
        assert [[float(v) for v in row[3:]] for row in kernel[1:]] == expected.tolist()


def test_several_runs_say_their_own_steps(browser: Browser, tmp_path: Path):
    long, short = Growing(tmp_path / "a", name="a"), Growing(tmp_path / "b", name="b")
    long.measure(0, 4, 9, pictures=False)
    short.measure(0, 3, pictures=False)
    ready = "document.querySelectorAll('.card').length === 2 && !document.getElementById('steps').hidden"
    with live(browser, tmp_path, ready):
        assert browser.evaluate("Number(document.getElementById('step').max)") == 3  # 0, 3, 4, 9
        at(browser, 2)
        assert words(browser, "#curve-loss .readout") == "step 4: a 0.1429, b 0.1667 at 3"
        browser.resize(390)
        browser.painted()
        assert browser.evaluate("document.documentElement.scrollWidth") == 390
        browser.resize(1200)
