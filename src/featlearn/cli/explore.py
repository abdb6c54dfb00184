"""`featlearn explore`: an interactive page of the theories."""

from pathlib import Path

from featlearn.cli.answer import Answer


def explore(*, out: Path = Path("explore.html"), json: bool = False, debug: bool = False) -> Answer:
    """Write an HTML page with the theories, sliders, and small networks in training.

    It covers six topics: degrees of richness, silent alignment, alignment of layers, rotation of ReLU kernels, features
    and gradients, and better kernels. The page is self-contained; open it in a browser.

    For example:

        featlearn explore
        featlearn explore --out lecture.html

    Args:
        out: Path of the page; an existing file is replaced.
        json: Print one JSON document instead.
        debug: Show where an error comes from.
    """
    from featlearn.explorer.explorer_page import explore as write

    path = write(out)
    return Answer(data={"page": path}, text=f"page: {path}\nopen {path.resolve().as_uri()}")
