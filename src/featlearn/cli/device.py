"""The option --device."""

import torch

from featlearn.cli.answer import UsageError
from featlearn.errors import InputValueError, did_you_mean

KNOWN = ("cpu", "cuda", "mps", "xpu")


def checked_device(name: str) -> str:
    """Check a device. Unknown names are usage errors; devices missing on this machine are failures."""
    try:
        torch.device(name)
    except RuntimeError as error:
        hint = did_you_mean(name.partition(":")[0], KNOWN)
        raise UsageError(f"--device {name} does not exist, expected cpu, cuda, cuda:1 ...{hint}") from error
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputValueError(f"--device {name} cannot be used: {str(error).splitlines()[0]}") from error
    return name
