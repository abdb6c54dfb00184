"""The page without a browser: what it holds, that it needs nothing else, and that strings cannot break out of it."""

import base64
import hashlib
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy
import pytest
import torch

import featlearn as fl
from featlearn import reporting
from featlearn.errors import InputTypeError, InputValueError, RunError
from featlearn.record import Run, RunWriter
from featlearn.reporting.document import static
from featlearn.reporting.groups import groups
from featlearn.reporting.page import LARGEST, report
from tests.reporting.runs import HOSTILE, by_hand, watched

VOID = {"img", "input", "link", "meta"}


class Page(HTMLParser):
    """Elements in order, with their attributes and text; fails on what does not close."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.source = path.read_text(encoding="utf-8")
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(self.source)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self._open[-1] if self._open else "", data))

    def having(self, tag: str, **attributes: str) -> list[dict[str, str | None]]:
        return [a for name, a in self.elements if name == tag and attributes.items() <= a.items()]

    def text(self, *tags: str) -> str:
        return " ".join(data for tag, data in self.texts if not tags or tag in tags)

    @property
    def blocks(self) -> dict[str, dict]:
        found = re.search(r'<script type="application/json" id="blocks">(.*?)</script>', self.source, re.DOTALL)
        assert found
        return {one["key"]: one for one in json.loads(found[1])}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return watched(tmp_path_factory.mktemp("report") / "one")


def test_it_is_a_public_function_of_one_run_or_several(run: Run, tmp_path: Path):
    from featlearn.reporting import figures

    assert fl.report is report
    assert reporting.figures is figures
    one, path, several = tmp_path / "one.html", tmp_path / "path.html", tmp_path / "several.html"
    stored = fl.open_run(run.path)
    assert fl.report(stored, one) == one
    assert fl.report(run.path, path).read_text() == one.read_text() == stored.report(tmp_path / "run.html").read_text()
    # advice is tried where the network is in the process
    assert ("tried for" in run.report(tmp_path / "tried.html").read_text()) == (run.network is not None)
    assert fl.report([run, run.path], several).read_text() != one.read_text()


@pytest.fixture(scope="module")
def page(run: Run) -> Page:
    return Page(run.report(run.path.parent / "one.html"))


def test_nothing_is_fetched(page: Page):
    policy = page.having("meta", **{"http-equiv": "Content-Security-Policy"})[0]["content"]
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    for tag, attributes in page.elements:
        assert tag == "img" or "src" not in attributes
        assert re.match(
            "data:image/png;base64,iVBORw0KGgo", attributes.get("src") or "data:image/png;base64,iVBORw0KGgo"
        )
        assert "style" not in attributes  # the policy would not apply it
        assert tag not in {"iframe", "object", "embed", "base", "form"}
        assert re.match(r"#|data:,$", attributes.get("href") or "#")
    styles = " ".join(data for tag, data in page.texts if tag == "style")
    assert "url(" not in styles
    assert "@import" not in styles


def test_only_its_own_scripts_and_styles_are_allowed(page: Page):
    policy = page.having("meta", **{"http-equiv": "Content-Security-Policy"})[0]["content"]
    for tag, count in (("script", 6), ("style", 2)):
        bodies = re.findall(rf"<{tag}>(.*?)</{tag}>", page.source, re.DOTALL)
        assert len(bodies) == count
        hashes = {base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() for body in bodies}
        assert set(re.findall(r"'sha256-([^']+)'", re.search(rf"{tag}-src ([^;]*)", policy)[1])) == hashes


def test_the_vendored_files_are_those_of_the_checksums():
    folder = Path(reporting.__file__).parent / "static"
    for line in (folder / "uPlot.sha256").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    assert "MIT" in static("uPlot.LICENSE")


def test_the_verdict_comes_first_with_every_statement(run: Run, page: Page):
    headings = [data for tag, data in page.texts if tag == "h2"]
    assert headings[:2] == ["Verdict", "Next"]
    found, text = fl.diagnose(run), page.text()
    assert len(found.evidence) > 8
    for item in found.evidence:
        assert item.says in text
        assert item.threshold in text
        assert item.source in text


def test_every_section_is_there_and_linked(page: Page):
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    linked = [a["href"].removeprefix("#") for a in page.having("a") if a["href"].startswith("#")]
    assert set(linked) <= set(ids)
    assert {"verdict", "panel-curves", "panel-layers", "panel-evidence", "panel-details"} <= set(linked)
    assert {"curves", "timeline", "layers", "features", "specialization", "evidence", "spectra"} <= set(ids)
    assert {"next", "overhead", "provenance", "citations", "figure-kernels"} <= set(ids)
    assert "Not there" not in page.text()


def test_the_page_says_how_many_samples_of_the_probe_were_measured(tmp_path: Path):
    plain = by_hand(tmp_path / "plain", {"loss": [1.0, 0.5]}, [0, 9], probe={"samples": 130})
    thin = by_hand(tmp_path / "thin", {"loss": [1.0, 0.5]}, [0, 9], probe={"samples": 130, "measured": 33})
    texts = [data for _, data in Page(report([plain, thin], tmp_path / "both.html")).texts]
    place = len(texts) - 1 - texts[::-1].index("probe samples")  # under Provenance
    assert texts[place + 1 : place + 3] == ["130", "33 of 130"]


def test_headings_step_down_one_at_a_time(page: Page):
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(later - earlier <= 1 for earlier, later in itertools.pairwise(levels))


def test_what_is_drawn_is_described_and_in_a_table(page: Page):
    drawn = page.having("div", role="img") + page.having("canvas")
    assert len(drawn) >= 15
    assert all(len(one["aria-label"] or "") > 30 for one in drawn)
    assert len(page.having("details")) >= len(page.blocks) - 1  # kernels give their numbers as CSV alone
    assert len(page.having("table")) == len(page.having("caption"))
    for box in page.having("div", **{"class": "scroll"}):
        assert box["tabindex"] == "0"
        assert box["role"] == "region"
        assert box["aria-label"]
    assert page.having("input", type="range")[0]["id"] in [label["for"] for label in page.having("label")]
    assert [tag for tag, _ in page.elements if tag in {"header", "nav", "main", "footer"}] == [
        "header",
        "nav",
        "main",
        "nav",
        "footer",
    ]


def test_the_numbers_are_those_of_the_run(run: Run, page: Page):
    norm = page.blocks["ntk-norm"]
    steps, values = run.scalar("ntk/norm")
    assert norm["x"] == steps.tolist()
    assert norm["lines"][0]["y"] == values.tolist()
    spectrum = page.blocks["spectrum"]
    last = run.array("spectrum", int(steps[-1]))["eigenvalues"]
    assert spectrum["lines"][0]["label"] == f"step {steps[-1]}"
    assert spectrum["lines"][0]["y"] == last.tolist()
    power = run.array("spectrum", 0)["task_power"]
    assert page.blocks["power"]["lines"][1]["y"] == pytest.approx((power.cumsum() / power.sum()).tolist(), rel=1e-12)
    table = [data for tag, data in page.texts if tag == "td"]
    assert f"{values[-1]:.4g}" in table


def unpacked(packed: dict[str, str]) -> numpy.ndarray:
    ((bits, text),) = packed.items()
    return numpy.frombuffer(base64.b64decode(text), f"<f{int(bits) // 8}")


def test_a_spectrum_is_there_at_every_step(run: Run, page: Page):
    steps = run.arrays["spectrum"]
    assert len(steps) > 15
    for name, read in (
        ("spectrum", lambda found: found["eigenvalues"]),
        ("power", lambda found: found["task_power"].cumsum() / found["task_power"].sum()),
    ):
        block = page.blocks[name]
        last, first = block["lines"]
        assert "frames" not in first
        assert last["frames"]["steps"] == steps
        frames = unpacked(last["frames"]["values"]).reshape(len(steps), len(block["x"]))
        expected = numpy.array([read(run.array("spectrum", step)) for step in steps])
        assert numpy.array_equal(frames, expected)
        assert frames[-1].tolist() == last["y"]
        kept = expected[expected > 1e-8 * expected.max(1, keepdims=True)]
        assert block["yLimits"][0] < kept.min() < kept.max() < block["yLimits"][1]


def test_frames_of_runs_with_other_probes_stand_at_their_places(tmp_path: Path):
    small, large = (
        by_hand(
            tmp_path / f"p{size}",
            {"loss": [1.0, 0.5]},
            [0, 9],
            {"spectrum": [{"eigenvalues": numpy.arange(size, 0.0, -1) * scale} for scale in (1, 2)]},
            lr=size,
        )
        for size in (2, 5)
    )
    block = Page(report([small, large], tmp_path / "page.html")).blocks["spectrum"]
    frames = [unpacked(line["frames"]["values"]).reshape(2, 5) for line in block["lines"] if "frames" in line]
    assert numpy.array_equal(frames[0], [[2, 1, *[numpy.nan] * 3], [4, 2, *[numpy.nan] * 3]], equal_nan=True)
    assert frames[1].tolist() == [[5, 4, 3, 2, 1], [10, 8, 6, 4, 2]]


def test_round_off_does_not_stretch_the_axis_of_a_spectrum(tmp_path: Path):
    found = [{"eigenvalues": numpy.array([2.0, 1.0, tail])} for tail in (0.5, 1e-19, 0.25)]
    run = by_hand(tmp_path / "a", {"loss": [1.0, 0.5, 0.2]}, [0, 5, 9], {"spectrum": found})
    page = Page(report(run, tmp_path / "page.html"))
    low, high = page.blocks["spectrum"]["yLimits"]
    assert 0.2 < low < 0.25 < 2.0 < high < 2.3
    assert "below 1e-8 of the largest value" in page.text()
    sound = by_hand(tmp_path / "b", {"loss": [1.0, 0.5, 0.2]}, [0, 5, 9], {"spectrum": found[::2]})
    assert "below 1e-8" not in Page(report(sound, tmp_path / "sound.html")).text()


def test_there_is_a_slider_only_where_something_moves(run: Run, page: Page, tmp_path: Path):
    assert len(page.having("input", type="range")) == 1
    kernels = {"kernel": [{"mean": numpy.eye(3) * scale} for scale in (1, 2, 3)]}
    for name, arrays, count in (("none", {}, 0), ("one", {"kernel": kernels["kernel"][:1]}, 0), ("two", kernels, 1)):
        made = by_hand(tmp_path / name, {"probe/loss": [1.0, 0.5, 0.2]}, [0, 1, 2], arrays)
        assert len(Page(report(made, tmp_path / f"{name}.html")).having("input", type="range")) == count
    still = Page(report(tmp_path / "two", tmp_path / "still.html", kernels=False))
    assert not still.having("input", type="range")


def test_tables_hold_their_numbers_in_full(run: Run, page: Page, tmp_path: Path):
    source = page.source
    found = fl.diagnose(run)
    moved = re.search(r'id="grid-layer-learning">.*?<td[^>]*data-value="([^"]+)"', source, re.DOTALL)
    assert moved
    assert float(moved[1]) == found.layers["network.0"].centered_share  # the layer that learned most comes first
    opinion = re.search(r'class="scroll opinions".*?data-value="([^"]+)"', source, re.DOTALL)
    assert opinion
    assert float(opinion[1]) == next(iter(found.opinions.values())).value
    other = watched(tmp_path / "lazy", gamma=0.05, steps=20)
    both = report([run, other], tmp_path / "both.html").read_text()
    gap = re.search(r'data-value="([^"]+)" data-error="([^"]+)" data-name="linearization gap"', both)
    assert gap
    assert (float(gap[1]), float(gap[2])) == (float(found.numbers["gap"]), float(found.numbers["gap"].stderr))


def test_a_kernel_is_sorted_by_class_and_in_full(run: Run, page: Page):
    sequence = page.blocks["kernels"]
    last = sequence["sequences"][0][-1]
    kernel = run.array("kernel", int(last["step"]))["mean"]
    assert last["step"] == run.arrays["kernel"][-1]
    labels = run.array("targets", 0)["y"].argmax(1)
    order = sorted(range(len(labels)), key=lambda i: (labels[i], i))
    centering = numpy.eye(30) - 1 / 30
    centered = centering @ kernel.astype(float) @ centering
    expected = [[centered[i, j] / (centered[i, i] * centered[j, j]) ** 0.5 for j in order] for i in order]
    assert unpacked(last["values"]).reshape(last["size"]) == pytest.approx(numpy.array(expected), abs=1e-6)
    first = sequence["sequences"][0][0]
    assert (last["low"], last["high"]) == (first["low"], first["high"])  # the same colors
    same = [float(kernel[i, j]) for i in range(30) for j in range(30) if i != j and labels[i] == labels[j]]
    assert f"same class {sum(same) / len(same):.4g}" in last["label"]


def test_kernels_can_be_left_out(run: Run, tmp_path: Path):
    small = Page(report(run, tmp_path / "a.html", kernels=False))
    assert "kernels" not in small.blocks
    assert "kernels were left out, as was asked for" in small.text()


def test_runs_that_differ_in_their_seed_become_a_band(run: Run, tmp_path: Path):
    scalars = {"probe/loss": [4.0, 2.0, 1.0], "ntk/norm": [1.0, 2.0, 4.0]}
    first = by_hand(tmp_path / "a", scalars, [0, 1, 3], seed=0, lr=1)
    second = by_hand(tmp_path / "b", {**scalars, "ntk/norm": [3.0, 4.0, 5.0]}, [0, 1, 3], seed=1, lr=1)
    page = Page(report([first, second], tmp_path / "page.html"))
    (line,) = page.blocks["ntk-norm"]["lines"]
    assert (line["low"], line["y"], line["high"]) == ([1, 2, 4], [2, 3, 4.5], [3, 4, 5])
    assert "3 (2 to 4)" in page.text("td")
    apart = Page(report([first, second], tmp_path / "apart.html", bands=False))
    assert [line["label"] for line in apart.blocks["ntk-norm"]["lines"]] == ["a", "b"]


def test_bands_interpolate_between_steps_of_their_own(tmp_path: Path):
    first = by_hand(tmp_path / "a", {"ntk/norm": [0.0, 2.0]}, [0, 3], seed=0)
    second = by_hand(tmp_path / "b", {"ntk/norm": [0.0, 5.0, 5.0]}, [0, 1, 7], seed=1)
    page = Page(report([first, second], tmp_path / "page.html"))
    block = page.blocks["ntk-norm"]
    assert block["x"] == [0, 1, 3]  # where both were measured
    assert block["lines"][0]["low"] == [0, 1, 2]  # log(1 + 1) is half of log(1 + 3)


@pytest.mark.parametrize("other", [{"seed": 1, "lr": 2}, {"seed": 0, "lr": 1}, {"lr": 1}])
def test_other_runs_are_laid_over_each_other(tmp_path: Path, other):
    runs = [
        by_hand(tmp_path / name / "run", {"ntk/norm": [1.0, 2.0]}, [0, 1], **config)
        for name, config in {"a": {"seed": 0, "lr": 1}, "b": other}.items()
    ]
    page = Page(report(runs, tmp_path / "page.html"))
    assert [line["label"] for line in page.blocks["ntk-norm"]["lines"]] == ["run (1)", "run (2)"]
    assert len(page.having("button", **{"data-run": "1"})) == 1


class Law:
    """A theory."""

    times = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)

    def curves(self):
        return {
            "loss": torch.tensor([8.0, 4.0, 2.0]),
            "ntk/alignment": torch.tensor([0.1, 0.2, 0.3]),
            "strength": torch.tensor([0.0, 0.5, 1.0]),
        }


def test_a_theory_is_laid_over(tmp_path: Path):
    run = by_hand(
        tmp_path / "a",
        {"probe/loss": [4.0, 2.0], "ntk/alignment": [0.1, 0.2]},
        [0, 10],
        {"targets": [{"y": numpy.ones((4, 1))}]},
    )
    page = Page(report(run, tmp_path / "page.html", theory={"law": Law()}, time_scale=0.1))
    loss = page.blocks["loss"]
    assert loss["x"] == [0, 10, 20]
    assert [line["label"] for line in loss["lines"]][-1] == "theory: law"
    assert loss["lines"][-1]["y"] == [2, 1, 0.5]  # per sample, of which there are 4
    assert page.blocks["alignment"]["lines"][-1]["y"] == torch.tensor([0.1, 0.2, 0.3]).tolist()
    assert "strength: predicted, but the runs have no such number" in page.text()


def test_what_is_no_theory_is_refused(run: Run, tmp_path: Path):
    with pytest.raises(InputTypeError, match=r"theory\['law'\] is int, expected a prediction"):
        report(run, tmp_path / "a.html", theory={"law": 3})
    with pytest.raises(InputValueError, match="time_scale is 0"):
        report(run, tmp_path / "a.html", theory={"law": Law()}, time_scale=0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name", [HOSTILE, "</script><script>alert(1)</script>", "<!-- <script>", "a\u2028b\u2029c\x00", "{{x}}"]
)
def test_strings_from_a_run_stay_text(tmp_path: Path, name: str):
    writer = RunWriter(
        tmp_path / "run",
        {
            "name": name,
            "seed": name,
            "device": name,
            "versions": {name: name, "torch": name},
            "model": {"class": name},
            "optimizer": {"class": name, "groups": [{"lr": name}]},
            "layer_names": {name: "net.0"},
            "loss_convention": name,
        },
    )
    for step in (0, 1):
        writer.scalars(step, {"probe/loss": 1.0 - step / 2, "weights/net.0/norm": 1.0 + step})
    writer.event("failed", 1, message=name)
    writer.close()
    page = Page(report(tmp_path / "run", tmp_path / "page.html", title=name))
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == 7
    assert "img" not in tags
    assert not any(key.startswith("on") for _, attributes in page.elements for key in attributes)
    assert not {"\u2028", "\u2029", "\x00"} & set(page.source)
    block = re.search(r'id="blocks">(.*?)</script>', page.source, re.DOTALL)[1]
    assert not set("<>&") & set(block)
    if name.isprintable():
        assert name in [data for tag, data in page.texts if tag == "strong"]
        assert page.text("title") == f"{name}: featlearn report"
        assert page.blocks["norms"]["lines"][0]["label"] == name


def test_what_was_not_recorded_is_said_to_be_missing(tmp_path: Path):
    page = Page(report(by_hand(tmp_path / "a", {"probe/loss": [1.0, 0.5]}, [0, 1]), tmp_path / "page.html"))
    text = page.text()
    for reason in (
        "neural features were not recorded",
        "no spectrum was recorded",
        "no specialization matrix",
        "alignment of layers was not recorded",
        "no kernel was recorded",
        "overhead was not recorded",
        "kernel-task alignment was not recorded",
        "no prediction, as kernels",
    ):
        assert reason in text
    assert "cannot tell" in text


def test_an_empty_run_has_a_page(tmp_path: Path):
    page = Page(report(by_hand(tmp_path / "a", {}, []), tmp_path / "page.html"))
    assert page.blocks == {}
    assert "no loss on the probe was recorded" in page.text()


def test_numbers_that_are_not_finite_are_gaps(tmp_path: Path):
    nan, inf = float("nan"), float("inf")
    scalars = {
        "probe/loss": [1.0, 0.5, nan],
        "ntk/norm": [1.0, inf, 3.0],
        "ntk/distance": [nan, nan, nan],
        "weights/a/norm": [0.0, 1.0, 2.0],
    }
    page = Page(report(by_hand(tmp_path / "a", scalars, [0, 1, 2]), tmp_path / "page.html"))
    assert page.blocks["ntk-norm"]["x"] == [0, 2]
    assert "distance" not in page.blocks
    assert page.blocks["norms"]["lines"][0]["y"] == [None, None, None]  # shares of nothing


def test_arrays_of_unexpected_shapes_are_left_out(tmp_path: Path):
    arrays = {
        "kernel": [{"mean": numpy.full((5, 5), numpy.nan)}] * 2,
        "spectrum": [{"eigenvalues": numpy.ones((2, 2))}],
        "specialization": [{"ksm": numpy.ones((1, 1))}],
        "targets": [{"y": numpy.ones(5)}],
    }
    page = Page(report(by_hand(tmp_path / "a", {"mine": [1.0, 0.5]}, [0, 1], arrays), tmp_path / "page.html"))
    assert page.blocks == {}


@pytest.mark.parametrize("place", ["arrays/kernel/000000000000.npz", "scalars.jsonl", "events.jsonl"])
def test_a_damaged_run_is_refused_and_nothing_is_written(tmp_path: Path, place: str):
    arrays = {"kernel": [{"mean": numpy.eye(3)}]}
    writer = by_hand(tmp_path / "run", {"probe/loss": [1.0]}, [0], arrays)
    (writer.path / place).write_bytes(b'{"step": "x"}\n{"step": 1}\n')
    (tmp_path / "page.html").write_text("before")
    with pytest.raises(RunError):
        report(tmp_path / "run", tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "run"]


def test_a_place_that_cannot_be_written_is_an_error(run: Run, tmp_path: Path):
    with pytest.raises(RunError, match="the report cannot be written"):
        run.report(tmp_path / "missing" / "a.html")


@pytest.mark.parametrize(("runs", "error"), [([], InputValueError), (3, InputTypeError)])
def test_what_is_no_run_is_refused(tmp_path: Path, runs, error):
    with pytest.raises(error, match=r"expected"):
        report(runs, tmp_path / "a.html")


def test_a_long_run_with_many_layers_stays_small(tmp_path: Path):
    steps = list(range(1500))
    names = [
        f"{kind}/block.{i}.linear/{what}"
        for i in range(40)
        for kind, what in (("weights", "norm"), ("weights", "distance"), ("features", "centered"))
    ]
    scalars = {name: [1.0 + (i % 7) * s / 1500 for s in steps] for i, name in enumerate(names)}
    scalars["probe/loss"] = [1 / (1 + s) for s in steps]
    page = Page(report(by_hand(tmp_path / "run", scalars, steps), tmp_path / "page.html", kernels=False))
    assert len(page.source.encode()) < LARGEST
    loss = page.blocks["loss"]
    assert len(loss["x"]) <= 200
    assert (loss["x"][0], loss["x"][-1]) == (0, 1499)
    assert "The 8 layers that changed most; 32 others are in the run." in page.text()


def test_runs_that_differ_in_their_cost_and_seed_alone_are_one_group(tmp_path: Path):
    runs = [watched(tmp_path / f"run{seed}", seed=seed, steps=12) for seed in (0, 1)]
    assert runs[0].config["wall_share"] != runs[1].config["wall_share"]
    (group,) = groups(runs, points=100)
    assert len(group.findings) == 2


def test_a_cost_that_was_measured_under_another_load_does_not_part_seeds(tmp_path: Path):
    runs = [
        by_hand(tmp_path / f"run{seed}", {"probe/loss": [1.0, 0.5]}, [0, 1], seed=seed, costs={"step": 2.0**-seed})
        for seed in (8, 10)
    ]
    assert len(groups(runs, points=100)) == 1
