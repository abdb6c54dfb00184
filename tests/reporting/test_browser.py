"""The page in a real browser: nothing is fetched, what is drawn changes, and it can be read and operated by all."""

import base64
import re
import time
from pathlib import Path

import pytest

from featlearn.record import RunWriter
from featlearn.reporting.page import report
from tests.reporting.browser import CHROMIUM, DRIVER, Browser
from tests.reporting.runs import HOSTILE, by_hand, watched
from tests.reporting.test_diverged import diverged, sound

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="chromium and chromedriver are not installed"),
]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("browser")
    runs = [watched(folder / f"rich{seed}", seed=seed) for seed in (0, 1)]
    runs.append(watched(folder / "lazy", gamma=0.05))
    hostile = RunWriter(folder / "hostile", {"name": HOSTILE, "layer_names": {HOSTILE: "net"}, "device": HOSTILE})
    for step in (0, 1, 2):
        hostile.scalars(step, {"probe/loss": 1.0 - step / 3, "weights/net/norm": 1.0 + step})
    hostile.close()
    silent = by_hand(
        folder / "silent",
        {
            "probe/loss": [1.0, 0.99, 0.98, 0.2, 0.01],
            "ntk/norm": [1.0, 1.1, 1.3, 30.0, 40.0],
            "ntk/centered_alignment": [0.1, 0.5, 0.9, 0.92, 0.92],
        },
        [0, 20, 28, 40, 50],
    )
    return {
        "one": report(runs[0], folder / "one.html"),
        "many": report(runs, folder / "many.html"),
        "hostile": report(folder / "hostile", folder / "hostile.html", title=HOSTILE),
        "silent": report(silent, folder / "silent.html"),
        "diverged": report([sound(folder / "sound"), diverged(folder / "diverged")], folder / "diverged.html"),
    }


@pytest.fixture(scope="module")
def window():
    with Browser() as found:
        yield found


@pytest.fixture
def browser(window: Browser):
    window.devtools("Emulation.setDeviceMetricsOverride", width=1200, height=900, deviceScaleFactor=1, mobile=False)
    window.media()
    window.log()
    window.requests()
    return window


OPEN = "for (const one of document.querySelectorAll('details')) one.open = true"


def drawn(browser: Browser, selector: str) -> str:
    """The pixels of a canvas, as a string that differs where they do."""
    browser.painted()
    return browser.script("return document.querySelector(arguments[0]).toDataURL()", selector)


@pytest.mark.parametrize("name", ["one", "many", "hostile", "silent", "diverged"])
def test_nothing_is_fetched_and_nothing_goes_wrong(browser: Browser, pages: dict[str, Path], name: str):
    browser.open(pages[name])
    assert browser.evaluate("document.documentElement.classList.contains('drawn')")
    assert browser.log() == []
    asked = [url for url in browser.requests() if not url.startswith("data:")]
    assert asked == [pages[name].as_uri()]


def test_a_hostile_name_is_shown_and_not_run(browser: Browser, pages: dict[str, Path]):
    browser.open(pages["hostile"])
    assert browser.evaluate("document.querySelector('.kicker strong').textContent") == HOSTILE
    assert browser.evaluate("document.images.length") == 0
    assert HOSTILE in browser.evaluate("document.querySelector('#figure-norms .legend').textContent")


def test_every_chart_and_picture_has_ink(browser: Browser, pages: dict[str, Path]):
    browser.open(pages["many"])
    count = """
        return [...document.querySelectorAll(arguments[0])].map((canvas) => {
            const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
            return new Set(new Uint32Array(pixels.buffer)).size;
        })"""
    charts, pictures = browser.script(count, ".chart canvas"), browser.script(count, ".picture canvas")
    assert len(charts) > 10
    assert min(charts) > 100
    assert len(pictures) == 8
    assert min(pictures) > 2


def test_a_line_of_the_legend_hides_and_shows(browser: Browser, pages: dict[str, Path]):
    browser.open(pages["many"])
    canvas, button = "#chart-loss canvas", "#figure-loss .legend button"
    before = drawn(browser, canvas)
    browser.script("document.querySelector(arguments[0]).click()", button)
    hidden = drawn(browser, canvas)
    assert hidden != before
    assert browser.evaluate(f"document.querySelector('{button}').getAttribute('aria-pressed')") == "false"
    browser.script("document.querySelector(arguments[0]).click()", button)
    assert drawn(browser, canvas) == before


def test_a_run_hides_in_all_charts(browser: Browser, pages: dict[str, Path]):
    browser.open(pages["many"])
    charts = ["#chart-loss canvas", "#chart-ntk-norm canvas", "#chart-features-uncentered canvas"]
    before = [drawn(browser, chart) for chart in charts]
    browser.script("document.querySelector('.runs button[data-run=\"1\"]').click()")
    assert all(drawn(browser, chart) != old for chart, old in zip(charts, before, strict=True))
    states = "[...document.querySelectorAll('figure .legend button[data-group=\"1\"]')].map(b => b.ariaPressed)"
    assert set(browser.evaluate(states)) == {"false"}


def test_a_style_hides_in_all_runs_and_stays_hidden_with_them(browser: Browser, pages: dict[str, Path]):
    browser.open(pages["many"])
    canvas, click = "#chart-gap canvas", "document.querySelector(arguments[0]).click()"
    run, kind = '#figure-gap [data-group="1"]', '#figure-gap [data-kind="on test points"]'
    states = []
    for button in (kind, run, kind, run):
        states.append(drawn(browser, canvas))
        browser.script(click, button)
    assert len(set(states)) == 4
    assert drawn(browser, canvas) == states[0]


def test_a_link_opens_what_is_folded(browser: Browser, pages: dict[str, Path]):
    browser.open(pages["many"])
    for selector, target in (
        ("nav a[href='#panel-layers']", "#figure-weights"),
        ("#runs .run a", "#runs .run .sources"),
    ):
        visible = f"document.querySelector('{target}').checkVisibility()"
        assert browser.evaluate(visible) is False
        browser.script("document.querySelector(arguments[0]).click()", selector)
        time.sleep(0.2)
        assert browser.evaluate(visible)


def test_tabs_by_mouse_and_keyboard(browser: Browser, pages: dict[str, Path]):
    browser.open(pages["one"])
    shown = "[...document.querySelectorAll('[role=tabpanel]')].filter((p) => p.checkVisibility()).map((p) => p.id)"
    assert browser.evaluate(shown) == ["panel-curves"]
    browser.click("#tab-layers")
    assert browser.evaluate(shown) == ["panel-layers"]
    assert browser.evaluate("document.querySelector('#chart-weights canvas').getBoundingClientRect().width") > 300
    for key, panel in (("ArrowRight", "evidence"), ("ArrowRight", "details"), ("ArrowRight", "curves")):
        browser.keys(key)
        assert browser.evaluate(shown) == [f"panel-{panel}"]
        assert browser.evaluate("document.activeElement.id") == f"tab-{panel}"
    browser.script("document.querySelector('.numbers a').click()")
    time.sleep(0.2)
    assert browser.evaluate(shown) == ["panel-evidence"]


def test_terms_open_by_keyboard_and_the_command_is_copied(browser: Browser, pages: dict[str, Path]):
    browser.open(pages["one"])
    meaning = "document.querySelector('.meaning').checkVisibility()"
    assert browser.evaluate(meaning) is False
    browser.script("document.querySelector('.term').focus()")
    browser.keys("Enter")
    assert browser.evaluate(meaning)
    assert browser.evaluate("document.querySelector('.term').ariaExpanded") == "true"


def test_the_first_screen_holds_answer_pictures_and_what_to_do(browser: Browser, pages: dict[str, Path]):
    browser.open(pages["one"])
    assert float(browser.evaluate("getComputedStyle(document.querySelector('h1')).fontSize").removesuffix("px")) >= 40
    places = "['h1', '#figure-kernels canvas', '.neighbors', '.patterns', '.strip', '#play', '.next'].map((one) => " + (
        "document.querySelector(one).getBoundingClientRect().top)"
    )
    found = browser.evaluate(places)
    assert found[0] < 100
    assert max(found) < 900


@pytest.mark.parametrize("width", [390, 1280])
def test_words_on_gauges_do_not_touch(browser: Browser, pages: dict[str, Path], width: int):
    browser.resize(width)
    browser.open(pages["one"])
    browser.click("#tab-evidence")
    boxes = browser.evaluate("""[...document.querySelectorAll('.gauge > svg')].map((svg) =>
        [...svg.querySelectorAll('text')].map((t) => {
            const { left, right, top, bottom } = t.getBoundingClientRect();
            return [left, right, top, bottom]; }))""")
    assert len(boxes) == 4
    for words in boxes:
        assert len(words) >= 4
        for i, (left, right, top, bottom) in enumerate(words):
            assert left >= 0
            assert right <= width
            assert not any(left < r and l < right and top < b and t < bottom for l, r, t, b in words[:i])


def test_a_card_opens_by_keyboard(browser: Browser, pages: dict[str, Path]):
    browser.open(pages["many"])
    browser.click("#tab-evidence")
    assert browser.evaluate("document.querySelector('.run .gauges').checkVisibility()") is False
    browser.script("document.querySelector('.run > summary').focus()")
    browser.keys("Enter")
    assert browser.evaluate("document.querySelector('.run .gauges').checkVisibility()")


def test_the_window_of_silent_alignment_is_drawn(browser: Browser, pages: dict[str, Path]):
    browser.open(pages["silent"])
    assert "silent alignment: steps" in browser.evaluate("document.querySelector('#timeline').textContent")
    shaded = """
        const canvas = document.querySelector('#chart-timeline canvas');
        const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
        let count = 0;
        for (let i = 0; i < pixels.length; i += 4) count += pixels[i + 3] > 20 && pixels[i + 3] < 90;
        return count;"""
    assert browser.script(shaded) > 2000


def test_a_diverged_run_leaves_room_for_the_others(browser: Browser, pages: dict[str, Path]):
    """The line of the sound run spans much of the axis, from its lowest to its highest pixel."""
    browser.open(pages["diverged"])
    share = browser.script("""
        const canvas = document.querySelector('#chart-ntk-norm canvas');
        const context = canvas.getContext('2d');
        const pixels = context.getImageData(0, 0, canvas.width, canvas.height).data;
        const rows = [];
        for (let i = 0; i < pixels.length; i += 4)
            if (pixels[i + 3] > 200 && pixels[i + 2] - pixels[i] > 90) rows.push(Math.floor(i / 4 / canvas.width));
        return (Math.max(...rows) - Math.min(...rows)) / canvas.height;""")
    assert share > 0.3


def test_the_page_is_operated_by_keyboard(browser: Browser, pages: dict[str, Path]):
    browser.open(pages["one"])
    browser.keys("Tab")
    assert browser.evaluate("document.activeElement.className") == "skip"
    assert browser.evaluate("document.activeElement.getBoundingClientRect().left") >= 0
    browser.keys("Enter")
    assert browser.evaluate("location.hash") == "#verdict"
    browser.script("document.querySelector('#figure-loss .legend button').focus()")
    browser.keys("Space")
    assert browser.evaluate("document.activeElement.ariaPressed") == "false"
    assert browser.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    browser.script("document.querySelector('#figure-loss summary').focus()")
    browser.keys("Enter")
    assert browser.evaluate("document.querySelector('#figure-loss details').open")


CONTRASTS = """
    const channel = (c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
    const parts = (color) => color.match(/[\\d.]+/g).map(Number);
    const ground = (element) => {
        for (let at = element; at; at = at.parentElement) {
            const color = parts(getComputedStyle(at).backgroundColor);
            if (color.length === 3 || color[3] > 0) return color;
        }
        return null;
    };
    for (const one of document.querySelectorAll('details')) one.open = true;
    const found = {};
    for (const element of document.querySelectorAll('body *')) {
        const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
        if (!own || !element.checkVisibility() || element.closest('script, style')) continue;
        const [a, b] = [light(parts(getComputedStyle(element).color)), light(ground(element))].sort((x, y) => y - x);
        found[element.tagName + '.' + element.className] = Math.min((a + 0.05) / (b + 0.05),
            found[element.tagName + '.' + element.className] ?? 99);
    }
    return found;
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_from_their_ground(browser: Browser, pages: dict[str, Path], scheme: str):
    browser.media(scheme=scheme)
    browser.open(pages["many"])
    browser.script("document.querySelector('.legend button').click()")
    ground = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (max(map(int, re.findall(r"\d+", ground)[:3])) < 60) is (scheme == "dark")
    contrasts = browser.script(CONTRASTS)
    assert len(contrasts) > 15
    assert {name: ratio for name, ratio in contrasts.items() if ratio < 4.5} == {}


def test_lines_have_colors_of_the_scheme(browser: Browser, pages: dict[str, Path]):
    browser.open(pages["one"])
    light = drawn(browser, "#chart-loss canvas")
    browser.media(scheme="dark")
    time.sleep(0.2)
    assert drawn(browser, "#chart-loss canvas") != light


@pytest.mark.parametrize("name", ["one", "many", "hostile"])
def test_a_phone_needs_no_horizontal_scrolling(browser: Browser, pages: dict[str, Path], name: str):
    browser.resize(375)
    browser.open(pages[name])
    browser.script(OPEN)
    assert browser.evaluate("document.documentElement.scrollWidth") == 375
    widths = "[...document.querySelectorAll('canvas')].map(c => c.getBoundingClientRect().right)"
    assert max(browser.evaluate(widths)) <= 375
    browser.resize(1000)
    time.sleep(0.3)
    assert browser.evaluate("document.querySelector('#chart-loss canvas').getBoundingClientRect().width") > 375


def test_print_has_two_pages_and_all_tables_if_asked_for(browser: Browser, pages: dict[str, Path]):
    browser.media(scheme="dark")
    browser.open(pages["one"])
    pdf = base64.b64decode(browser.devtools("Page.printToPDF", paperWidth=8.27, paperHeight=11.69)["data"])
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) == 2
    browser.visit(f"{pages['one'].as_uri()}?print=all")
    browser.script("""window.seen = null; addEventListener('beforeprint', () => {
        window.seen = [document.querySelectorAll('details:not([open])').length,
                       getComputedStyle(document.documentElement).getPropertyValue('--paper').trim()]; })""")
    assert len(browser.devtools("Page.printToPDF")["data"]) > 50_000
    assert browser.evaluate("window.seen") == [0, "#fff"]
    assert browser.evaluate("document.querySelectorAll('details[open]').length") == 0
    assert browser.evaluate("document.documentElement.classList.contains('print')") is False


def test_every_control_has_a_name(browser: Browser, pages: dict[str, Path]):
    browser.open(pages["many"])
    browser.script(OPEN)
    nodes = browser.devtools("Accessibility.getFullAXTree")["nodes"]
    named = {"button", "slider", "image", "region", "table", "figure", "navigation", "link", "heading"}
    found = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in nodes if not n["ignored"]]
    kinds = {role for role, _ in found}
    assert {"banner", "navigation", "main", "contentinfo", "slider", "button", "image"} <= kinds
    assert [role for role, name in found if role in named - {"figure", "table"} and not name.strip()] == []
