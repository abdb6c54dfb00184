"""What to cite: every public name leads to papers that exist, or to the library."""

import inspect
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch

import featlearn as fl
from featlearn.citation_index import Place, places
from featlearn.citations import FIVE, _public_names, bibliography, citation, equations, papers, sources

TOP = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("theory.latent.solve", ("004",)),
        ("theory.phases", ("004",)),
        ("theory.early.free_probability", ("003",)),
        ("metrics.alignment", ("000", "001")),
        ("metrics.correlation", ("003",)),
        ("featlearn.steer.SLO", ("003", "004")),
        ("fl.neural_features", ("003", "radhakrishnan2024")),
        ("dynamics.linearize", ("lee2019",)),
        ("ntk", ("jacot2018",)),
        ("data.digits", ()),
        ("002", ("002",)),
    ],
)
def test_names(name: str, expected: tuple[str, ...]):
    assert papers(name) == expected
    entries = citation(name)
    assert [bibliography()[paper] in entries for paper in expected] == [True] * len(expected)
    assert entries.count("@") == max(1, len(expected))


def test_things_themselves():
    path = fl.theory.latent.solve(torch.ones(2), torch.ones(2, 1), torch.ones(1), 1.0, times=[0.0])
    things = {
        path: ("004",),
        fl.theory.latent.solve: ("004",),
        fl.theory.phases.Phase.KERNEL: ("004",),
        fl.theory.latent: ("004",),
        fl.theory.infinite_width.ntk: ("jacot2018", "lee2019"),
        fl.theory: FIVE,
        fl.ntk: ("jacot2018",),
        fl.layer_alignment: ("004",),
        fl.metrics.correlation: ("003",),
        fl.metrics.Interference: ("000", "001"),
        fl.steer.SLO: ("003", "004"),
        fl.FeatlearnError: (),
        fl: (),
    }
    for thing, expected in things.items():
        assert papers(thing) == expected, thing
    optimizer = fl.steer.SLO([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    assert citation(optimizer) == citation("steer.SLO") != citation("003")


def test_a_result_has_the_papers_of_the_function_that_returned_it():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    x = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    features = next(iter(fl.neural_features(model, x).values()))
    assert papers(features) == papers("neural_features")
    pair = next(iter(fl.layer_alignment(model, x).values()))
    assert papers(pair) == papers("layer_alignment")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("theory.latent.slove", "did you mean 'theory.latent.solve'"),
        ("metrcs.alignment", "did you mean 'metrics.alignment'"),
        ("classify", "did you mean 'theory.phases.classify'"),
        ("05", "expected a name such as 'theory.ofe' or one of 000, 001, 002, 003, 004|did you mean"),
        ("slo", "did you mean 'steer.SLO'"),
        ("__version__", "is no public name"),
        ("theory..ofe", "is no public name"),
        ("", "is no public name"),
    ],
)
def test_an_unknown_name_is_corrected(wrong: str, message: str):
    with pytest.raises(fl.FeatlearnError, match=message):
        citation(wrong)


@pytest.mark.parametrize(
    ("place", "function"),
    [
        ("000 Eq. 20", "metrics.feature_rate"),
        ("000 eq 23", "theory.ofe.solve"),
        ("Shan & Bordelon 2021b, Eq. 16", "theory.relu.growth_rates"),
        ("001 Eq. 54", "theory.deep_linear.subkernel_terms"),
        ("002 Eq. 91", "ntk"),
        ("002 Equation 17", "dynamics.evolving_kernel_descent"),
        ("002 Theorem 1", "dynamics.kernel_regression"),
        ("003 Eq. 24", "theory.early.free_probability"),
        ("003 Prop. 4", "quantities.ptk"),
        ("004 Eq. 7", "theory.latent.Latent.time_scale"),
        ("004 Table 1", "theory.phases.column"),
    ],
)
def test_an_equation_leads_to_the_function_that_computes_it(place: str, function: str):
    names = [line.partition(": ")[0] for line in citation(place).splitlines()]
    assert f"fl.{function}" in names
    assert len(names) <= 3


def test_places_are_read_as_docstrings_write_them():
    text = "See Xu & Ziyin 2024, Eq. 5 to 7, Theorem 1 (corrected); 2021b, App. D.2. Yang & Hu 2021, Eq. 9."
    found = [place[1:] for place in places(text) if place.paper == "004"]
    assert found == [("Eq", "5"), ("Eq", "6"), ("Eq", "7"), ("Theorem", "1")]
    assert list(places(text))[4:] == [Place("001", "App", "D.2")]


@pytest.mark.parametrize("place", ["002 Eq. 300", "003 Eq. 0"])
def test_an_equation_without_a_function_is_refused(place: str):
    with pytest.raises(fl.FeatlearnError, match="no function of featlearn computes"):
        citation(place)


def test_most_equations_of_every_paper_have_a_function():
    counts = Counter(place.paper for place in equations().functions if place.kind == "Eq")
    assert all(counts[paper] >= least for paper, least in zip(FIVE, (35, 70, 65, 20, 30), strict=True))


@pytest.mark.parametrize("thing", [3, torch.ones(1), torch.nn.Linear, TOP, [].append])
def test_what_is_not_ours_is_refused(thing: object):
    with pytest.raises(fl.FeatlearnError, match="expected a name, or a function, class, module or result of featlearn"):
        citation(thing)


def test_every_public_name_can_be_cited():
    names = list(_public_names())
    assert {"ntk", "metrics.alignment", "theory.latent.solve", "theory.phases.TABLE_1"} <= set(names)
    for name in names:
        assert citation(name).startswith("@")
        thing = fl
        for part in name.split("."):
            thing = getattr(thing, part)
        # constants and aliases do not say where they come from
        module = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", "")
        if isinstance(thing, ModuleType) or inspect.isfunction(thing) or inspect.isclass(thing):
            assert papers(thing) == papers(name), name
            assert module.startswith("featlearn")


def test_every_name_of_the_bibliography_is_public():
    results_by_file = {"quantities.layer_features", "quantities.layer_pairs"}
    assert set(sources()) - set(_public_names()) == results_by_file
    assert {paper for keys in sources().values() for paper in keys} == set(bibliography())


def test_bibtex_is_well_formed():
    everything = "\n\n".join(citation(paper) for paper in bibliography())
    entries = everything.split("\n\n")
    for entry in entries:
        assert re.fullmatch(r"@(misc|article|inproceedings|software)\{\w+,\n(  \w+ = \{.*\},\n)+\}", entry), entry
        assert entry.count("{") == entry.count("}")
        assert entry.isascii()
    assert len({entry.splitlines()[0] for entry in entries}) == len(entries) == 10
    assert r"Hongler, Cl{\'e}ment" in citation("jacot2018")
    assert "pages = {795--828}" in citation("cortes2012")
    assert f"version = {{{fl.__version__}}}" in citation("quantities.ntk_diagonal") + citation()


def test_text_is_one_line_each():
    lines = citation(style="text").splitlines()
    assert lines[0].startswith("The featlearn authors. featlearn:")
    assert len(lines) == 6
    assert lines[3] == (
        "A. Atanasov, B. Bordelon, C. Pehlevan. Neural Networks as Kernel Learners: The Silent Alignment Effect. "
        "International Conference on Learning Representations, arXiv:2111.00034, 2022."
    )
    assert citation("cortes2012", style="text").endswith("Journal of Machine Learning Research 13, 795-828, 2012.")
    with pytest.raises(fl.FeatlearnError, match="style='html', expected 'bibtex' or 'text'"):
        citation(style="html")


@pytest.mark.parametrize("listing", ["CITATION.cff", "docs/papers.md"])
def test_the_five_papers_are_those_that_the_project_lists(listing: str):
    text = (TOP / listing).read_text()
    places = []
    for key in FIVE:
        fields = dict(re.findall(r"(\w+) = \{+(.*?)\}+,", bibliography()[key]))
        places.append(text.index(fields["title"]))
        assert all(author.split(",")[0] in text for author in fields["author"].split(" and "))
    assert places == sorted(places)


def test_papers_need_no_torch():
    code = "import sys; from featlearn.citations import citation; citation('004'); citation(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "featlearn.citations" in done.stdout.split()
    assert "torch" not in done.stdout.split()
