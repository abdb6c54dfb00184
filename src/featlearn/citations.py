"""The papers to cite for a result."""

import sys
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from enum import Enum
from importlib import import_module
from inspect import isclass, isfunction
from types import MappingProxyType, ModuleType
from typing import Any, Literal, NamedTuple

from featlearn.errors import InputTypeError, InputValueError

Style = Literal["bibtex", "text"]


class Paper(NamedTuple):
    """One publication."""

    key: str
    """of the BibTeX entry"""
    authors: tuple[tuple[str, str], ...]
    """(family name, given names)"""
    title: str
    year: int
    proceedings: str = ""
    journal: str = ""
    volume: str = ""
    pages: str = ""
    arxiv: str = ""
    note: str = ""

    def bibtex(self) -> str:
        """The BibTeX entry."""
        kind = "inproceedings" if self.proceedings else "article" if self.journal else "misc"
        fields = {
            "title": f"{{{self.title}}}",
            "author": " and ".join(f"{family}, {given}" for family, given in self.authors),
            "booktitle": self.proceedings,
            "journal": self.journal,
            "volume": self.volume,
            "pages": self.pages.replace("-", "--"),
            "year": str(self.year),
            "eprint": self.arxiv,
            "archivePrefix": "arXiv" if self.arxiv else "",
            "note": self.note,
        }
        lines = [f"  {name} = {{{value}}}," for name, value in fields.items() if value]
        entry = "\n".join([f"@{kind}{{{self.key},", *lines, "}"])
        return entry.replace("é", r"{\'e}")

    def text(self) -> str:
        """One line of a list of references."""
        names = ", ".join(
            f"{' '.join(f'{part[0]}.' for part in given.split())} {family}" for family, given in self.authors
        )
        place = ", ".join(
            part for part in (f"{self.proceedings}{self.journal} {self.volume}".strip(), self.pages) if part
        )
        sources = [place, f"arXiv:{self.arxiv}" if self.arxiv else "", str(self.year)]
        end = ". " + self.note + "." if self.note else "."
        return f"{names}. {self.title}. {', '.join(part for part in sources if part)}{end}"


PAPERS: Mapping[str, Paper] = MappingProxyType(
    {
        "000": Paper(
            "shan2021rapid",
            (("Shan", "Haozhe"), ("Bordelon", "Blake")),
            "Rapid Feature Evolution Accelerates Learning in Neural Networks",
            2021,
            arxiv="2105.14301v1",
            note="First version of arXiv:2105.14301",
        ),
        "001": Paper(
            "shan2021theory",
            (("Shan", "Haozhe"), ("Bordelon", "Blake")),
            "A Theory of Neural Tangent Kernel Alignment and Its Influence on Training",
            2021,
            arxiv="2105.14301",
        ),
        "002": Paper(
            "atanasov2022neural",
            (("Atanasov", "Alexander"), ("Bordelon", "Blake"), ("Pehlevan", "Cengiz")),
            "Neural Networks as Kernel Learners: The Silent Alignment Effect",
            2022,
            proceedings="International Conference on Learning Representations",
            arxiv="2111.00034",
        ),
        "003": Paper(
            "beaglehole2024feature",
            (("Beaglehole", "Daniel"), ("Mitliagkas", "Ioannis"), ("Agarwala", "Atish")),
            "Feature learning as alignment: a structural property of gradient descent in non-linear neural networks",
            2024,
            arxiv="2402.05271",
        ),
        "004": Paper(
            "xu2024three",
            (("Xu", "Yizhou"), ("Ziyin", "Liu")),
            "Three Mechanisms of Feature Learning in the Exact Solution of a Latent Variable Model",
            2024,
            arxiv="2401.07085",
        ),
        "jacot2018": Paper(
            "jacot2018neural",
            (("Jacot", "Arthur"), ("Gabriel", "Franck"), ("Hongler", "Clément")),
            "Neural Tangent Kernel: Convergence and Generalization in Neural Networks",
            2018,
            proceedings="Advances in Neural Information Processing Systems",
            volume="31",
        ),
        "lee2019": Paper(
            "lee2019wide",
            (
                ("Lee", "Jaehoon"),
                ("Xiao", "Lechao"),
                ("Schoenholz", "Samuel"),
                ("Bahri", "Yasaman"),
                ("Novak", "Roman"),
                ("Sohl-Dickstein", "Jascha"),
                ("Pennington", "Jeffrey"),
            ),
            "Wide Neural Networks of Any Depth Evolve as Linear Models Under Gradient Descent",
            2019,
            proceedings="Advances in Neural Information Processing Systems",
            volume="32",
            pages="8572-8583",
        ),
        "cortes2012": Paper(
            "cortes2012algorithms",
            (("Cortes", "Corinna"), ("Mohri", "Mehryar"), ("Rostamizadeh", "Afshin")),
            "Algorithms for Learning Kernels Based on Centered Alignment",
            2012,
            journal="Journal of Machine Learning Research",
            volume="13",
            pages="795-828",
        ),
        "radhakrishnan2024": Paper(
            "radhakrishnan2024mechanism",
            (
                ("Radhakrishnan", "Adityanarayanan"),
                ("Beaglehole", "Daniel"),
                ("Pandit", "Parthe"),
                ("Belkin", "Mikhail"),
            ),
            "Mechanism for feature learning in neural networks and backpropagation-free machine learning models",
            2024,
            journal="Science",
            volume="383",
            pages="1461-1467",
        ),
    }
)
"""The five papers that featlearn brings together, 000 to 004, and the sources of its definitions.

Prose cites by author and year: 000 is Shan & Bordelon 2021a, the first version of arXiv:2105.14301, and 001 is Shan &
Bordelon 2021b, the later version; 002 is Atanasov et al. 2022, 003 Beaglehole et al. 2024, 004 Xu & Ziyin 2024.
"""

FIVE = ("000", "001", "002", "003", "004")

SOURCES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "ntk": ("jacot2018",),
        "ntk_velocity": ("000",),
        "feature_speed": ("002",),
        "representation_kernels": ("002",),
        "layer_alignment": ("004",),
        "layer_balance": ("002", "004"),
        "neural_features": ("003", "radhakrishnan2024"),
        "ptk": ("003",),
        "egop": ("003",),
        "corrupted_agop": ("003",),
        "SLO": ("003", "004"),
        "AdaptiveSLO": ("003",),
        "metrics": ("000", "001"),
        "metrics.centered_alignment": ("cortes2012", "002"),
        "metrics.correlation": ("003",),
        "metrics.agreement": ("002",),
        "dynamics": ("000", "002"),
        "dynamics.kernel_descent": ("000",),
        "dynamics.evolving_kernel_descent": ("002",),
        "dynamics.kernel_regression": ("002",),
        "dynamics.linearize": ("lee2019",),
        "dynamics.rate": (),
        "steer": ("003",),
        "data.alignment_reversing": ("003",),
        "data.gaussian_mixture": ("001",),
        "data.line": ("004",),
        "data.linear_teacher": ("000", "001", "002"),
        "data.quadratic_form": ("003",),
        "data.random_labels": ("001",),
        "data.two_gaussians": ("004",),
        "data.chain_monomial": ("003",),
        "data.power_law_gaussian": ("003",),
        "theory": FIVE,
        "theory.ofe": ("000", "001"),
        "theory.deep_linear": ("001", "002"),
        "theory.deep_linear.two_layer_final_kernel": ("000",),
        "theory.relu": ("001",),
        "theory.transfer": ("002",),
        "theory.latent": ("004",),
        "theory.phases": ("004",),
        "theory.early": ("003",),
        "theory.infinite_width": ("jacot2018", "lee2019"),
    }
)
"""Public name -> papers; a name that is not here has those of the longest beginning that is, or none."""

BESIDE: Mapping[str, str] = MappingProxyType({"layer_features": "neural_features"})
"""Files of results -> the public function that returns them, where it does not have the name of the file."""


def citation(name: Any = None, *, style: Style = "bibtex") -> str:
    """What to cite for a result, as BibTeX entries or as lines of text.

    Args:
        name: a public name ("theory.ofe.solve", "metrics.alignment", "SLO"), a paper ("000" to "004"), or the thing
            itself: a function, a class, a module of featlearn, or a result that one of them returned. By default
            featlearn and its five papers. For a name without a paper, featlearn itself.
        style: "bibtex" or "text".
    """
    if style not in ("bibtex", "text"):
        raise InputValueError(f"style={style!r}, expected 'bibtex' or 'text'")
    if name is None:
        entries: list[Paper | _Library] = [_library(), *(PAPERS[paper] for paper in FIVE)]
    else:
        entries = [PAPERS[paper] for paper in papers(name)]
        entries = entries or [_library()]
    return ("\n\n" if style == "bibtex" else "\n").join(_written(entry, style) for entry in entries)


def papers(name: Any) -> tuple[str, ...]:
    """Keys of `PAPERS` behind a name or an object, as `citation` takes them; empty where there is no paper."""
    if not isinstance(name, str) or isinstance(name, Enum):
        return _papers_of_object(name)
    plain = name.strip().removeprefix("featlearn.").removeprefix("fl.")
    if plain in PAPERS:
        return (plain,)
    if plain in SOURCES:
        return SOURCES[plain]
    thing = _resolved(plain)
    if thing is None:
        raise InputValueError(f"{name!r} is no public name of featlearn and no paper{_suggestion(plain)}")
    own = isfunction(thing) or isclass(thing)
    return _papers_of_object(thing) if own and thing.__module__.startswith(f"{__package__}.") else _longest(plain)


def _longest(name: str) -> tuple[str, ...]:
    """The papers of the longest beginning of a dotted name that is in the table."""
    parts = name.split(".")
    beginnings = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((SOURCES[beginning] for beginning in beginnings if beginning in SOURCES), ())


def _papers_of_object(thing: Any) -> tuple[str, ...]:
    kind = thing if isinstance(thing, ModuleType) or hasattr(thing, "__qualname__") else type(thing)
    path = str(kind.__name__ if isinstance(kind, ModuleType) else kind.__module__).split(".")
    if path[0] != __package__:
        raise InputTypeError(
            f"got {type(thing).__name__} from {path[0]}, expected a name, or a function, class, module or result of "
            "featlearn"
        )
    inside = path[1:]
    if isinstance(kind, ModuleType):
        return _longest(".".join(inside))
    own = kind.__qualname__.split(".")[0]
    # public under its package, whatever file it lives in, or at the top
    public = [".".join([*inside[:depth], own]) for depth in range(len(inside), 0, -1)]
    public += [own] if getattr(_package(), own, None) is kind else []
    # what the functions at the top return lives beside them
    public += [BESIDE.get(inside[-1], inside[-1])] if inside[:1] == ["quantities"] else []
    return next((SOURCES[place] for place in public if place in SOURCES), _longest(".".join(inside)))


def _resolved(name: str) -> Any:
    """What a dotted name leads to from the package, or None."""
    place: Any = _package()
    for part in name.split("."):
        if not part.isidentifier() or part.startswith("_"):
            return None
        place = getattr(place, part, None)
    return place


def _suggestion(name: str) -> str:
    known = {other.lower(): other for other in [*_public_names(), *PAPERS]}
    ending = [other for other in known if other.endswith(f".{name.lower()}")]
    close = ending or get_close_matches(name.lower(), known, n=1)
    if close:
        return f"; did you mean {known[close[0]]!r}?"
    return f", expected a name such as 'theory.ofe' or one of {', '.join(FIVE)}"


def _public_names() -> Iterator[str]:
    """Every dotted name that the package lists, down to the functions of its modules."""

    def below(module: ModuleType, prefix: str) -> Iterator[str]:
        for name in getattr(module, "__all__", ()):
            yield f"{prefix}{name}"
            inner = getattr(module, name, None)
            if isinstance(inner, ModuleType):
                yield from below(inner, f"{prefix}{name}.")

    package = _package()
    for name in dir(package):
        if not name.startswith("_"):
            yield name
            thing = getattr(package, name)
            if isinstance(thing, ModuleType):
                yield from below(thing, f"{name}.")


def _package() -> ModuleType:
    return sys.modules.get(str(__package__)) or import_module(str(__package__))


class _Library(NamedTuple):
    """featlearn itself."""

    version: str

    def bibtex(self) -> str:
        return (
            "@software{featlearn,\n  title = {{featlearn: tangent kernels, kernel-task alignment and feature learning "
            f"in PyTorch models}}}},\n  author = {{{{The featlearn authors}}}},\n  version = {{{self.version}}},\n}}"
        )

    def text(self) -> str:
        return (
            "The featlearn authors. featlearn: tangent kernels, kernel-task alignment and feature learning in PyTorch "
            f"models. Version {self.version}."
        )


def _library() -> _Library:
    return _Library(_package().__version__)


def _written(entry: Paper | _Library, style: Style) -> str:
    return entry.bibtex() if style == "bibtex" else entry.text()
