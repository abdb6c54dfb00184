"""The explorer in a real browser: what moves, what trains, what is asked for, and who can use it."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from featlearn.explorer.explorer_page import explore
from tests.explorer.test_python import difference, drawn
from tests.explorer.vectors import vectors
from tests.reporting.browser import CHROMIUM, DRIVER, Browser

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="chromium and chromedriver are not installed"),
]

LONG = "?layers=4&sigma=0.1&rate=0.005"  # trains for many seconds
TOPICS = ["rich", "silent", "mechanism", "growth", "features", "transfer"]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return explore(tmp_path_factory.mktemp("explorer") / "explore.html")


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with Browser() as found:
        yield found


@pytest.fixture
def browser(window: Browser) -> Browser:
    window.devtools("Emulation.setDeviceMetricsOverride", width=1200, height=900, deviceScaleFactor=1, mobile=False)
    window.media()
    window.log()
    window.requests()
    return window


def opened(browser: Browser, page: Path, topic: str = "silent", rest: str = "") -> None:
    """The page anew, at a topic."""
    browser.open(page)
    browser.script("location.hash = arguments[0]", f"#{topic}{rest}")
    until(browser, f"explorer.shown.topic.key === '{topic}' && explorer.shown.theory")


def until(browser: Browser, condition: str, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not browser.evaluate(f"Boolean({condition})"):
        assert time.monotonic() < end, f"not within {seconds} s: {condition}"
        time.sleep(0.05)


def theory(browser: Browser) -> Any:
    browser.painted()
    return browser.evaluate("JSON.parse(JSON.stringify(explorer.shown.theory.charts))")


def slide(browser: Browser, key: str, place: str) -> None:
    browser.script(
        """const input = document.getElementById(`control-${arguments[0]}`);
        input.value = arguments[1];
        input.dispatchEvent(new Event("input", { bubbles: true }))""",
        key,
        place,
    )


def test_the_mathematics_agrees_with_the_theory(browser: Browser, page: Path):
    browser.open(page)
    comparison = (Path(__file__).parent / "comparison.mjs").read_text().replace("export ", "")
    given = vectors()
    # devtools evaluates outside of the policy of the page, which forbids scripts like this one
    expression = f"(() => {{ {comparison}; return failures(explorer.mathematics, {json.dumps(given)}); }})()"
    found = browser.devtools("Runtime.evaluate", expression=expression, returnByValue=True)
    assert found["result"]["value"] == []
    assert len(given) >= 200


def test_the_page_draws_and_offers_what_was_tested_without_it(browser: Browser, page: Path):
    """The Python code and the curves of tests/explorer/test_python.py, from the page itself."""
    browser.open(page)
    for one in drawn():
        state = f"{{ ...explorer.initial('{one['topic']}'), ...{json.dumps(one['set'])} }}"
        code, charts = browser.evaluate(
            f"[explorer.topics.{one['topic']}.python({state}), explorer.topics.{one['topic']}.theory({state}).charts]"
        )
        assert code == one["python"]
        curves = {line["name"]: (chart["x"], line["y"]) for chart in charts.values() for line in chart["lines"]}
        plain = {
            name: tuple([float("inf") if v is None else v for v in axis] for axis in curve)
            for name, curve in curves.items()
        }
        assert difference(plain, one["curves"]) < 1e-9


@pytest.mark.parametrize("topic", TOPICS)
def test_every_topic_trains_on_every_chart_and_asks_for_nothing(browser: Browser, page: Path, topic: str):
    opened(browser, page, topic)
    until(browser, "explorer.experiment.over", 60)
    counted = "[...explorer.experiment.of(key).values()].map((points) => points.y.length)"
    charts = browser.evaluate(f"explorer.shown.charts.map(({{ spec: {{ key }} }}) => [key, {counted}])")
    assert all(counts and min(counts) >= 1 for _, counts in charts), charts
    assert max(max(counts) for _, counts in charts) >= 8
    assert browser.evaluate("explorer.experiment.status.className") == "status done"
    ink = browser.evaluate("""[...document.querySelectorAll('.chart canvas')].map((canvas) =>
        new Set(new Uint32Array(canvas.getContext('2d')
            .getImageData(0, 0, canvas.width, canvas.height).data.buffer)).size)""")
    assert len(ink) == len(charts)
    assert min(ink) > 50
    assert browser.log() == []
    asked = {url.partition("#")[0] for url in browser.requests()}
    assert {url for url in asked if not url.startswith(("data:", "blob:"))} == {page.as_uri()}


@pytest.mark.parametrize("topic", TOPICS)
def test_every_slider_moves_what_it_names(browser: Browser, page: Path, topic: str):
    """Sliders of the theory move a line, all of them change what trains; the address keeps their values."""
    opened(browser, page, topic)
    ours, networks = browser.evaluate("[explorer.shown.topic.controls, explorer.shown.topic.networkControls]")
    for control in [*ours, *networks]:
        if control["key"] == "gap":  # of the modes, of which there is one at first
            browser.script("explorer.set({ modes: 3 })")
        before, setting = theory(browser), browser.evaluate("JSON.stringify(explorer.experiment.setting)")
        options = control.get("options")
        place = next(value for value, _ in options if value != control["value"]) if options else None
        last = browser.evaluate(f"Number(document.getElementById('control-{control['key']}').max || 0)")
        now = browser.evaluate(f"document.getElementById('control-{control['key']}').value")
        slide(browser, control["key"], place or str(last if float(now) < last / 2 else 0))
        after = theory(browser)
        if control in ours and control["key"] != "kappa":  # the plane alone
            assert after != before, control["key"]
        if (
            control["key"] != "steps"
            and control["key"] != "kappa"
            and (control in networks or topic in ("silent", "mechanism"))
        ):
            assert browser.evaluate("JSON.stringify(explorer.experiment.setting)") != setting, control["key"]
        time.sleep(0.4)
        assert f"{control['key']}=" in browser.evaluate("location.hash")
        browser.script("explorer.set(explorer.initial(explorer.shown.topic.key))")
    assert browser.log() == []


def test_what_a_slider_names_is_what_it_moves(browser: Browser, page: Path):
    """Smaller weights are silent for longer; a richer theory ends more aligned."""
    opened(browser, page, "silent")
    spans = []
    for place in ("200", "100", "0"):
        slide(browser, "sigma", place)
        spans.append(theory(browser)["loss"].get("window", {}).get("to", 0))
    assert spans[0] < spans[1] < spans[2]
    opened(browser, page, "rich")
    ends = []
    for place in ("0", "120", "240"):
        slide(browser, "share", place)
        ends.append(theory(browser)["alignment"]["lines"][0]["y"][-1])
    assert ends[0] < ends[1] < ends[2]


@pytest.mark.parametrize("topic", TOPICS)
def test_sixty_frames_in_two_seconds_of_a_slider(browser: Browser, page: Path, topic: str):
    opened(browser, page, topic)
    key = browser.evaluate("explorer.shown.topic.controls[0].key")
    frames = browser.script(
        """const input = document.getElementById(`control-${arguments[0]}`), chart = explorer.shown.charts[0];
        let drawn = 0, place = 0;
        const draw = chart.draw.bind(chart);
        chart.draw = (...given) => { drawn += 1; draw(...given); };
        const begun = performance.now();
        return new Promise((done) => {
          const move = () => {
            place = (place + 1) % (Number(input.max) + 1);
            input.value = place;
            input.dispatchEvent(new Event("input", { bubbles: true }));
            if (performance.now() - begun < 2000) requestAnimationFrame(move);
            else done(drawn);
          };
          move();
        })""",
        key,
    )
    assert frames >= 60


def test_the_network_is_paused_stepped_restarted_and_reseeded(browser: Browser, page: Path):
    opened(browser, page, "silent", LONG)
    count = "Number(explorer.experiment.status.textContent.split(' ')[0])"
    until(browser, f"{count} > 0")
    browser.script("explorer.experiment.toggle.click()")
    assert browser.evaluate("explorer.experiment.toggle.textContent") == "Train"
    time.sleep(0.3)
    paused = browser.evaluate(count)
    time.sleep(0.3)
    assert browser.evaluate(count) == paused
    browser.script("[...document.querySelectorAll('button')].find((b) => b.textContent === 'Step').click()")
    until(browser, f"{count} === {paused + 1}")
    first = "[...explorer.experiment.of('alignment').values()][0].y[0]"
    before = browser.evaluate(first)
    browser.script("[...document.querySelectorAll('button')].find((b) => b.textContent === 'Restart').click()")
    until(browser, f"{count} === 0")
    assert browser.evaluate(first) == before
    browser.script("[...document.querySelectorAll('button')].find((b) => b.textContent === 'Other seed').click()")
    until(browser, f"explorer.shown.state.seed === 1 && explorer.experiment.points.size && {first} !== {before}")
    assert browser.log() == []


def test_a_rate_too_large_is_seen_to_fail(browser: Browser, page: Path):
    opened(browser, page, "silent", "?rate=2.5")
    until(browser, "explorer.experiment.over")
    assert "diverged" in browser.evaluate("explorer.experiment.status.textContent")
    assert "too large" in browser.evaluate("explorer.experiment.said.textContent")
    assert browser.log() == []


def test_theory_and_network_meet_and_part(browser: Browser, page: Path):
    """The latent model is exact: its points lie on the lines, and leave them off the line of the data."""
    apart = []
    for rest in ("", "?off=0.7"):
        opened(browser, page, "mechanism", rest)
        until(browser, "explorer.experiment.over")
        apart.append(
            browser.script("""
            const { x, lines: [{ y }] } = explorer.shown.theory.charts.zeta;
            const { x: at, y: seen } = explorer.experiment.of('zeta').get(0);
            const theory = (t) => y[Math.round(t / x.at(-1) * (x.length - 1))];
            return Math.max(...at.map((t, i) => Math.abs(seen[i] - theory(t))))""")
        )
    assert apart[0] < 0.02
    assert apart[1] > 0.05


def test_the_theory_moves_where_workers_are_forbidden(browser: Browser, page: Path):
    script = "delete window.Worker; window.Worker = class { constructor() { throw new Error('forbidden'); } }"
    added = browser.devtools("Page.addScriptToEvaluateOnNewDocument", source=script)
    try:
        opened(browser, page, "silent")
        assert browser.evaluate("explorer.experiment.status.textContent") == "No network can train here: forbidden"
        before = theory(browser)
        slide(browser, "sigma", "200")
        assert theory(browser) != before
        assert browser.log() == []
    finally:
        browser.devtools("Page.removeScriptToEvaluateOnNewDocument", identifier=added["identifier"])


def test_a_click_in_the_plane_sets_the_sliders(browser: Browser, page: Path):
    opened(browser, page, "mechanism")
    browser.script("[...document.querySelectorAll('.plane button')].find((b) => b.textContent === 'NTK').click()")
    browser.painted()
    state = browser.evaluate("explorer.shown.state")
    assert (state["scale"], state["rateU"], state["normU"]) == (0.1, 0.01, 10)
    assert "kernel" in browser.evaluate("document.querySelector('.plane .readout').textContent")
    click = """const svg = document.querySelector('.plane svg'), box = svg.getBoundingClientRect();
        const place = { clientX: box.left + 0.15 * box.width, clientY: box.top + 0.8 * box.height };
        svg.dispatchEvent(new MouseEvent('click', { ...place, bubbles: true }))"""
    browser.script(click)
    browser.painted()
    assert "frozen" in browser.evaluate("document.querySelector('.plane .readout').textContent")
    browser.script("document.querySelector('.plane svg').focus()")
    scale = browser.evaluate("explorer.shown.state.scale")
    browser.keys("ArrowRight")
    browser.painted()
    assert browser.evaluate("explorer.shown.state.scale") == pytest.approx(scale * 100**0.25, rel=1e-4)
    places = browser.evaluate("[...document.querySelectorAll('.plane button')].map((b) => b.textContent)")
    for label in places:
        browser.script(
            f"[...document.querySelectorAll('.plane button')].find((b) => b.textContent === '{label}').click()"
        )
        browser.painted()
        phase = browser.evaluate("document.querySelector('.plane .readout').textContent")
        expected = {
            "NTK": "kernel",
            "mean field": "frozen",
            "mean field⁺": "learning",
            "Kaiming": "unstable",
            "Kaiming⁻": "kernel",
            "Xavier": "learning",
            "Xavier⁻": "kernel",
            "lazy": "unstable",
        }
        assert expected[label] in phase, label


def test_the_address_holds_the_state(browser: Browser, page: Path):
    opened(browser, page, "silent", "?sigma=0.3&layers=3&start=balanced&seed=7")
    state = browser.evaluate("explorer.shown.state")
    assert (state["sigma"], state["layers"], state["start"], state["seed"]) == (0.3, 3, "balanced", 7)
    browser.script("document.querySelector('#topics a[data-topic=\"transfer\"]').click()")
    until(browser, "location.hash === '#transfer'")
    opened(browser, page, "silent", "?sigma=<img onerror=1>&layers=99&nonsense=1&start=evil&seed=Infinity")
    state = browser.evaluate("explorer.shown.state")
    assert (state["sigma"], state["layers"], state["start"], state["seed"]) == (0.02, 4, "random", 0)
    assert "nonsense" not in state
    browser.script("location.hash = '#no-such-topic'")
    until(browser, "explorer.shown.topic.key === 'lazy'")
    assert browser.log() == []


def test_code_and_link_are_copied(browser: Browser, page: Path):
    browser.devtools("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    opened(browser, page, "transfer", "?spike=7")
    browser.devtools("Emulation.setFocusEmulationEnabled", enabled=True)  # only a page with the focus may copy
    for label, expected in (
        ("Copy Python", "fl.theory.transfer.learning_curve"),
        ("Copy link", f"{page.as_uri()}#transfer?spike=7"),
    ):
        browser.script(f"[...document.querySelectorAll('button')].find((b) => b.textContent === '{label}').click()")
        until(browser, "[...document.querySelectorAll('button')].some((b) => b.textContent === 'Copied')")
        assert expected in browser.script("return navigator.clipboard.readText()")
        until(browser, "![...document.querySelectorAll('button')].some((b) => b.textContent === 'Copied')")


def test_it_is_operated_by_keyboard(browser: Browser, page: Path):
    opened(browser, page, "silent")
    browser.keys("6")
    until(browser, "explorer.shown.topic.key === 'transfer'")
    browser.keys("2")
    until(browser, "explorer.shown.topic.key === 'silent'")
    browser.script("location.hash = arguments[0]", f"#silent{LONG}")
    until(browser, "explorer.shown.state.layers === 4")
    browser.keys("p")
    assert browser.evaluate("explorer.experiment.running") is False
    seed = browser.evaluate("explorer.shown.state.seed")
    browser.keys("n")
    assert browser.evaluate("explorer.shown.state.seed") == seed + 1
    browser.script("document.getElementById('control-sigma').focus()")
    sigma = browser.evaluate("explorer.shown.state.sigma")
    browser.keys("ArrowRight")
    assert browser.evaluate("explorer.shown.state.sigma") > sigma
    unnamed = browser.evaluate("""[...document.querySelectorAll('button, input, select, a, [role=img]')].filter((e) =>
        !(e.textContent.trim() || e.getAttribute('aria-label') || e.labels?.length)).length""")
    assert unnamed == 0


@pytest.mark.parametrize("topic", TOPICS)
def test_it_fits_a_phone(browser: Browser, page: Path, topic: str):
    browser.resize(390)
    opened(browser, page, topic)
    until(browser, "explorer.experiment.points.size")
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390
    parts = ".stage :is(input, select, button, canvas, svg, p), .lead, .said, h2"
    right = browser.script(f"""return Math.max(...[...document.querySelectorAll("{parts}")].map((e) =>
        e.getBoundingClientRect().right))""")
    assert right <= 390
    tops = browser.evaluate(
        """['figure', '.panel', '.charts figure:nth-child(2)'].map((s) =>
        document.querySelector(`.stage ${s}`).getBoundingClientRect().top)"""
    )
    assert tops == sorted(tops)  # a picture, then its sliders, then the others
    small = browser.evaluate("""[...document.querySelectorAll('.stage button, .examples button, input')].filter((e) => {
        const box = e.getBoundingClientRect(); return box.width > 0 && box.height < 28; }).length""")
    assert small == 0


def test_dark_and_light_and_print(browser: Browser, page: Path):
    def looks() -> tuple[str, str]:
        browser.painted()
        return (
            browser.evaluate("getComputedStyle(document.body).backgroundColor"),
            browser.script("return document.querySelector('.chart canvas').toDataURL()"),
        )

    opened(browser, page, "silent")
    until(browser, "explorer.experiment.over")
    light = looks()
    browser.media(scheme="dark")
    time.sleep(0.2)
    dark = looks()
    assert light[0] != dark[0]
    assert light[1] != dark[1]
    browser.media(scheme="light", media="print")
    assert browser.evaluate("getComputedStyle(document.querySelector('.examples')).display") == "none"
    assert browser.evaluate("getComputedStyle(document.querySelector('.chart')).display") != "none"


def test_it_waits_for_who_prefers_less_motion(browser: Browser, page: Path):
    features = [{"name": "prefers-reduced-motion", "value": "reduce"}]
    browser.devtools("Emulation.setEmulatedMedia", media="", features=features)
    opened(browser, page, "silent")
    until(browser, "explorer.experiment.points.size")
    time.sleep(0.3)
    assert browser.evaluate("explorer.experiment.status.textContent").startswith("0 steps")
    assert browser.evaluate("explorer.experiment.toggle.textContent") == "Train"


def test_question_0_plays_on_arrival_and_tells_lazy_from_rich(browser: Browser, page: Path):
    browser.open(page)
    until(browser, "explorer.shown.lazy.network.steps > 0")
    until(browser, "explorer.shown.lazy.over")
    said = "document.querySelector('.lazy .said').textContent"
    assert "Rich." in browser.evaluate(said)
    turned = browser.evaluate("explorer.shown.lazy.network.turned()")
    assert turned > 20
    assert "Train again" in browser.evaluate("document.querySelector('.lazy .main').textContent")
    slide(browser, "scale", "100")
    assert browser.evaluate("explorer.shown.lazy.scale") == 30
    until(browser, "explorer.shown.lazy.over")
    assert "Lazy." in browser.evaluate(said)
    assert browser.evaluate("explorer.shown.lazy.network.turned()") < 4
    until(browser, "location.hash === '#lazy?scale=30'")
    browser.click(".lazy .buttons:last-of-type button")
    until(browser, "document.querySelector('.wide').textContent.startsWith('After')", 120)
    errors = dict(re.findall(r"([\d.]+): (\d+)%", browser.evaluate("document.querySelector('.wide').textContent")))
    assert int(errors["0.05"]) < 20
    assert int(errors["30"]) > 35
    colors = """(() => { const canvas = document.querySelector('.lazy canvas');
        return new Set(new Uint32Array(canvas.getContext('2d').getImageData(0, 0, 384, 384).data.buffer)).size; })()"""
    assert browser.evaluate(colors) > 50
    assert browser.log() == []


def test_question_0_is_left_and_found_again_by_keys(browser: Browser, page: Path):
    browser.open(page)
    until(browser, "explorer.shown.lazy")
    browser.keys("p")
    assert not browser.evaluate("explorer.shown.lazy.running")
    steps = browser.evaluate("explorer.shown.lazy.network.steps")
    browser.painted()
    assert browser.evaluate("explorer.shown.lazy.network.steps") == steps
    browser.keys("1")
    until(browser, "explorer.shown.topic.key === 'rich' && explorer.shown.theory")
    assert browser.evaluate("explorer.experiment.running")  # it trains on arrival
    browser.keys("0")
    until(browser, "explorer.shown.lazy?.network.steps > 0")
    browser.script("location.hash = '#lazy?scale=99'")
    until(browser, "explorer.shown.lazy.scale === 30")


def test_question_0_stands_still_where_motion_is_not_wanted_and_fits_a_phone(browser: Browser, page: Path):
    browser.media(motion="reduce")
    browser.visit(f"{page.as_uri()}?embed#lazy")
    until(browser, "explorer.shown.lazy")
    assert browser.evaluate("explorer.shown.lazy.network.steps") == 0
    assert browser.evaluate("document.querySelector('.lazy .main').textContent") == "Train"
    browser.click(".lazy .main")
    until(browser, "explorer.shown.lazy.network.steps > 0")
    browser.resize(390)
    browser.painted()
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390
    assert not browser.evaluate("document.querySelector('header').checkVisibility()")
