"""The settings that every measurement of a model shares."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict, Unpack

import torch

from featlearn.distributed.group import RankGroup
from featlearn.errors import InputValueError
from featlearn.network.inputs import Readout, checked_dtype


class Settings(TypedDict, total=False):
    """Keyword arguments that every function measuring a model accepts."""

    readout: Readout | None
    """Map from the model's output to (P,) or (P, C): `readout(output)` or `readout(output, x)`."""
    parameters: str | Sequence[str] | None
    """Glob or list of globs, such as `"layers.*.weight"`. Only matching parameters count; None for all."""
    dtype: torch.dtype | None
    """`torch.float64` to measure a copy of the model in double precision; None for the model's own precision."""
    memory: str | int | None
    """Byte budget, such as `"2GiB"`; None for half of the free memory."""
    group: object
    """`"world"` or a process group whose ranks divide the samples; None to divide nothing."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Validated settings of a measurement."""

    readout: Readout | None
    parameters: str | Sequence[str] | None
    dtype: torch.dtype | None
    memory: str | int | None
    group: RankGroup
    use_proofs: bool = True
    """Skip the passes that compare samples in parts where the ops prove that samples stay apart. Tests turn it off."""

    @staticmethod
    def of(**settings: Unpack[Settings]) -> "Request":
        """Validate settings, and fill in the defaults."""
        return Request(
            readout=settings.get("readout"),
            parameters=settings.get("parameters"),
            dtype=checked_dtype(settings.get("dtype")),
            memory=settings.get("memory"),
            group=RankGroup(settings.get("group")),
        )

    def refuse(self, call: str, *names: str) -> None:
        """Refuse settings that would have no effect on a measurement."""
        passed = {
            "readout": self.readout is not None,
            "parameters": self.parameters is not None,
            "group": self.group.given,
        }
        for name in names:
            if passed[name]:
                raise InputValueError(
                    f"{name}=... has no effect on {call}, expected None: {_REASONS[name]}; leave {name}= out, or use a "
                    "Session without it"
                )


_REASONS = {
    "readout": "it does not read the model's output",
    "parameters": "it does not select weights",
    "group": "every rank would measure all samples",
}
