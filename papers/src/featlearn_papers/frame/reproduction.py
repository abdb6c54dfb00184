"""What it takes to reproduce a figure: the experiments that it draws from, the picture and the claims."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from featlearn_papers.frame.claims import Claim
from featlearn_papers.frame.experiment import AnyExperiment

ONLY = ""
"""name of the experiment of a figure that draws from one"""


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """One figure or table of a paper; declared in `registry`."""

    id: str
    """As declared: "002/figC2"."""
    about: str
    """What the paper shows, what it leaves open and what was chosen; one paragraph, shown on the page."""
    experiment: AnyExperiment | Mapping[str, AnyExperiment]
    """One, and then `plot` and `claims` get its set-up and its runs; or several under names of the figure's own, and
    then they get two dictionaries by these names."""
    plot: Callable[[Any, Any], Any]
    """The picture as in the paper, ours beside theirs: set-up and runs to a matplotlib Figure."""
    claims: Callable[[Any, Any], Iterable[Claim]]

    @property
    def experiments(self) -> dict[str, AnyExperiment]:
        """By name; one alone is named ''."""
        return dict(self.experiment) if isinstance(self.experiment, Mapping) else {ONLY: self.experiment}

    def given(self, parts: Mapping[str, Any]) -> Any:
        """What `plot` and `claims` get, from one thing for each experiment."""
        return dict(parts) if isinstance(self.experiment, Mapping) else parts[ONLY]
