"""Measure feature learning in PyTorch models: tangent kernels, kernel-task alignment and how they change in training.

The public names load on first use: ``import featlearn`` alone imports neither torch nor any submodule.
"""

from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from featlearn import data as data
    from featlearn import dynamics as dynamics
    from featlearn import errors as errors
    from featlearn import metrics as metrics
    from featlearn import ops as ops
    from featlearn import readouts as readouts
    from featlearn import theory as theory
    from featlearn.errors import FeatlearnError as FeatlearnError
    from featlearn.ops.registry import register_rule as register_rule
    from featlearn.quantities.directions import Probes as Probes
    from featlearn.quantities.ntk import ntk as ntk
    from featlearn.quantities.ntk import plan as plan
    from featlearn.quantities.plan import Plan as Plan
    from featlearn.quantities.representation import representation_kernels as representation_kernels
    from featlearn.quantities.velocity import feature_speed as feature_speed
    from featlearn.quantities.velocity import ntk_velocity as ntk_velocity

__version__ = "0.1.0.dev0"

_HOME = {
    "FeatlearnError": "featlearn.errors",
    "Plan": "featlearn.quantities.plan",
    "Probes": "featlearn.quantities.directions",
    "feature_speed": "featlearn.quantities.velocity",
    "ntk": "featlearn.quantities.ntk",
    "ntk_velocity": "featlearn.quantities.velocity",
    "plan": "featlearn.quantities.ntk",
    "register_rule": "featlearn.ops.registry",
    "representation_kernels": "featlearn.quantities.representation",
}
_SUBMODULES = ("data", "dynamics", "errors", "metrics", "ops", "readouts", "theory")


def __getattr__(name: str) -> object:
    if name in _SUBMODULES:
        return import_module(f"featlearn.{name}")
    if name not in _HOME:
        close = get_close_matches(name, __dir__(), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise AttributeError(f"module 'featlearn' has no attribute {name!r}{hint}", name=name)
    value: object = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(["__version__", *_HOME, *_SUBMODULES])
