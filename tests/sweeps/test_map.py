"""Values over two axes, as numbers and as a picture; the table as CSV and as arrays."""

import csv
import math
import statistics

import matplotlib.pyplot as plt
import numpy
import pytest
from matplotlib.colors import to_hex

import featlearn as fl
from featlearn import sweeps
from featlearn.errors import FeatlearnError, InputTypeError, InputValueError
from featlearn.palette import LIGHT_GRAY, REGIMES
from featlearn.sweeps.cells import axis
from featlearn.sweeps.grid import Point
from featlearn.sweeps.map_picture import colors_of, edges, ink_on

GAMMAS, WIDTHS, SEEDS = (0.01, 0.1, 1.0, 10.0), (5, 15, 25), (0, 1, 4)


def number(gamma: float, width: int, seed: int) -> float:
    return gamma * width + 0.01 * seed**2


def measured(gamma, width, seed, kind="a"):
    """Numbers and words that are known in closed form; one cell fails, one fails for some seeds."""
    if (gamma, width) == (10.0, 5) or (gamma, width, seed) == (0.1, 25, 4):
        raise ValueError("too large")
    words = ("lazy", "lazy", "rich") if gamma < 1 else ("rich", "mixed", "lazy")
    return {"number": number(gamma, width, seed), "regime": words[SEEDS.index(seed)], "ok": gamma > 0.05}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    out = tmp_path_factory.mktemp("map") / "s"
    grid = {"gamma": GAMMAS, "width": WIDTHS, "kind": "a"}
    return fl.sweep(measured, grid, out=out, seeds=SEEDS, executor=sweeps.Serial(), quiet=True)


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def test_cells_hold_means_spread_and_number_of_seeds(found):
    cells = found.cells("gamma", "width", "number")
    assert (cells.x.values, cells.y.values) == (list(GAMMAS), list(WIDTHS))
    assert cells.values.shape == (3, 4)
    for row, width in enumerate(WIDTHS):
        for column, gamma in enumerate(GAMMAS):
            seeds = [s for s in SEEDS if (gamma, width, s) != (0.1, 25, 4) and (gamma, width) != (10.0, 5)]
            each = [number(gamma, width, seed) for seed in seeds]
            assert cells.count[row, column] == len(each)
            assert cells.failed[row, column] == 3 - len(each)
            assert cells.points[row, column] == (Point({"gamma": gamma, "width": width, "kind": "a"}).id,)
            if each:
                assert cells.values[row, column] == pytest.approx(statistics.mean(each))
                assert cells.spread[row, column] == pytest.approx(statistics.stdev(each))
            else:
                assert math.isnan(cells.values[row, column])


def test_words_are_the_most_frequent_and_ties_are_told(found):
    cells = found.cells("width", "gamma", "regime")
    assert not cells.numeric
    assert cells.values[0].tolist() == ["lazy"] * 3  # gamma 0.01
    assert cells.spread[0].tolist() == pytest.approx([1 / 3] * 3)
    assert cells.values[1].tolist() == ["lazy"] * 3
    assert cells.spread[1].tolist() == pytest.approx([1 / 3, 1 / 3, 0])
    assert cells.values[2].tolist() == ["lazy / mixed / rich"] * 3
    assert cells.values[3].tolist() == [None, *["lazy / mixed / rich"] * 2]
    assert cells.words == ["lazy", "lazy / mixed / rich"]
    assert found.cells("gamma", None, "ok", {"width": 15}).values.tolist() == [["false", "true", "true", "true"]]


def test_an_axis_may_be_the_seed_and_others_must_be_fixed(found):
    cells = found.cells("seed", "gamma", "number", {"width": 15})
    assert cells.x.values == [0, 1, 4]
    assert cells.values[2].tolist() == pytest.approx([number(1.0, 15, seed) for seed in SEEDS])
    for arguments, said in (
        (
            ("seed", "gamma", "number"),
            r"differ in 'width' \(5, 15, 25\), expected one: where={'width': 5}",
        ),
        (("gama", "width", "number"), "did you mean 'gamma'"),
        (("gamma", "gamma", "number"), "x and y are both 'gamma'"),
        (("gamma", "width", "numer"), "did you mean 'number'"),
        (("gamma", "width", "number", {"gamma": 1.0}), "where= fixes 'gamma'"),
        (("gamma", "width", "number", {"kind": "b"}), "no point has"),
        (("gamma", "width", "number", {"kin": "b"}), "did you mean 'kind'"),
    ):
        with pytest.raises(InputValueError, match=said):
            found.cells(*arguments)


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ([1, 2, 3, 4], "linear"),
        ([1, 2, 4, 8], "log"),
        ([0.01, 0.03, 0.1, 0.3, 1], "log"),
        ([0, 1, 10, 100], "linear"),
        ([-1, 1], "linear"),
        ([16, 64], "log"),
        ([1, 2], "linear"),
        ([10, 20, 30, 50], "linear"),
        ([1, 2, 5, 10], "log"),
        ([5], "linear"),
        (["a", "b"], "words"),
        ([1, "b"], "words"),
        ([True, False], "words"),
        ([[1, 2], [3]], "words"),
    ],
)
def test_axes_are_logarithmic_where_values_are_geometric(values, scale):
    assert axis("a", values).scale == scale


def test_edges_lie_half_way_between_values():
    assert edges(axis("a", [1.0, 2.0, 4.0])).tolist() == pytest.approx([2**-0.5, 2**0.5, 2**1.5, 2**2.5])
    assert edges(axis("a", [1, 2, 4, 5])).tolist() == pytest.approx([0.5, 1.5, 3, 4.5, 5.5])
    assert edges(axis("a", ["x", "y"])).tolist() == [-0.5, 0.5, 1.5]
    assert edges(None).tolist() == [-0.5, 0.5]


def test_numbers_are_drawn_where_they_belong(found):
    ax = found.map(x="gamma", y="width", value="number")
    (mesh,) = ax.collections
    drawn = mesh.get_array()
    cells = found.cells("gamma", "width", "number")
    assert numpy.ma.filled(drawn, numpy.nan) == pytest.approx(cells.values, nan_ok=True)
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "linear")
    assert ax.get_xlim() == pytest.approx((0.01 / 10**0.5, 10 * 10**0.5))
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["0.01", "0.1", "1", "10"]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["failed"]
    written = {text.get_position(): text.get_text() for text in ax.texts}
    assert len(written) == 11
    assert written[1.0, 15.0] == f"{number(1.0, 15, 0) + 0.01 * 17 / 3:.2g}"
    assert type(mesh.norm).__name__ == "LogNorm"
    assert (mesh.norm.vmin, mesh.norm.vmax) == pytest.approx((numpy.nanmin(cells.values), numpy.nanmax(cells.values)))
    assert ax.get_title("left") == "number, 3 seeds"


def test_the_spread_is_drawn_on_request(found):
    ax = found.map(x="gamma", y="width", value="number", spread=True)
    drawn = numpy.ma.filled(ax.collections[0].get_array(), numpy.nan)
    assert drawn == pytest.approx(found.cells("gamma", "width", "number").spread, nan_ok=True)


def test_regimes_have_their_colors(found):
    ax = found.map(x="gamma", y="width", value="regime", where={"kind": "a"})
    (mesh,) = ax.collections
    colors = numpy.array([to_hex(c) for c in mesh.to_rgba(mesh.get_array()).reshape(-1, 4)]).reshape(3, 4)
    assert colors[1].tolist() == [REGIMES["lazy"].lower()] * 2 + [LIGHT_GRAY.lower()] * 2
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["lazy", "lazy / mixed / rich", "failed"]
    assert {text.get_text() for text in ax.texts} == {"2/3", "1/3"}
    assert len(set(REGIMES.values())) == len(REGIMES)
    assert colors_of(["rich", "b", "a", "lazy"])["rich"] == REGIMES["rich"]
    assert len(set(colors_of(list("abcdefgh")).values())) == 8


def test_ink_can_be_read_on_every_color():
    def luminance(color):
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in color]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for color in ((0, 0, 0), (1, 1, 1), (0.9, 0.9, 0.1), (0, 0.2, 0.5), (0.5, 0.5, 0.5)):
        bright, ink = luminance(color), luminance({"black": (0, 0, 0), "white": (1, 1, 1)}[ink_on(color)])
        assert (max(bright, ink) + 0.05) / (min(bright, ink) + 0.05) >= 4.5  # WCAG AA


def test_a_boundary_is_a_function_or_curves(found):
    ax = found.map(x="gamma", y="width", value="regime", boundary=lambda gamma: 10 / gamma)
    (line,) = [one for one in ax.lines if one.get_color() == "black"]
    x, y = line.get_data()
    assert x[[0, -1]] == pytest.approx([0.01 / 10**0.5, 10 * 10**0.5])
    assert y == pytest.approx(10 / x)
    assert ax.get_ylim() == pytest.approx((0, 30))  # as without it
    several = {"first": ([0.1, 1.0], [5, 6]), "second": lambda gamma: 7}
    ax = found.map(x="gamma", y="width", value="number", boundary=several)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["failed", "first", "second"]
    for wrong, kind in ((3, InputTypeError), (([1, 2], [1]), InputValueError)):
        with pytest.raises(kind, match=r"a boundary has|boundary is"):
            found.map(x="gamma", y="width", value="number", boundary=wrong)
    with pytest.raises(InputValueError, match="needs two numeric axes"):
        found.map(x="kind", y="width", value="number", where={"gamma": 1.0}, boundary=several)


def test_it_draws_into_axes_that_are_given(found):
    _, (left, right) = plt.subplots(1, 2)
    assert found.map(x="gamma", y=None, value="number", where={"width": 5}, ax=right) is right
    assert not left.collections
    assert right.collections[0].get_array().shape == (1, 4)


def test_the_table_as_csv(found, tmp_path):
    with found.to_csv(tmp_path / "t.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 36
    assert list(rows[0]) == [
        "gamma",
        "width",
        "kind",
        "seed",
        "number",
        "regime",
        "ok",
        "status",
        "seconds",
        "error",
        "path",
    ]
    for row, own in zip(rows, found.rows, strict=True):
        assert (float(row["gamma"]), int(row["width"]), row["kind"]) == (own["gamma"], own["width"], "a")
        if own["status"] == "failed":
            assert (row["number"], row["error"]) == ("", "ValueError: too large")
        else:
            assert float(row["number"]) == number(own["gamma"], own["width"], own["seed"])


def test_a_formula_is_no_formula_in_a_spreadsheet(tmp_path):
    fl.sweep(lambda: {"a": "=1+1", "b": -1}, {}, out=tmp_path / "s", executor=sweeps.Serial(), quiet=True)
    text = fl.open_sweep(tmp_path / "s").to_csv(tmp_path / "t.csv").read_text()
    assert ",'=1+1,-1," in text


def test_the_table_as_arrays(found, tmp_path):
    xarray = pytest.importorskip("xarray", reason="xarray is an optional extra")
    data = found.to_xarray()
    assert isinstance(data, xarray.Dataset)
    assert dict(data.sizes) == {"gamma": 4, "width": 3, "seed": 3}
    assert data.attrs["kind"] == "a"
    for gamma, width, seed in ((0.01, 5, 0), (1.0, 25, 4), (10.0, 15, 1)):
        assert float(data["number"].sel(gamma=gamma, width=width, seed=seed)) == number(gamma, width, seed)
    assert bool(numpy.isnan(data["number"].sel(gamma=10.0, width=5)).all())
    assert data["status"].sel(gamma=10.0, width=5, seed=0).item() == "failed"
    assert data["regime"].sel(gamma=0.01, width=5, seed=4).item() == "rich"
    points = [{"gamma": 1.0, "width": 5}, {"gamma": 0.1, "width": 15}, {"gamma": 1.0, "width": 25}]
    listed = fl.sweep(measured, points, out=tmp_path, seeds=2, executor=sweeps.Serial(), quiet=True).to_xarray()
    assert dict(listed.sizes) == {"point": 3, "seed": 2}
    assert listed["width"].to_numpy().tolist() == [5, 15, 25]
    assert listed["number"].to_numpy()[:, 1].tolist() == [number(p["gamma"], p["width"], 1) for p in points]


def test_a_missing_xarray_is_named(found, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "xarray", None)
    with pytest.raises(FeatlearnError, match=r"pip install 'featlearn\[xarray\]'"):
        found.to_xarray()
