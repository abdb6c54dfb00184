"""`featlearn explore`: the theories as a page to play with."""

from pathlib import Path

from featlearn.cli.answer import Answer


def explore(*, out: Path = Path("explore.html"), json: bool = False, debug: bool = False) -> Answer:
    """Write one HTML page with the theories, their sliders, and small networks that train beside them.

    Six questions: how rich is rich, why a network is silent before it learns, how layers align, which part of a ReLU
    kernel turns, when features match gradients, whether a better kernel helps. The page needs no network; open it in a
    browser.

    For example:

        featlearn explore
        featlearn explore --out lecture.html

    Args:
        out: The page; an existing one is replaced.
        json: Print one JSON document instead.
        debug: Show where an error comes from.
    """
    from featlearn.explorer.explorer_page import explore as write

    written = write(out)
    return Answer(data={"page": written}, text=f"page: {written}\nopen {written.resolve().as_uri()}")
