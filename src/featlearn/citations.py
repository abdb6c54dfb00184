"""Papers to cite for a result."""

import re
from collections.abc import Iterator
from difflib import get_close_matches
from enum import Enum
from functools import cache
from importlib import import_module
from importlib.resources import files
from inspect import isclass, isfunction
from types import ModuleType
from typing import Any, Literal

from featlearn.citation_index import Index, Place, places
from featlearn.errors import InputTypeError, InputValueError
from featlearn.signatures import name_keywords

Style = Literal["bibtex", "text"]

FIVE = ("000", "001", "002", "003", "004")
"""The five papers that featlearn brings together. Prose cites by author and year.

000 is Shan & Bordelon 2021a, the first version of arXiv:2105.14301; 001 is Shan & Bordelon 2021b, the later version.
002 is Atanasov et al. 2022, 003 Beaglehole et al. 2024, 004 Xu & Ziyin 2024.
"""


@name_keywords()
def citation(name: Any = None, *, style: Style = "bibtex") -> str:
    """Return what to cite for a result, or which function computes an equation of the five papers.

    >>> print(fl.citation("theory.ofe.solve"))  # BibTeX entries
    >>> print(fl.citation("002 Eq. 91"))  # fl.ntk: ...

    Args:
        name: a public name ("theory.ofe.solve", "metrics.alignment", "SLO"), a paper ("000" to "004"), a place in one
            of them ("002 Eq. 91", "004 Theorem 1", "Atanasov et al. 2022, App. G"), or an object: a function, a class,
            a module of featlearn, or a result that one of them returned. By default featlearn and its five papers. For
            a name without a paper, featlearn itself.
        style: "bibtex" or "text", for entries.

    Returns:
        Entries; for a place, one line per function: its name, and what it computes.
    """
    if style not in ("bibtex", "text"):
        raise InputValueError(f"style={style!r}, expected 'bibtex' or 'text'")
    if isinstance(name, str) and not isinstance(name, Enum) and (asked := list(places(name.title()))):
        return "\n".join(f"fl.{found}: {equations().summary(found)}" for found in functions(*asked))
    keys = ("featlearn", *FIVE) if name is None else papers(name) or ("featlearn",)
    entries = [bibliography()[key] for key in keys]
    return "\n\n".join(entries) if style == "bibtex" else "\n".join(map(_reference, entries))


@cache
def equations() -> Index:
    """Index of the places in the five papers that public functions compute, read from their docstrings."""
    return Index((name, _resolve(name)) for name in _public_names())


def functions(*asked: Place) -> list[str]:
    """Return the public names that compute places of the papers."""
    table = equations().functions
    missing = [place for place in asked if place not in table]
    if missing:
        paper, kind, label = missing[0]
        known = [place.label for place in table if place[:2] == (paper, kind)]
        if label.isdigit():
            known = sorted(filter(str.isdigit, known), key=lambda other: abs(int(other) - int(label)))[:3]
        raise InputValueError(
            f"no function of featlearn computes {missing[0]}, expected a place such as {kind} {', '.join(known)}; the "
            "page 'Equations of the papers' lists all that have a function"
        )
    return list(dict.fromkeys(name for place in asked for name in table[place]))


@cache
def bibliography() -> dict[str, str]:
    """BibTeX entries by short name, in the order of `citations.bib`."""
    return {key: entry.replace("VERSION", _package().__version__) for key, _, entry in _read()}


@cache
def sources() -> dict[str, tuple[str, ...]]:
    """Short names of papers by the public names that rest on them. Other names inherit from their longest prefix."""
    keys: dict[str, tuple[str, ...]] = {}
    for key, names, _ in _read():
        keys |= {name: (*keys.get(name, ()), key) for name in names.split()}
    return keys


def _read() -> list[tuple[str, str, str]]:
    """(short name, public names, BibTeX entry) of each publication."""
    text = (files(__package__) / "citations.bib").read_text(encoding="ascii")
    return re.findall(r"^(\w+):([^@]*)(@.*?^\})$", text, re.MULTILINE | re.DOTALL)


def papers(name: Any) -> tuple[str, ...]:
    """Return the short names of the papers behind a name or an object; empty if there is none."""
    if not isinstance(name, str) or isinstance(name, Enum):
        return _papers_of_object(name)
    plain = name.strip().removeprefix("featlearn.").removeprefix("fl.")
    if plain in bibliography():
        return (plain,)
    target = _resolve(plain)
    if target is None:
        raise InputValueError(f"{name!r} is no public name of featlearn and no paper{_suggestion(plain)}")
    defined_here = (isfunction(target) or isclass(target)) and target.__module__.startswith(f"{__package__}.")
    return _papers_of_object(target) if defined_here else _first_listed(_prefixes(plain))


def _papers_of_object(target: Any) -> tuple[str, ...]:
    definition = target if isinstance(target, ModuleType) or hasattr(target, "__qualname__") else type(target)
    is_module = isinstance(definition, ModuleType)
    path = definition.__name__ if is_module else str(definition.__module__)
    root, _, module = path.partition(".")
    if root != __package__:
        raise InputTypeError(
            f"got {type(target).__name__} from {root}, expected a name, or a function, class, module or result of "
            "featlearn"
        )
    if is_module:
        return _first_listed(_prefixes(module))
    name = definition.__qualname__.split(".")[0]
    public = [f"{package}.{name}" for package in _prefixes(module)]
    if getattr(_package(), name, None) is definition:
        public.append(name)
    if module.startswith("quantities."):  # results of the functions at the top level
        public.append(module.rpartition(".")[2])
    return _first_listed([*public, *_prefixes(module)])


def _first_listed(names: list[str]) -> tuple[str, ...]:
    return next((sources()[name] for name in names if name in sources()), ())


def _prefixes(name: str) -> list[str]:
    """The dotted prefixes of a name, longest first."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def _reference(entry: str) -> str:
    """Format a BibTeX entry as one line of a list of references."""
    plain = entry.replace(r"{\'e}", "é").replace("--", "-")
    fields = dict(re.findall(r"^  (\w+) = \{+(.*?)\}+,$", plain, re.MULTILINE))
    authors = ", ".join(map(_initials, fields["author"].split(" and ")))
    venue = f"{fields.get('booktitle') or fields.get('journal', '')} {fields.get('volume', '')}".strip()
    prefixes = {"pages": "", "eprint": "arXiv:", "version": "Version ", "year": ""}
    details = [venue, *(prefix + fields[key] for key, prefix in prefixes.items() if key in fields)]
    note = f" {fields['note']}." if "note" in fields else ""
    return f"{authors}. {fields['title']}. {', '.join(filter(None, details))}.{note}"


def _initials(author: str) -> str:
    """Turn "Family, Given Names" into "G. N. Family"."""
    family, _, given = author.partition(", ")
    return " ".join([*(f"{name[0]}." for name in given.split()), family])


def _resolve(name: str) -> Any:
    """Return the object behind a dotted public name, or None."""
    target: Any = _package()
    for part in name.split("."):
        if not part.isidentifier() or part.startswith("_"):
            return None
        target = getattr(target, part, None)
    return target


def _suggestion(name: str) -> str:
    names = {other.lower(): other for other in [*_public_names(), *bibliography()]}
    same_ending = [other for other in names if other.endswith(f".{name.lower()}")]
    close = same_ending or get_close_matches(name.lower(), names, n=1)
    if close:
        return f"; did you mean {names[close[0]]!r}?"
    return f", expected a name such as 'theory.ofe' or one of {', '.join(FIVE)}"


def _public_names() -> Iterator[str]:
    """Yield all dotted public names, down to the functions of modules."""
    package = _package()
    yield from _names_below(package, [name for name in dir(package) if not name.startswith("_")], "")


def _names_below(module: ModuleType, names: list[str], prefix: str) -> Iterator[str]:
    for name in names:
        yield prefix + name
        member = getattr(module, name, None)
        if isinstance(member, ModuleType):
            yield from _names_below(member, list(getattr(member, "__all__", ())), f"{prefix}{name}.")


def _package() -> ModuleType:
    return import_module(str(__package__))
