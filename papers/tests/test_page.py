"""The gallery in a browser: it can be read on a phone and in the dark."""

import pytest

from featlearn_papers.frame import results
from featlearn_papers.frame.page import gallery
from featlearn_papers.frame.registry import DECLARATIONS
from tests.reporting.browser import CHROMIUM, DRIVER, Browser
from tests.reporting.test_browser import CONTRASTS

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="chromium and chromedriver are not installed"),
]
PHONE = 390


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory):
    found = {one.id: kept for one in DECLARATIONS if (kept := results.kept(one.id)) is not None}
    page = tmp_path_factory.mktemp("gallery") / "gallery.html"
    page.write_text(gallery(DECLARATIONS, found), encoding="utf-8")
    with Browser() as window:
        window.resize(PHONE)
        window.open(page)
        window.script(
            "document.head.append(Object.assign(document.createElement('style'), { textContent: arguments[0] }))",
            ".gallery section { display: block !important } .overview { display: none }",
        )
        yield window


@pytest.fixture(scope="module")
def overview(tmp_path_factory: pytest.TempPathFactory):
    found = {one.id: kept for one in DECLARATIONS[:12] if (kept := results.kept(one.id)) is not None}
    page = tmp_path_factory.mktemp("overview") / "gallery.html"
    page.write_text(gallery(DECLARATIONS, found), encoding="utf-8")
    with Browser() as window:
        window.open(page)
        yield window


SHOWN = (
    "[...document.querySelectorAll('.grid li')].filter((card) => card.checkVisibility()).map((card) => card.className)"
)


def test_the_overview_is_a_grid_that_filters_by_paper_and_verdict(overview: Browser):
    cards = overview.evaluate(SHOWN)
    assert len(cards) == 12
    assert overview.evaluate("document.documentElement.scrollHeight") < 3000
    assert overview.evaluate("document.querySelectorAll('.grid img').length") == 12
    for choice in ("paper-001", "verdict-fails"):
        overview.click(f"#{choice}")
        kind = choice.partition("-")[2]
        assert overview.evaluate(SHOWN) == [card for card in cards if f"of-{kind}" in card.split()] != cards
        overview.click(f"#{choice.partition('-')[0]}-")
    assert overview.evaluate(SHOWN) == cards


def test_a_figure_has_a_page_of_its_own(overview: Browser):
    overview.click(".grid a")
    sections = "[...document.querySelectorAll('section')].filter((one) => one.checkVisibility()).map((one) => one.id)"
    assert overview.evaluate(sections) == [DECLARATIONS[0].id.replace("/", "-")]
    assert not overview.evaluate("document.querySelector('.grid').checkVisibility()")
    overview.click("section:target a")
    assert overview.evaluate("document.querySelector('.grid').checkVisibility()")


def test_a_phone_scrolls_boxes_and_not_the_page(browser: Browser):
    assert browser.evaluate("document.documentElement.scrollWidth") == PHONE
    boxes = browser.evaluate("""[...document.querySelectorAll('.box')].map((box) =>
        [box.getBoundingClientRect().right, box.scrollWidth > box.clientWidth, box.tabIndex])""")
    assert len(boxes) == browser.evaluate("document.querySelectorAll('section img, section table').length") > 20
    assert max(right for right, _, _ in boxes) <= PHONE
    assert {(wide, focus) for _, wide, focus in boxes} == {(True, 0)}


def test_figures_and_rows_have_a_readable_size(browser: Browser):
    widths = browser.evaluate(
        "[...document.querySelectorAll('.picture img')].map((one) => one.getBoundingClientRect().width)"
    )
    assert {round(width) for width in widths} == {640}
    lines = browser.evaluate("""[...document.querySelectorAll('tr')].map((row) =>
        row.getBoundingClientRect().height / parseFloat(getComputedStyle(row).lineHeight))""")
    assert max(lines) < 30, "a narrow column makes long rows that look empty"


def test_the_verdict_on_a_claim_is_seen_without_scrolling(browser: Browser):
    edges = browser.evaluate("""[...document.querySelectorAll('td.holds, td.fails, td.known')].map((one) =>
        one.getBoundingClientRect().right)""")
    assert max(edges) <= PHONE


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_and_figures_lie_on_white(browser: Browser, scheme: str):
    browser.media(scheme=scheme)
    browser.painted()
    ground = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(22, 22, 22)")
    cards = browser.evaluate("""[...document.querySelectorAll('.picture img')].map((one) =>
        getComputedStyle(one.parentElement).backgroundColor)""")
    assert set(cards) == {"rgb(255, 255, 255)"}
    contrasts = browser.script(CONTRASTS)
    assert len(contrasts) > 5
    assert {name: ratio for name, ratio in contrasts.items() if ratio < 4.5} == {}


def test_a_desk_shows_tables_and_figures_whole(browser: Browser):
    browser.resize(1280)
    browser.painted()
    wide = browser.evaluate("[...document.querySelectorAll('.box')].filter((box) => box.scrollWidth > box.clientWidth)")
    assert wide == []
    browser.resize(PHONE)
