"""`featlearn cite`: the papers behind a result."""

from typing import Literal

from featlearn.cli.answer import Answer, UsageError
from featlearn.errors import InputValueError


def cite(*names: str, style: Literal["bibtex", "text"] = "bibtex", json: bool = False, debug: bool = False) -> Answer:
    """Print what to cite for a result, or which function computes an equation.

    For example:

        featlearn cite
        featlearn cite theory.ofe.solve SLO
        featlearn cite 002 --style text
        featlearn cite "002 Eq. 91" "004 Theorem 1"

    Args:
        names: Public names of featlearn, papers, 000 to 004, or places in them; by default featlearn and the five
            papers.
        style: BibTeX entries, or lines of text.
        json: Print one JSON document instead.
        debug: Show where an error comes from.
    """
    from featlearn.citations import citation

    try:
        entries = {name: citation(name, style=style) for name in names} or {"featlearn": citation(style=style)}
    except InputValueError as error:  # a name that does not exist
        raise UsageError(str(error)) from error
    separator = "\n\n" if style == "bibtex" else "\n"
    text = separator.join(dict.fromkeys(line for entry in entries.values() for line in entry.split(separator)))
    return Answer(data={"style": style, "citations": entries}, text=text)
