"""The exceptions raised by featlearn, and its warnings.

Every exception derives from :class:`FeatlearnError` and is also a ``ValueError`` or a ``TypeError``; every warning is a
``UserWarning``.
"""

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = [
    "ChangedOutputsError",
    "CheckpointError",
    "CoupledSamplesError",
    "HeavyTailWarning",
    "InputTypeError",
    "InputValueError",
    "MemoryBudgetError",
    "NotFiniteError",
    "RankError",
    "RunError",
    "UnsupportedModelError",
    "VerificationError",
    "WorkerKilledError",
    "WorkerStartError",
]


class FeatlearnError(Exception):
    """Base of every exception raised on purpose by featlearn."""


class InputValueError(FeatlearnError, ValueError):
    """An argument has the right type and a value that cannot be used."""


class InputTypeError(FeatlearnError, TypeError):
    """An argument has a type that cannot be used."""


class ChangedOutputsError(InputValueError):
    """Outputs have another number, dtype, or device than those of other samples."""


class CheckpointError(InputValueError):
    """A checkpoint cannot be read, or does not fit the model."""


class CoupledSamplesError(InputValueError):
    """The output of one sample depends on the other samples of the batch."""


class MemoryBudgetError(InputValueError):
    """The computation does not fit into the memory budget."""


class NotFiniteError(InputValueError):
    """Outputs or kernels of a network are nan or infinite."""


class RankError(FeatlearnError, ValueError):
    """Another rank of the process group failed, so that no rank has a result."""


class RunError(InputValueError):
    """A recorded run cannot be written or read."""


class UnsupportedModelError(InputValueError):
    """The model does something that cannot be measured exactly."""


class VerificationError(FeatlearnError, ValueError):
    """A result disagrees with its independent check."""


class WorkerKilledError(FeatlearnError, ValueError):
    """The process that ran a job was killed at every attempt."""


class WorkerStartError(FeatlearnError, ValueError):
    """Worker processes cannot be started."""


class HeavyTailWarning(UserWarning):
    """Too few draws dominate the error of an estimate, so the stated error is unreliable."""


def did_you_mean(word: object, candidates: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the closest known name, or an empty string."""
    names = {name.lower(): name for name in candidates}
    close = get_close_matches(str(word).lower(), names, n=1)
    return f"; did you mean {names[close[0]]!r}?" if close else ""
