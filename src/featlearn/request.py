"""Validated settings of a measurement."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from featlearn.distributed.group import RankGroup
from featlearn.errors import InputValueError
from featlearn.network.inputs import Readout


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
