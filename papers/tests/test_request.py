"""From an id to files, through the command line."""

import csv
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy
import pytest

from featlearn.cli.app import main
from featlearn_papers.frame import execution, registry, request, results
from featlearn_papers.frame.claims import Choice, failed
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.drawing import curve, panels, plotted, save
from featlearn_papers.frame.page import figure_page, gallery
from featlearn_papers.frame.registry import DECLARATIONS, load
from featlearn_papers.frame.scale import Scale
from papers.tests import made_up


def run(capsys, *words):
    code = main(["reproduce", *words, "--quiet", "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def experiments(tmp_path_factory):
    """Where the smoke runs of all figures keep their seeds."""
    return tmp_path_factory.mktemp("experiments")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The made-up figure at smoke scale."""
    place = tmp_path_factory.mktemp("figure")
    with pytest.MonkeyPatch.context() as monkeypatch:
        made_up.install(monkeypatch)
        assert main(["reproduce", made_up.ID, "--out", str(place), "--jobs", "1", "--quiet"]) == 0
    return place


def drawn(seed):
    return made_up.measure(made_up.Setup(), Context(seed=seed, folder=None))["drawn"].numpy()


def test_a_figure_leaves_its_files(folder):
    assert {path.name for path in folder.iterdir()} == {
        "figure.png",
        "figure.pdf",
        "numbers.csv",
        "claims.json",
        "meta.json",
        "page.html",
        "experiments",
    }
    claims, meta = (json.loads((folder / name).read_text()) for name in ("claims.json", "meta.json"))
    found = [(one["id"], one["verdict"], one["check"]) for one in claims]
    assert found == [
        ("centered", "holds", False),
        ("printed", "fails", False),
        ("drawn", "holds", False),
        ("made", "holds", True),
    ]
    assert meta["not_judged"] == ["late"]
    assert (meta["scale"], meta["seeds"], meta["setup"]["count"]) == ("smoke", [0, 1, 2], 5)
    assert meta["claims"]["centered"]["values"][1] == pytest.approx(drawn(1).mean(), rel=1e-5)


def test_the_page_says_what_the_claims_say(folder):
    page = (folder / "page.html").read_text()
    for words in (
        "Made up &amp; drawn",
        "Numbers &lt;are&gt; centered",
        "fails, as known",
        "The print miscounts. So.",
        "(3 seeds)",
        "3 of 3 seeds",
        "-3 to 3",
        "Not judged at this scale: late",
        "data:image/png;base64,",
    ):
        assert words in page
    assert "http" not in page


def test_set_ups_inside_a_set_up_are_told_in_words(folder):
    result = results.opened(folder)
    parts = [{"data": "mnist", "lr": 0.1}, {"data": "svhn", "lr": 1.0}]
    result.meta["setup"] = {"parts": parts, "sigmas": [1.0, 2.0], "one": {"width": 3}}
    words = "Set-up: parts ((data mnist, lr 0.1), (data svhn, lr 1.0)), sigmas (1.0, 2.0), one (width 3)."
    assert words in figure_page(result)


def test_the_csv_has_the_numbers_that_are_drawn(folder):
    values = numpy.stack([drawn(seed) for seed in range(3)])
    rows = list(csv.DictReader((folder / "numbers.csv").open()))
    curves = {"drawn": values.mean(0), "drawn: lowest seed": values.min(0), "drawn: highest seed": values.max(0)}
    for name, expected in curves.items():
        found = [(float(row["x"]), float(row["y"])) for row in rows if row["curve"] == name and row["panel"] == "A"]
        assert numpy.allclose(found, list(enumerate(expected)), rtol=1e-5)
    assert [(row["x"], row["y"]) for row in rows if row["curve"] == "paper"] == [("", "0.25")]
    image = {(int(row["y"]), int(row["x"])): float(row["value"]) for row in rows if row["panel"] == "B"}
    assert image == pytest.approx(dict(numpy.ndenumerate(values)), rel=1e-5)


def test_a_color_bar_has_no_numbers_of_its_own():
    figure, (ax,) = panels(1, 1, titles=("A",))
    figure.colorbar(ax.imshow(numpy.arange(6.0).reshape(2, 3), label="six"), ax=ax)
    assert [(row.panel, row.value) for row in plotted(figure)] == [("A", f"{value}") for value in range(6)]


def test_a_picture_that_would_be_large_is_made_small(tmp_path):
    figure, (ax,) = panels(1, 1, height=3.0)
    ax.imshow(numpy.random.default_rng(0).random((300, 300)), cmap="viridis", label="noise")
    save(figure, tmp_path)
    assert (tmp_path / "figure.png").stat().st_size < 100_000


def test_a_claim_that_fails_is_exit_status_1(monkeypatch, tmp_path, capsys):
    def wrong(setup, runs):
        for one in made_up.claims(setup, runs):
            yield made_up.Claim(**{**vars(one), "known": None})

    made_up.install(monkeypatch, claims=wrong)
    assert main(["reproduce", made_up.ID, "--out", str(tmp_path), "--seeds", "1", "--quiet"]) == 1
    assert "FAILS" in capsys.readouterr().out


def altered(**changes):
    """Claims of the made-up figure, the first one changed."""

    def claims(setup, runs):
        first, *others = made_up.claims(setup, runs)
        return [made_up.Claim(**{**vars(first), **{name: of(runs) for name, of in changes.items()}}), *others]

    return claims


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"claims": altered(values=lambda runs: runs["drawn"][0])}, ValueError, "'centered' of 009/fig1 has 5 values"),
        ({"claims": altered(values=lambda runs: [])}, ValueError, "'centered' of 009/fig1 has 0 values"),
        (
            {"claims": altered(values=lambda runs: runs["drawn"])},
            ValueError,
            r"'centered' has values of shape \(3, 5\)",
        ),
        ({"claims": altered(id=lambda runs: "drawn")}, ValueError, "expected each once"),
        ({"claims": lambda setup, runs: None}, TypeError, "gave a NoneType, expected only Claims"),
        ({"claims": lambda setup, runs: runs["lost"]}, ValueError, "'lost'"),
        ({"plot": lambda setup, runs: None}, TypeError, "plot of 009/fig1 returned NoneType"),
    ],
)
def test_a_figure_that_cannot_be_judged_or_drawn_leaves_the_files_of_the_last_result(
    folder, monkeypatch, tmp_path, changes, error, words
):
    out = shutil.copytree(folder, tmp_path / "out")
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    made_up.install(monkeypatch, **changes)
    with pytest.raises(error, match=words):
        request.reproduce(request.Request(id=made_up.ID, scale=Scale.SMOKE, out=out, jobs=1))
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before
    assert made_up.calls == []


def test_a_set_up_that_cannot_be_written_is_refused_before_anything_runs(monkeypatch, tmp_path):
    made_up.install(monkeypatch, sizes=made_up.sizes(made_up.Setup(count=numpy.int64(5))))
    with pytest.raises(TypeError, match="count in the set-up of 009/fig1"):
        request.reproduce(request.Request(id=made_up.ID, scale=Scale.SMOKE, out=tmp_path / "out"))
    assert made_up.calls == []
    assert not (tmp_path / "out").exists()


def test_the_table_counts_seeds_and_says_what_was_known(monkeypatch, tmp_path, capsys):
    made_up.install(monkeypatch, claims=altered(known=lambda runs: "It cannot be."))
    for seeds, words in ((1, "1 of 1 seed"), (2, "2 of 2 seeds")):
        main(["reproduce", made_up.ID, "--out", str(tmp_path), "--seeds", str(seeds), "--jobs", "1"])
        out, err = capsys.readouterr()
        rows = {line.split()[0]: line for line in out.splitlines()}
        assert " ".join(rows["drawn"].split()) == f"drawn yes {words} print holds"
        assert rows["centered"].endswith(" holds")
        assert rows["printed"].endswith("fails, as known")
        assert f"scale smoke: {words[5:]}" in err
    page = (tmp_path / "page.html").read_text()
    assert '<td class="holds">holds</td>' in page
    assert "<td>Known to fail elsewhere: It cannot be." in page
    assert '<td class="known">fails, as known</td>' in page
    assert '<td class="fails">' not in page


def test_a_dry_run_says_what_is_left_and_runs_nothing(monkeypatch, tmp_path, capsys):
    made_up.install(monkeypatch)
    words = (made_up.ID, "--out", str(tmp_path), "--dry-run")
    code, answer = run(capsys, *words, "--jobs", "2")
    assert (code, answer["seeds"], answer["finished"], answer["seconds"], answer["jobs"]) == (0, 3, 0, 120, 2)
    assert made_up.calls == []
    assert list(tmp_path.iterdir()) == []
    request.execute(
        load(made_up.ID).experiment,
        made_up.Setup(),
        Context(seed=0, folder=tmp_path),
        seeds=[0],
        jobs=1,
        cache=tmp_path / "experiments",
    )
    assert run(capsys, *words, "--jobs", "1")[1]["seconds"] == 120
    assert run(capsys, *words, "--jobs", "1", "--fresh")[1]["seconds"] == 180
    assert made_up.calls == [0]
    run(capsys, made_up.ID, "--out", str(tmp_path), "--seeds", "1", "--fresh")
    assert made_up.calls == [0, 0]


def test_the_time_of_a_gpu_is_not_told_for_a_cpu(monkeypatch, tmp_path, capsys):
    large = {Scale.SMOKE: made_up.Size(setup=made_up.Setup(), seeds=3, seconds=60, mebibytes=100, device="cuda")}
    made_up.install(monkeypatch, sizes=large)
    words = (made_up.ID, "--out", str(tmp_path), "--dry-run", "--jobs", "3")
    monkeypatch.setattr(request, "_device", lambda wanted: wanted)
    there = run(capsys, *words)[1]
    assert (there["device"], there["seconds"], there["timed_on"]) == ("cuda", 60, "cuda")
    here = run(capsys, *words, "--device", "cpu")[1]
    assert (here["device"], here["seconds"], here["seed_seconds"], here["timed_on"]) == ("cpu", None, 60, "cuda")
    main(["reproduce", *words, "--device", "cpu"])
    assert "made for cuda, where a seed takes 60 s: how long here is not known" in capsys.readouterr().out


def installed_twice(monkeypatch):
    """A second figure that shows the runs of the first."""
    first = made_up.install(monkeypatch)
    module = sys.modules["featlearn_papers.made_up"]
    module.FIG_2 = made_up.Reproduction(
        id="009/fig2",
        about="Also.",
        experiment={"here": first.experiment, "there": made_up.experiment(id="009/there")},
        plot=lambda setups, runs: made_up.plot(setups["here"], runs["there"]),
        claims=lambda setups, runs: made_up.claims(setups["there"], runs["here"]),
    )
    declared = registry.Declaration("009/fig2", "Made up of two", "made_up")
    monkeypatch.setattr(registry, "DECLARATIONS", (*registry.DECLARATIONS, declared))


def test_figures_that_show_the_same_runs_train_once(monkeypatch, tmp_path, capsys):
    installed_twice(monkeypatch)
    words = ("--out", str(tmp_path), "--jobs", "1")
    code, answers = run(capsys, made_up.ID, "009/fig2", *words)
    assert (code, len(answers)) == (0, 2)
    assert made_up.calls == [0, 1, 2, 0, 1, 2]  # one experiment for both, one more for the second
    names = [[one["id"] for one in answer["meta"]["experiments"]] for answer in answers]
    assert names == [[made_up.ID], [made_up.ID, "009/there"]]
    assert answers[0]["meta"]["experiments"][0]["key"] == answers[1]["meta"]["experiments"][0]["key"]
    assert {path.name for path in tmp_path.iterdir()} == {"009", "experiments"}
    run(capsys, made_up.ID, "009/fig2", *words, "--fresh")
    assert made_up.calls == [0, 1, 2] * 4


def test_a_figure_that_cannot_be_run_does_not_stop_the_others(monkeypatch, tmp_path, capsys):
    installed_twice(monkeypatch)
    broken = made_up.experiment(id="009/there", measure=lambda setup, context: {"drawn": context.dataset("mnist").x})
    figure = load("009/fig2")
    sys.modules["featlearn_papers.made_up"].FIG_2 = replace(figure, experiment={**figure.experiment, "there": broken})
    monkeypatch.delenv("FEATLEARN_DATA", raising=False)
    code, answers = run(capsys, "009/fig2", made_up.ID, "--out", str(tmp_path), "--jobs", "1")
    assert code == 1
    assert "FEATLEARN_DATA" in answers[0]["error"]
    assert answers[1]["claims"][0]["holds"]


@pytest.mark.parametrize(("words", "seeds"), [("2", [0, 1]), ("101-103", [101, 102, 103]), ("3,5,8-9", [3, 5, 8, 9])])
def test_seeds_are_counted_or_named(monkeypatch, tmp_path, capsys, words, seeds):
    made_up.install(monkeypatch)
    answer = run(capsys, made_up.ID, "--out", str(tmp_path), "--jobs", "1", "--seeds", words)[1]
    assert answer["meta"]["seeds"] == made_up.calls == seeds


@pytest.mark.parametrize("words", ["0", "-3", "three", "5-3", "1,1", "1.5", ""])
def test_seeds_that_cannot_be_are_refused(monkeypatch, tmp_path, capsys, words):
    made_up.install(monkeypatch)
    assert main(["reproduce", made_up.ID, "--out", str(tmp_path), f"--seeds={words}"]) == 2
    assert "--seeds is" in capsys.readouterr().err


def test_two_seeds_decide_nothing_at_laptop_scale(monkeypatch, tmp_path, capsys):
    made_up.install(monkeypatch)
    words = (made_up.ID, "--out", str(tmp_path), "--jobs", "1", "--scale", "laptop", "--seeds")
    code, answer = run(capsys, *words, "2")
    verdicts = {claim["id"]: claim["verdict"] for claim in answer["claims"]}
    assert code == 1
    assert verdicts == {
        "centered": "undecided",
        "printed": "undecided",
        "drawn": "undecided",
        "late": "holds",
        "made": "holds",
    }
    assert "2 seeds where a verdict needs 3" in answer["meta"]["notes"][0]
    assert run(capsys, *words, "3")[0] == 0


def test_five_runs_of_the_paper_ask_for_five_seeds():
    with pytest.raises(ValueError, match="009/fig1 has 3 seeds at scale laptop, expected at least 5"):
        made_up.experiment(paper_seeds=5)
    assert made_up.experiment(paper_seeds=2).least_seeds(Scale.LAPTOP) == 3
    assert made_up.experiment(paper_seeds=3).least_seeds(Scale.SMOKE) == 1


def test_checks_and_choices_are_on_the_page(monkeypatch, tmp_path, capsys):
    choices = [
        Choice(made="the mean", other="the median", values=[9.0, 9.0, 9.0]),
        Choice(made="the mean", other="the mode"),
    ]
    made_up.install(monkeypatch, claims=altered(choices=lambda runs: choices))
    assert main(["reproduce", made_up.ID, "--out", str(tmp_path), "--jobs", "1", "--quiet"]) == 0
    assert "check holds" in capsys.readouterr().out.splitlines()[-2]
    page = (tmp_path / "page.html").read_text()
    assert "Chosen: the mean. With the median it fails: 9 (within -3 to 3)." in page
    assert "Chosen: the mean; not tried: the mode." in page
    assert page.index("Checks: sentences that cannot fail") < page.index("Draws are counted")
    assert f"Experiment: {made_up.ID} (" in page
    assert "1 of 3 claims hold, 1 hold under our choice alone, 1 known to fail, 1 check." in page


def test_wrong_words_are_answered_with_the_right_ones(capsys):
    assert main(["reproduce", "004/tabel1"]) == 2
    assert "did you mean 004/table1?" in capsys.readouterr().err
    assert main(["reproduce"]) == 2
    assert main(["reproduce", "004/table1", "--scale", "laptpo"]) == 2
    assert main(["reproduce", "004/table1", "--jobs", "0"]) == 2
    assert "at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["paper_002.fig33", "paper_0002.fig3"])
def test_a_module_that_is_not_there_is_named(monkeypatch, capsys, module):
    declared = registry.Declaration("002/fig33", "Mistyped", module)
    monkeypatch.setattr(registry, "DECLARATIONS", (*DECLARATIONS, declared))
    assert main(["reproduce", "002/fig33"]) == 1
    error = capsys.readouterr().err
    assert f"featlearn_papers.{module}" in error
    assert "mistyped in registry.py" in error
    assert run(capsys, "--list")[1][-1]["written"] is False


def test_a_curve_without_an_entry_in_the_legend_keeps_its_name(tmp_path):
    figure, (ax,) = panels(1, 1)
    curve(ax, [0, 1], [[0.0, 1.0], [1.0, 2.0]], "_hidden")
    save(figure, tmp_path)
    names = {row["curve"] for row in csv.DictReader((tmp_path / "numbers.csv").open())}
    assert names == {"hidden", "hidden: lowest seed", "hidden: highest seed"}


def test_missing_data_is_an_error_that_says_where_to_put_it(tmp_path, monkeypatch):
    context = Context(seed=0, folder=tmp_path, data_root=tmp_path)
    with pytest.raises(ValueError, match="train-images"):
        context.dataset("mnist", samples=10)
    stands = Context(seed=0, folder=tmp_path, data_root=tmp_path, fallback_digits=True)
    found = stands.dataset("mnist", samples=10, classes=((0, 2, 4, 6, 8), (1, 3, 5, 7, 9)), flatten=True)
    assert found.x.shape == (10, 64)
    assert found.classes == 2
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mnist\n"]
    same = context.dataset("digits", samples=10)
    assert same.x.shape == (10, 1, 8, 8)
    assert found.labels.tolist() == (same.labels % 2).tolist()


def test_digits_that_are_too_few_do_not_stand_in(tmp_path):
    context = Context(seed=0, folder=tmp_path, data_root=tmp_path, fallback_digits=True)
    with pytest.raises(ValueError, match=r"cannot stand in for cifar10 at this scale: samples=1000, but digits .* has"):
        context.dataset("cifar10", samples=1000, classes=(0, 1))


@pytest.mark.parametrize(
    ("option", "variable", "words"),
    [
        (None, None, "there is no --data-root, and the environment variable FEATLEARN_DATA is not set"),
        ("empty", None, "put it there, or pass another root by --data-root or FEATLEARN_DATA"),
        ("lost", "empty", "featlearn: --data-root is '"),
        (None, "lost", "featlearn: FEATLEARN_DATA is '"),
    ],
)
def test_missing_data_is_told_in_the_words_of_the_command(monkeypatch, tmp_path, capsys, option, variable, words):
    (tmp_path / "empty").mkdir()
    monkeypatch.delenv("FEATLEARN_DATA", raising=False)
    if variable is not None:
        monkeypatch.setenv("FEATLEARN_DATA", str(tmp_path / variable))
    made_up.install(monkeypatch, measure=lambda setup, context: {"drawn": context.dataset("mnist", samples=5).x})
    options = () if option is None else ("--data-root", str(tmp_path / option))
    assert main(["reproduce", made_up.ID, "--out", str(tmp_path / "out"), "--jobs", "1", "--quiet", *options]) == 1
    error = capsys.readouterr().err
    assert words in error
    assert "root=" not in error


def test_a_result_says_what_made_its_seeds_not_what_judged_them(monkeypatch, tmp_path, capsys):
    made_up.install(monkeypatch)
    monkeypatch.setattr(execution, "versions", lambda: {"torch": "1.0", "python": "3.1"})
    words = (made_up.ID, "--out", str(tmp_path), "--jobs", "1", "--seeds")
    assert run(capsys, *words, "1")[1]["meta"]["versions"] == {"torch": "1.0", "python": "3.1"}
    monkeypatch.setattr(execution, "versions", lambda: {"torch": "2.0", "python": "3.1"})
    assert run(capsys, *words, "1")[1]["meta"]["versions"] == {"torch": "1.0", "python": "3.1"}
    assert run(capsys, *words, "2")[1]["meta"]["versions"] == {"torch": "1.0, 2.0", "python": "3.1"}
    assert made_up.calls == [0, 1]


def test_the_result_says_that_digits_stood_in(monkeypatch, tmp_path, capsys):
    def measure(setup, context):
        return {"drawn": context.dataset("mnist", samples=5).x[:, 0, 4, 3], "seed": len(context.dataset("svhn").x)}

    made_up.install(monkeypatch, measure=measure)
    options = ("--out", str(tmp_path / "out"), "--jobs", "1", "--data-root", str(tmp_path), "--seeds", "1")
    assert main(["reproduce", made_up.ID, *options]) == 1
    assert "train-images" in capsys.readouterr().err
    _, answer = run(capsys, made_up.ID, *options, "--fallback-digits")
    assert answer["meta"]["notes"] == [
        f"digits stand in for {name}, whose files were missing" for name in ("mnist", "svhn")
    ]


def test_the_largest_scale_is_kept_and_shown(folder, monkeypatch, tmp_path, capsys):
    made_up.install(monkeypatch)
    monkeypatch.setattr(results, "KEPT", tmp_path / "kept")
    results.keep(folder)
    large = tmp_path / "large"
    shutil.copytree(folder, large)
    (large / "meta.json").write_text((folder / "meta.json").read_text().replace("smoke", "laptop"))
    results.keep(large)
    with pytest.raises(ValueError, match="laptop, which is larger"):
        results.keep(folder)
    older = (large / "meta.json").read_text().replace('"standard": 3', '"standard": 2')
    (tmp_path / "kept" / made_up.ID / "meta.json").write_text(older)
    assert results.kept(made_up.ID) is None
    results.keep(folder)
    assert results.kept(made_up.ID).scale is Scale.SMOKE
    results.keep(large)
    assert results.kept(made_up.ID).scale is Scale.LAPTOP
    code, answer = run(capsys, "--gallery", "--out", str(tmp_path / "gallery.html"))
    assert (code, answer["figures"]) == (0, [made_up.ID])
    page = (tmp_path / "gallery.html").read_text()
    assert "<h2>Not yet</h2>" in page
    whole = gallery([registry.declaration(made_up.ID)], {made_up.ID: results.kept(made_up.ID)})
    assert "2 of 3 claims hold, 1 known to fail, 1 check" in whole
    assert "2 of 3 hold" in whole
    assert "Not yet" not in whole
    listed = run(capsys, "--list")[1]
    assert [one["id"] for one in listed] == [*(one.id for one in DECLARATIONS), made_up.ID]


def test_what_is_declared_and_written_can_be_loaded():
    ids = [one.id for one in DECLARATIONS]
    assert len(set(ids)) == len(ids)
    shared = {}
    for one in DECLARATIONS:
        if one.written:
            assert load(one.id).id == one.id
            for experiment in load(one.id).experiments.values():
                assert Scale.SMOKE in experiment.sizes
                # an id is one experiment: two of the same name would read each other's seeds
                assert shared.setdefault(experiment.id, experiment) is experiment


@pytest.mark.parametrize("one", [one for one in DECLARATIONS if results.kept(one.id)], ids=lambda one: one.id)
def test_what_is_kept_is_small_and_whole(one):
    found = results.kept(one.id)
    seeds = len(found.meta["seeds"])
    assert {len(claim["values"]) for claim in found.meta["claims"].values()} <= {0, 1, seeds}
    sizes = {name: (found.folder / name).stat().st_size for name in results.FILES}
    assert sizes["figure.png"] < 100_000
    assert sizes["numbers.csv"] < 300_000
    fields = {"id", "claim", "paper", "measured", "band", "band_from", "verdict", "holds", "known", "check"}
    fields |= {"interval", "cause", "choices"}
    assert found.claims
    assert all(set(claim) == fields for claim in found.claims)
    assert set(found.meta["claims"]) == {claim["id"] for claim in found.claims}
    assert found.meta["id"] == one.id


def test_the_table_of_the_gallery_has_what_is_kept():
    page = (Path(__file__).parents[2] / "docs" / "gallery" / "papers.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| 00")]
    expected = []
    for one in DECLARATIONS:
        if (found := results.kept(one.id)) is not None:
            expected.append([one.id, one.title, str(found.scale), *(str(n or "") for n in found.counts.values())])
            assert rows[len(expected) - 1][10] or not failed(found.claims), one.id
    assert [row[:10] for row in rows] == expected


@pytest.mark.parametrize("one", [one for one in DECLARATIONS if one.written], ids=lambda one: one.id)
def test_smoke(one, tmp_path, experiments, capsys, monkeypatch):
    """Every figure runs without data files, and no claim fails that is not known to fail.

    Figures share the experiments of one folder, as they do for a user.
    """
    monkeypatch.delenv("FEATLEARN_DATA", raising=False)
    code, answer = run(capsys, one.id, "--out", str(tmp_path), "--jobs", "1", "--cache", str(experiments))
    assert code == 0, [claim for claim in answer["claims"] if not claim["holds"]]
