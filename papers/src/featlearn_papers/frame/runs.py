"""The numbers of the seeds, on disk and in memory.

A seed is one .npz, written beside its place and moved there: it is whole or not there, whenever a process is killed.
Its folder is named by a hash of all that the numbers depend on.
"""

import dataclasses
import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy

from featlearn.errors import InputTypeError, InputValueError
from featlearn_papers.frame.seed_source import source_text

Numbers = Any
"""A number, a nested sequence of them, an array or a tensor."""
Array = numpy.ndarray[Any, Any]

SECONDS = "_seconds"
"""Wall time of a seed, kept with its numbers."""
VERSIONS = "_versions"
"""Of what made them, as JSON: seeds are judged again long after, with other versions, and on other machines."""


class Runs:
    """Named arrays of several seeds; ``runs["loss"]`` has the seeds first."""

    def __init__(self, seeds: Sequence[int], values: Sequence[Mapping[str, Array]]) -> None:
        self.seeds = list(seeds)
        self._values = list(values)

    def __len__(self) -> int:
        return len(self.seeds)

    def __contains__(self, name: object) -> bool:
        return all(name in one for one in self._values)

    def __getitem__(self, name: str) -> Array:
        """(S, ...): stacked over seeds; `each` where shapes differ."""
        arrays = self.each(name)
        if len({array.shape for array in arrays}) != 1:
            raise InputValueError(
                f"{name!r} has shapes {sorted({array.shape for array in arrays})} over seeds, expected one; use each()"
            )
        return numpy.stack(arrays)

    def each(self, name: str) -> list[Array]:
        """One array for each seed."""
        if name not in self:
            names = sorted(set().union(*self._values) - {SECONDS, VERSIONS})
            raise InputValueError(f"no run has {name!r}, expected one of {', '.join(names)}")
        return [one[name] for one in self._values]

    @property
    def seconds(self) -> list[float]:
        """Wall time of each seed."""
        return [float(one.get(SECONDS, numpy.nan)) for one in self._values]

    @property
    def versions(self) -> dict[str, str]:
        """Of what made the numbers; several, divided by commas, where seeds have different ones."""
        each = [json.loads(str(one[VERSIONS])) for one in self._values if VERSIONS in one]
        names = dict.fromkeys(name for one in each for name in one)
        return {name: ", ".join(dict.fromkeys(one[name] for one in each if name in one)) for name in names}


def key(id: str, setup: Any, measure: Callable[..., Any], **surroundings: object) -> str:
    """SETTINGS-CODE: what the numbers of a seed depend on.

    A hash of experiment, set-up and surroundings, and one of the source behind `measure`.
    """
    if not dataclasses.is_dataclass(setup) or isinstance(setup, type):
        raise InputTypeError(f"the set-up of {id} is {type(setup).__name__}, expected a frozen dataclass")
    for name, value in dataclasses.asdict(setup).items():
        try:
            json.dumps(value, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InputTypeError(
                f"{name} in the set-up of {id} is {value!r}, expected finite numbers, words, and tuples or dataclasses "
                f"of them, as JSON can hold: {error}"
            ) from error
    settings = {"id": id, "setup": dataclasses.asdict(setup), **surroundings}
    return f"{_hash(json.dumps(settings, sort_keys=True))}-{_hash(source_text(measure))}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def save(path: Path, numbers: Mapping[str, Any], seconds: float, versions: Mapping[str, str] | None = None) -> None:
    """Write a finished seed, with what it took and what made it."""
    if not isinstance(numbers, Mapping):
        raise InputTypeError(f"measure returned {type(numbers).__name__}, expected a dictionary of named numbers")
    arrays = {name: as_array(value, name) for name, value in numbers.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays[SECONDS], arrays[VERSIONS] = numpy.asarray(seconds), numpy.asarray(json.dumps(dict(versions or {})))
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("wb") as file:
        numpy.savez_compressed(file, **arrays)  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def saved(path: Path) -> dict[str, Array] | None:
    """A finished seed; None where it is not there or damaged."""
    try:
        # numpy leaves a file that it opened and could not read to the collector
        with path.open("rb") as file, numpy.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, zipfile.BadZipFile, EOFError):
        return None


def as_array(value: Any, name: str) -> Array:
    """A number, nested sequence, array or tensor as an array of numbers."""
    detach = getattr(value, "detach", None)
    try:
        array = numpy.asarray(detach().cpu() if detach is not None else value)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputTypeError(
            f"{name!r} cannot be made an array, expected a number, nested lists whose rows are equally long, an array "
            f"or a tensor: {error}"
        ) from error
    if name.startswith("_") or array.dtype.kind not in "biuf":
        raise InputValueError(
            f"{name!r} is {array.dtype}, expected numbers, under a name that does not begin with an underscore"
        )
    return array
