"""Figures for print: the same numbers, as PDF, PNG and CSV."""

import csv
from pathlib import Path

import matplotlib
import numpy
import pytest

from featlearn.errors import InputValueError
from featlearn.record import Run
from featlearn.reporting import figures
from tests.reporting.runs import by_hand, watched

matplotlib.use("Agg")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return watched(tmp_path_factory.mktemp("figures") / "one", steps=30)


@pytest.fixture(autouse=True)
def _closed():
    import matplotlib.pyplot as plt

    yield
    plt.close("all")


@pytest.mark.parametrize("name", figures.FIGURES)
def test_every_figure_draws_into_given_axes(run: Run, name: str):
    from matplotlib.figure import Figure

    ax = Figure().subplots()
    before = dict(matplotlib.rcParams)
    assert figures.draw(run, name, ax=ax) is ax
    assert ax.lines or ax.images
    assert ax.get_xlabel()
    assert ax.get_ylabel()
    assert dict(matplotlib.rcParams) == before


def test_lines_are_the_numbers_of_the_run(run: Run):
    ax = figures.draw(run, "kernel_norm")
    steps, values = run.scalar("ntk/norm")
    assert ax.lines[0].get_xdata() == pytest.approx(steps)
    assert ax.lines[0].get_ydata() == pytest.approx(values)
    assert ax.get_figure().get_size_inches().tolist() == pytest.approx([3.25, 2.4])
    kernel = figures.draw(run, "kernel").images[0].get_array()
    assert kernel.shape == (30, 30)


def test_an_unknown_figure_is_named(run: Run):
    with pytest.raises(InputValueError, match="did you mean 'spectrum'"):
        figures.draw(run, "spectra")


def test_what_is_missing_is_an_error_with_the_reason(tmp_path: Path):
    run = by_hand(tmp_path / "a", {"probe/loss": [1.0, 0.5]}, [0, 1])
    with pytest.raises(InputValueError, match=r"'features': neural features were not recorded"):
        figures.draw(run, "features")


def test_all_are_saved_with_their_numbers(tmp_path: Path):
    scalars = {"probe/loss": [1.0, 0.5, 0.25], "ntk/norm": [1.0, 2.0]}
    ksm = {"specialization": [{"ksm": numpy.array([[1.5, 0.5], [0.25, 1.75]])}]}
    runs = [by_hand(tmp_path / name, scalars, [0, 1, 3], ksm, seed=seed) for seed, name in enumerate(["_$a^$", "=b"])]
    paths = figures.save_figures(runs, tmp_path / "figures", bands=False)
    stems = {path.stem for path in paths}
    assert {"loss", "timeline", "ntk-norm", "specialization"} == stems
    assert len(paths) == 3 * len(stems)
    assert all(path.stat().st_size for path in paths)
    assert (tmp_path / "figures" / "loss.pdf").read_bytes().startswith(b"%PDF")
    with (tmp_path / "figures" / "ntk-norm.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [["step", "_$a^$", "'=b"], ["0.0", "1.0", "1.0"], ["1.0", "2.0", "2.0"]]
    with (tmp_path / "figures" / "specialization.csv").open(newline="") as file:
        assert ["_$a^$", "0.0", "1", "0", "0.25"] in list(csv.reader(file))


def test_a_run_returns_its_figures_by_name(run: Run):
    import matplotlib.pyplot as plt

    drawn = run.figures()
    assert set(figures.FIGURES) <= set(drawn)
    assert drawn["kernel_norm"].axes[0].lines[0].get_ydata() == pytest.approx(run.scalar("ntk/norm")[1])
    assert plt.get_fignums() == []  # so that a notebook does not show them twice
