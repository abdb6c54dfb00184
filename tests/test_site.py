"""The documentation site: built without a warning and without network, complete, and without a broken link."""

import os
import pkgutil
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.reporting.browser import CHROMIUM, DRIVER, Browser

pytest.importorskip("sphinx")
pytest.importorskip("myst_parser")
pytest.importorskip("furo")

TOP = Path(__file__).parents[1]
EXTENSIONS = TOP / "docs" / "extensions"
INVENTORIES = sorted((TOP / "docs" / "inventories").glob("*.txt"))
OWN_PAGES = ("explorer.html", "figures.html")  # written by the package, with tests of their own

sys.path += [str(EXTENSIONS), str(EXTENSIONS.parent)]  # as Sphinx finds them


def sphinx(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m sphinx` without network."""
    command = [sys.executable, str(TOP / ".ci" / "offline.py"), "sphinx", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


FAULTY = {
    "index": "# Title\n\n```{public} ntk plan\n```\n\n```{toctree}\nabsent\nformula\n```\n",
    "absent": "# Absent\n\n```{public} metrics.aligment\n```\n",
    "formula": "# Formula\n\n$\\frac12$\n",
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What Sphinx says of a site of three pages with a fault each, which must not build."""
    source = tmp_path_factory.mktemp("source")
    (source / "conf.py").write_text(
        f"import sys\nsys.path[:0] = {[str(path) for path in (EXTENSIONS, EXTENSIONS.parent, TOP / 'src')]!r}\n"
        "extensions = ['myst_parser', 'mathml', 'reference']\n"
        "html_theme, html_math_renderer, myst_enable_extensions = 'basic', 'mathml', ['dollarmath']\n"
    )
    for name, page in FAULTY.items():
        (source / f"{name}.md").write_text(page)
    done = sphinx("-q", "-W", "--keep-going", str(source), str(source / "built"))
    assert done.returncode != 0
    return done.stderr


def test_a_public_name_without_a_page_fails_the_build(said: str):
    missing = set(re.findall(r"the public name fl\.(\S+) is on no page", said))
    assert {"Session", "metrics.alignment", "theory.ofe.solve", "errors.RunError", "readouts.token"} <= missing
    assert not missing & {"ntk", "plan"}


def test_a_name_that_is_not_there_fails_the_build(said: str):
    assert re.search(r"absent\.md.* featlearn has no metrics\.aligment", said)


def test_a_formula_that_cannot_be_read_fails_the_build(said: str):
    assert re.search(r"formula\.md.* \\frac12: ", said)


def test_docstrings_become_markdown():
    from entries import markdown

    text = markdown(
        """One <A, B> and `<C>`.

        Args:
            x, y: first
                second.
            z: third.

        Returns:
            Words.

        More."""
    )
    assert text.split("\n") == [
        "One &lt;A, B> and `<C>`.",
        "",
        "**Args**",
        "",
        "- `x, y`: first",
        "  second.",
        "- `z`: third.",
        "",
        "**Returns**",
        "",
        "Words.",
        "",
        "",
        "More.",
    ]


def test_an_entry_shows_its_signature_without_types_and_documented_members():
    from entries import entry

    import featlearn as fl

    assert entry("quantities.ntk_diagonal", fl.quantities.ntk_diagonal).startswith(
        "````````{py:function} featlearn.quantities.ntk_diagonal(model, x, *, outputs='mean', by='network', "
    )
    shown = entry("Estimate", fl.Estimate)
    assert "{py:attribute} stderr\n\nStandard error" in shown
    assert "{py:method} from_samples(values)" in shown
    assert " at 0x" not in entry("AdaptiveSLO", fl.steer.AdaptiveSLO)


def test_the_help_of_every_command_is_there_as_it_is():
    from generated_pages import command_help

    from featlearn.cli.app import COMMANDS, KNOWN_DISTRIBUTIONS, RUNS

    text = command_help()
    headings = re.findall(r"^#+ (featlearn .+)$", text, re.MULTILINE)
    names = [*COMMANDS, *KNOWN_DISTRIBUTIONS, "runs", *(f"runs {name}" for name in RUNS)]
    assert set(headings) == {f"featlearn {name}" for name in names}
    assert "--output-scale" in text
    assert ", --no-" not in text  # no flag has a negative form


class Page(HTMLParser):
    """Links, what is fetched, pictures without words, and places of one page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.wordless: list[str] = []
        self.places: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.places |= {value for name, value in attrs if name in ("id", "name") and value}
        if tag == "img" and len(found.get("alt") or "") < 5:
            self.wordless.append(str(found.get("src")))
        if tag == "a" and found.get("href"):
            self.links.append(str(found["href"]))
        elif tag in ("img", "script", "iframe", "source") and found.get("src"):
            self.fetched.append(str(found["src"]))
        elif tag == "link" and found.get("href") and found.get("rel") != "canonical":
            self.fetched.append(str(found["href"]))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site that FEATLEARN_SITE names, or a new one."""
    if "FEATLEARN_SITE" in os.environ:
        return Path(os.environ["FEATLEARN_SITE"])
    out = tmp_path_factory.mktemp("site")
    done = sphinx("-q", "-W", "--keep-going", str(TOP / "docs"), str(out))
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path.resolve(): Page(path) for path in sorted(site.rglob("*.html"))}


@pytest.mark.slow
def test_links_inside_the_site_lead_to_pages_and_places(site: Path, pages: dict[Path, Page]):
    broken = []
    ours = [path for path in pages if (TOP / "docs" / path.relative_to(site.resolve())).with_suffix(".md").exists()]
    for path in ours:
        page = pages[path]
        for link in page.links + page.fetched:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            place = unquote(parts.fragment)
            drawn = target.name == "explorer.html"  # its script makes the places
            if not target.exists() or (place and target in pages and not drawn and place not in pages[target].places):
                broken.append(f"{path.name}: {link}")
    assert len(ours) > 60
    assert broken == []


def listed_elsewhere() -> dict[str, str]:
    """Names of other libraries in `docs/inventories`, and the page of each."""
    lines = [line.split() for path in INVENTORIES for line in path.read_text().splitlines() if line[0] != "#"]
    return {name: page for name, _, page in lines}


@pytest.mark.parametrize("name", listed_elsewhere())
def test_names_of_other_libraries_exist(name: str):
    library = name.split(".")[0]
    pytest.importorskip(library)
    assert pkgutil.resolve_name(name)


@pytest.mark.slow
def test_names_of_other_libraries_are_links(site: Path, pages: dict[Path, Page]):
    links = {link for page in pages.values() for link in page.links}
    assert "https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module" in links
    unused = [page for page in listed_elsewhere().values() if not any(f"/{page}#" in link for link in links)]
    assert unused == []


@pytest.mark.slow
def test_every_picture_is_described(pages: dict[Path, Page]):
    assert {path.name: page.wordless for path, page in pages.items() if page.wordless} == {}


@pytest.mark.slow
def test_no_page_fetches_anything_from_the_network(pages: dict[Path, Page]):
    fetched = [url for page in pages.values() for url in page.fetched if urlsplit(url).netloc]
    assert fetched == []
    styles = [path.read_text() for path in next(iter(pages)).parent.rglob("*.css")]
    assert not any(re.search(r"url\([\"']?(https?:)?//|@import", style) for style in styles)


@pytest.mark.slow
def test_programs_find_every_page_with_its_first_sentence(site: Path, pages: dict[Path, Page]):
    listed = re.findall(r"^- \[.+\]\((\S+)\.html\): \S", (site / "llms.txt").read_text(), re.MULTILINE)
    built = {str(path.relative_to(site.resolve()).with_suffix("")) for path in pages}
    assert set(listed) <= built
    assert {"index", "choose", "how-to/for-agents", "concepts/tangent-kernel", "reference/command-line"} <= set(listed)


@pytest.mark.slow
def test_the_pages_that_the_package_writes_are_there(site: Path, pages: dict[Path, Page]):
    for name in OWN_PAGES:
        assert (site / name).resolve() in pages
    assert "Width" in (site / "explorer.html").read_text()
    assert "002/fig1" in (site / "figures.html").read_text()


@pytest.mark.slow
def test_mathematics_is_in_the_pages(site: Path):
    assert (site / "concepts" / "tangent-kernel.html").read_text().count("<math") >= 3


QUESTIONS = {
    "Did my network learn features?": ("Did my network learn features?", "fl.diagnose(watch.run)"),
    "Where, and what should I change?": ("Read a diagnosis", "fl.diagnose("),
    "What does it cost?": ("What does it cost?", "budget=0.05"),
    "Which number answers my question?": ("Which number for which question?", "fl.dynamics.kernel_regression("),
}
"""Card of the start page -> the heading where one lands, and code that answers the question."""

IN_VIEW = """
return [...document.querySelectorAll("h1, h2")].filter((heading) => {
  const box = heading.getBoundingClientRect();
  return box.top >= -5 && box.top < window.innerHeight;
}).map((heading) => heading.firstChild.textContent);
"""


@pytest.fixture(scope="module")
def window():
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("chromium and chromedriver are not installed")
    with Browser(1280, 900) as found:
        yield found


@pytest.mark.browser
@pytest.mark.parametrize("question", QUESTIONS)
def test_a_card_of_the_start_page_leads_to_the_answer(site: Path, window: Browser, question: str):
    heading, code = QUESTIONS[question]
    window.open(site / "index.html")
    card = "[...document.querySelectorAll('.sd-card')].find((card) => card.innerText.includes(arguments[0]))"
    window.script(f"{card}.querySelector('a.sd-stretched-link').click()", question)
    for _ in range(50):
        if heading in window.script(IN_VIEW):
            break
        time.sleep(0.1)
    assert heading in window.script(IN_VIEW)
    assert code in window.evaluate("document.body.innerText")


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_fits_a_phone_and_fetches_nothing(site: Path, pages: dict[Path, Page], window: Browser, scheme: str):
    window.media(scheme=scheme)
    window.resize(390)
    window.requests()
    wide = {}
    for page in pages:
        window.open(page)
        if (width := window.evaluate("document.documentElement.scrollWidth")) > 390:
            wide[page.name] = width
    assert wide == {}
    assert [url for url in window.requests() if not url.startswith(("file:", "data:", "about:", "blob:"))] == []
    assert [line for line in window.log() if "ERR_" in line or "Uncaught" in line] == []


@pytest.mark.browser
def test_no_table_is_cut_on_a_desktop(pages: dict[Path, Page], window: Browser):
    window.devtools("Emulation.clearDeviceMetricsOverride")
    cut = []
    for page in pages:
        window.open(page)
        tables = "[...document.querySelectorAll('article .table-wrapper')]"
        cut += [page.name] * window.evaluate(f"{tables}.some((one) => one.scrollWidth > one.clientWidth + 2)")
    assert cut == []


@pytest.mark.browser
def test_the_explorer_runs_in_its_page(site: Path, window: Browser):
    window.devtools("Emulation.clearDeviceMetricsOverride")
    window.open(site / "gallery" / "explorer.html")
    frame = window.evaluate("document.querySelector('iframe.explorer').getAttribute('src')")
    assert frame == "../explorer.html"
    window.open(site / "explorer.html")
    assert window.evaluate("document.querySelectorAll('canvas, svg').length") > 0
