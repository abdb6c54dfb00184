"""The live page in a real browser: what arrives is drawn, nothing foreign is asked for, and it fits a phone."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from featlearn.record import RunWriter
from tests.explorer.test_browser import until
from tests.live.serving import TOKEN, served
from tests.reporting.browser import CHROMIUM, DRIVER, Browser
from tests.reporting.runs import HOSTILE, watched

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="chromium and chromedriver are not installed"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


def opened(browser: Browser, port: int) -> None:
    browser.devtools("Emulation.setDeviceMetricsOverride", width=1200, height=900, deviceScaleFactor=1, mobile=False)
    browser.log()
    browser.requests()
    browser.visit(f"http://127.0.0.1:{port}/?token={TOKEN}")


def points(name: str) -> str:
    return f"Number(document.getElementById('curve-{name}')?.querySelector('.chart').dataset.points ?? 0)"


def test_a_new_point_is_drawn_within_two_seconds(browser: Browser, tmp_path: Path):
    writer = RunWriter(tmp_path / "a", {"name": HOSTILE})
    writer.scalars(0, {"loss": 1.0, "gap/probe": 0.1, "gap/probe_error": 0.02})
    with served(tmp_path / "a") as port:
        opened(browser, port)
        until(browser, f"{points('loss')} === 1")
        for step in (1, 2, 3, 10):
            begun = time.monotonic()
            latest = (
                f"document.getElementById('curve-loss').querySelector('.latest').textContent === '{1 / (1 + step):.4g}'"
            )
            writer.scalars(step, {"loss": 1 / (1 + step), "gap/probe": 0.2, "gap/probe_error": 0.02, "own": step})
            until(browser, f"document.querySelector('.facts').textContent.startsWith('step {step}')", 2)
            until(browser, latest, 2)
            assert time.monotonic() - begun < 2.0
        assert browser.evaluate(points("loss")) == 5
        assert browser.evaluate(points("own")) == 4
        assert browser.evaluate("document.querySelector('#runs h3').textContent") == HOSTILE
        assert browser.evaluate("document.getElementById('curve-gap/probe_error')") is None
        browser.painted()
        assert browser.log() == []
        asked = [one for one in browser.requests() if one.startswith(("http", "ws"))]
        assert asked
        assert all(one.startswith(f"http://127.0.0.1:{port}/") for one in asked)


def test_the_verdict_the_pictures_and_a_phone(browser: Browser, tmp_path: Path):
    run = watched(tmp_path / "a", steps=30)
    with served(run.path) as port:
        opened(browser, port)
        until(browser, "document.querySelector('.judged .chip') && document.querySelector('#pictures canvas')")
        browser.script("document.querySelectorAll('details.fold').forEach((one) => { one.open = true; })")
        until(browser, f"{points('ntk/trace')} > 3")
        moved = """
            const slider = document.getElementById("step");
            const bytes = () => document.querySelector("#figure-kernels canvas").toDataURL();
            const before = bytes();
            slider.value = slider.min;
            slider.dispatchEvent(new Event("input"));
            const later = (act) => requestAnimationFrame(() => requestAnimationFrame(act));
            return new Promise((done) => later(() => done(before !== bytes())));
        """
        assert browser.script(moved)
        for scheme in ("light", "dark"):
            browser.media(scheme=scheme)
            browser.resize(390)
            browser.painted()
            assert browser.evaluate("document.documentElement.scrollWidth") <= 390
        browser.media()
        assert browser.log() == []


def test_the_end_of_the_server_is_said_and_its_return_noticed(browser: Browser, tmp_path: Path):
    RunWriter(tmp_path / "a", {}).scalars(0, {"loss": 1.0})
    with served(tmp_path / "a") as port:
        opened(browser, port)
        until(browser, "document.getElementById('state').textContent.startsWith('Connected')")
    until(browser, "document.getElementById('state').classList.contains('lost')", 10)
    assert browser.evaluate(points("loss")) == 1  # what was shown stays


def test_an_error_of_a_run_is_shown(browser: Browser, tmp_path: Path):
    RunWriter(tmp_path / "a", {}).scalars(0, {"loss": 1.0})
    RunWriter(tmp_path / "b", {}).scalars(0, {"loss": 2.0})
    (tmp_path / "a" / "run.json").write_text("{")
    with served(tmp_path) as port:
        opened(browser, port)
        until(browser, f"document.querySelectorAll('.card').length === 2 && {points('loss')} === 1")
        shown = browser.evaluate(
            "[...document.querySelectorAll('.trouble')].filter((one) => !one.hidden).map((one) => one.textContent)"
        )
        assert len(shown) == 1
        assert "damaged" in shown[0]
