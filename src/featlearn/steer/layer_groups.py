"""Parameter groups by layer name."""

import fnmatch
from collections.abc import Mapping
from typing import Any

from torch import nn

from featlearn.errors import InputTypeError, InputValueError

__all__ = ["speed_groups"]


def speed_groups(model: nn.Module, speeds: Mapping[str, float]) -> list[dict[str, Any]]:
    """Groups for :class:`featlearn.SLO` from globs: ``SLO(speed_groups(model, {"0": 500.0, "*": 0.002}), lr=0.03)``.

    A glob matches the name of a parameter (``"0.weight"``) or of the layer that owns it (``"0"``); ``*`` also matches
    dots. The first glob that matches wins. A tied parameter is taken once and answers to each of its names; frozen
    parameters are left out.

    Every trainable parameter must be matched, and every glob but a last ``"*"`` must take at least one parameter:
    otherwise an error says which is left over.

    Returns:
        One group for each glob that took something, ``{"params": [...], "speed": ...}``, in the order of `speeds`.
    """
    if not isinstance(speeds, Mapping) or not speeds or not all(isinstance(glob, str) for glob in speeds):
        raise InputTypeError(f"speeds is {speeds!r}, expected a mapping from globs to speeds, {{'0': 500.0, '*': 1.0}}")
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(parameter, []).extend([name, name.rpartition(".")[0]])
    taken: dict[str, list[nn.Parameter]] = {glob: [] for glob in speeds}
    for parameter, answers in names.items():
        glob = next((g for g in speeds if any(fnmatch.fnmatchcase(name, g) for name in answers)), None)
        if glob is None:
            raise InputValueError(f"no glob of {[*speeds]} matches {answers[0]!r}; add a last entry '*': 1.0")
        taken[glob].append(parameter)
    for position, (glob, parameters) in enumerate(taken.items()):
        if not parameters and not (glob == "*" and position == len(taken) - 1):
            some = ", ".join(answers[0] for answers in [*names.values()][:8])
            raise InputValueError(
                f"the glob {glob!r} takes no trainable parameter: it matches none, or those before it took them; "
                f"expected one that matches some of {some}"
            )
    return [{"params": parameters, "speed": speeds[glob]} for glob, parameters in taken.items() if parameters]
