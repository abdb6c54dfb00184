"""The page without a browser: what it holds, that it needs nothing else, and how modules become scripts."""

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest

from featlearn.cli.app import main
from featlearn.explorer.explorer_page import TITLE, explore, explorer_page, source
from featlearn.explorer.modules import bundle, module_order
from featlearn.reporting.document import static
from tests.reporting.test_page import Page

STATIC = Path(__file__).parents[2] / "src/featlearn/explorer/static"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Page:
    return Page(explore(tmp_path_factory.mktemp("explorer") / "explore.html"))


def test_the_page_needs_nothing_else(written: Page):
    for tag, attributes in written.elements:
        assert not attributes.keys() & {"src", "srcset", "style", "action"}
        assert tag not in {"iframe", "object", "embed", "img", "base", "form"}
        assert re.match(r"#|data:,$", attributes.get("href") or "#")
    assert not re.search(r"\b(fetch|XMLHttpRequest|importScripts|EventSource|WebSocket|eval)\(", written.source)
    assert "url(" not in " ".join(data for tag, data in written.texts if tag == "style")
    assert len(written.source.encode()) < 400_000


def test_the_policy_allows_our_scripts_and_a_worker_of_our_own(written: Page):
    policy = written.having("meta", **{"http-equiv": "Content-Security-Policy"})[0]["content"]
    assert policy.startswith("default-src 'none';")
    assert "worker-src blob:" in policy
    assert "unsafe" not in policy
    for tag, count in (("script", 3), ("style", 3)):
        bodies = re.findall(rf'<{tag}(?: id="shared")?>(.*?)</{tag}>', written.source, re.DOTALL)
        assert len(bodies) == count
        hashes = {base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() for body in bodies}
        assert set(re.findall(r"'sha256-([^']+)'", re.search(rf"{tag}-src ([^;]*)", policy)[1])) == hashes


def test_the_one_vendored_copy_of_uplot_is_used(written: Page):
    assert static("uPlot.iife.min.js") in written.source
    assert list(STATIC.rglob("*uPlot*")) == []


def test_every_module_is_in_the_page_once(written: Page):
    names = re.findall(r'featlearnModules\["([^"]+)"\] = \(\(\) =>', written.source)
    assert sorted(names) == sorted(str(path.relative_to(STATIC)) for path in STATIC.rglob("*.mjs"))


def test_the_page_is_the_same_each_time(written: Page):
    assert explorer_page() == written.source
    assert TITLE in written.text("h1")


def test_modules_are_small_and_typed():
    for path in STATIC.rglob("*.mjs"):
        text = path.read_text()
        assert len(text.splitlines()) <= 400, path
        assert text.startswith("/** "), path
    assert "@param" in source("mathematics/ofe.mjs")


FILES = {
    "a.mjs": 'import { b, c as d } from "./x/b.mjs";\nimport * as all from "./x/b.mjs";\n'
    "/** Say. */\nexport const a = b + d + all.b;\n",
    "x/b.mjs": "/**\n * Two numbers.\n */\nexport const b = 1;\nexport function c() {}\n",
    "loop.mjs": 'import { a } from "./round.mjs";\n',
    "round.mjs": 'import { a } from "./loop.mjs";\n',
    "other.mjs": "export default 3;\n",
    "lost.mjs": 'import { b, e } from "./x/pair.mjs";\n',
    "x/pair.mjs": "export const b = 1, e = 2;\n",
}


def test_modules_become_functions_in_the_order_of_their_imports():
    assert module_order("a.mjs", FILES.__getitem__) == ["x/b.mjs", "a.mjs"]
    assert module_order("a.mjs", FILES.__getitem__, ["x/b.mjs"]) == ["a.mjs"]
    script = bundle(["x/b.mjs", "a.mjs"], FILES.__getitem__)
    assert 'const {b,c: d} = featlearnModules["x/b.mjs"];' in script
    assert 'const all = featlearnModules["x/b.mjs"];' in script
    assert "return { b, c };" in script
    assert "Say" not in script
    assert "export" not in script


def test_what_the_bundle_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="import each other"):
        module_order("loop.mjs", FILES.__getitem__)
    with pytest.raises(ValueError, match="expected imports and exports in the form"):
        bundle(["other.mjs"], FILES.__getitem__)
    with pytest.raises(ValueError, match=r"lost.mjs imports e, expected names that x/pair.mjs exports"):
        bundle(["lost.mjs"], FILES.__getitem__)


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "lecture.html"
    assert main(["explore", "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"page": str(out)}
    assert out.read_text() == explorer_page()
    assert main(["explore", "--out", str(tmp_path / "no" / "a.html")]) == 1
    assert "the page cannot be written to" in capsys.readouterr().err
    assert main(["explore", "lecture.html"]) == 2
