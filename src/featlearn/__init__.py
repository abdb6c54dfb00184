"""Measure feature learning in PyTorch models: tangent kernels, kernel-task alignment and how they change in training.

The public names load on first use: ``import featlearn`` alone imports neither torch nor any submodule.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from featlearn import data as data
    from featlearn import dynamics as dynamics
    from featlearn import errors as errors
    from featlearn import integrations as integrations
    from featlearn import losses as losses
    from featlearn import metrics as metrics
    from featlearn import models as models
    from featlearn import ops as ops
    from featlearn import quantities as quantities
    from featlearn import readouts as readouts
    from featlearn import steer as steer
    from featlearn import theory as theory
    from featlearn.attribution.attribute import attribute as attribute
    from featlearn.attribution.interference import interference as interference
    from featlearn.attribution.replay import replay as replay
    from featlearn.citations import citation as citation
    from featlearn.comparison import compare as compare
    from featlearn.contraction.tensor_sketch import Sketch as Sketch
    from featlearn.diagnosis.advice import advise as advise
    from featlearn.diagnosis.verdict import diagnose as diagnose
    from featlearn.errors import FeatlearnError as FeatlearnError
    from featlearn.gradients.directions import Directions as Directions
    from featlearn.linalg.estimate import Estimate as Estimate
    from featlearn.linalg.stored_kernel import StoredKernel as StoredKernel
    from featlearn.monitoring.checkpoints import watch_checkpoints as watch_checkpoints
    from featlearn.monitoring.entry import watch as watch
    from featlearn.quantities.alignment_estimate import estimate_alignment as estimate_alignment
    from featlearn.quantities.layer_pairs import layer_alignment as layer_alignment
    from featlearn.quantities.linearization_gap import linearization_gap as linearization_gap
    from featlearn.quantities.neural_features import neural_features as neural_features
    from featlearn.quantities.ntk import ntk as ntk
    from featlearn.quantities.ntk_plan import plan as plan
    from featlearn.quantities.operator import NTKOperator as NTKOperator
    from featlearn.record.reader import open_run as open_run
    from featlearn.reporting.page import report as report
    from featlearn.session import Session as Session
    from featlearn.statistics.gradient_noise import gradient_noise as gradient_noise
    from featlearn.statistics.posterior import posterior as posterior
    from featlearn.sweeps.grid_run import sweep as sweep
    from featlearn.sweeps.results import open_sweep as open_sweep
    from featlearn.widths.check import scale_check as scale_check
    from featlearn.widths.check import width_check as width_check

__version__ = "0.1.0"

_HOME = {
    "Estimate": "featlearn.linalg.estimate",
    "FeatlearnError": "featlearn.errors",
    "NTKOperator": "featlearn.quantities.operator",
    "Directions": "featlearn.gradients.directions",
    "Session": "featlearn.session",
    "Sketch": "featlearn.contraction.tensor_sketch",
    "StoredKernel": "featlearn.linalg.stored_kernel",
    "advise": "featlearn.diagnosis.advice",
    "attribute": "featlearn.attribution.attribute",
    "citation": "featlearn.citations",
    "compare": "featlearn.comparison",
    "diagnose": "featlearn.diagnosis.verdict",
    "estimate_alignment": "featlearn.quantities.alignment_estimate",
    "gradient_noise": "featlearn.statistics.gradient_noise",
    "interference": "featlearn.attribution.interference",
    "layer_alignment": "featlearn.quantities.layer_pairs",
    "linearization_gap": "featlearn.quantities.linearization_gap",
    "neural_features": "featlearn.quantities.neural_features",
    "ntk": "featlearn.quantities.ntk",
    "open_run": "featlearn.record.reader",
    "open_sweep": "featlearn.sweeps.results",
    "plan": "featlearn.quantities.ntk_plan",
    "posterior": "featlearn.statistics.posterior",
    "replay": "featlearn.attribution.replay",
    "report": "featlearn.reporting.page",
    "sweep": "featlearn.sweeps.grid_run",
    "watch": "featlearn.monitoring.entry",
    "watch_checkpoints": "featlearn.monitoring.checkpoints",
    "scale_check": "featlearn.widths.check",
    "width_check": "featlearn.widths.check",
}
_SUBMODULES = (
    "data",
    "dynamics",
    "errors",
    "integrations",
    "losses",
    "metrics",
    "models",
    "ops",
    "quantities",
    "readouts",
    "steer",
    "theory",
)
__all__ = [*_HOME, *_SUBMODULES]


def __getattr__(name: str) -> object:
    if name in _SUBMODULES:
        return import_module(f"featlearn.{name}")
    if name not in _HOME:
        from featlearn.errors import did_you_mean

        raise AttributeError(f"module 'featlearn' has no attribute {name!r}{did_you_mean(name, __dir__())}", name=name)
    value: object = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(["__version__", *__all__])
