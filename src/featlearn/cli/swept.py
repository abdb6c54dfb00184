"""What worker processes of `featlearn sweep` call: one diagnosed training, or the user's function."""

import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featlearn.cli.settings import Settings
from featlearn.cli.user_errors import reporting_user_errors

if TYPE_CHECKING:
    from featlearn.record import Run


def diagnosed(subject: str | None, first: int, *, seed: int, out: Path, **options: Any) -> "Run":
    """Train and watch as `featlearn diagnose` does, in the folder `out`.

    All seeds of a point take the learning rate of the `first`, so that they can be averaged.
    """
    from featlearn.cli.progress import ProgressDisplay
    from featlearn.cli.training import learning_rate, train  # torch takes a second to load
    from featlearn.record import open_run

    if options.get("data_root") is not None:
        options["data_root"] = Path(options["data_root"])
    settings = Settings(**options, seed=seed)
    errors = nullcontext() if subject is None else reporting_user_errors(subject)
    with errors, redirect_stdout(sys.stderr):
        if seed != first:
            settings = replace(settings, lr=learning_rate(subject, replace(settings, seed=first)))
        train(subject, settings, out, ProgressDisplay(out.name, settings.steps, quiet=True))
    return open_run(out)


def called(place: str, **arguments: Any) -> Any:
    """Call the user's function at FILE.py:function; what it prints goes to stderr."""
    with redirect_stdout(sys.stderr):
        return _loaded(place)(**arguments)


@lru_cache
def _loaded(place: str) -> Callable[..., Any]:
    from featlearn.cli.user_task import loaded

    return loaded(place)
