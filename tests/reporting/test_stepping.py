"""The step slider, zoom and copying of the report, in a real browser."""

import csv
import io
import itertools
import re
import time
from pathlib import Path
from typing import Any

import numpy
import pytest

import featlearn as fl
from featlearn.record import Run, RunWriter
from featlearn.reporting.page import report
from featlearn.reporting.pictures import cosines
from tests.reporting.browser import CHROMIUM, DRIVER, Browser
from tests.reporting.runs import HOSTILE, by_hand, watched

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="chromium and chromedriver are not installed"),
]

OPEN = "for (const one of document.querySelectorAll('[role=tabpanel]')) one.hidden = false"


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return watched(tmp_path_factory.mktemp("stepping") / "rich")


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Another configuration, which ends at step 24."""
    return watched(tmp_path_factory.mktemp("stepping") / "short", gamma=0.05, steps=24)


@pytest.fixture(scope="module")
def one(rich: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report(rich, tmp_path_factory.mktemp("stepping") / "one.html")


@pytest.fixture(scope="module")
def two(rich: Run, short: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report([rich, short], tmp_path_factory.mktemp("stepping") / "two.html")


@pytest.fixture(scope="module")
def window():
    with Browser() as found:
        yield found


@pytest.fixture
def browser(window: Browser):
    window.devtools("Emulation.setDeviceMetricsOverride", width=1200, height=900, deviceScaleFactor=1, mobile=False)
    window.media()
    window.log()
    yield window
    assert window.log() == []


def opened(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.script(OPEN)
    browser.painted()


def at(browser: Browser, step: int) -> None:
    """Move the slider to a step."""
    browser.script(
        """
        const slider = document.getElementById("step");
        for (let i = 0; i <= Number(slider.max); i++) {
            slider.value = i;
            slider.dispatchEvent(new Event("input"));
            if (document.getElementById("step-shown").textContent === `step ${arguments[0]}`) return;
        }
        throw new Error("there is no such step");""",
        step,
    )
    browser.painted()


def pixels(browser: Browser, selector: str) -> list[str]:
    return browser.script("return [...document.querySelectorAll(arguments[0])].map((c) => c.toDataURL())", selector)


def words(browser: Browser, selector: str) -> list[str]:
    found = "[...document.querySelectorAll(arguments[0])].map((one) => one.textContent)"
    return browser.script(f"return {found}", selector)


def copied(browser: Browser, selector: str) -> list[list[str]]:
    """What a button puts on the clipboard, caught on its way there."""
    browser.script("""
        window.caught = null;
        navigator.clipboard.writeText = async (text) => { window.caught = text; };""")
    browser.click(selector)
    browser.painted()
    assert words(browser, selector) == ["Copied"]
    return list(csv.reader(io.StringIO(browser.evaluate("window.caught"))))


def test_one_slider_moves_every_picture_every_spectrum_and_every_cursor(browser: Browser, one: Path, rich: Run):
    opened(browser, one)
    moving = [
        "#figure-kernels canvas[data-moves]",
        "#figure-specialization canvas[data-moves]",
        "#chart-spectrum canvas",
        "#chart-power canvas",
    ]
    lines = ".chart:has(.u-over) .step-line"
    last = [pixels(browser, selector) for selector in moving]
    assert browser.evaluate("document.querySelectorAll('input[type=range]').length") == 1
    assert browser.evaluate(f"[...document.querySelectorAll('{lines}')].every((line) => line.hidden)")
    at(browser, 12)
    shown = [pixels(browser, selector) for selector in moving]
    assert all(a != b for old, new in zip(last, shown, strict=True) for a, b in zip(old, new, strict=True))
    charts = browser.evaluate("drawing.charts.map(({ block }) => [block.key, block.xAxis])")
    stepped = [key for key, axis in charts if axis == "steps"]
    assert len(stepped) > 8
    for key, axis in charts:
        place = browser.evaluate(f"document.querySelector('#chart-{key} .step-line').checkVisibility()")
        assert place is (axis == "steps")
    place = """
        const chart = drawing.charts.find(({ block }) => block.key === "loss");
        const line = chart.line.getBoundingClientRect(), over = chart.plot.over.getBoundingClientRect();
        return [line.left + line.width / 2 - over.left, chart.plot.valToPos(Math.log10(13), "x")]"""
    found, expected = browser.script(place)
    assert found == pytest.approx(expected, abs=1.0)
    assert words(browser, "#figure-spectrum .legend button") == ["step 12", "step 0"]
    assert all(said == "step 12" for said in words(browser, "#figure-kernels .picture:last-child .range"))
    at(browser, rich.arrays["kernel"][-1])
    assert [pixels(browser, selector) for selector in moving] == last


def test_what_is_drawn_is_the_measurement_of_the_step(browser: Browser, one: Path, rich: Run):
    opened(browser, one)
    at(browser, 15)
    shown = browser.evaluate("drawing.charts.find(({ block }) => block.key === 'spectrum').plot.data[1]")
    expected = rich.array("spectrum", 15)["eigenvalues"]
    assert shown == [value if value > 0 else None for value in expected.tolist()]
    (value,) = words(browser, "#figure-ntk-norm .legend .value")
    steps, norms = rich.scalar("ntk/norm")
    assert float(value) == pytest.approx(norms[steps.tolist().index(15)], rel=1e-3)


def test_runs_show_their_latest_measurement_and_say_which(browser: Browser, two: Path, short: Run):
    opened(browser, two)
    at(browser, 40)
    assert [said.split(":")[0] for said in words(browser, "#figure-kernels .picture:last-child .range")] == [
        "step 40",
        "step 24",
    ]
    assert words(browser, "#figure-spectrum .readout") == ["rich: step 40, short: step 24"]
    exact, earlier = words(browser, "#figure-ntk-norm .legend .value")
    assert re.fullmatch(r"[\d.e-]+", exact)
    assert earlier.endswith(" at 24")
    kinds = words(browser, "#figure-alignment .legend [data-kind]")
    assert len(kinds) == 4
    told = words(browser, '#figure-alignment .legend [data-group="1"] .value')[0].split(" · ")
    names = {
        "probe, centered": "ntk/centered_alignment",
        "probe": "ntk/alignment",
        "test, centered": "ntk/test/centered_alignment",
        "test": "ntk/test/alignment",
    }
    for kind, said in zip(kinds, told, strict=True):
        number, _, step = said.partition(" at ")
        assert step == "24"
        assert float(number) == pytest.approx(short.scalar(names[kind])[1][-1], rel=1e-3)
    assert words(browser, "#figure-alignment .readout") == [""]
    at(browser, 0)
    assert set(words(browser, "#figure-kernels .picture:last-child .range")) == {"step 0"}


def test_the_slider_is_moved_by_keyboard(browser: Browser, one: Path):
    opened(browser, one)
    browser.script("document.getElementById('step').focus()")
    browser.keys("Home")
    browser.keys("ArrowRight")
    browser.painted()
    told = "[document.getElementById('step').getAttribute('aria-valuetext'), "
    told += "document.getElementById('step-shown').textContent]"
    assert browser.evaluate(told) == ["step 1", "step 1"]
    assert "at step 1:" in browser.evaluate("document.querySelector('#figure-kernels canvas[data-moves]').ariaLabel")
    browser.keys("Space")  # plays
    until = time.monotonic() + 20
    while browser.evaluate(told)[0] == "step 1":
        assert time.monotonic() < until
    browser.keys("Space")  # pauses
    held = browser.evaluate(told)
    time.sleep(0.8)
    assert browser.evaluate(told) == held
    assert words(browser, "#play") == ["Play"]
    browser.click("#step-back")
    assert browser.evaluate(told) == ["step 60", "step 60"]
    assert browser.evaluate("document.querySelector('#step-back').checkVisibility()") is False
    assert browser.evaluate("[...document.querySelectorAll('.step-line')].every((line) => line.hidden)")


@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_play_goes_to_the_end_once(browser: Browser, one: Path, motion: str):
    browser.media(motion=motion)
    opened(browser, one)
    browser.script("""
        window.seen = [];
        new MutationObserver(() => seen.push([performance.now(), document.getElementById("step-shown").textContent]))
            .observe(document.getElementById("step-shown"), { childList: true });""")
    browser.click("#play")
    end = time.monotonic() + 30
    while browser.evaluate("document.getElementById('play').textContent") == "Pause":
        assert time.monotonic() < end
        time.sleep(0.1)
    seen = browser.evaluate("seen")
    steps = [int(said.removeprefix("step ")) for _, said in seen]
    assert steps == sorted(set(steps))
    assert (steps[0], steps[-1]) == (0, 60)
    pauses = [b - a for (a, _), (b, _) in itertools.pairwise(seen)]
    if motion == "reduce":
        assert min(pauses) > 900
        assert len(steps) < 13
    else:
        assert len(steps) == 19
        assert 300 < numpy.median(pauses) < 700


def test_sixty_frames_of_the_slider_take_two_seconds(browser: Browser, two: Path):
    opened(browser, two)
    sixty = """
        return new Promise((done) => {
            const slider = document.getElementById("step"), begun = performance.now();
            let frame = 0;
            const next = () => {
                if (frame === 60) { done(performance.now() - begun); return; }
                slider.value = frame++ % (Number(slider.max) + 1);
                slider.dispatchEvent(new Event("input"));
                requestAnimationFrame(next);
            };
            next();
        })"""
    assert min(browser.script(sixty) for _ in range(3)) < 2000  # the machine may be busy with other things


def test_nothing_moves_without_kernels_and_spectra(browser: Browser, tmp_path: Path):
    run = by_hand(tmp_path / "a", {"probe/loss": [1.0, 0.5, 0.2], "ntk/norm": [1.0, 2.0, 3.0]}, [0, 10, 20])
    opened(browser, report(run, tmp_path / "a.html"))
    assert browser.evaluate("document.getElementById('steps')") is None
    assert browser.evaluate("document.querySelectorAll('.chart canvas').length") > 1


# ---- zoom

SCALE = "(({ scales: { x } }) => [x.min, x.max])(drawing.charts.find(({ block }) => block.key === 'loss').plot)"
OVER = "#chart-loss .u-over"


def test_a_drag_zooms_and_three_ways_lead_back(browser: Browser, one: Path):
    opened(browser, one)
    whole = browser.evaluate(SCALE)
    back = "#figure-loss .tools .back"

    def clicked() -> None:
        browser.click(back)

    for leave in (lambda: browser.click(OVER, times=2), lambda: browser.keys("Escape"), clicked):
        assert browser.evaluate(f"document.querySelector('{back}').checkVisibility()") is False
        browser.drag(OVER, 0.25, 0.75)
        low, high = browser.evaluate(SCALE)
        span = whole[1] - whole[0]
        assert low == pytest.approx(whole[0] + 0.25 * span, abs=0.01 * span)
        assert high == pytest.approx(whole[0] + 0.75 * span, abs=0.01 * span)
        assert browser.evaluate(f"document.querySelector('{back}').checkVisibility()")
        at(browser, 12)
        assert browser.evaluate(SCALE) == [low, high]
        leave()
        browser.painted()
        assert browser.evaluate(SCALE) == whole


def test_a_narrow_zoom_has_round_numbers_on_its_axis(browser: Browser, one: Path):
    opened(browser, one)
    browser.drag(OVER, 0.62, 0.7)
    ticks = browser.evaluate("drawing.charts.find(({ block }) => block.key === 'loss').plot.axes[0]._values")
    assert len(ticks) >= 3
    assert len(set(ticks)) == len(ticks)
    assert all(re.fullmatch(r"\d+", tick) for tick in ticks)


def test_a_spectrum_keeps_its_zoom_under_the_slider(browser: Browser, one: Path):
    opened(browser, one)
    browser.drag("#chart-spectrum .u-over", 0.2, 0.6)
    scale = SCALE.replace("'loss'", "'spectrum'")
    before, ink = browser.evaluate(scale), pixels(browser, "#chart-spectrum canvas")
    at(browser, 4)
    assert browser.evaluate(scale) == before
    assert pixels(browser, "#chart-spectrum canvas") != ink


def test_a_finger_scrolls_over_a_chart(browser: Browser, one: Path):
    browser.resize(390)
    browser.devtools("Emulation.setTouchEmulationEnabled", enabled=True)
    try:
        opened(browser, one)
        browser.script("document.querySelector('#chart-loss').scrollIntoView({ block: 'center', behavior: 'instant' })")
        before, scale = browser.evaluate("scrollY"), browser.evaluate(SCALE)
        for kind, places in (("touchStart", [500]), ("touchMove", range(480, 280, -20)), ("touchEnd", [None])):
            for y in places:
                points = [] if y is None else [{"x": 200, "y": y}]
                browser.devtools("Input.dispatchTouchEvent", type=kind, touchPoints=points)
        browser.painted()
        assert browser.evaluate("scrollY") > before + 100
        assert browser.evaluate(SCALE) == scale
    finally:
        browser.devtools("Emulation.setTouchEmulationEnabled", enabled=False)


# ---- numbers on the clipboard


def test_the_numbers_of_a_chart_are_those_of_the_run(browser: Browser, one: Path, rich: Run):
    opened(browser, one)
    rows = copied(browser, "#figure-ntk-norm .copy")
    steps, values = rich.scalar("ntk/norm")
    assert rows[0][0] == "step"
    assert [(float(x), float(y)) for x, y in rows[1:]] == list(zip(steps.tolist(), values.tolist(), strict=True))


def test_a_spectrum_is_copied_at_the_step_that_is_shown(browser: Browser, one: Path, rich: Run):
    opened(browser, one)
    at(browser, 15)
    rows = copied(browser, "#figure-spectrum .copy")
    assert rows[0] == ["place", "step 15", "step 0"]
    for column, step in ((1, 15), (2, 0)):
        expected = rich.array("spectrum", step)["eigenvalues"].tolist()
        assert [float(row[column]) for row in rows[1:]] == expected


def test_a_heat_map_is_copied_at_the_step_that_is_shown(browser: Browser, two: Path, rich: Run, short: Run):
    opened(browser, two)
    at(browser, 40)
    rows = copied(browser, "#figure-kernels figcaption .copy")
    assert rows[0] == ["run", "step", "sample, by class", *map(str, range(30))]
    for name, run, step in (("rich", rich, 40), ("short", short, 24)):
        own = [row for row in rows[1:] if row[0] == name]
        assert {row[1] for row in own} == {"0", str(step)}
        labels = run.array("targets", 0)["y"].argmax(1)
        order = numpy.argsort(labels, kind="stable")
        expected = cosines(run.array("kernel", step)["mean"].astype(float))[numpy.ix_(order, order)]
        shown = [[float(v) for v in row[3:]] for row in own if row[1] == str(step)]
        assert shown == expected.astype(numpy.float32).tolist()


def test_a_band_has_columns_of_its_own(browser: Browser, tmp_path: Path):
    runs = [by_hand(tmp_path / f"a{seed}", {"ntk/norm": [1.0, 2.0 + seed / 3]}, [0, 3], seed=seed) for seed in (0, 1)]
    opened(browser, report(runs, tmp_path / "a.html"))
    rows = copied(browser, "#figure-ntk-norm .copy")
    assert rows[0] == ["step", "a0", "a0, lowest", "a0, highest"]
    assert [float(v) for v in rows[2]] == [3.0, numpy.mean([2.0, 2 + 1 / 3]), 2.0, 2 + 1 / 3]


def test_a_table_has_full_numbers_and_errors(browser: Browser, two: Path, rich: Run, short: Run):
    opened(browser, two)
    rows = copied(browser, "#verdict > .tools .copy")
    place = rows[0].index("linearization gap")
    assert rows[0][place + 1] == "linearization gap, standard error"
    for row, run in zip(rows[1:], (rich, short), strict=True):
        gap = fl.diagnose(run).numbers["gap"]
        assert row[0] == run.name
        assert (float(row[place]), float(row[place + 1])) == (float(gap), float(gap.stderr))
    assert len({len(row) for row in rows}) == 1


def test_without_a_clipboard_a_selection_is_copied(browser: Browser, one: Path):
    opened(browser, one)
    browser.script("""
        Object.defineProperty(navigator, "clipboard", { value: undefined });
        window.caught = null;
        addEventListener("copy", () => { window.caught = document.activeElement.value; });""")
    browser.click("#figure-loss .copy")
    browser.painted()
    assert words(browser, "#figure-loss .copy") == ["Copied"]
    assert browser.evaluate("caught").startswith("step,measured,")
    assert browser.evaluate("document.querySelector('textarea')") is None
    assert browser.evaluate("document.activeElement.className") == "copy"


def test_a_refusal_is_said(browser: Browser, one: Path):
    opened(browser, one)
    browser.script("""
        navigator.clipboard.writeText = () => Promise.reject(new Error("no"));
        document.execCommand = () => false;""")
    browser.click("#figure-loss .copy")
    browser.painted()
    assert words(browser, "#figure-loss .copy") == ["Could not copy"]


@pytest.mark.parametrize("name", [HOSTILE, '=HYPERLINK("x")', 'a,b "c"'])
def test_names_of_strangers_stay_one_field(browser: Browser, tmp_path: Path, name: str):
    for run, value in (("a", 1.0), ("b", -2.0)):
        writer = RunWriter(tmp_path / run, {"name": name if run == "a" else "b", "lr": value})
        for step in (0, 1):
            writer.scalars(step, {"ntk/norm": value + step})
        writer.close()
    opened(browser, report([tmp_path / "a", tmp_path / "b"], tmp_path / "page.html"))
    rows = copied(browser, "#figure-ntk-norm .copy")
    assert rows == [["step", f"'{name}" if name.startswith("=") else name, "b"], ["0", "1", "-2"], ["1", "2", "-1"]]


def test_every_chart_heat_map_and_table_has_a_button(browser: Browser, two: Path):
    opened(browser, two)
    browser.script("for (const one of document.querySelectorAll('details')) one.open = true")
    captions = "[...document.querySelectorAll('figure > figcaption')]"
    count: Any = f"{captions}.map((one) => one.querySelectorAll('.copy').length)"
    assert set(browser.evaluate(count)) == {1}
    bare = """[...document.querySelectorAll(".scroll:has(> table)")].filter((one) =>
        !one.previousElementSibling?.matches(".tools") && !one.closest("figure")?.querySelector(".chart"))"""
    assert browser.evaluate(f"({bare}).length") == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_has_room_for_it(browser: Browser, two: Path, scheme: str):
    browser.media(scheme=scheme)
    browser.resize(390)
    opened(browser, two)
    at(browser, 12)
    assert browser.evaluate("document.documentElement.scrollWidth") == 390
    browser.script("document.getElementById('spectra').scrollIntoView({ behavior: 'instant' })")
    browser.painted()
    top, bottom, heading = browser.evaluate("""(() => {
        const { top, bottom } = document.getElementById("steps").getBoundingClientRect();
        return [top, bottom, document.getElementById("spectra-title").getBoundingClientRect().top]; })()""")
    assert top == 0
    assert 0 < bottom < 110
    assert heading >= bottom  # the slider stays in sight, and hides no heading
