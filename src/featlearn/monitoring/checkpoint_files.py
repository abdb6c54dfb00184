"""Finding checkpoints: a folder of them, or a list of (step, path); steps are read from names."""

import hashlib
import itertools
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from featlearn.errors import CheckpointError, InputTypeError, InputValueError
from featlearn.monitoring.probe_data import tensors_digest
from featlearn.record.layout import checked_step

PICKLED = (".pt", ".pth", ".bin", ".ckpt")
SAFE = ".safetensors"
INDEX = ".index.json"
WEIGHTS = tuple(f"{name}{end}" for name in ("model.safetensors", "pytorch_model.bin") for end in ("", INDEX))
"""Files of a Hugging Face checkpoint, the first that is there counts; an index names the files of a divided one."""

_COMPANION = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state.*)\.(bin|pt|pth)|.+-\d{5}-of-\d{5}\..+")
# 100 in step100, but no part of 100k, 1e3 or 1.5
_INTEGER = r"([0-9]+)(?![0-9]|\.[0-9]|[A-Za-z])"
_STEP = re.compile(rf"(?:step|checkpoint|ckpt|iter|iteration)s?[-_=. ]?{_INTEGER}", re.IGNORECASE)
_LIST_FORM = 'pass a list of (step, path) instead: [(0, "first.pt"), (100, "later.pt")]'


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The weights at one step of training."""

    step: int
    source: Any
    """A path, or a state dict; with `load=`, whatever that function takes."""

    @property
    def path(self) -> Path | None:
        """Where it lies; None if it is not on disk."""
        if not isinstance(self.source, str | os.PathLike):
            return None
        found = Path(self.source)
        return found if found.exists() else None

    @property
    def name(self) -> str:
        """The name of its file or folder."""
        if isinstance(self.source, Mapping):
            return "a state dict"
        return Path(self.source).name if isinstance(self.source, str | os.PathLike) else str(self.source)[:80]

    def __str__(self) -> str:
        source = os.fspath(self.source) if isinstance(self.source, str | os.PathLike) else self.name
        return f"the checkpoint of step {self.step} ({source})"

    @property
    def mark(self) -> str | None:
        """A digest that changes when the checkpoint is written anew: of sizes and times of files, or of the tensors."""
        digest = hashlib.sha256()
        if isinstance(self.source, Mapping):
            tensors = tuple(value for value in self.source.values() if isinstance(value, Tensor))
            return hashlib.sha256(f"{list(self.source)} {tensors_digest(tensors)}".encode()).hexdigest()
        path = self.path
        if path is None:
            return None
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        own = [file for file in files if file.name.startswith(("model", "pytorch_model"))]  # not those of an optimizer
        for status in (file.stat() for file in own or files):
            digest.update(f"{status.st_size} {status.st_mtime_ns};".encode())
        return digest.hexdigest()


def listed_checkpoints(given: Any, *, own_format: bool) -> list[Checkpoint]:
    """The checkpoints in the order of their steps; the first must be of step 0, with which the others are compared."""
    if isinstance(given, str | os.PathLike):
        found = _in_folder(Path(given), own_format)
    elif isinstance(given, Sequence):
        found = [_pair(one, own_format) for one in given]
    else:
        raise InputTypeError(
            f"checkpoints is {type(given).__name__}, expected a folder, or a list of (step, path): "
            '[(0, "first.pt"), (100, "later.pt")]'
        )
    found.sort(key=lambda one: one.step)
    for one, other in itertools.pairwise(found):
        if one.step == other.step:
            raise InputValueError(
                f"{one.name} and {other.name} are both of step {one.step}, expected one checkpoint a step; {_LIST_FORM}"
            )
    if not found or found[0].step != 0:
        what = f"the first checkpoint is of step {found[0].step}" if found else "there is no checkpoint"
        raise InputValueError(
            f"{what}, expected one of step 0: the state before training, with which all others are compared. Save it "
            "as step0.pt beside the others, or put it at the head of a list, as a path or a state dict: [(0, initial), "
            '(100, "step100.pt")]. To compare with a later state, number the steps from it'
        )
    return found


def _pair(given: Any, own_format: bool) -> Checkpoint:
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise InputTypeError(f"checkpoints has {str(given)[:80]!r}, expected pairs (step, path)")
    step, source = checked_step(given[0]), given[1]
    if not own_format and not isinstance(source, str | os.PathLike | Mapping):
        raise InputTypeError(
            f"the checkpoint of step {step} is {type(source).__name__}, expected a path or a state dict; pass load= "
            "for another kind"
        )
    found = Checkpoint(step, source)
    if not own_format and not isinstance(source, Mapping) and found.path is None:
        raise CheckpointError(f"{found} is not there, expected a file, or a folder with one of {', '.join(WEIGHTS)}")
    return found


def _in_folder(folder: Path, own_format: bool) -> list[Checkpoint]:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder, expected one with checkpoints in it; for one, {_LIST_FORM}")
    try:
        entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
        paths = list(_numbered(entries) if own_format else _with_weights(entries))
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    inside = any(path.is_dir() for path in paths)
    final = [path.name for path in paths if path.name in WEIGHTS and path.is_file()]
    if inside and final and not own_format:  # what a trainer saves at its end, beside the folders of its checkpoints
        print(f"featlearn: left out of {folder}, having no step: {', '.join(final)}", file=sys.stderr)
        paths = [path for path in paths if path.name not in final]
    if not paths:
        raise CheckpointError(
            f"{folder} holds no checkpoints, expected files {', '.join(f'*{end}' for end in (*PICKLED, SAFE))}, or "
            f"folders with one of {', '.join(WEIGHTS)}; for another format pass load="
        )
    return [Checkpoint(step_in(path), path) for path in paths]


def _numbered(entries: Sequence[Path]) -> Iterator[Path]:
    """Entries with a number in their names: of a format that only its reader knows."""
    return (entry for entry in entries if re.search(r"[0-9]", entry.name))


def _with_weights(entries: Sequence[Path]) -> Iterator[Path]:
    for entry in entries:
        if entry.is_dir():
            if weights_in(entry) is not None:
                yield entry
            elif _STEP.search(entry.name):
                raise CheckpointError(
                    f"{entry} is named as a checkpoint and holds none of {', '.join(WEIGHTS)}, expected one of them; "
                    f"move it away, or {_LIST_FORM}"
                )
        elif entry.name in WEIGHTS or (_suffix(entry) and not _COMPANION.fullmatch(entry.name)):
            yield entry


def weights_in(folder: Path) -> Path | None:
    """The file of a checkpoint folder that holds its weights, or names those that do; None if there is none."""
    return next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)


def step_in(path: Path) -> int:
    """The step in the name of a file or folder: the number after step, checkpoint or iter, or the only one."""
    name = path.name.removesuffix(_suffix(path)) if path.is_file() else path.name
    every = {int(number) for number in re.findall("[0-9]+", name)}
    marked = {int(number) for number in _STEP.findall(name)}
    plain = {int(number) for number in re.findall(_INTEGER, name)}
    found = marked if marked else plain if plain == every else every
    if len(found) == 1 and found <= plain:
        return checked_step(found.pop())
    what = (
        f"the numbers {', '.join(map(str, sorted(every)))}"
        if len(every) > 1
        else "no number"
        if not every
        else ("no plain number")
    )
    raise CheckpointError(f"{path} has {what} in its name, expected one, the step (step100); {_LIST_FORM}")


def _suffix(path: Path) -> str:
    return next((end for end in (*PICKLED, SAFE) if path.name.endswith(end)), "")
