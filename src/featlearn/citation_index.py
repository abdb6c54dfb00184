"""Equations of the five papers -> the public functions that compute them, read from docstrings.

Docstrings cite by author and year, then by place: "Atanasov et al. 2022, Eq. 60", "Eq. 50, 51", "Eq. 45 to 47". A
place without an author belongs to the paper that the docstring named last, and else to the paper of its module.
"""

import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from types import ModuleType
from typing import NamedTuple

AUTHORS: Mapping[str, str] = {
    "000": "Shan & Bordelon 2021a",
    "001": "Shan & Bordelon 2021b",
    "002": "Atanasov et al. 2022",
    "003": "Beaglehole et al. 2024",
    "004": "Xu & Ziyin 2024",
}
_KINDS = {"Equation": "Eq", "Section": "Sec", "Appendix": "App", "Proposition": "Prop", "Corollary": "Cor"}
_KINDS |= {"Figure": "Fig", "Thm": "Theorem", "Corollaries": "Cor", "Eqs": "Eq"}
_KIND = "|".join(["Eq", "Sec", "App", "Prop", "Cor", "Fig", "Table", "Theorem", *_KINDS])
_LABEL = r"(?:[A-Z]\.)?\d+(?:\.\d+)*|[A-Z](?:\.\d+)*\b"
_TOKEN = re.compile(
    rf"(?P<author>(?i:{'|'.join(map(re.escape, AUTHORS.values()))})|\b2021[ab]\b|(?<![\w.,])00[0-4]\b)"
    r"|(?P<other>[A-Z]\w+ (?:et al\.|& [A-Z]\w+)? ?(?:19|20)\d\d[ab]?\b)"
    rf"|\b(?P<kind>{_KIND})\b\.?\s+(?P<labels>(?:{_LABEL})(?:(?:, | to |-| and )(?:{_LABEL})(?![\w%]))*)"
)


class Place(NamedTuple):
    """A numbered place in one of the papers."""

    paper: str
    """code of the paper, "000" to "004" """
    kind: str
    """"Eq", "Sec", "App", "Prop", "Cor", "Fig", "Table" or "Theorem" """
    label: str
    """its number"""

    def __str__(self) -> str:
        dot = "" if self.kind in ("Table", "Theorem") else "."
        return f"{AUTHORS[self.paper]}, {self.kind}{dot} {self.label}"

    @property
    def order(self) -> tuple[str, str, list[tuple[int, str]]]:
        """Sort key: numbers by size."""
        parts = [(int(part), "") if part.isdigit() else (0, part) for part in self.label.split(".")]
        return self.paper, self.kind, parts


def places(text: str, paper: str | None = None) -> Iterator[Place]:
    """Yield the places that a text cites; `paper` is that of places before the first author."""
    codes = {author.lower(): code for code, author in AUTHORS.items()}
    codes |= {"2021a": "000", "2021b": "001"} | {code: code for code in AUTHORS}
    for token in _TOKEN.finditer(" ".join(text.split())):
        if token["author"]:
            paper = codes[token["author"].lower()]
        elif token["other"]:
            paper = None
        elif paper is not None:
            kind = _KINDS.get(token["kind"], token["kind"])
            yield from (Place(paper, kind, label) for label in _labels(token["labels"]))


def _labels(text: str) -> Iterator[str]:
    """Yield "50", "51" of "50, 51", and all from 45 to 47 of "45 to 47"."""
    for part in re.split(r", | and ", text):
        first, _, last = part.replace(" to ", "-").partition("-")
        if first.isdigit() and last.isdigit():
            yield from map(str, range(int(first), int(last) + 1))
        else:
            yield from filter(None, (first.upper(), last.upper()))


class Index:
    """Places of the papers and the public names that compute them."""

    def __init__(self, objects: Iterable[tuple[str, object]]) -> None:
        self._objects = {name: value for pair in objects for name, value in _with_members(*pair)}

    @cached_property
    def functions(self) -> dict[Place, tuple[str, ...]]:
        """Public names by place: those that compute it, by the docstrings that cite it most prominently."""
        ranked: dict[Place, dict[int, list[str]]] = {}
        for name, value in self._objects.items():
            for place, rank in _cited(value):
                names = ranked.setdefault(place, {}).setdefault(rank, [])
                if name not in names:
                    names.append(name)
        return {place: tuple(ranked[place][min(ranked[place])]) for place in sorted(ranked, key=lambda p: p.order)}

    def summary(self, name: str) -> str:
        """Return the first line of the docstring of a public name."""
        return (inspect.getdoc(self._objects[name]) or "").partition("\n")[0]


def _with_members(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield a function, or a class with its public methods and properties."""
    if inspect.isfunction(value) or inspect.isclass(value):
        yield name, value
    if inspect.isclass(value):
        for key, member in vars(value).items():
            function = getattr(member, "fget", getattr(member, "func", member))
            if not key.startswith("_") and inspect.isfunction(function):
                yield f"{name}.{key}", function


def _cited(value: object) -> Iterator[tuple[Place, int]]:
    """Yield cited places with a rank: 0 summary and "See" lines, 1 body, 2 errata, 3 docstring of the module."""
    module = inspect.getmodule(value)
    paper = _only_paper(module)
    body, *errata = re.split(r"\bErrat(?:um|a)\b", inspect.getdoc(value) or "")
    paragraphs = body.split("\n\n")
    for i, text in enumerate(paragraphs):
        rank = 0 if i == 0 or text.startswith("See ") else 1
        yield from ((place, rank) for place in places(text, paper))
    yield from ((place, 2) for text in errata for place in places(text, paper))
    if inspect.isfunction(value) and module is not None:
        yield from ((place, 3) for place in places(module.__doc__ or "", paper))


def _only_paper(module: ModuleType | None) -> str | None:
    """Return the paper of a module, where its docstring, or else that of its package, names one alone."""
    while module is not None and "." in module.__name__:
        text = " ".join((module.__doc__ or "").split())
        papers = [code for code, author in AUTHORS.items() if author in text]
        if papers:
            return papers[0] if len(papers) == 1 else None
        module = sys.modules.get(module.__name__.rpartition(".")[0])
    return None
