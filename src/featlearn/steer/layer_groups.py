"""Parameter groups by layer name."""

import fnmatch
from collections.abc import Mapping
from typing import Any

from torch import nn

from featlearn.errors import InputTypeError, InputValueError

__all__ = ["speed_groups"]


def speed_groups(model: nn.Module, speeds: Mapping[str, float]) -> list[dict[str, Any]]:
    """Build groups for :class:`featlearn.SLO`: ``SLO(speed_groups(model, {"0": 500.0, "*": 0.002}), lr=0.03)``.

    A glob matches the name of a parameter (``"0.weight"``) or of the layer that owns it (``"0"``); ``*`` also matches
    dots. The first matching glob wins. A tied parameter is added once and matched by each of its names; frozen
    parameters are excluded.

    Every trainable parameter must be matched, and every glob except a last ``"*"`` must add at least one parameter.
    Otherwise an error names the parameter or glob.

    Returns:
        A group per glob with parameters, ``{"params": [...], "speed": ...}``, in the order of `speeds`.
    """
    if not isinstance(speeds, Mapping) or not speeds or not all(isinstance(glob, str) for glob in speeds):
        raise InputTypeError(f"speeds is {speeds!r}, expected a mapping from globs to speeds, {{'0': 500.0, '*': 1.0}}")
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(parameter, []).extend([name, name.rpartition(".")[0]])
    matched: dict[str, list[nn.Parameter]] = {glob: [] for glob in speeds}
    for parameter, parameter_names in names.items():
        glob = next((g for g in speeds if any(fnmatch.fnmatchcase(name, g) for name in parameter_names)), None)
        if glob is None:
            raise InputValueError(f"no glob of {[*speeds]} matches {parameter_names[0]!r}; add a last entry '*': 1.0")
        matched[glob].append(parameter)
    for position, (glob, parameters) in enumerate(matched.items()):
        if not parameters and not (glob == "*" and position == len(matched) - 1):
            examples = ", ".join(parameter_names[0] for parameter_names in [*names.values()][:8])
            raise InputValueError(
                f"the glob {glob!r} adds no trainable parameter: it matches none, or only those of earlier globs; "
                f"expected a glob that matches some of {examples}"
            )
    return [{"params": parameters, "speed": speeds[glob]} for glob, parameters in matched.items() if parameters]
