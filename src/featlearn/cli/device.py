"""The device that is asked for."""

import torch

from featlearn.cli.answer import UsageError, suggestion
from featlearn.errors import InputValueError

KNOWN = ("cpu", "cuda", "mps", "xpu")


def checked_device(name: str) -> str:
    """A name that torch has never heard of is wrong usage; a device that is not in this machine is a failure."""
    try:
        torch.device(name)
    except RuntimeError as error:
        hint = suggestion(name.partition(":")[0], KNOWN)
        raise UsageError(f"--device {name} does not exist, expected cpu, cuda, cuda:1 ...{hint}") from error
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputValueError(f"--device {name} cannot be used: {str(error).splitlines()[0]}") from error
    return name
