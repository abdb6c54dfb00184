"""The first screen of a report on one run: facts, headline, pictures, strip of time, next step, numbers."""

import base64
import re
import struct
import zlib
from pathlib import Path

import numpy
import pytest

from featlearn.diagnosis import diagnose
from featlearn.diagnosis.verdict import findings_of
from featlearn.record import Run
from featlearn.reporting.first_screen import TERMS, defined
from featlearn.reporting.gauges import gauges
from featlearn.reporting.matrix_sections import sample_order
from featlearn.reporting.page import TABS, report
from featlearn.reporting.pictures import colored, cosines, png
from tests.reporting.runs import HOSTILE, by_hand, watched
from tests.reporting.test_page import Page


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return watched(tmp_path_factory.mktemp("screen") / "one")


@pytest.fixture(scope="module")
def page(run: Run) -> Page:
    return Page(report(run, run.path.parent / "one.html"))


def pixels(address: str) -> numpy.ndarray:
    """Decode a PNG without filters."""
    data = base64.b64decode(address.removeprefix("data:image/png;base64,"))
    width, height, _, kind = struct.unpack(">IIBB", data[16:26])
    start = data.index(b"IDAT")
    (size,) = struct.unpack(">I", data[start - 4 : start])
    lines = numpy.frombuffer(zlib.decompress(data[start + 4 : start + 4 + size]), numpy.uint8)
    rows = lines.reshape(height, -1)[:, 1:]
    return rows if kind == 0 else rows.reshape(height, width, 3)


def test_the_answer_leads(run: Run, page: Page):
    found = diagnose(run)
    headline = "".join(data for tag, data in page.texts[: page.texts.index(("h2", "Verdict"))] if tag in ("h1", "span"))
    assert found.headline[1:] in headline
    assert found.why_helped in re.sub(r" \((?:" + "|".join(map(re.escape, TERMS.values())) + r")\)", "", plain(page))
    useful = found.useful
    assert f"test accuracy {1 - useful.network:.2f} (chance {1 - useful.constant:.2f})" in page.text("span")
    assert f"SGD · {found.findings[0].run_data.steps} steps" in page.text("span")


def plain(page: Page) -> str:
    return "".join(data for _, data in page.texts)


def test_terms_are_defined_where_they_stand():
    html = defined("A kernel method on the initial features <b> reaches chance, and chance.")
    assert html.count('class="term"') == 2
    assert html.count("hidden") == 2
    assert "&lt;b&gt;" in html
    assert TERMS["chance"] in html


def test_everything_else_is_in_four_tabs(page: Page):
    tabs = page.having("button", role="tab")
    assert [tab["id"] for tab in tabs] == [f"tab-{name.lower()}" for name in TABS]
    assert [tab["aria-controls"] for tab in tabs] == [panel["id"] for panel in page.having("div", role="tabpanel")]


def test_numbers_open_their_gauges(run: Run, page: Page):
    links = re.search(r'<nav class="numbers".*?</nav>', page.source)[0]
    keys = [one.key for one in gauges(diagnose(run))]
    assert re.findall(r'href="#([^"]+)"', links) == [*keys, "opinions"]
    ids = [attributes.get("id") for _, attributes in page.elements]
    assert all(ids.count(key) == 1 for key in keys)


def test_kernels_of_start_and_now_have_the_same_colors_and_named_classes(run: Run, page: Page):
    block = page.blocks["kernels"]
    assert len({(one["low"], one["high"]) for one in block["sequences"][0]}) == 1
    figure = re.search(r'<figure id="figure-kernels">.*?</figure>', page.source, re.DOTALL)[0]
    assert figure.count("<canvas") == 2
    labels = run.array("targets", 0)["y"].argmax(1)
    centers = [100 * float(numpy.flatnonzero(numpy.sort(labels) == c).mean() + 0.5) / 30 for c in range(3)]
    names = re.findall(r'<text x="([\d.]+)%" y="11" text-anchor="middle">(\d)</text>', figure)
    assert names == [(f"{center:.1f}", str(c)) for c, center in enumerate(centers)] * 2


def test_cosines_are_those_of_centered_gradients():
    gradients = numpy.random.default_rng(0).normal(size=(7, 5))
    centered = gradients - gradients.mean(0)
    expected = centered @ centered.T
    sizes = numpy.linalg.norm(centered, axis=1)
    assert cosines(gradients @ gradients.T) == pytest.approx(expected / sizes / sizes[:, None])
    assert cosines(numpy.ones((4, 4))).tolist() == numpy.zeros((4, 4)).tolist()


def test_neighbors_are_the_nearest_by_both_kernels(run: Run, page: Page):
    """Of every sample that is shown, the pictures are those of its largest cosines."""
    recorded = run.array("pictures", 0)
    labels = run.array("targets", 0)["y"].argmax(1)
    ends = [cosines(run.array("kernel", step)["mean"].astype(float)) for step in (0, run.arrays["kernel"][-1])]
    rows = re.findall(r'<div class="neighbors">.*?</div></div>', page.source)
    assert len(rows) == 3
    for row in rows:
        images = re.findall(r'<img src="([^"]+)" alt="([^"]+)"', row)
        assert len(images) == 11
        matches = [i for i in range(30) if numpy.array_equal(recorded["thumbnails"][i], pixels(images[0][0]))]
        place = int(recorded["samples"][matches[0]])
        for shown, kernel in zip((images[1:6], images[6:]), ends, strict=True):
            order = [j for j in numpy.argsort(-kernel[place], kind="stable") if j != place][:5]
            for (address, name), other in zip(shown, order, strict=True):
                assert pixels(address).tolist() == recorded["thumbnails"][other].tolist()
                assert ("same class" in name) == (labels[other] == labels[place])


def test_patterns_are_drawn_blue_below_zero_and_red_above():
    image = colored(numpy.array([[[-2.0, 0.0, 2.0]]], numpy.float32))
    assert image.tolist() == [[[33, 102, 172], [247, 247, 247], [178, 24, 43]]]
    assert pixels(png(image)).tolist() == image.tolist()


def test_the_strip_has_zones_half_of_the_loss_and_accuracy(tmp_path: Path):
    scalars = {
        "probe/loss": [1.0, 0.7, 0.4, 0.1],
        "gap/probe": [0.01, 0.05, 0.5, 0.9],
        "test/accuracy": [0.1, 0.2, 0.5, 0.75],
    }
    source = report(by_hand(tmp_path / "run", scalars, [0, 10, 14, 20]), tmp_path / "page.html").read_text()
    strip = re.search(r'<svg height="64" class="strip".*?</section>', source)[0]
    assert re.findall(r'class="zone-(\w+)"', strip) == ["unknown", "low", "high"]
    assert "half of the loss" in strip
    points = [tuple(map(float, pair.split(","))) for pair in re.search(r'points="([^"]+)"', strip)[1].split()]
    assert [y for _, y in points] == pytest.approx([41.4, 38.8, 31.0, 24.5])
    assert [x for x, _ in points] == pytest.approx(
        [100 * numpy.log1p(s) / numpy.log1p(20) for s in (0, 10, 14, 20)], abs=0.01
    )
    assert "lazy at step 0, then rich at step 14. Not measured between 10 and 14." in strip


def test_the_strip_has_no_color_where_nothing_was_measured(tmp_path: Path):
    gaps = {"probe/loss": [1.0, 0.9, 0.8, 0.7, 0.1], "gap/probe": [0.0, 0.05, 0.10, 0.14, 1.06]}
    source = report(by_hand(tmp_path / "run", gaps, [0, 1, 2, 3, 150]), tmp_path / "page.html").read_text()
    strip = re.search(r'<section><div class="when">.*?</section>', source)[0]
    parts = re.findall(r'<rect x="([\d.]+)%" width="([\d.]+)%" y="18" height="26" class="zone-(\w+)"', strip)
    ends = {name: (float(x), float(x) + float(width)) for x, width, name in parts}
    third = 100 * numpy.log1p(3) / numpy.log1p(150)
    assert ends["low"] == pytest.approx((0, third), abs=0.02)
    assert ends["unknown"] == pytest.approx((third, 100), abs=0.02)
    assert ends["high"] == pytest.approx((99, 100), abs=0.02)
    assert "not measured between 3 and 150" in strip
    assert "steps, logarithmic axis" in strip


def test_a_kernel_that_shrank_and_a_metric_that_disagrees_are_said(tmp_path: Path):
    (first, last), y = kernels(), {"targets": [{"y": Y}]}
    small = {"mean": last["mean"] * 0.05 * numpy.linalg.norm(first["mean"]) / numpy.linalg.norm(last["mean"])}
    scalars = {"probe/loss": [1.0, 0.1], "gap/probe": [0.0, 0.9], "richness/low_rank": [0.9, 0.9]}
    arrays = {"kernel": [first, small], **y}
    scalars |= {"ntk/norm": [1.0, 0.05]}
    source = report(by_hand(tmp_path / "run", scalars, [0, 9], arrays), tmp_path / "page.html").read_text()
    numbers = re.search(r'<nav class="numbers".*?</nav>', source)[0]
    assert "kernel shrank to <strong>5.0%</strong>" in numbers
    assert "metrics that disagree: <strong>low-rank richness says lazy</strong>" in numbers
    assert "kernel grew" not in numbers


def kernels(count: int = 12) -> list[dict[str, numpy.ndarray]]:
    generator = numpy.random.default_rng(0)
    factors = [generator.normal(size=(count, 4)) for _ in range(2)]
    return [{"mean": (factor @ factor.T).astype(numpy.float32)} for factor in factors]


def with_pictures(path: Path, pictures: dict[str, numpy.ndarray], **config) -> str:
    arrays = {"kernel": kernels(), **FITTED} | ({"pictures": [pictures]} if pictures else {})
    run = by_hand(path, {"probe/loss": [1.0, 0.1]}, [0, 9], arrays, **config)
    return report(run, path.parent / f"{path.name}.html").read_text()


PLACES = numpy.arange(12)
Y = numpy.eye(3, dtype=numpy.float32)[PLACES % 3]
FITTED = {"targets": [{"y": Y}], "outputs": [{"f": 0 * Y}, {"f": Y}]}


def test_tokens_are_text_by_the_vocabulary_and_escaped(tmp_path: Path):
    tokens = {"samples": PLACES, "tokens": numpy.tile([0, 1, 2, 7], (12, 1))}
    page = with_pictures(tmp_path / "a", tokens, settings={"vocabulary": ["<img src=x onerror=alert(1)>", "b", "\n"]})
    assert "&lt;img src=x onerror=alert(1)&gt;b⏎?" in page
    assert "<img src=x" not in page
    assert "0 1 2 7" in with_pictures(tmp_path / "b", tokens)


def test_rows_of_tables_are_numbers(tmp_path: Path):
    rows = {"samples": PLACES, "rows": numpy.full((12, 3), 0.25, numpy.float32)}
    page = with_pictures(tmp_path / "a", rows)
    assert "0.25 0.25 0.25" in page
    assert "Each row: columns 0, 1, 2." in page


def test_rows_of_a_regression_begin_with_their_target_and_show_the_heaviest_columns(tmp_path: Path):
    targets = numpy.arange(12, dtype=numpy.float32)[:, None] / 10
    pictures = [
        {"samples": PLACES, "rows": numpy.tile(numpy.float32([0.5, 1.5, 2.5, 3.5]), (12, 1))},
        {"columns": numpy.array([3, 1]), "column_shares": numpy.array([0.6, 0.3])},
    ]
    outputs = [{"f": 0 * targets}, {"f": targets}]
    arrays = {"kernel": kernels(), "targets": [{"y": targets}], "outputs": outputs, "pictures": pictures}
    run = by_hand(tmp_path / "run", {"probe/loss": [1.0, 0.1]}, [0, 9], arrays)
    page = report(run, tmp_path / "page.html").read_text()
    assert ">1.1: 3.5 1.5<" in page
    assert "Each row: its target, then columns 3, 1." in page
    near = []
    for kernel in kernels():
        order = numpy.argsort(-(cosines(kernel["mean"].astype(float)) - 9 * numpy.eye(12)), axis=1)[:, :5]
        near.append(numpy.abs(targets[order, 0] - targets).mean())
    spread = numpy.abs(targets - targets.T).mean()
    assert f"differ by {near[0] / spread:.0%} → {near[1] / spread:.0%} of" in page


def test_without_targets_samples_are_sorted_by_likeness_and_have_neighbors(tmp_path: Path):
    two = numpy.float64([1, -1] * 6)
    arrays = {
        "kernel": [{"mean": numpy.eye(12)}, {"mean": numpy.eye(12) + numpy.outer(two, two)}],
        "pictures": [{"samples": PLACES, "tokens": numpy.tile([0, 1, 2, 7], (12, 1))}],
    }
    run = by_hand(tmp_path / "run", {"probe/loss": [1.0, 0.1]}, [0, 9], arrays)
    page = Page(report(run, tmp_path / "page.html"))
    assert "Sorted by likeness" in page.source
    assert page.source.count('class="neighbors of-texts"') == 3
    (order,) = {tuple(sample_order(one, 12)) for one in findings_of(run)}
    assert sorted(order[:6]) in ([0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11])


def test_squares_are_called_learned_only_where_classes_came_apart(tmp_path: Path):
    classes = PLACES % 3
    square = (classes[:, None] == classes) + numpy.eye(12)
    for name, ends in {"learned": (numpy.eye(12), square), "kept": (square, square)}.items():
        arrays = {"kernel": [{"mean": end.astype(numpy.float32)} for end in ends], **FITTED}
        page = report(by_hand(tmp_path / name, {"probe/loss": [1.0, 0.1]}, [0, 9], arrays), tmp_path / "page.html")
        assert ("the squares are learned" in page.read_text()) == (name == "learned")


def test_tokens_whose_nearest_ones_changed_come_first(tmp_path: Path):
    words, before = numpy.arange(3), numpy.array([[3, 4], [3, 4], [3, 4]])
    after = numpy.array([[3, 4], [5, 6], [3, 6]])
    arrays = {"pictures": [{"words": words, "nearest": before}, {"words": words, "nearest": after}]}
    run = by_hand(tmp_path / "run", {"probe/loss": [1.0, 0.1]}, [0, 9], arrays, settings={"vocabulary": "abcde f"})
    table = re.search(r'<table class="tokens">.*?</table>', report(run, tmp_path / "page.html").read_text())[0]
    cells = re.findall(r"<code>(.*?)</code>", table)
    assert [cells[i : i + 3] for i in (0, 3, 6)] == [["b", "d e", "␣ f"], ["c", "d e", "d f"], ["a", "d e", "d e"]]


@pytest.mark.parametrize(
    "pictures",
    [
        {"samples": PLACES, "thumbnails": numpy.zeros((12, 8, 8), numpy.float32)},
        {"samples": PLACES, "thumbnails": numpy.zeros((11, 8, 8), numpy.uint8)},
        {"samples": PLACES, "thumbnails": numpy.zeros((12, 8, 8, 4), numpy.uint8)},
        {"samples": PLACES, "thumbnails": numpy.zeros((12, 300, 8), numpy.uint8)},
        {"samples": PLACES + 1, "thumbnails": numpy.zeros((12, 8, 8), numpy.uint8)},
        {"samples": PLACES[:, None], "thumbnails": numpy.zeros((12, 8, 8), numpy.uint8)},
        {"samples": PLACES.astype(float), "tokens": numpy.zeros((12, 3), int)},
        {"patterns": numpy.full((4, 1, 8, 8), numpy.nan, numpy.float32), "shares": numpy.ones(4)},
        {"patterns": numpy.zeros((4, 2, 8, 8), numpy.float32), "shares": numpy.ones(4)},
        {"words": numpy.zeros(3, int), "nearest": numpy.zeros(3, int)},
        {"columns": numpy.zeros((2, 2)), "column_shares": numpy.zeros(2)},
    ],
)
def test_pictures_of_wrong_shapes_are_left_out(tmp_path: Path, pictures: dict[str, numpy.ndarray]):
    page = with_pictures(tmp_path / "run", pictures)
    assert "<img" not in page
    assert 'class="neighbors' not in page
    assert "Neighbors are not shown" in page


def test_runs_without_pictures_say_so(tmp_path: Path):
    page = with_pictures(tmp_path / "run", {})
    assert "Pictures of samples were not recorded" in page


def test_hostile_names_of_classes_are_text(tmp_path: Path):
    run = by_hand(
        tmp_path / "run",
        {"probe/loss": [1.0, 0.1]},
        [0, 9],
        {"kernel": kernels(), **FITTED},
        settings={"classes": ["<script>", HOSTILE, "c"]},
    )
    page = Page(report(run, tmp_path / "page.html"))
    assert "<script>" in page.text("text")
    assert page.source.count("<script>") == 6


def test_layers_are_boxes_in_forward_order(page: Page, run: Run):
    drawing = re.search(r'<svg height="\d+" class="network".*?</svg>', page.source)[0]
    names = re.findall(r'text-anchor="end">([^<]+)<', drawing)
    assert names == ["network.0", "network.2"]
    widths = [float(width) for width in re.findall(r'width="([\d.]+)%"', drawing)]
    shares = [diagnose(run).layers[name].kernel_share for name in names]
    assert [width / max(widths) for width in widths] == pytest.approx(
        [share / max(shares) for share in shares], abs=1e-3
    )
