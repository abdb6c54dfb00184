"""What a run gets besides its set-up: seed, device, data and a folder of its own."""

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from featlearn.data import Labeled

DIGITS = "digits"
STOOD_IN = "digits-stood-in-for.txt"
"""left in the folder of a seed, for the result to say so"""


@dataclass(frozen=True, kw_only=True)
class Context:
    """The surroundings of one seed."""

    seed: int
    folder: Path
    """Its own; what is written here is still there when a killed run starts again: fl.watch(out=..., resume=True)."""
    device: str = "cpu"
    data_root: Path | None = None
    """Where data files are; None for FEATLEARN_DATA."""
    fallback_digits: bool = False
    """Whether digits may stand in for a data set whose files are missing; only where a person asked for it."""
    quiet: bool = True
    started: float = field(default_factory=time.monotonic)
    _said: list[int] = field(default_factory=list, init=False)

    def generator(self, stream: int = 0) -> "torch.Generator":
        """A generator (CPU) of this seed; other streams are independent of each other."""
        import torch

        return torch.Generator().manual_seed(1_000_003 * self.seed + stream)

    def dataset(self, name: str, *, split: str = "train", **options: Any) -> "Labeled":
        """fl.data.<name>(root=..., split=..., **options); "digits" need no files and take the same options.

        Raises what the reader raises where files are missing, which says where to put them.
        """
        from featlearn.errors import InputValueError
        from featlearn_papers.data import image_reader

        if name == DIGITS:
            return _digits(split, options)
        try:
            return image_reader(name)(root=self.data_root, split=split, **options)
        except InputValueError as error:
            if not self.fallback_digits:
                raise
            print(f"digits stand in for {name}: {error}", file=sys.stderr)
            with (self.folder / STOOD_IN).open("a") as file:
                file.write(f"{name}\n")
            return _stand_in(name, split, options)

    def progress(self, step: int, of: int, **values: float) -> None:
        """One line on stderr, whenever the step has doubled since the last, and at the end."""
        if self.quiet or (self._said and step < 2 * self._said[-1] and step != of):
            return
        self._said.append(max(step, 1))
        self.say(" ".join([f"step={step}/{of}", *(f"{name}={float(value):.4g}" for name, value in values.items())]))

    def say(self, words: str) -> None:
        """One line on stderr."""
        if not self.quiet:
            print(f"seed={self.seed} t={time.monotonic() - self.started:.0f}s {words}", file=sys.stderr, flush=True)


def _stand_in(name: str, split: Any, options: dict[str, Any]) -> "Labeled":
    from featlearn.errors import InputValueError

    try:
        return _digits(split, options)
    except InputValueError as error:
        raise InputValueError(
            f"digits cannot stand in for {name} at this scale: {error}; --scale smoke takes as many as there are"
        ) from error


def _digits(split: Any, options: dict[str, Any]) -> "Labeled":
    """The digits with the options of the image sets; those of one set alone mean nothing here."""
    from featlearn import data
    from featlearn.data.selection import Selection

    known = {name: value for name, value in options.items() if name in Selection.__dataclass_fields__}
    selection = Selection.from_options(known)
    whole = data.digits(split)
    rows, labels, classes = selection.rows(whole.labels.numpy(), whole.classes, f"digits {split}")
    x = whole.x[rows]
    return data.Labeled(x if selection.flatten else x.view(-1, 1, 8, 8), labels, classes, DIGITS)
